"""Weights by least squares: what stays is to give the last queries what all there was gave them.

With 1 + x_j the factor of a slot that stays, s_qj its share of what query q reads, v_j its value,
and z_q the layer's answer, two things are to stay as they are: the share of all slots together,
which is the mass of attention, and to first order the answer itself::

    Σ_q (Σ_j s_qj x_j - m_q)²  +  Σ_q |Σ_j s_qj x_j (v_j - z_q) - d_q|² / σ²  +  p Σ_j x_j²

m and d are the sums over what is gone, of s and of s (v - z). Both are linear in x. Knows slots and
what was read; nothing of who stays, or why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weir.pools.reading import Reading
from weir.slab import Slots

LEAST = 1e-30
"""Sums of squares below are as good as none, and divide nothing."""


def fitted(
    read: Reading, whole: Slots, kept: Slots, window: int, pull: float, most: float
) -> Tensor:
    """Factors of the weights of what stays [batch, kv_heads, kept], float32, above 0.

    Each KV head its own, for all its query heads together.

    Args:
        read: what the queries have read, `whole` among it.
        whole: all that was there, with the weights that are to be kept up.
        kept: those that stay, weighed as they were.
        window: the last so many queries are asked.
        pull: p, in mean squares of what a slot gives.
        most: no log-weight of `kept` leaves -most to most.
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
    # Of s (v - z) and of the mass, all products of two slots summed over queries and query heads.
    along = shares * (answer @ values.mT)
    cross = along.mT @ shares
    long = 1 + answer.square().sum(dim=4, keepdim=True)
    gram = (shares.mT @ shares) * (values @ values.mT) - cross - cross.mT
    gram = (gram + shares.mT @ (shares * long)).sum(dim=2)
    wanted = ((shares.mT @ off) * values).sum(dim=4)
    wanted = wanted + (shares.mT @ (mass - (answer * off).sum(dim=4, keepdim=True)))[..., 0]
    pulled = pull * gram.diagonal(dim1=2, dim2=3).mean(dim=2).clamp_min(LEAST)[..., None]
    gram = gram + torch.diag_embed(pulled.expand_as(kept.b))
    # `cholesky_ex` asks no GPU whether it could be done. What is pulled is regular.
    root = torch.linalg.cholesky_ex(gram)[0]
    found = 1 + torch.cholesky_solve(wanted.sum(dim=2)[..., None], root)[..., 0]
    found = found.where(found.isfinite(), 1.0)
    log = kept.b.masked_fill(~kept.held, 0.0)
    return found.clamp((-most - log).exp(), (most - log).exp())


def _given(read: Reading, slots: Slots, window: int) -> tuple[Tensor, Tensor]:
    """What slots give to queries: shares [batch, kv_heads, group, window, slots], and values where
    the layer's output goes, as numerators count them [batch, kv_heads, group, slots, dim].
    """
    shares = read.attention(slots)[:, :, :, -window:]
    more = (slots.a - slots.b).exp().masked_fill(~slots.held, 0.0)
    values = (slots.values.float() * more[..., None])[:, :, None]
    if read.output is not None:
        values = torch.einsum("bhnd,hged->bhgne", values[:, :, 0], read.output)
    return shares, values.expand(-1, -1, shares.shape[2], -1, -1)
