"""How far means are believed: what the last queries would have been answered with them instead.

At the moment at which tokens are merged it is still known what the last queries got from them. So
every share of belief can be tried on these queries. Knows what was read and what is to stand in its
place, and nothing of how that was made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weir.pools.reading import Reading
from weir.slab import Slots

GATES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of its weight that a mean may be given; of equally good ones the first is taken."""
LEAST = 1e-6
"""Shares of attention below count as this: a query that read nothing else has no better answer."""
ROUNDING = 1e-5
"""An answer that is off by so much of itself is as good as the truth: it may be rounding, which
must not choose between gates. More than float32's, since shares of everything are taken off.
"""


def misled(read: Reading, held: Slots, new: Slots, means: Slots, window: int) -> Tensor:
    """How far the last queries' answers move when means stand for what has just arrived.

    What the pool held meanwhile is left out on both sides, since of that nobody knows the truth any
    more.

    Args:
        read: what the queries have read, `held` and `new` among it.
        held: the slots of the pool.
        new: what arrived, each token by itself.
        means: what is to stand for it, weighed for the arrivals alone.
        window: the last so many queries are asked.

    Returns:
        By gate, the squared distances of the layer's output, added up over queries and the query
        heads of each KV head [batch, kv_heads, gates], float32; all that may be rounding is alike.
    """
    old_above, old_below = _part(read.attention(held), held, window)
    above, below = _part(read.attention(new), new, window)
    rest_above = read.answers[:, :, :, -window:].float() - old_above - above
    rest_below = 1 - old_below - below
    truth = (rest_above + above) / (rest_below + below).clamp_min(LEAST)
    above, below = _part(read.would_attend(means), means, window)

    def moves(answers: Tensor) -> Tensor:
        if read.output is not None:
            answers = torch.einsum("bhgnd,hged->bhgne", answers, read.output)
        return answers.square().sum(dim=(2, 3, 4))

    far = []
    for gate in GATES:
        answer = (rest_above + gate * above) / (rest_below + gate * below).clamp_min(LEAST)
        far.append(moves(answer - truth))
    return torch.stack(far, dim=2).maximum(moves(ROUNDING * truth)[..., None])


def _part(shares: Tensor, slots: Slots, window: int) -> tuple[Tensor, Tensor]:
    """What slots bring to the numerator and to the denominator, in shares of what was read.

    [batch, kv_heads, group, window, value_dim] and [..., 1], float32.
    """
    below = shares[:, :, :, -window:]
    more = (slots.a - slots.b).exp().masked_fill(~slots.held | slots.b.isneginf(), 0.0)
    above = below * more[:, :, None, None]
    return above @ slots.values.float()[:, :, None], below.sum(dim=4, keepdim=True)
