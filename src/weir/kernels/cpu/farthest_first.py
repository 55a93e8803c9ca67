"""Greedy k-center on the CPU: `weir.pools.kcenter.farthest_first`, pick for pick.

Each pick asks for the distance of all keys that are left to one of them. Where a good part of the
keys is picked, all distances are made beforehand, by tiles (`pairwise`); of many keys they would
be too many to be held, and of few picks most would be made for nothing. Then keys lie with their
slots side by side, and a pick goes through them once. Roofline: that of the distances, or at most k
times the keys of a head, read from the cache of the processor. Sums run over the dimensions of a
key in another order than PyTorch's, so a distance may differ by roundings.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weir.kernels.cpu.compilation import compiled, spread
from weir.kernels.cpu.pairwise import nearer, pairs
from weir.kernels.cpu.vectors import lanes

_WORTH_A_THREAD = 2**26
"""Differences below which a thread of their own costs more than it saves."""
_BETWEEN = 64
"""Picks after which the keys that are left are packed side by side."""
_TOGETHER = 8
"""Dimensions whose differences are summed before `square` is written."""
_AT_ONCE = 2**20
"""Distances that are held, of a head and in each thread: 4 MB."""
_SHARE = 5
"""All distances are made if one of so many keys is picked, or more: the tiles take about a quarter
of the time for each, and make those to keys that are picked early too.
"""


def _pick(
    keys: np.ndarray, far: np.ndarray, weight: np.ndarray, wanted: np.ndarray, order: np.ndarray
) -> None:
    heads, dim, slots = keys.shape
    square = np.empty(slots, np.float32)
    places, stays = np.empty(slots, np.int64), np.empty(slots, np.int64)
    for head in range(heads):
        reach, heavy = far[head], weight[head]
        # Floats that are not negative are in the order of their bits read as whole numbers, and
        # numba vectorizes a maximum of whole numbers only.
        bits = reach.view(np.int32)
        left = slots
        for place in range(slots):
            places[place] = place
        for done in range(wanted[head]):
            if done % _BETWEEN == 0:
                # Close the gaps of keys that were picked or are not candidates (both -1), in order.
                count = 0
                for place in range(left):
                    stays[count] = place
                    count += reach[place] >= 0.0
                left = count
                if left == 0:
                    break
                for place in range(left):
                    reach[place] = reach[stays[place]]
                    heavy[place] = heavy[stays[place]]
                    places[place] = places[stays[place]]
                for part in range(dim):
                    line = keys[head, part]
                    for place in range(left):
                        line[place] = line[stays[place]]
            largest = bits[0]
            for place in range(left):
                largest = max(largest, bits[place])
            if largest < 0:
                break
            at = 0
            while bits[at] != largest:
                at += 1
            order[head, places[at]] = done
            square[:left] = 0.0
            # Eight dimensions at a time: `square` is read and written an eighth as often.
            for part in range(0, dim, _TOGETHER):
                k0, k1 = keys[head, part], keys[head, part + 1]
                k2, k3 = keys[head, part + 2], keys[head, part + 3]
                k4, k5 = keys[head, part + 4], keys[head, part + 5]
                k6, k7 = keys[head, part + 6], keys[head, part + 7]
                c0, c1, c2, c3 = k0[at], k1[at], k2[at], k3[at]
                c4, c5, c6, c7 = k4[at], k5[at], k6[at], k7[at]
                for place in range(left):
                    d0, d1 = k0[place] - c0, k1[place] - c1
                    d2, d3 = k2[place] - c2, k3[place] - c3
                    d4, d5 = k4[place] - c4, k5[place] - c5
                    d6, d7 = k6[place] - c6, k7[place] - c7
                    half = (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)
                    square[place] += half + ((d4 * d4 + d5 * d5) + (d6 * d6 + d7 * d7))
            for place in range(left):
                reach[place] = min(reach[place], np.sqrt(square[place]) * heavy[place])
            reach[at] = -1.0


def _pick_of_pairs(
    keys: np.ndarray,
    far: np.ndarray,
    weight: np.ndarray,
    wanted: np.ndarray,
    order: np.ndarray,
    widest: np.ndarray,
) -> None:
    heads, slots, dim = keys.shape
    width = widest[0]
    number = (slots + width - 1) // width
    panels = np.empty((number, dim * width), np.float32)
    distances = np.empty((number * width, number * width), np.float32)
    reach, heavy = np.empty(number * width, np.float32), np.ones(number * width, np.float32)
    most, where = np.empty(width, np.float32), np.empty(width, np.int32)
    for head in range(heads):
        pairs(keys[head], width, panels, distances)
        reach[:slots], heavy[:slots] = far[head], weight[head]
        reach[slots:] = -1.0
        largest, at = np.float32(-1.0), 0
        for place in range(slots):
            if reach[place] > largest:
                largest, at = reach[place], place
        for done in range(wanted[head]):
            if largest < 0.0:
                break
            order[head, at] = done
            reach[at] = -1.0
            largest, at = nearer(distances[at], heavy, reach, width, most, where)


_compiled_pick, _compiled_pick_of_pairs = compiled(_pick), compiled(_pick_of_pairs)


def farthest_first(keys: Tensor, among: Tensor, k: int, weight: Tensor | None = None) -> Tensor:
    """In which order keys are picked [batch, kv_heads, n], int64, -1 for no; as the reference.

    Args:
        keys: [batch, kv_heads, n, key_dim].
        among: the candidates [batch, kv_heads, n], bool.
        k: how many are picked of each head.
        weight: what distances are multiplied by [batch, kv_heads, n], float32; None for 1.
    """
    far = torch.where(among, torch.inf, -1.0).float().flatten(0, 1)
    heavy = torch.ones_like(far) if weight is None else weight.flatten(0, 1).float().contiguous()
    order = torch.full(far.shape, -1, dtype=torch.int64, device=far.device)
    if far.numel():
        heads, slots = far.shape
        wanted = np.full(heads, k)
        threads = 1 + k * keys.numel() // _WORTH_A_THREAD
        if slots * slots <= _AT_ONCE and slots <= _SHARE * k:
            lines, pick = keys.float().contiguous().flatten(0, 1), _compiled_pick_of_pairs
            more = [np.full(heads, lanes())]
        else:
            # Zeros change no distance.
            whole = F.pad(keys.float(), (0, -keys.shape[3] % _TOGETHER)).flatten(0, 1)
            lines, pick = whole.mT.clone(memory_format=torch.contiguous_format), _compiled_pick
            heavy, more = heavy.clone(), []  # packed with the keys that are left
        arrays = [t.numpy() for t in (lines, far, heavy, order)]
        spread(pick, [*arrays[:3], wanted, arrays[3], *more], threads)
    return order.view_as(among)
