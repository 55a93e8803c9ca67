"""The self-balancing walk on a GPU, one program per block, with the same signs as on a CPU.

The reference is `weir.pools.balance.halving.walk`. For each token in the order of the walk, the
kernel and the reference add the token's row of inner products, times its sign, to the sums of all
later tokens, in float32. A product times a sign is exact, so both get the same sums. The random
number of a token is compared with its probability in float64, where gain times sum, a product of
two float32 numbers, is also exact, whether or not it is fused with the subtraction. Roofline: each
inner product above the diagonal is read once. In practice, waiting takes longer than reading,
because each token needs the signs of all tokens before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _signs(products, gain, u, free, signs, tokens, PLACES: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    lean = tl.load(gain + block).to(tl.float64)
    total = tl.zeros([PLACES], tl.float32)
    row = products + block * tokens * tokens
    for j in range(tokens):
        # Triton cannot index a tensor, but the sum of one number and zeros is exactly that number.
        so_far = tl.sum(tl.where(place == j, total, 0.0), axis=0)
        chance = 0.5 - lean * so_far.to(tl.float64)
        plus = tl.load(u + block * tokens + j) < chance
        sign = tl.where(plus, 1.0, -1.0)
        sign = tl.where(tl.load(free + block * tokens + j) != 0, sign, 0.0)
        tl.store(signs + block * tokens + j, sign)
        later = tl.load(row + place, mask=(place > j) & (place < tokens), other=0.0)
        total += sign * later
        row += tokens


def walk(products: Tensor, gain: Tensor, u: Tensor, free: Tensor) -> Tensor:
    """Compute signs [..., n] on a GPU; arguments as in `weir.pools.balance.halving.walk`.

    Args:
        products: inner products of the tokens of each block [..., n, n].
        gain: the gain of each block [...]. A sign is + with probability 1/2 - gain * sum, where
            sum adds up the token's inner products with all earlier tokens, each times the
            earlier token's sign.
        u: uniform random numbers, one for each token [..., n].
        free: mask of the tokens to walk [..., n]; the others get a sign of 0.
    """
    n = u.shape[-1]
    signs = torch.zeros(u.shape, dtype=torch.float32, device=u.device)
    if signs.numel():
        blocks = signs.numel() // n
        places = triton.next_power_of_2(n)
        _signs[(blocks,)](
            products.float().contiguous(),
            gain.float().contiguous(),
            u.double().contiguous(),
            free.to(torch.uint8).contiguous(),
            signs,
            n,
            PLACES=places,
            num_warps=min(8, max(1, places // 256)),
        )
    return signs
