"""Rows of a batch: the progress of each, and which columns fed to it are tokens.

transformers passes columns, masks and positions; a stream counts tokens. Here a forward that does
not continue every row is refused, and tokens are separated from padding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from weir.cache.layer import ForwardPlan, place_on_axes, plan_forward
from weir.errors import WeirError
from weir.models import OFFSETS, StopTokens, out_of_range
from weir.pools import Marks

GO_ON = (
    "pass the whole conversation again, or only what is new with an attention_mask that covers "
    "everything so far"
)


@dataclass(frozen=True)
class BegunForward:
    """A forward that has been checked and planned.

    Attributes:
        plan: the segments of the forward.
        after: the rows after the forward.
        refused: by row, why its tokens are refused; the other rows go on.
        ids: token ids for the model, those out of range replaced; None if none were fed.
        again: by row, the ids of the chunk that folds, where it is read a second time.
    """

    plan: ForwardPlan
    after: Rows
    refused: dict[int, WeirError]
    ids: Tensor | None
    again: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """The rows of a cache's batch between two forwards.

    Attributes:
        columns: columns fed so far, including padding.
        seen: tokens each row has seen.
        waiting: tokens in each row's tail.
        claimed: tokens of each row as `generate` counts them; it also counts the padding of rows
            that ended.
        last: each row's last token, if token ids were fed.
        ended: whether `generate` feeds the row padding since its end token.
        marks: the marks of each row.
        drift: each row's next place on three axes minus that in the stream; 0 without images.
        tail: the ids of the tokens in each row's tail, where chunks are read twice; else none.
    """

    columns: int = 0
    seen: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    claimed: list[int] = field(default_factory=list)
    last: list[int | None] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    marks: list[Marks] = field(default_factory=list)
    drift: list[int] = field(default_factory=list)
    tail: list[list[int]] = field(default_factory=list)

    @classmethod
    def empty(cls, batch: int) -> Rows:
        """Make rows without tokens."""
        zeros = [0] * batch
        ended, marks = [False] * batch, [Marks()] * batch
        return cls(0, zeros, zeros, zeros, [None] * batch, ended, marks, zeros, [[]] * batch)

    @property
    def batch(self) -> int | None:
        """Rows of the batch; None before the first token."""
        return len(self.seen) or None

    def select(self, index: list[int]) -> Rows:
        """Return the rows `index`, in that order; a row may come more than once."""
        return Rows(self.columns, *([part[row] for row in index] for part in self._parts()))

    def with_row(self, row: int, other: Rows) -> Rows:
        """Replace one row by the only row of `other`."""
        parts = []
        for mine, theirs in zip(self._parts(), other._parts(), strict=True):
            changed = list(mine)
            changed[row] = theirs[0]
            parts.append(changed)
        # `generate` feeds what comes after the columns of the longest row.
        columns = other.columns if len(self.seen) == 1 else max(self.columns, other.columns)
        return Rows(columns, *parts)

    def marked(self, row: int, marks: Marks) -> Rows:
        """Replace the marks of one row."""
        return replace(self, marks=[*self.marks[:row], marks, *self.marks[row + 1 :]])

    def _parts(self) -> tuple[list[Any], ...]:
        rest = self.last, self.ended, self.marks
        return self.seen, self.waiting, self.claimed, *rest, self.drift, self.tail

    def begin(
        self,
        given: Mapping[str, Any],
        *,
        generation: Any,
        vocabulary: int,
        chunk: int,
        prefill: bool,
        origin: int,
        without: Collection[int] = (),
        fixed: bool = False,
        twice: bool = False,
    ) -> BegunForward:
        """Check and plan a forward, given the decoder's arguments by name.

        Args:
            generation: the model's generation configuration, which has the stop tokens.
            prefill: fold the first forward at once.
            without: rows whose tokens are left out.
            fixed: whether the cache was made with a number of rows, which a reset keeps.
            twice: whether chunks are read twice, so that their ids are kept.

        Raises:
            WeirError: the forward does not continue the stream of every row, or no row is left.
        """
        tokens = _tokens(given)
        batch, length = tokens.shape[:2]
        self._check_shape(batch, length, fixed)
        if given.get("use_cache") is False:
            # MPT's configurations set it, so the caller may not have.
            raise WeirError(
                "use_cache=False would feed the whole text at every step; pass use_cache=True"
            )
        ids: Tensor | None = given.get("input_ids")
        before = self if self.seen else Rows.empty(batch)
        claimed = before._claim(given.get("attention_mask"), batch, length)
        if given.get("position_ids") is not None:
            _refuse_right_padding(claimed)
        before._check_positions(given.get("position_ids"), claimed, batch)
        ended = before._ended(ids, generation, stepping=given.get("position_ids") is not None)
        refused: dict[int, WeirError] = {}
        if ids is not None and (ids.device.type == "cpu" or length > 1):
            refused, ids = _check_ids(ids, claimed, vocabulary)
        out = {*refused, *without}
        real = claimed
        if out or any(ended):
            silent = [gone or row in out for row, gone in enumerate(ended)]
            going = ~torch.tensor(silent, device=tokens.device)[:, None]
            real = going.expand(batch, length) if claimed is None else claimed & going
        if prefill and any(before.seen):
            prefill = False
            if any(
                not seen and (real is None or bool(real[row].any()))
                for row, seen in enumerate(before.seen)
            ):
                raise WeirError(
                    'prefill="full" folds the prompts of all rows at once; feed a row that joins '
                    "later through a cache of its own and put it here with put_row"
                )
        plan = plan_forward(
            real,
            batch,
            length,
            before.seen,
            before.waiting,
            chunk,
            tokens.device,
            prefill=prefill,
            origin=origin,
            marks=before.marks,
        )
        plan, drift = place_on_axes(plan, before.drift, given.get(OFFSETS), real)
        counts = [length] * batch if claimed is None else claimed.sum(dim=1).tolist()
        seen, waiting = plan.after(before.seen, before.waiting)
        again: dict[int, list[int]] = {}
        tail = before.tail
        if twice:
            again, tail = before._repeat(ids, real, plan, chunk)
        after = Rows(
            before.columns + length,
            seen,
            waiting,
            [c + n for c, n in zip(before.claimed, counts, strict=True)],
            before.last if ids is None else ids[:, -1].tolist(),
            ended,
            before.marks,
            drift,
            tail,
        )
        return BegunForward(plan, after.keeping(before, out), refused, ids, again)

    def _repeat(
        self, ids: Tensor | None, real: Tensor | None, plan: ForwardPlan, chunk: int
    ) -> tuple[dict[int, list[int]], list[list[int]]]:
        """Return the ids of each chunk that folds, by row, and those in the tails afterwards."""
        if ids is None:
            raise WeirError(
                "the pool reconstruct repeats token ids, and embeddings were fed; choose a policy "
                "without it"
            )
        if len(plan.segments) > 1:
            raise WeirError(
                f"the pool reconstruct reads each {chunk} tokens twice before more come, so a call "
                f"may not bring {ids.shape[1]:,} at once; feed them through weir.Stream, or choose "
                "a policy that reads once, as with gated in its place"
            )
        rows = [ids[row] if real is None else ids[row][real[row]] for row in range(len(ids))]
        tail = [old + new.tolist() for old, new in zip(self.tail, rows, strict=True)]
        again = {row: part[:chunk] for row, part in enumerate(tail) if len(part) >= chunk}
        return again, [part[chunk:] if row in again else part for row, part in enumerate(tail)]

    def keeping(self, before: Rows, rows: Collection[int]) -> Rows:
        """Return these rows, with `rows` as they were in `before`."""
        if not rows:
            return self
        parts = [
            [was if row in rows else now for row, (now, was) in enumerate(zip(*both, strict=True))]
            for both in zip(self._parts(), before._parts(), strict=True)
        ]
        return Rows(self.columns, *parts)

    def _check_shape(self, batch: int, length: int, fixed: bool) -> None:
        if length == 0 and self.columns:
            raise WeirError(f"nothing new was fed after {self.columns} tokens; {GO_ON}")
        if length == 0:
            raise WeirError("a prompt of zero tokens was fed; a stream needs at least one")
        if self.seen and batch != self.batch:
            instead = "use one cache per batch, or reset() it"
            if fixed:
                instead = (
                    "feed all of them, those that get no token with attention_mask 0, or make a "
                    f"cache with batch={batch}"
                )
            raise WeirError(
                f"this cache holds {self.batch} rows but a batch of {batch} was fed; {instead}"
            )

    def _claim(self, mask: Tensor | None, batch: int, length: int) -> Tensor | None:
        """Return which new columns are tokens by the mask [batch, length]; None if all are."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise WeirError("attention_mask must be [batch, tokens]; weir makes its own 4D masks")
        if mask.shape[0] != batch or mask.shape[1] not in (length, self.columns + length):
            raise WeirError(
                f"attention_mask is {list(mask.shape)}, but {batch} rows of {length} new tokens "
                f"after {self.columns} need [{batch}, {self.columns + length}]"
                + (f"; {GO_ON}" if self.columns else "")
            )
        if self.columns and length > 1 and mask.shape[1] > length:
            for row, count in enumerate((mask[:, :-length] != 0).sum(dim=1).tolist()):
                self._check_place(row, count)
        real = mask[:, -length:].bool()
        return None if bool(real.all()) else real

    def _ended(self, ids: Tensor | None, generation: Any, *, stepping: bool) -> list[bool]:
        """Return which rows have ended: generate() feeds them padding with mask 1."""
        if ids is None or ids.shape[1] != 1 or ids.shape[0] == 1 or not stepping:
            return [False] * len(self.ended)
        endings = StopTokens.of(generation)
        return [
            token == endings.pad and (ended or last in endings.stops)
            for token, last, ended in zip(ids[:, 0].tolist(), self.last, self.ended, strict=True)
        ]

    def _check_positions(self, given: Tensor | None, real: Tensor | None, batch: int) -> None:
        """Refuse tokens that do not continue the stream."""
        if given is None or given.ndim != 2 or given.device.type == "meta":
            return
        places = given.expand(batch, -1)
        first = places[:, 0]
        if places.shape[1] > 1:
            real_columns = torch.ones_like(places, dtype=torch.bool) if real is None else real
            # Equal for all tokens of a row if positions rise by one from token to token.
            start = places - real_columns.cumsum(dim=1) + 1
            first = start.gather(1, real_columns.int().argmax(dim=1, keepdim=True))[:, 0]
            if bool(((start != first[:, None]) & real_columns).any()):
                raise WeirError("position_ids must rise by one from token to token of a row")
        for row, place in enumerate(first.tolist()):
            if real is None or bool(real[row].any()):
                self._check_place(row, place)

    def _check_place(self, row: int, place: int) -> None:
        """Refuse to continue a row at `place` if its stream is elsewhere."""
        if place not in (self.seen[row], self.claimed[row], self.columns):
            raise WeirError(
                f"row {row} is to go on after {place} tokens, but its stream has seen "
                f"{self.seen[row]}; {GO_ON}"
            )


def _tokens(given: Mapping[str, Any]) -> Tensor:
    """Return the ids or embeddings that were fed [batch, length, ...]."""
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    tokens: Tensor | None = ids if ids is not None else embeds
    if tokens is None:
        raise WeirError("neither input_ids nor inputs_embeds was given")
    if tokens.ndim < 2:
        raise WeirError(f"input_ids must be [batch, tokens], not {list(tokens.shape)}")
    return tokens


def _refuse_right_padding(real: Tensor | None) -> None:
    """Refuse right padding for `generate`, which continues from the last column."""
    if real is None:
        return
    wrong = (real.any(dim=1) & ~real[:, -1]).nonzero()[:, 0].tolist()
    if wrong:
        raise WeirError(
            f"row {wrong[0]} is padded on the right, so its last column is no token to go on from; "
            "pad on the left: tokenizer.padding_side = 'left'"
        )


def _check_ids(
    ids: Tensor, real: Tensor | None, vocabulary: int
) -> tuple[dict[int, WeirError], Tensor]:
    """Return why ids [batch, length] are refused, by row, and ids that the model can look up.

    `real` says which are tokens [batch, length], bool; None if all are.
    """
    low, high = ids.aminmax()
    if int(low) >= 0 and int(high) < vocabulary:
        return {}, ids
    wrong = (ids < 0) | (ids >= vocabulary)
    refused: dict[int, WeirError] = {}
    for row, column in wrong.nonzero().tolist():
        if row not in refused and (real is None or bool(real[row, column])):
            where = f"row {row}, token {column + 1} of this call: " if ids.shape[0] > 1 else ""
            refused[row] = out_of_range(int(ids[row, column]), vocabulary, where)
    if refused and len(refused) == ids.shape[0]:
        raise next(iter(refused.values()))
    return refused, ids.masked_fill(wrong, 0)
