"""State of a batch's rows in one layer, and how rows come and go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weir.cache.layer.spec import LayerSpec, count_used
from weir.errors import WeirError
from weir.slab import Heads, Slab, cut_slots, put_first


@dataclass(frozen=True)
class WholeRows:
    """All rows of a layer that is narrowed to some rows.

    Attributes:
        slab, lengths, seeds, plain, first: as in `LayerState`, for all rows.
        view: view of the rows `start` to `stop`.
    """

    slab: Slab
    lengths: list[list[int]]
    seeds: list[int]
    plain: bool
    first: int
    view: Slab
    start: int
    stop: int


class LayerState:
    """The slots of one layer, and their use by each row of the batch.

    Attributes:
        spec: the layer's fixed facts.
        slab: the slots; None before the first token.
        lengths: slots in use, per row and per pool of the pipe.
        seeds: the seed of each row's draws.
        plain: whether every slot in use holds one token of weight 1, so that attention can skip the
            weights.
        first: the first slot that attention reads: an exact one while no row has quantized ones.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.reset()

    def reset(self) -> None:
        """Drop all rows and free the slots."""
        self.slab: Slab | None = None
        self.lengths: list[list[int]] = []
        self.seeds: list[int] = []
        self.plain = True
        self.first = self.spec.pipe.quantized_slots
        self._whole: WholeRows | None = None

    def allocate(
        self,
        heads: Heads,
        batch: int,
        start: Tensor,
        device: torch.device,
        seeds: list[int] | None = None,
    ) -> None:
        """Allocate the slots of rows that begin at `start` [batch], int64; WeirError without the
        memory.

        `seeds` are those of each row's draws; None for the layer's.
        """
        spec = self.spec.slab(heads)
        try:
            slab = Slab(spec, batch, device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise WeirError(f"no memory for {spec.slots} slots in every layer: {reason}") from None
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
        """Return the end of each row's slots in use, including its tail of `waiting` tokens."""
        return [used + w for used, w in zip(self.used, waiting, strict=True)]

    @property
    def used(self) -> list[int]:
        """The first slot of each row's tail."""
        return [count_used(self.spec.pipe, row) for row in self.lengths]

    def narrow(self, start: int, stop: int) -> None:
        """Hold only the rows `start` to `stop` until `widen`; for pipes with a limit."""
        assert self.slab is not None
        view = self.slab.view(start, stop)
        as_it_was = (self.slab, self.lengths, self.seeds, self.plain, self.first)
        self._whole = WholeRows(*as_it_was, view, start, stop)
        self.slab, self.lengths = view, self.lengths[start:stop]
        self.seeds = self.seeds[start:stop]
        self.first = self._read_from

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
        whole, self._whole = self._whole, None
        assert whole is not None
        assert self.slab is not None
        if self.slab is not whole.view:  # a forward was undone: this is its backup
            for name, t in whole.view.tensors().items():
                t.copy_(self.slab.tensors()[name])
        lengths, seeds = list(whole.lengths), list(whole.seeds)
        lengths[whole.start : whole.stop] = self.lengths
        seeds[whole.start : whole.stop] = self.seeds
        self.slab, self.lengths, self.seeds = whole.slab, lengths, seeds
        same = self.first == whole.first
        self.plain = self.plain and whole.plain and same
        self.first = min(self.first, whole.first)

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder the rows of the batch by `index` [n]."""
        if self.slab is None:
            return
        self.slab = self.slab.rows(index)
        self.lengths = [list(self.lengths[row]) for row in index.tolist()]
        self.seeds = [self.seeds[row] for row in index.tolist()]

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

    def reset_row(self, row: int, start: int, seed: int) -> None:
        """Empty a row; its next token is at place `start` of the stream."""
        slab = self.slab
        assert slab is not None
        slab.clear(row)
        part = slab.view(row, row + 1)
        self._init_pool_state(part)
        for name, t in slab.state.items():
            put_first(t[row : row + 1], part.state[name])  # it may have grown since
        place = torch.tensor([start], device=slab.keys.device)
        part.open_tail(slab.first, place, self.spec.chunk)
        self.lengths[row] = [0] * len(self.spec.pipe.pools)
        self.seeds[row] = seed
        self.refresh()

    def _init_pool_state(self, slab: Slab) -> None:
        """Set the pools' state in a slab to that before the first token."""
        with torch.inference_mode(False):
            for index, pool in enumerate(self.spec.pipe.pools):
                for name, t in pool.state(slab.run(0, 0)).items():
                    slab.state[f"{index}.{name}"] = t

    def refresh(self) -> None:
        """Update `plain` and `first` after slots were rewritten."""
        slab = self.slab
        assert slab is not None
        ends, start = self.used, self._read_from
        stop = max(ends)
        weights = [t[:, :, start:stop] for t in (slab.a, slab.b)]
        if min(ends) < stop:
            slots = torch.arange(start, stop, device=slab.a.device)
            behind = slots >= torch.tensor(ends, device=slots.device)[:, None, None]
            weights = [t.masked_fill(behind, 0.0) for t in weights]
        self.plain, self.first = not any(bool(t.any()) for t in weights), start
