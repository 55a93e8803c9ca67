"""Places on three axes: where the tokens of a forward stand in time, height and width.

A row has one clock for all three, the place that its next word takes. Words move it on by one; the
pieces of an image stand around its place, and behind the last of them it moves on by the image's
longer side. Without images the clock is the place in the stream, so a row remembers by how much it
has come to differ, its *drift*, and models with one axis have none. Knows nothing about models or
slots.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weir.cache.layer.plan import Piece, Plan


def on_axes(
    plan: Plan, drift: list[int], offsets: Tensor | None, real: Tensor | None
) -> tuple[Plan, list[int]]:
    """A plan whose tokens stand where they belong on three axes.

    Args:
        plan: how the forward is cut.
        drift: of each row before it.
        offsets: of each column [batch, length, 5], as `models.offsets` has them; None for words.
        real: which columns hold tokens [batch, length], bool; None if all do.

    Returns:
        The plan, and the drift of each row after it.
    """
    if not plan.pieces or (offsets is None and not any(drift)):
        return plan, drift
    ahead = torch.tensor(drift, device=plan.positions.device)
    if offsets is None:
        pieces = [replace(piece, drift=ahead) for piece in plan.pieces]
        return replace(plan, pieces=pieces, positions=plan.positions + ahead[:, None]), drift
    offsets = offsets.to(ahead.device)
    steps = offsets[:, :, 4] if real is None else offsets[:, :, 4] * real
    clock = plan.pieces[0].start + ahead
    after = clock[:, None] + steps.cumsum(dim=1)
    begins = after - steps
    spans = torch.stack([begins, offsets[:, :, 3]], dim=-1)
    pieces = []
    for piece in plan.pieces:
        clock = _clock_after(piece, clock, after)
        its = spans.gather(1, piece.columns[:, :, None].expand(-1, -1, 2))
        pieces.append(replace(piece, drift=clock - piece.after, pictured=its))
    positions = begins[:, :, None] + offsets[:, :, :3]
    then: list[int] = (clock - pieces[-1].after).tolist()
    return replace(plan, pieces=pieces, positions=positions), then


def _clock_after(piece: Piece, before: Tensor, after: Tensor) -> Tensor:
    """Each row's clock [batch] behind a piece, from that before and that after each column."""
    counts = torch.tensor(piece.counts, device=before.device)
    last = piece.columns.gather(1, (counts - 1).clamp_min(0)[:, None])
    return torch.where(counts > 0, after.gather(1, last)[:, 0], before)
