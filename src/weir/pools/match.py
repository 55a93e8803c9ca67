"""Attention matching: reweight the kept tokens to make up for the evicted ones.

Attention Matching (Zweiger et al. 2026, "Fast KV Compaction via Attention Matching",
arXiv:2602.16284), section 3: a few of many keys and values are kept. Each gets a log-weight, fitted
by least squares, so that sampled queries give the kept tokens together the attention that they gave
all tokens. Here this is done at every fold, with the last queries. Weights are pulled towards their
previous values, and evicted tokens are forgotten gradually.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold, Pool, PoolWrapper
from weir.pools.observed_attention import ObservedAttention
from weir.pools.parameters import Bounds, Count
from weir.pools.registry import pool
from weir.slab import Slots

MOST = 3.0
"""Limit of log-weights in both directions, as in the paper."""
LEAST_PULL = 1e-3
"""The smallest `pull`, a multiple of the mean of the diagonal of the least-squares matrix. In sums
over 8,192 slots, the rounding errors of the matrix are below this multiple.
"""


@pool("match")
@dataclass(frozen=True)
class Match(PoolWrapper):
    """Keep the tokens that another pool keeps, reweighted for those it evicts. Experimental.

    Weights do not change while there is room. No token is passed on to another pool, because the
    kept tokens represent the evicted ones.

    Attributes:
        pool: the pool that chooses; it must not weigh tokens itself.
        window: how many of the last queries the weights are fitted to.
        half_life: arrivals after which log-weights halve; none for never.
        pull: how strongly a weight is pulled towards its previous value.
    """

    ends_pipe = True
    drops = False  # the weights represent evicted tokens
    needs_shares = True

    pool: Pool
    window: Count = 64
    half_life: Count | None = 64
    pull: Annotated[float, Bounds(LEAST_PULL)] = 10.0

    def __post_init__(self) -> None:
        if self.pool.ends_pipe or self.pool.weighs or self.pool.slots() is None:
            raise WeirError(
                "match needs an inner pool that has a limit and keeps weights unchanged, as in "
                f"match(snap(64)), got {self.pool.name}. Use another inner pool."
            )

    @property
    def needs_queries(self) -> int:
        """The window, or the number of the inner pool if that is larger."""
        return max(self.window, self.pool.needs_queries)

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Let the inner pool choose, and fit the weights of the kept tokens so that they stand for
        all tokens that were there.
        """
        if len(held) + len(new) <= self.slots() or fold.read is None:
            return self.pool.fold(held, new, fold)
        if self.half_life is not None:
            left = 0.5 ** (new.held.sum(dim=2, keepdim=True) / self.half_life)
            a, b = ((t * left).masked_fill(~held.held, -torch.inf) for t in (held.a, held.b))
            held = held.weighed(a, b)
        kept, _ = self.pool.fold(held, new, fold)
        weight = fit_weights(fold.read, held.join(new), kept, self.window, self.pull)
        more = weight.log()
        return kept.weighed(kept.a + more, kept.b + more), new.part(0, 0)


LEAST = 1e-30
"""The smallest divisor of values, and the smallest mean of the diagonal of the least-squares
matrix. It replaces a smaller number, which could be 0.
"""


def fit_weights(
    read: ObservedAttention,
    whole: Slots,
    kept: Slots,
    window: int,
    pull: float,
    most: float = MOST,
) -> Tensor:
    """Fit factors of the weights of the kept slots by least squares [batch, kv_heads, kept].

    The factor of a kept slot j is 1 + x_j. The x_j minimize::

        Σ_q (Σ_j s_qj x_j - m_q)²  +  Σ_q |Σ_j s_qj x_j (v_j - z_q) - d_q|² / σ²  +  p Σ_j x_j²

    The first term preserves the attention that all slots of `whole` received together. The second
    preserves the layer's output, to first order. The third pulls the factors towards 1. s_qj is the
    share of slot j in the attention of query q, v_j its value, z_q the layer's output for q, and σ
    the root mean square length of the values. m_q and d_q are sums over the evicted slots: of s_qj,
    and of s_qj (v_j - z_q).

    Args:
        read: the attention of the last `window` queries, to `whole` among others.
        whole: all slots that were there, with the weights that attention has used.
        kept: the slots that stay, with these weights.
        window: number of queries.
        pull: p, as a multiple of the mean square of a slot's contribution.
        most: log-weights of `kept` stay between -most and most.
    """
    factor = read.output
    answer = read.answers[:, :, :, -window:].float()
    answer = answer if factor is None else torch.einsum("bhgnd,hged->bhgne", answer, factor)
    shares, values = _given(read, kept, window)
    all_shares, all_values = _given(read, whole, window)
    size = all_values.double().square().sum(dim=4).mean(dim=(2, 3)).sqrt().clamp_min(LEAST)
    size = size.float()[:, :, None, None, None]
    answer, values, all_values = answer / size, values / size, all_values / size
    mass = all_shares.sum(dim=4, keepdim=True) - shares.sum(dim=4, keepdim=True)
    off = all_shares @ all_values - shares @ values - mass * answer
    # For each two slots i and j: s_i s_j (<v_i - z, v_j - z> + 1), summed over queries and query
    # heads.
    along = shares * (answer @ values.mT)
    cross = along.mT @ shares
    long = 1 + answer.square().sum(dim=4, keepdim=True)
    gram = (shares.mT @ shares) * (values @ values.mT) - cross - cross.mT
    gram = (gram + shares.mT @ (shares * long)).sum(dim=2)
    wanted = ((shares.mT @ off) * values).sum(dim=4)
    wanted = wanted + (shares.mT @ (mass - (answer * off).sum(dim=4, keepdim=True)))[..., 0]
    pulled = pull * gram.diagonal(dim1=2, dim2=3).mean(dim=2).clamp_min(LEAST)[..., None]
    gram = gram + torch.diag_embed(pulled.expand_as(kept.b))
    # `cholesky_ex` does not ask the GPU whether it succeeded. With the pull, the matrix is regular.
    root = torch.linalg.cholesky_ex(gram)[0]
    found = 1 + torch.cholesky_solve(wanted.sum(dim=2)[..., None], root)[..., 0]
    found = found.where(found.isfinite(), 1.0)
    log = kept.b.masked_fill(~kept.held, 0.0)
    return found.clamp((-most - log).exp(), (most - log).exp())


def _given(read: ObservedAttention, slots: Slots, window: int) -> tuple[Tensor, Tensor]:
    """Return the shares of slots, and their values after the output projection.

    Shares are [batch, kv_heads, group, window, slots], and values [batch, kv_heads, group, slots,
    dim]. Values are multiplied by e^(a - b), because shares are computed with b, and the numerator
    counts with a.
    """
    shares = read.attention(slots, window)
    more = (slots.a - slots.b).exp().masked_fill(~slots.held, 0.0)
    values = (slots.values.float() * more[..., None])[:, :, None]
    if read.output is not None:
        values = torch.einsum("bhnd,hged->bhgne", values[:, :, 0], read.output)
    return shares, values.expand(-1, -1, shares.shape[2], -1, -1)
