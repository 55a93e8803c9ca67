"""The rows of a layer: their slots made, taken, put, emptied, and some of them for all there are.

What moves rows knows what a layer holds, and nothing of how it attends or when it folds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weir.cache.layer.spec import LayerSpec, count_used
from weir.errors import WeirError
from weir.slab import Heads, Slab


@dataclass(frozen=True)
class WholeRows:
    """All rows of a layer that is narrowed to some of them.

    Attributes:
        slab, lengths, seeds: as they were.
        plain, first: whether weights were read, and from which slot on.
        view: the slots of the rows `start` to `stop`.
    """

    slab: Slab
    lengths: list[list[int]]
    seeds: list[int]
    plain: bool
    first: int
    view: Slab
    start: int
    stop: int


class LayerRows:
    """What a layer holds of each row of a batch.

    Attributes:
        spec: what is always so about the layer.
        slab: the slots; None before the first token.
        lengths: per row and per pool of the pipe, slots in use.
        seeds: of each row's draws.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.reset()

    def reset(self) -> None:
        """Hold no rows."""
        self.slab: Slab | None = None
        self.lengths: list[list[int]] = []
        self.seeds: list[int] = []
        # Whether every slot in use holds one token that counts once: then weights are not read.
        self._plain = True
        # The first slot that is read: while no row has quantized ones, the first exact slot.
        self._from = self.spec.pipe.quantized_slots
        self._whole: WholeRows | None = None

    def allocate(
        self, heads: Heads, batch: int, start: Tensor, device: torch.device, seeds: list[int]
    ) -> None:
        """Make the slots of a batch, without a token.

        Args:
            heads: the sizes of the layer's attention.
            batch: rows.
            start: each row's first place in the stream [batch], int64.
            device: where.
            seeds: of each row's draws.

        Raises:
            WeirError: there is no memory for them.
        """
        spec = self.spec.slab(heads)
        try:
            slab = Slab(spec, batch, device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise WeirError(f"no memory for {spec.slots} slots in every layer: {reason}") from None
        self._remember_nothing(slab)
        slab.open_tail(slab.first, start, self.spec.chunk)
        self.slab = slab
        self.lengths = [[0] * len(self.spec.pipe.pools) for _ in range(batch)]
        self.seeds = list(seeds)
        self._plain, self._from = True, self.spec.pipe.quantized_slots

    def _seeds_of(self, batch: int) -> list[int]:
        """The seeds of rows that were not given any: those of the layer's draws."""
        seed = self.spec.draws.seed
        return [seed] * batch if isinstance(seed, int) else list(seed)

    def ends(self, waiting: list[int]) -> list[int]:
        """Per row, where its slots in use end."""
        return [used + w for used, w in zip(self.used, waiting, strict=True)]

    @property
    def used(self) -> list[int]:
        """Per row, where the tail begins."""
        return [count_used(self.spec.pipe, row) for row in self.lengths]

    def narrow(self, start: int, stop: int) -> None:
        """Be the rows `start` to `stop` alone, until `widen`; for pipes with a limit."""
        assert self.slab is not None
        view = self.slab.view(start, stop)
        as_it_was = (self.slab, self.lengths, self.seeds, self._plain, self._from)
        self._whole = WholeRows(*as_it_was, view, start, stop)
        self.slab, self.lengths = view, self.lengths[start:stop]
        self.seeds = self.seeds[start:stop]
        self._from = self._read_from

    @property
    def _read_from(self) -> int:
        """The first slot that is in use in any row."""
        pipe = self.spec.pipe
        quantized = any(row[pool] for row in self.lengths for pool in pipe.quantized)
        return 0 if quantized else pipe.quantized_slots

    @property
    def narrowed(self) -> bool:
        """Whether it is some of its rows for now."""
        return self._whole is not None

    def widen(self) -> None:
        """Be all rows again, with what has become of some of them."""
        whole, self._whole = self._whole, None
        assert whole is not None
        assert self.slab is not None
        if self.slab is not whole.view:  # a forward was undone: this is the copy made before it
            for name, t in whole.view.tensors().items():
                t.copy_(self.slab.tensors()[name])
        lengths, seeds = list(whole.lengths), list(whole.seeds)
        lengths[whole.start : whole.stop] = self.lengths
        seeds[whole.start : whole.stop] = self.seeds
        self.slab, self.lengths, self.seeds = whole.slab, lengths, seeds
        same = self._from == whole.first
        self._plain = self._plain and whole.plain and same
        self._from = min(self._from, whole.first)

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder the rows of the batch as `index` [n] says."""
        if self.slab is None:
            return
        self.slab = self.slab.rows(index)
        self.lengths = [list(self.lengths[row]) for row in index.tolist()]
        self.seeds = [self.seeds[row] for row in index.tolist()]

    def take_row(self, row: int) -> tuple[dict[str, Tensor], list[int]]:
        """Copies of a row's tensors [1, kv_heads, ...] by name, and its lengths."""
        assert self.slab is not None
        return self.slab.view(row, row + 1).copy().tensors(), list(self.lengths[row])

    def put_row(self, row: int, tensors: dict[str, Tensor], lengths: list[int], seed: int) -> None:
        """Overwrite a row by one that was taken; sizes and types have been checked."""
        slab = self.slab
        assert slab is not None
        if self.spec.pipe.slots is None:
            tensors = self._of_one_size(slab, tensors)
        slab.put_row(row, tensors)
        self.lengths[row] = list(lengths)
        self.seeds[row] = seed
        self._look(slab)

    def reset_row(self, row: int, start: int, seed: int) -> None:
        """Empty a row; its next token stands at the place `start` of the stream."""
        slab = self.slab
        assert slab is not None
        slab.clear(row)
        part = slab.view(row, row + 1)
        self._remember_nothing(part)
        for name, t in slab.state.items():
            first = part.state[name][0]
            if t[row].shape == first.shape:
                t[row].copy_(first)
            else:  # lengthened since, as pools without a limit may
                t[row].zero_()
                t[row, :, : first.shape[1]].copy_(first)
        place = torch.tensor([start], device=slab.keys.device)
        part.open_tail(slab.first, place, self.spec.chunk)
        self.lengths[row] = [0] * len(self.spec.pipe.pools)
        self.seeds[row] = seed
        self._look(slab)

    @staticmethod
    def _of_one_size(slab: Slab, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a row of a pipe without a limit, and the slab, made equally long."""
        other = Slab.of(tensors)
        slab.grow(len(other), 0 if other.masters is None else other.masters.shape[2])
        other.grow(len(slab), 0 if slab.masters is None else slab.masters.shape[2])
        slab.lengthen_state(other)
        other.lengthen_state(slab)
        return other.tensors()

    def _remember_nothing(self, slab: Slab) -> None:
        """Give a slab what its pools remember before the first token."""
        with torch.inference_mode(False):
            for index, pool in enumerate(self.spec.pipe.pools):
                for name, t in pool.state(slab.run(0, 0)).items():
                    slab.state[f"{index}.{name}"] = t

    def _look(self, slab: Slab) -> None:
        """Note from which slot on slots are read, and whether their weights are."""
        ends, start = self.used, self._read_from
        stop = max(ends)
        weights = [t[:, :, start:stop] for t in (slab.a, slab.b)]
        if min(ends) < stop:
            slots = torch.arange(start, stop, device=slab.a.device)
            behind = slots >= torch.tensor(ends, device=slots.device)[:, None, None]
            weights = [t.masked_fill(behind, 0.0) for t in weights]
        self._plain, self._from = not any(bool(t.any()) for t in weights), start
