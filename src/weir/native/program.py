"""The table of a native step: describes a decoder's form and a cache's slots as operations for a
kernel.

The table has the addresses of weights and slots, so it is valid until a module, a weight or a slab
is replaced. The only data of a cache that this file uses is the `slab.Step` of a call.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weir.native import dispatch
from weir.native.block_weights import BlockEmbedding
from weir.native.form import DecoderForm, LayerForm, ModelForm, Norm, NotNative, Projection
from weir.native.linear_kernels import is_plain
from weir.native.watch import Watch
from weir.slab import AttentionParams, DecodeSlots, HeldPart, Rotary, Step, block_size


class OutOfDate(Exception):
    """The slots were used with other attention parameters than the modules have now. When the model
    itself runs a step, the slots get the current parameters.
    """


@dataclass(frozen=True, eq=False)
class LayerOperations:
    """The operations of one layer, and the memory for their results.

    Attributes:
        first, mlp, stop: numbers of operations in the table: those of attention begin at `first`,
            those of the MLP at `mlp`, and both end before `stop`.
        parts: the layer's slots (`slab.HeldPart`).
        spans: for each part, its row in the program's spans.
        q, k, v, o, gate, up, down: products [rows, outputs]; q and k are normalized if all heads
            are normalized together.
        partial: answers and sums of each stretch (see `native.kernels.step`) of each head, in the
            layout of `weir.kernels.cpu.decode`.
        gated: the input of `down`.
    """

    first: int
    mlp: int
    stop: int
    parts: Sequence[HeldPart]
    spans: Sequence[int]
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    partial: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    gated: Tensor


Fields = dict[str, Any]
"""Fields of an operation of the step table, by name (`weir.native.kernels.step.OPERATION`)."""


@dataclass(frozen=True, eq=False)
class Whole:
    """A model around a decoder; its form has been proved.

    Attributes:
        model: the causal language model.
        form: of the model.
        watch: notices when its modules are replaced.
    """

    model: weakref.ref[nn.Module]
    form: ModelForm
    watch: Watch


class StepProgram:
    """The table of a decoder over a cache's slots.

    Attributes:
        largest: the largest absolute key or value of each part of a layer, row and head in the last
            step.
        kind: a key that is the same for programs of which only the first must be checked (`check`).
        table: the operations.
        layers: the operations of each layer.
        hidden: [rows, width], float32, which layers read and add to.
        normed: [rows, width], float32, the input of the head.
        logits: [rows, vocabulary], float32, from the last step or check; None without a head.
        dtype: the dtype of a step's result.
        whole: the model around the decoder, if steps go from token ids to logits.

    Args:
        form: of the decoder.
        params: how each layer attends.
        watch: notices when modules are replaced.
        step: a step over the cache's slots.
        whole: see the attribute.

    Raises:
        NotNative: no table can be made of these slots.
        OutOfDate: the slots have other parameters.
    """

    def __init__(
        self,
        form: DecoderForm,
        params: Sequence[AttentionParams],
        watch: Watch,
        step: Step,
        whole: Whole | None = None,
    ) -> None:
        make, held = dispatch.decode_step(torch.device("cpu")), step.held()
        if make is None:
            raise NotNative("there is no kernel for steps on this machine")
        self._watch, self._slabs, self._threads = watch, step.slots.slabs, torch.get_num_threads()
        parts = [part for layer in held for part in layer]
        self.kind = whole, tuple((part.slots.sizes, part.heads) for part in parts)
        batch = len(step.waiting)
        self.table = table = make(batch, self._threads)
        self._spans, self._waiting, self._places = (
            np.zeros_like(t) for t in (step.spans, step.waiting, step.places)
        )
        self.dtype = form.norm.module.weight.dtype
        self.hidden, self.normed = (table.memory(batch, form.norm.width) for _ in range(2))
        self.whole = whole
        self._tokens = np.zeros(batch, np.int64)
        if whole is not None:
            self._add_embedding(whole.form, form.factor)
        self._first = len(table)  # the first operation of the decoder
        self._angles = self._add_angles([part.rotary for part in parts])
        self._before_layers = len(table)
        most = max(sum(part.slots.keys.shape[1] for part in layer) for layer in held)
        self.largest = table.memory(len(parts), batch, most)
        self._largest = self.largest.flatten().numpy()
        self.layers: list[LayerOperations] = []
        done = 0
        for layer, own, how in zip(form.layers, held, params, strict=True):
            if any(not _is_same(part.params, how) for part in own):
                raise OutOfDate
            self.layers.append(self._add_layer(layer, done, own))
            done += len(own)
        fields = form.norm.fields()
        self._last = table.add("norms", inputs=form.norm.width, x=self.hidden, **fields)
        self._stop = len(table)
        self.logits: Tensor | None = None
        if whole is not None:
            head = whole.form.head
            self.logits = table.memory(batch, head.outputs)
            memory = {"x": self.normed, "source": "plain"}
            self._logits_at = table.multiply([head.weight()], [self.logits], **memory)["out"]
        table.finish()
        # These are made once, because making them takes longer than using them in a step.
        self._embedded = self.hidden[:, None]
        self._onto = table.operations["onto"][self._last :]
        self._normed_at = self.normed.data_ptr()

    def fits(self, watch: Watch, step: Step) -> bool:
        """Return whether this program was made for these modules and slots, and for the current
        number of threads.
        """
        if watch is not self._watch or torch.get_num_threads() != self._threads:
            return False
        if step.slots.slabs is not self._slabs:  # after a fold, it is another list
            if len(step.slots.slabs) != len(self._slabs):
                return False
            if not all(map(operator.is_, step.slots.slabs, self._slabs)):
                return False
            self._slabs = step.slots.slabs
        return True

    def run(self, embedded: Tensor, step: Step) -> Tensor:
        """Return the hidden state [batch, 1, width] of one token of each row."""
        self._embedded.copy_(embedded)
        self._place(step)
        out = torch.empty_like(self._embedded)
        self._onto[0] = out.data_ptr()
        self.table.run(self._first, self._stop)
        return out if self.dtype == out.dtype else out.to(self.dtype)

    def run_whole(self, tokens: Sequence[int], step: Step) -> Tensor:
        """Return the logits [batch, vocabulary] of one token of each row."""
        assert self.logits is not None
        self._tokens[:] = tokens
        self._place(step)
        self.logits = out = torch.empty_like(self.logits)  # callers keep it
        self._logits_at[0], self._onto[0] = out.data_ptr(), self._normed_at
        self.table.run()
        return out if self.dtype == out.dtype else out.to(self.dtype)

    @property
    def top(self) -> float:
        """The largest of `largest`; NaN if one of them is NaN."""
        return float(np.maximum.reduce(self._largest))

    def _place(self, step: Step) -> None:
        self._spans[:], self._waiting[:], self._places[:] = step.spans, step.waiting, step.places

    def run_attention(self, index: int, step: Step, places: Tensor) -> None:
        """Run a layer's attention over `hidden`, with rows at places of the stream [batch]."""
        self._spans[:], self._waiting[:] = step.spans, step.waiting
        self._places[:] = places.numpy()
        self.table.run(self._first, self._before_layers)
        layer = self.layers[index]
        self.table.run(layer.first, layer.mlp)

    def run_mlp(self, index: int) -> None:
        """Run a layer's MLP over `hidden`."""
        layer = self.layers[index]
        self.table.run(layer.mlp, layer.stop)

    def normalize(self, norm: Norm | None, x: Tensor) -> Tensor:
        """Normalize x [rows, width]. The result is bit-identical to the input that an operation
        with this norm computes from x. Without a norm, x is returned.
        """
        if norm is None:
            return x
        given, out = x.contiguous(), torch.empty_like(x, dtype=torch.float32)
        table = type(self.table)(len(x), 1)
        more: Fields = {"inputs": norm.width, "x": given, "onto": out, "then": "store"}
        table.add("norms", **more, **norm.fields())
        table.finish()
        table.run()
        return out

    def run_norm(self) -> Tensor:
        """Run the last norm of `hidden`, and the head if there is one; returns `normed`."""
        self._onto[0] = self._normed_at
        self.table.run(self._last)
        return self.normed

    def look_up(self, ids: Tensor) -> Tensor:
        """Write the embeddings of ids [batch] into `hidden`, the input of the first layer, and
        return it.
        """
        self._tokens[:] = ids.numpy()
        self.table.run(0, self._first)
        return self.hidden

    def _add_embedding(self, form: ModelForm, factor: float) -> None:
        """Add the look-up of each row's token."""
        module = form.embedding
        fields: Fields = {"where": self._tokens, "onto": self.hidden}
        if isinstance(module, BlockEmbedding):
            read = dispatch.block_reader(torch.device("cpu"))
            assert read is not None  # otherwise the form is refused
            reader, lookup, held = read(self._tokens, module, self.hidden)
            self._held = held
            fields |= {"reader": reader, "lookup": lookup}
        else:
            weight = module.weight
            fields |= {"weight": weight, "weight_bits": 8 * weight.itemsize, "tokens": len(weight)}
        self.table.add("look_up", inputs=self.hidden.shape[1], factor=factor, **fields)

    def _add_angles(self, rotaries: Sequence[Rotary | None]) -> list[Fields]:
        """Add tables of angles, one for each rotary embedding.

        Args:
            rotaries: the rotary embedding of each part of each layer.

        Returns:
            For each part, the fields of its attention that are about rotation.
        """
        known: dict[int, Fields] = {}
        for rotary in rotaries:
            if rotary is None or id(rotary) in known:
                continue
            turns = (rotary.frequencies.double() / (2 * math.pi)).contiguous()
            half = len(turns)
            tables = [self.table.memory(len(self._places), half) for _ in range(2)]
            fields: Fields = {"half": half, "cosines": tables[0], "sines": tables[1]}
            more: Fields = {"where": self._places, "turns": turns, "scaling": rotary.scaling}
            self.table.add("angles", **fields, **more)
            known[id(rotary)] = fields
        return [{} if rotary is None else known[id(rotary)] for rotary in rotaries]

    def _add_layer(self, form: LayerForm, first: int, parts: Sequence[HeldPart]) -> LayerOperations:
        """Add a layer; `first` is the number of its first part among those of all layers."""
        start = len(self.table)
        attention = self._add_attention(form, first, parts)
        middle = len(self.table)
        mlp = self._add_mlp(form)
        numbers = range(first, first + len(parts))
        return LayerOperations(start, middle, len(self.table), parts, numbers, *attention, *mlp)

    def _add_attention(
        self, form: LayerForm, first: int, parts: Sequence[HeldPart]
    ) -> list[Tensor]:
        """Add a layer's attention; returns the memory of q, k, v, o and partial answers."""
        table = self.table
        asked = form.q, form.k, form.v
        outs = [table.memory(table.rows, part.outputs) for part in (*asked, form.o)]
        weights = [part.weight() for part in asked]
        table.multiply(weights, outs[:3], **self._from(form.before_attention))
        batch, _, _, dim = parts[0].slots.keys.shape
        width = parts[0].slots.values.shape[3]
        heads = sum(part.slots.keys.shape[1] for part in parts)
        group = form.q.outputs // (heads * dim)
        of_heads: Fields = {}
        if form.q_norm is not None and form.k_norm is not None:
            if form.heads_together:
                for out, norm in zip(outs[:2], (form.q_norm, form.k_norm), strict=True):
                    more: Fields = {"inputs": norm.width, "x": out, "onto": out, "then": "store"}
                    table.add("norms", **more, **norm.fields())
            else:
                of_heads = _norms_of_heads(form.q_norm, form.k_norm)
        o = form.o.weight()
        # Parts of a layer differ in their numbers of slots, so each head is divided among all
        # threads.
        stretches = table.stretches(heads if len(parts) == 1 else 1)
        partial = table.memory(batch * heads * stretches, group, width + 2)
        answered = {"stretches": stretches, "all_heads": heads, "partial": partial}
        for number, part in enumerate(parts):
            slots, last = part.slots, number + 1 == len(parts)
            waiting = {}
            if slots.queries is not None:
                places = slots.queries.shape[2]
                waiting = {"waiting_queries": slots.queries, "places": places}
                waiting["unasked"] = slots.unasked
            own = slots.keys.shape[1]
            table.add_attention(
                self._hold(slots, part.params, group),
                own,
                slots.b.shape[2],
                waits=len(parts) if last else 0,
                numbers=np.array(range(heads) if part.heads is None else part.heads),
                queries=outs[0],
                keys=outs[1],
                values=outs[2],
                query_width=heads * group * dim,
                key_width=heads * dim,
                value_width=heads * width,
                span=self._spans[first + number],
                window=slots.window or 0,
                waiting=self._waiting,
                largest=self.largest[first + number],
                most_heads=self.largest.shape[2],
                ahead=o.numbers,
                ahead_bytes=o.numbers.nbytes if last else 0,
                **answered,
                **waiting,
                **self._angles[first + number],
                **of_heads,
            )
        answered |= {"group": group, "width": width, "source": "merge"}
        self._add_product(form, form.o, outs[3], form.after_attention, **answered)
        return [*outs, partial]

    def _add_mlp(self, form: LayerForm) -> list[Tensor]:
        """Add a layer's MLP; returns the memory of gate, up, down and the input of down."""
        table = self.table
        pair = [form.gate.weight(), form.up.weight()]
        gate, up, gated = (table.memory(table.rows, form.gate.outputs) for _ in range(3))
        more = {"then": "gate", "onto": gated, "activation": form.activation}
        table.multiply(pair, [gate, up], **more, **self._from(form.before_mlp))
        down = table.memory(table.rows, form.down.outputs)
        self._add_product(form, form.down, down, form.after_mlp, x=gated, source="plain")
        return [gate, up, down, gated]

    def _from(self, norm: Norm | None) -> Fields:
        """Return the fields of an operation that reads the hidden state, through a norm if there is
        one.
        """
        if norm is None:
            return {"x": self.hidden, "source": "plain"}
        return {"x": self.hidden, "source": "norm", **norm.fields()}

    def _add_product(
        self, form: LayerForm, part: Projection, out: Tensor, norm: Norm | None, **fields: Any
    ) -> None:
        """Add a product that is added to the hidden state, through a norm if there is one."""
        add: Fields = {"then": "add", "onto": self.hidden, "factor": form.factor}
        if norm is None:
            self.table.multiply([part.weight()], [out], **add, **fields)
            return
        self.table.multiply([part.weight()], [out], **fields)
        self.table.add("norms", x=out, inputs=part.outputs, **add, **norm.fields())

    def _hold(self, slots: DecodeSlots, params: AttentionParams, group: int) -> np.ndarray:
        """Describe a layer's slots for the kernel."""
        coded, blocks, quantized = None, (0, 0), slots.quantized
        if not all(t.is_contiguous() for t in slots.tensors()):
            raise NotNative("its slots are not contiguous in memory")
        if not is_plain(slots.keys):
            raise NotNative(
                f"its slots are in {_name(slots.keys.dtype)}, and native steps read float32 and "
                "bfloat16"
            )
        if quantized is not None:
            coded = quantized.stored
            if quantized.format.name == "int4":
                blocks = block_size(slots.keys.shape[3]), block_size(slots.values.shape[3])
            elif quantized.format.name != "int8":
                raise NotNative(
                    f"it has slots of the format {quantized.format.name}, and native steps read "
                    "int8 and int4"
                )
        mask, *split = (slots.b,) if slots.split is None else slots.split
        sinks = params.sinks
        if sinks is not None:
            sinks = sinks.float().expand(len(slots.keys), -1, -1).contiguous()
        more = coded, blocks, group, params.scale, mask, tuple(split) or None, sinks
        return self.table.hold(slots.keys, slots.values, *more, params.softcap)


def _norms_of_heads(query: Norm, key: Norm) -> Fields:
    """Return the fields of the norms of each head's queries and keys, which differ only in their
    weights.
    """
    if query[2:] != key[2:] or query.module.weight.dtype != key.module.weight.dtype:
        raise NotNative(f"{query.name} and {key.name} differ in more than their weights")
    fields = {"norm_bits": 8 * query.module.weight.itemsize}
    fields |= {"query_norm": query.module.weight, "key_norm": key.module.weight}
    return fields | {"epsilon": query.epsilon, "offset": query.offset}


def _is_same(one: AttentionParams, other: AttentionParams) -> bool:
    """Return whether two layers' parameters of attention are the same."""
    if one.scale != other.scale or one.softcap != other.softcap:
        return False
    if one.sinks is None or other.sinks is None:
        return one.sinks is other.sinks
    return torch.equal(one.sinks.flatten(), other.sinks.flatten())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
