"""State of a batch's rows in one layer: where slots are in the slab, and how rows are added and
removed.

The *run* is the slots of pools that hold the newest tokens without a gap, the *front* those of all
other pools (`Pipe.run`, `Pipe.front`), and the *tail* has the tokens that wait for the next fold.

Quantized slots come first, in a region of fixed size: those of the front, those of the run, then
empty ones. The exact slots follow without a gap: front, run and tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import count

import torch
from torch import Tensor

from weir.errors import WeirError, first_line
from weir.policies import Pipe
from weir.pools import CounterRNG, Gating, Output, Recent, Sink, make_state
from weir.slab import (
    CODED,
    SLOT_BUFFERS,
    Heads,
    LayerPositions,
    Slab,
    SlabSpec,
    Slots,
    cut_slots,
    put_first,
)


@dataclass(frozen=True)
class Layout:
    """Layout of the slots of a row.

    Attributes:
        lengths: slots in use, by pool.
        order: the pools in the order of their slots.
        starts: the first slot of each pool, by its place in the pipe.
        quantized_front, quantized: quantized slots in use in the front, and in all.
        first: the first exact slot.
        front: the end of the exact slots of the front.
        used: the end of the run, where the tail begins.
    """

    lengths: tuple[int, ...]
    order: tuple[int, ...]
    starts: dict[int, int]
    quantized_front: int
    quantized: int
    first: int
    front: int
    used: int

    @property
    def run(self) -> int:
        """Tokens of the run, quantized and exact."""
        return self.quantized - self.quantized_front + self.used - self.front

    @property
    def packed(self) -> Layout:
        """The layout of the slots in use alone (`LayerSpec.held`), without empty ones."""
        gap = self.first - self.quantized
        starts = {pool: at - gap if at >= self.first else at for pool, at in self.starts.items()}
        return replace(
            self,
            starts=starts,
            first=self.quantized,
            front=self.front - gap,
            used=self.used - gap,
        )


def lay_out(pipe: Pipe, lengths: Sequence[int]) -> Layout:
    """Lay out a row whose pools have `lengths` slots in use."""
    return _build_layout(pipe.front, pipe.run, pipe.quantized, pipe.quantized_slots, tuple(lengths))


@lru_cache(maxsize=256)
def _build_layout(
    in_front: tuple[int, ...],
    in_run: tuple[int, ...],
    quantized: tuple[int, ...],
    first: int,
    lengths: tuple[int, ...],
) -> Layout:
    """Build the layout for `lay_out`.

    The result is cached, because all rows and folds share a layout once pools are full.
    """
    exact = [pool for pool in (*in_front, *in_run) if pool not in quantized]
    starts: dict[int, int] = {}
    ends = []
    for pools, at in ((quantized, 0), (exact, first)):
        for pool in pools:
            starts[pool] = at
            at += lengths[pool]
        ends.append(at)
    quantized_front = sum(lengths[pool] for pool in quantized if pool in in_front)
    front = first + sum(lengths[pool] for pool in in_front if pool not in quantized)
    return Layout(
        lengths, (*quantized, *exact), starts, quantized_front, ends[0], first, front, ends[1]
    )


def count_used(pipe: Pipe, lengths: Sequence[int]) -> int:
    """Compute `Layout.used` alone, which every step needs."""
    total = sum(lengths)
    return (
        pipe.quantized_slots + total - sum(lengths[p] for p in pipe.quantized)
        if pipe.quantized
        else total
    )


@dataclass(frozen=True)
class LayerSpec:
    """The fixed facts of one layer.

    Attributes:
        pipe: the pools that hold slots.
        positions: what the layer knows about positions.
        chunk: tokens between two folds.
        draws: the layer's random numbers; each row sets its own seed.
        index, layers: the number of the layer, and how many there are.
        heads: which of the layer's KV heads these facts are about, in ascending order; None for
            all.
        output: the projection of the layer's output; None if not known.
        gate: a trained map that predicts how much a token will be needed (`models/gates.py`); None
            if no pool reads it.
        dense: whether the cache keeps every token that layers see, unquantized.
    """

    pipe: Pipe
    positions: LayerPositions = field(default_factory=LayerPositions)
    chunk: int = 64
    draws: CounterRNG = field(default_factory=lambda: CounterRNG(0))
    index: int = 0
    layers: int = 1
    heads: tuple[int, ...] | None = None
    output: Output | None = field(default=None, compare=False)
    gate: Gating | None = field(default=None, compare=False)
    dense: bool = False

    def dense_bytes(self, heads: Heads, tokens: int) -> int | None:
        """Return the bytes of one row of `tokens` tokens in transformers' own cache; None if this
        cache is not `dense`.

        In that cache, a layer with a sliding window holds one token fewer than the window has.
        """
        if not self.dense:
            return None
        window = self.positions.window
        held = tokens if window is None else min(tokens, window - 1)
        return held * heads.token_bytes

    def why_not_constant(self) -> str | None:
        """Return why steps of this layer cannot have a constant shape; None if they can."""
        if self.pipe.slots is None:
            return "its policy has no fixed number of slots"
        if self.pipe.log_n:
            return "its policy scales queries by the number of tokens"
        if self.positions.alibi is not None:
            return "its attention has linear biases"
        if self.positions.rotary is not None and not self.positions.placed:
            return "it has its own attention code, which leaves rotations to weir"
        return None

    @property
    def front_moves(self) -> bool:
        """Whether tokens of the front move closer to the present at each fold."""
        return self.positions.rolling and bool(self.pipe.front)

    @property
    def three_axes(self) -> bool:
        """Whether tokens have places in time, height and width."""
        return self.positions.rotary is not None and self.positions.rotary.sections is not None

    @property
    def moves_on_axes(self) -> bool:
        """Whether tokens of the front move, and have places on three axes."""
        return self.front_moves and self.three_axes

    @cached_property
    def keeps_window(self) -> bool:
        """Whether the layer keeps only the first and the newest tokens, so that what it keeps
        depends only on how many have come. False also for layers that `WindowPiece` does not
        support, such as those with linear biases.
        """
        pipe, positions = self.pipe, self.positions
        return (
            all(type(pool) in (Sink, Recent) for pool in pipe.pools)
            and pipe.slots is not None
            and not set(pipe.quantized) & set(pipe.front)
            and positions.window is None
            and positions.alibi is None
            and (positions.rotary is None or positions.placed)
            and not self.three_axes
        )

    @property
    def keeps_queries(self) -> int:
        """Number of queries that wait in the slab: the last ones, or those of the whole tail if
        received attention is summed, whichever is more.
        """
        return max(self.pipe.needs_queries, self.chunk if self.pipe.needs_mass else 0)

    def query_place(self, waiting: int) -> int:
        """Return the place of the query of a token that has `waiting` tokens before it in the tail.

        The last query of a full tail takes the last place. Queries that no fold reads share the
        first place.
        """
        return max(0, waiting + self.keeps_queries - self.chunk)

    def held(self, lengths: Sequence[int]) -> dict[str, tuple[slice, ...]]:
        """Return the slots in use of a row and its whole tail, by the names of buffers
        (`Slab.tensors`).

        Buffers that are not listed have a size that does not depend on the number of slots.
        """
        lies = lay_out(self.pipe, lengths)
        end = lies.used + self.chunk
        coded, exact = slice(0, lies.quantized), slice(0, end - lies.first)
        slots = (coded, slice(lies.first, end)) if lies.first else (slice(0, end),)
        found: dict[str, tuple[slice, ...]] = dict.fromkeys(SLOT_BUFFERS, slots)
        found |= {"keys": (exact,), "values": (exact,)}
        found["masters"] = (slice(0, lies.front - lies.first),)
        for name, part in (
            ("keys", coded),
            ("values", coded),
            ("masters", slice(0, lies.quantized_front)),
        ):
            found |= dict.fromkeys((f"{CODED}{name}", f"{CODED}{name}_peaks"), (part,))
        return found

    def slab(self, heads: Heads) -> SlabSpec:
        """Describe the buffers of the layer; a pipe without a limit starts with a few chunks and
        grows.
        """
        pipe, positions = self.pipe, self.positions
        slots = (4 * self.chunk if pipe.slots is None else pipe.slots) + self.chunk
        rotates = self.front_moves and positions.rotary is not None
        quantized = [pool for pool in pipe.front if pool in pipe.quantized]
        exact = [pool for pool in pipe.front if pool not in quantized]
        masters = self.chunk if pipe.slots is None else 0
        return SlabSpec(
            heads,
            slots,
            masters=(pipe.slots_of(exact) or masters) if rotates else 0,
            mass=pipe.needs_mass,
            two_weights=pipe.two_weights,
            frames=positions.alibi is not None,
            spans=self.moves_on_axes,
            queries=self.keeps_queries,
            state=self._state(heads),
            format=pipe.format,
            quantized=pipe.quantized_slots,
            quantized_masters=pipe.slots_of(quantized) if rotates else 0,
        )

    def _state(self, heads: Heads) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shapes and dtypes of the state that pools have in addition to their slots, by
        the slab's names.
        """
        shape = (1, heads.kv_heads, 0)
        with torch.device("meta"):
            keys = torch.empty(*shape, heads.key_dim, dtype=heads.dtype)
            values = torch.empty(*shape, heads.value_dim, dtype=heads.dtype)
            weights = torch.empty(shape)
            position = torch.empty(shape, dtype=torch.int64)
        mass = weights if self.pipe.needs_mass else None
        nothing = Slots(keys, values, weights, weights, position, mass)
        return {
            f"{index}.{name}": (tuple(t.shape[2:]), t.dtype)
            for index, pool in enumerate(self.pipe.pools)
            for name, t in make_state(pool, nothing).items()
        }


_VERSIONS = count(1)


class LayerState:
    """The slots of one layer, and how each row of the batch uses them.

    Attributes:
        spec: the layer's fixed facts.
        slab: the slots; None until they are allocated.
        lengths: slots in use, per row and per pool of the pipe.
        seeds: the seed of each row's draws.
        plain: whether every slot in use holds one token of weight 1, so that attention can skip the
            weights.
        first: the first slot that attention reads: the first exact slot as long as no row has
            quantized ones, otherwise 0.
        version: a number that increases whenever slots are replaced or lengths change, in any layer
            of this process. A decode step, which only appends, does not increase it.
    """

    version = 0

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.reset()

    def nbytes(self, columns: int) -> int:
        """Return the bytes of the slots of all rows; 0 until they are allocated.

        For a cache of fixed size, these are the bytes of the slab. For a cache that keeps every
        token, they are what transformers' cache would hold of `columns` tokens and padding, because
        the slab grows in steps, and has positions and weights that plain attention does not need.
        """
        if self.slab is None:
            return 0
        dense = self.spec.dense_bytes(self.slab.heads(1), columns)
        return self.slab.nbytes if dense is None else self.slab.keys.shape[0] * dense

    def reset(self) -> None:
        """Drop all rows and free the slots."""
        self._note_change()
        self.slab: Slab | None = None
        self.lengths: list[list[int]] = []
        self.seeds: list[int] = []
        self.plain = True
        self.first = self.spec.pipe.quantized_slots
        # While the layer is narrowed: the state of all rows, the view of some of them, and which
        # rows those are.
        self._whole: tuple[LayerState, Slab, slice] | None = None

    def allocate(
        self,
        heads: Heads,
        batch: int,
        start: Tensor,
        device: torch.device,
        seeds: list[int] | None = None,
    ) -> None:
        """Allocate the slots of rows that begin at `start` [batch], int64; WeirError if there is
        not enough memory.

        `seeds` are the seeds of each row's draws; None uses the layer's seed.
        """
        spec = self.spec.slab(heads)
        try:
            slab = Slab(spec, batch, device)
        except RuntimeError as error:
            raise WeirError(
                f"no memory for {spec.slots} slots in every layer: {first_line(error)}"
            ) from None
        self._init_pool_state(slab)
        slab.open_tail(slab.first, start, self.spec.chunk)
        self.slab = slab
        self.lengths = [[0] * len(self.spec.pipe.pools) for _ in range(batch)]
        if seeds is None:
            seed = self.spec.draws.seed
            seeds = [seed] * batch if isinstance(seed, int) else list(seed)
        self.seeds = list(seeds)
        self.plain, self.first = True, self.spec.pipe.quantized_slots

    def ends(self, waiting: list[int]) -> list[int]:
        """Return where each row's slots in use end, including its tail of `waiting` tokens."""
        return [used + w for used, w in zip(self.used, waiting, strict=True)]

    @property
    def used(self) -> list[int]:
        """The first slot of each row's tail."""
        return [count_used(self.spec.pipe, row) for row in self.lengths]

    def narrow(self, start: int, stop: int) -> None:
        """Hold only the rows `start` to `stop` until `widen`; for pipes with a limit."""
        assert self.slab is not None
        view, rows = self.slab.same_view(start, stop), slice(start, stop)
        self._whole = copy(self), view, rows
        self.slab, self.lengths, self.seeds = view, self.lengths[rows], self.seeds[rows]
        self.first = self._read_from
        self._note_change()

    @property
    def _read_from(self) -> int:
        """The first slot that is in use in any row."""
        pipe = self.spec.pipe
        quantized = any(row[pool] for row in self.lengths for pool in pipe.quantized)
        return 0 if quantized else pipe.quantized_slots

    @property
    def narrowed(self) -> bool:
        """Whether the layer is narrowed to some of its rows."""
        return self._whole is not None

    def widen(self) -> None:
        """Hold all rows again, with the changes made to some of them since `narrow`."""
        assert self._whole is not None
        assert self.slab is not None
        (whole, view, rows), self._whole = self._whole, None
        if self.slab is not view:  # a forward was undone, and this is its backup
            for name, t in view.tensors().items():
                t.copy_(self.slab.tensors()[name])
        lengths, seeds = list(whole.lengths), list(whole.seeds)
        lengths[rows], seeds[rows] = self.lengths, self.seeds
        self.slab, self.lengths, self.seeds = whole.slab, lengths, seeds
        self.plain = self.plain and whole.plain and self.first == whole.first
        self.first = min(self.first, whole.first)
        self._note_change()

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder the rows of the batch by `index` [n]."""
        if self.slab is None:
            return
        self.slab = self.slab.rows(index)
        self.lengths = [list(self.lengths[row]) for row in index.tolist()]
        self.seeds = [self.seeds[row] for row in index.tolist()]
        self._note_change()

    def take_row(self, row: int) -> tuple[dict[str, Tensor], list[int]]:
        """Copy the slots in use of a row [1, kv_heads, ...], by name, and its lengths."""
        assert self.slab is not None
        held = self.spec.held(self.lengths[row])
        with torch.inference_mode(False):
            taken = {
                name: cut_slots(t[row : row + 1], held.get(name)).clone()
                for name, t in self.slab.tensors().items()
            }
        return taken, list(self.lengths[row])

    def put_row(self, row: int, tensors: dict[str, Tensor], lengths: list[int], seed: int) -> None:
        """Overwrite a row with one from `take_row`; sizes and types have been checked."""
        slab = self.slab
        assert slab is not None
        if self.spec.pipe.slots is None:
            masters = tensors["masters"].shape[2] if "masters" in tensors else 0
            slab.grow(tensors["position"].shape[2], masters)
            slab.lengthen_state(tensors)
        slab.put_row(row, tensors, self.spec.held(lengths))
        self.lengths[row] = list(lengths)
        self.seeds[row] = seed
        self.refresh()

    def drop(self, row: int, ranges: Sequence[tuple[int, int]], waiting: int) -> None:
        """Drop the tokens of a row at places in the stream; `waiting` tokens are in its tail.

        Slots of the front become empty, and the next fold fills them. The run and the tail have no
        gaps. There, a dropped token keeps its place and slot until it leaves the run, but its
        weight is zero, and its key and value are erased.
        """
        slab = self.slab
        assert slab is not None
        lies = lay_out(self.spec.pipe, self.lengths[row])
        position = slab.position[row]
        gone = torch.zeros_like(position, dtype=torch.bool)
        for start, stop in ranges:
            gone |= (position >= start) & (position < stop)
        gone[:, lies.used + waiting :] = False
        if not bool(gone.any()):
            return
        in_front = gone.clone()
        in_front[:, lies.quantized_front : lies.first] = False
        in_front[:, lies.front :] = False
        slab.drop(row, gone, in_front)
        self.refresh()

    def reset_row(self, row: int, start: int, seed: int) -> None:
        """Empty a row; its next token is at place `start` of the stream."""
        slab = self.slab
        assert slab is not None
        slab.clear(row)
        part = slab.view(row, row + 1)
        self._init_pool_state(part)
        for name, t in slab.state.items():
            # If the state has grown, `t` is longer than the state of an empty row.
            put_first(t[row : row + 1], part.state[name])
        place = torch.tensor([start], device=slab.keys.device)
        part.open_tail(slab.first, place, self.spec.chunk)
        self.lengths[row] = [0] * len(self.spec.pipe.pools)
        self.seeds[row] = seed
        self.refresh()

    def _init_pool_state(self, slab: Slab) -> None:
        """Set the pools' state in a slab to that before the first token."""
        with torch.inference_mode(False):
            for index, pool in enumerate(self.spec.pipe.pools):
                for name, t in make_state(pool, slab.run(0, 0)).items():
                    slab.state[f"{index}.{name}"] = t

    def refresh(self) -> None:
        """Update `plain` and `first` after slots were rewritten."""
        slab = self.slab
        assert slab is not None
        ends, start = [used + self.spec.chunk for used in self.used], self._read_from
        stop = max(ends)
        weights = [t[:, :, start:stop] for t in (slab.a, slab.b)]
        if min(ends) < stop:
            slots = torch.arange(start, stop, device=slab.a.device)
            behind = slots >= torch.tensor(ends, device=slots.device)[:, None, None]
            weights = [t.masked_fill(behind, 0.0) for t in weights]
        self.plain, self.first = not any(bool(t.any()) for t in weights), start
        self._note_change()

    @staticmethod
    def _note_change() -> None:
        LayerState.version = next(_VERSIONS)
