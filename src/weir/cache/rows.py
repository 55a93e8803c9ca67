"""The rows of a batch: how far each has come, and which of the columns fed to it are tokens.

transformers speaks of columns, masks and positions; a stream counts tokens. This is where the two
meet: a forward that does not continue the stream of every row is refused, padding is told from
tokens, and what remains is cut into chunks. Knows nothing about keys, values or layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from weir.cache.layer import Plan, cut
from weir.errors import WeirError
from weir.models import Endings, check_ids

GO_ON = (
    "pass the whole conversation again, or only what is new with an attention_mask that covers "
    "everything so far"
)


@dataclass(frozen=True)
class Rows:
    """What a cache knows about the rows of its batch between two forwards.

    Attributes:
        columns: columns fed so far, padding too.
        seen: tokens each row has seen.
        waiting: tokens in each row's tail.
        claimed: tokens of each row as `generate` counts them; it goes on counting rows that ended.
        last: each row's last token, where token ids were fed.
        ended: rows that `generate` feeds with padding since their end token.
    """

    columns: int = 0
    seen: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    claimed: list[int] = field(default_factory=list)
    last: list[int | None] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)

    @property
    def batch(self) -> int | None:
        """How many rows there are; None before the first token."""
        return len(self.seen) if self.columns else None

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it; `Rows(**...)` is the way back."""
        return asdict(self)

    def select(self, index: list[int]) -> Rows:
        """The rows `index`, in that order; a row may come more than once."""
        return Rows(
            self.columns,
            [self.seen[row] for row in index],
            [self.waiting[row] for row in index],
            [self.claimed[row] for row in index],
            [self.last[row] for row in index],
            [self.ended[row] for row in index],
        )

    def take(
        self,
        given: Mapping[str, Any],
        endings: Endings,
        *,
        vocabulary: int,
        chunk: int,
        full: bool,
        origin: int,
    ) -> tuple[Plan, Rows]:
        """Take in a forward.

        Args:
            given: the decoder's arguments by name.
            endings: what ends a row.
            vocabulary: token ids run from 0 to this, exclusive.
            chunk, full, origin: as for `plan.cut`; `full` counts for the first forward only.

        Returns:
            How the forward is cut, and the rows as they are once it has ended.

        Raises:
            WeirError: the forward does not continue the stream of every row.
        """
        tokens = _tokens(given)
        batch, length = tokens.shape[:2]
        self._check_shape(batch, length)
        if given.get("use_cache") is False:
            # Also where nobody said so: MPT's configurations do.
            raise WeirError(
                "use_cache=False would feed the whole text at every step; pass use_cache=True"
            )
        ids: Tensor | None = given.get("input_ids")
        if ids is not None and (ids.device.type == "cpu" or length > 1):
            check_ids(ids, vocabulary)
        before = self if self.columns else _fresh(batch)
        claimed = before._claim(given.get("attention_mask"), batch, length)
        if given.get("position_ids") is not None:
            _refuse_right_padding(claimed)
        before._check_positions(given.get("position_ids"), claimed, batch)
        ended = before._ended(ids, endings, stepping=given.get("position_ids") is not None)
        real = claimed
        if any(ended):
            going = ~torch.tensor(ended, device=tokens.device)[:, None]
            real = going if claimed is None else claimed & going
        plan = cut(
            real,
            batch,
            length,
            before.seen,
            before.waiting,
            chunk,
            tokens.device,
            full=full and not any(before.seen),
            origin=origin,
        )
        counts = [length] * batch if claimed is None else claimed.sum(dim=1).tolist()
        after = replace(
            before,
            columns=before.columns + length,
            claimed=[c + n for c, n in zip(before.claimed, counts, strict=True)],
            last=before.last if ids is None else ids[:, -1].tolist(),
            ended=ended,
        )
        return plan, after._past(plan)

    def _past(self, plan: Plan) -> Rows:
        seen, waiting = list(self.seen), list(self.waiting)
        for piece in plan.pieces:
            for row, count in enumerate(piece.counts):
                seen[row] = piece.seen[row] + count
                waiting[row] = 0 if row in piece.full else piece.waiting[row] + count
        return replace(self, seen=seen, waiting=waiting)

    def _check_shape(self, batch: int, length: int) -> None:
        if length == 0 and self.columns:
            raise WeirError(f"nothing new was fed after {self.columns} tokens; {GO_ON}")
        if length == 0:
            raise WeirError("a prompt of zero tokens was fed; a stream needs at least one")
        if self.columns and batch != self.batch:
            raise WeirError(
                f"this cache holds {self.batch} rows but a batch of {batch} was fed; "
                "use one cache per batch, or reset() it"
            )

    def _claim(self, mask: Tensor | None, batch: int, length: int) -> Tensor | None:
        """Which of the new columns the mask calls tokens [batch, length]; None if all are."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise WeirError("attention_mask must be [batch, tokens]; weir makes its own 4D masks")
        if mask.shape[0] != batch or mask.shape[1] not in (length, self.columns + length):
            raise WeirError(
                f"attention_mask is {list(mask.shape)}, but {batch} rows of {length} new tokens "
                f"after {self.columns} need [{batch}, {self.columns + length}]"
            )
        if self.columns and length > 1 and mask.shape[1] > length:
            for row, count in enumerate((mask[:, :-length] != 0).sum(dim=1).tolist()):
                self._check_place(row, count)
        real = mask[:, -length:].bool()
        return None if bool(real.all()) else real

    def _ended(self, ids: Tensor | None, endings: Endings, *, stepping: bool) -> list[bool]:
        """Rows that have ended: generate() goes on feeding them padding, with mask 1."""
        if ids is None or ids.shape[1] != 1 or ids.shape[0] == 1 or not stepping:
            return [False] * len(self.ended)
        return [
            token == endings.pad and (ended or last in endings.stops)
            for token, last, ended in zip(ids[:, 0].tolist(), self.last, self.ended, strict=True)
        ]

    def _check_positions(self, given: Tensor | None, real: Tensor | None, batch: int) -> None:
        """Refuse tokens that are not the next ones of the stream."""
        if given is None or given.ndim != 2 or given.device.type == "meta":
            return
        places = given.expand(batch, -1)
        first = places[:, 0]
        if places.shape[1] > 1:
            each = torch.ones_like(places, dtype=torch.bool) if real is None else real
            # The same for all tokens of a row where positions rise by one from token to token.
            start = places - each.cumsum(dim=1) + 1
            first = start.gather(1, each.int().argmax(dim=1, keepdim=True))[:, 0]
            if bool(((start != first[:, None]) & each).any()):
                raise WeirError("position_ids must rise by one from token to token of a row")
        for row, place in enumerate(first.tolist()):
            if real is None or bool(real[row].any()):
                self._check_place(row, place)

    def _check_place(self, row: int, place: int) -> None:
        """Refuse to go on after so many tokens of a row, if the stream has seen others."""
        if place not in (self.seen[row], self.claimed[row], self.columns):
            raise WeirError(
                f"row {row} is to go on after {place} tokens, but its stream has seen "
                f"{self.seen[row]}; {GO_ON}"
            )


def _fresh(batch: int) -> Rows:
    zeros = [0] * batch
    return Rows(0, zeros, zeros, zeros, [None] * batch, [False] * batch)


def _tokens(given: Mapping[str, Any]) -> Tensor:
    """The ids or embeddings that were fed [batch, length, ...]."""
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    tokens: Tensor | None = ids if ids is not None else embeds
    if tokens is None:
        raise WeirError("neither input_ids nor inputs_embeds was given")
    if tokens.ndim < 2:
        raise WeirError(f"input_ids must be [batch, tokens], not {list(tokens.shape)}")
    return tokens


def _refuse_right_padding(real: Tensor | None) -> None:
    """Refuse padding behind tokens where, as in `generate`, the last column is what goes on.

    Raises:
        WeirError: a row of `real` [batch, length] ends with padding.
    """
    if real is None:
        return
    wrong = (real.any(dim=1) & ~real[:, -1]).nonzero()[:, 0].tolist()
    if wrong:
        raise WeirError(
            f"row {wrong[0]} is padded on the right, so its last column is no token to go on from; "
            "pad on the left: tokenizer.padding_side = 'left'"
        )
