"""Native decode steps: a decoder of Llama's form as one table of operations for a kernel.

A step of a small model is mostly calls: of modules, of PyTorch's operations, of compiled programs.
Where all modules of a decoder are known, their weights and a cache's slots go into a table
(`weir.kernels.cpu.step`), and a step is one call. A decoder is known by what its modules are called
and made of; that they compute what they are called is found out by comparing the first step with
the model's own. Knows nothing about caches but what a call hands over, `cache.forward.StepRows`.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_outputs import BaseModelOutputWithPast

from weir import kernels
from weir.models import compiling
from weir.models.block_mlp import ACTIVATIONS, is_near
from weir.models.block_weights import BlockLinear
from weir.models.cache_name import CACHE
from weir.models.linear_kernels import is_plain, runs_as_linear
from weir.models.model_spec import attention_modules
from weir.models.quantized_weights import Int8Linear
from weir.slab import block_size

PATIENCE = 1.0
"""Seconds that the first step waits for the kernel, which is enough where numba has kept it."""
WAITING = (
    "compiling the decode step for this machine, which takes half a minute, once; until then "
    "tokens come uncompiled"
)
MOST_ROWS = 16
"""Rows from which on a step is many products, for which PyTorch is made."""
GROWTH = 32
"""Factor by which roundings may grow through a decoder; what computes something else is off by a
large part of the whole.
"""


class Norm(NamedTuple):
    """An RMS norm: `x / sqrt(mean(x^2) + epsilon) * (weight + offset)`."""

    weight: Tensor
    epsilon: float
    offset: float

    def fields(self) -> dict[str, Any]:
        """Return the fields of an operation with this norm."""
        bits = 8 * self.weight.itemsize
        return {"weight_bits": bits, **self._asdict()}


class Norms(NamedTuple):
    """The norms of a decoder's layer."""

    before_attention: Norm
    before_mlp: Norm
    after_attention: Norm | None = None
    after_mlp: Norm | None = None


class Weight(NamedTuple):
    """A linear layer's weight, as a table has it.

    Attributes:
        numbers: [outputs, inputs], float32, bfloat16 or int8; or the codes of `Blocks`.
        scale: of each output, float32, for int8; or the scales of `Blocks`.
        bias: float32 or bfloat16; None for none.
        outputs, inputs: sizes.
        function: for `Blocks` what multiplies with them (`kernels.block_function`), else 0.
    """

    numbers: Tensor
    scale: Tensor | None
    bias: Tensor | None
    outputs: int
    inputs: int
    function: int = 0


class Unknown(Exception):
    """A decoder or slots that no table can be made of."""


class NativeStep:
    """A decoder's native steps, while its modules are as they were.

    Attributes:
        wait: wait for the kernel to be compiled, however long that takes.

    Args:
        decoder: with `embed_tokens`, `layers` and `norm`.
        wait: see the attribute.
    """

    wait = False

    def __init__(self, decoder: nn.Module, wait: bool = False) -> None:
        if wait:
            self.wait = True
        self._decoder: Any = decoder
        self._watch: _Watch | None = None
        self._compiling: threading.Thread | None = None
        self._waited = False
        self._refused: set[Any] = set()
        self._proved: set[Any] = set()
        if _has_form(decoder):  # the kernel is often there before the first step is
            self._start_compiling()

    def __call__(self, rows: Any, given: dict[str, Any], usual: Callable[[], Any]) -> Any:
        """Return the decoder's output for one token of each row, None where there is no table.

        Args:
            rows: the cache's rows, `cache.forward.StepRows`; `largest` is set where the step took
                effect in the slots.
            given: the decoder's arguments by name.
            usual: the model's own step, which is compared with the first native one.
        """
        batch = len(rows.waiting)
        if batch > MOST_ROWS or kernels.is_compiling() or torch.is_autocast_enabled("cpu"):
            return None
        if not self._is_compiled():
            return usual()
        if self._watch is None or not self._watch.holds():
            self._watch = _Watch(self._decoder)
            self._refused, self._proved = set(), set()
        program = rows.stack.program
        if program is None or not program.fits(self._watch, rows):
            rows.stack.program = None
            key = batch, *(len(slab) for slab in rows.slabs)
            if key in self._refused:
                return None
            try:
                program = _StepProgram(self._decoder, self._watch, rows)
            except Unknown:
                self._refused.add(key)
                return None
        hidden = program.run(self._embedded(given), rows)
        if program is not rows.stack.program and program.sizes not in self._proved:
            output = usual()
            # Rows without a token answer nothing, and otherwise than the model's own step.
            known, off = output.last_hidden_state[rows.busy], GROWTH * program.roundings
            if not is_near(hidden[rows.busy], known, min(0.25, off)):
                self._refused.add((batch, *(len(slab) for slab in rows.slabs)))
                return output
            self._proved.add(program.sizes)
            rows.stack.program = program
            return output
        rows.stack.program = program
        rows.largest = program.largest.amax(2)
        return BaseModelOutputWithPast(last_hidden_state=hidden, **{CACHE: given.get(CACHE)})

    def _is_compiled(self) -> bool:
        """Return whether the kernel is there; a thread compiles it, and the first call waits."""
        thread = self._compiling or self._start_compiling()
        if not self._waited:
            self._waited = True
            thread.join(None if self.wait else PATIENCE)
            if thread.is_alive():
                compiling.say(WAITING)
        return not thread.is_alive()

    def _start_compiling(self) -> threading.Thread:
        make: Any = kernels.decode_step(torch.device("cpu"))
        self._compiling = threading.Thread(target=make.compile, daemon=True)
        self._compiling.start()
        return self._compiling

    def _embedded(self, given: dict[str, Any]) -> Tensor:
        embedded: Tensor | None = given.get("inputs_embeds")
        return self._decoder.embed_tokens(given["input_ids"]) if embedded is None else embedded


class _Watch:
    """Notices where modules of a decoder's layers are not what they were when it was made.

    It looks at what a table depends on: weights and their memory, modules, their forwards and
    hooks. Behind a step all of that is out of the processor's caches, and looking at 30 layers
    takes half a millisecond, twice what it takes again; so it looks at hooks only where any were
    registered in this process.
    """

    def __init__(self, decoder: Any) -> None:
        self._dicts: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._hooks: list[dict[Any, Any]] = []
        self._handles = -1  # how many hooks had been registered at the last look
        weights: list[Any] = []
        for module in (decoder, *decoder.layers.modules(), decoder.norm):
            own = vars(module)
            for held in (module._modules, module._parameters, module._buffers):
                self._dicts += [held] * len(held)
                self._names += held
            names = {"forward", *own.keys() & _READ}
            self._dicts += [own] * len(names)
            self._names += names
            self._hooks += [module._forward_hooks, module._forward_pre_hooks]
            weights += [*module.parameters(recurse=False), getattr(module, "numbers", None)]
        # One that torchao has packed has no memory of its own.
        self._weights = [t for t in weights if t is not None and type(t.data) is Tensor]
        self._held, self._memory = self._look()

    def holds(self) -> bool:
        """Return whether everything is as it was."""
        held, memory = self._look()
        # Identity first: a tensor compared with another has no truth value.
        if memory != self._memory or not all(map(operator.is_, held, self._held)):
            return False
        handles = RemovableHandle.next_id
        if handles != self._handles:
            if any(self._hooks):
                return False
            self._handles = handles
        return True

    def _look(self) -> tuple[list[Any], list[int]]:
        held = list(map(dict.get, self._dicts, self._names))
        return held, list(map(Tensor.data_ptr, self._weights))


_READ = {"training", "variance_epsilon", "eps", "scaling", "numbers", "scales", "act_fn"}
"""Attributes of modules that are read, beside modules and parameters."""


class _StepProgram:
    """The table of a decoder over a cache's slots.

    Attributes:
        largest: the largest absolute key or value of each layer, row and head in the last step.
        sizes: what tells it from others that need a proof of their own.
        roundings: by how much of itself the hidden state may be off, if errors do not grow.

    Raises:
        Unknown: no table can be made.
    """

    def __init__(self, decoder: Any, watch: _Watch, rows: Any) -> None:
        make, held = kernels.decode_step(torch.device("cpu")), rows.held()
        if make is None or held is None:
            raise Unknown
        self._watch, self._slabs, self._threads = watch, rows.slabs, torch.get_num_threads()
        parts = [part for layer in held for part in layer]
        self.sizes = tuple((part.slots.sizes, part.heads) for part in parts)
        attentions = attention_modules(decoder)  # those of now
        batch, layers = len(rows.waiting), len(attentions)
        self._table = table = make(batch, self._threads)
        self._spans, self._waiting, self._places = (
            np.zeros_like(t) for t in (rows.spans, rows.waiting, rows.places)
        )
        norm = _norm(decoder.norm)
        width = norm.weight.shape[0]
        self._dtype = norm.weight.dtype
        self._x = table.memory(batch, width)
        self._angles = self._add_angles([part.rotary for part in parts])
        most = max(sum(part.slots.keys.shape[1] for part in layer) for layer in held)
        self.largest = table.memory(len(parts), batch, most)
        done = 0
        for index, layer in enumerate(decoder.layers):
            attention = attentions[index]
            if layer.training or any(map(_is_hooked, layer.modules())):
                raise Unknown
            norms = _norms(layer)
            self._add_attention(norms, attention, done, held[index])
            done += len(held[index])
            self._add_mlp(norms, layer)
        # A layer rounds some 32 times. Where inputs are rounded to 8 bits, a difference in the last
        # place moves one of them by a step, and in the end all roundings may be others.
        eps = torch.finfo(self._dtype).eps
        if any(isinstance(module, BlockLinear) for module in decoder.modules()):
            eps = max(eps, 2.0**-13)
        self.roundings = eps * math.sqrt(32 * layers)
        self._last = table.add("norms", inputs=width, x=self._x, **norm.fields())
        table.finish()

    def fits(self, watch: _Watch, rows: Any) -> bool:
        """Return whether modules, slots and threads are those it was made for."""
        if watch is not self._watch or torch.get_num_threads() != self._threads:
            return False
        if rows.slabs is not self._slabs:  # another list, after a fold
            if len(rows.slabs) != len(self._slabs):
                return False
            if not all(map(operator.is_, rows.slabs, self._slabs)):
                return False
            self._slabs = rows.slabs
        return True

    def run(self, embedded: Tensor, rows: Any) -> Tensor:
        """Return the hidden state [batch, 1, width] of one token of each row."""
        self._x.copy_(embedded[:, 0])
        self._spans[:], self._waiting[:], self._places[:] = rows.spans, rows.waiting, rows.places
        out = torch.empty_like(self._x)[:, None]
        self._table.operations[self._last]["onto"] = out.data_ptr()
        self._table.run()
        return out.to(self._dtype)

    def _add_angles(self, rotaries: Sequence[Any]) -> list[dict[str, Any]]:
        """Add tables of angles, one for each rotary embedding; returns each layer's fields."""
        known: dict[int, dict[str, Any]] = {}
        for rotary in rotaries:
            if rotary is None or id(rotary) in known:
                continue
            turns = (rotary.frequencies.double() / (2 * math.pi)).contiguous()
            half = len(turns)
            tables = [self._table.memory(len(self._places), half) for _ in range(2)]
            fields = {"half": half, "cosines": tables[0], "sines": tables[1]}
            more = {"where": self._places, "turns": turns, "scaling": rotary.scaling}
            self._table.add("angles", **fields, **more)
            known[id(rotary)] = fields
        return [{} if rotary is None else known[id(rotary)] for rotary in rotaries]

    def _add_attention(
        self, norms: Norms, attention: Any, first: int, parts: Sequence[Any]
    ) -> None:
        """Add a layer's attention; `first` is the number of its first part among all."""
        table = self._table
        weights = [_weight(getattr(attention, f"{name}_proj", None)) for name in "qkvo"]
        outs = [table.memory(table.rows, weight.outputs) for weight in weights]
        before = norms.before_attention.fields()
        table.multiply(weights[:3], outs[:3], x=self._x, source="norm", **before)
        batch, _, _, dim = parts[0].slots.keys.shape
        width = parts[0].slots.values.shape[3]
        heads = sum(part.slots.keys.shape[1] for part in parts)
        group = weights[0].outputs // (heads * dim)
        sizes = [heads * group * dim, heads * dim, heads * width]
        if [weight.outputs for weight in weights[:3]] != sizes:
            raise Unknown
        of_heads: dict[str, Any] = {}
        if hasattr(attention, "q_norm") or hasattr(attention, "k_norm"):
            for name in ("query", "key"):
                norm = _norm(getattr(attention, f"{name[0]}_norm", None))
                if len(norm.weight) != dim:
                    raise Unknown
                of_heads[f"{name}_norm"] = norm.weight
                of_heads |= {"norm_bits": 8 * norm.weight.itemsize}
                of_heads |= {"epsilon": norm.epsilon, "offset": norm.offset}
        # Parts differ in length, so that each head is read by all threads.
        stretches = table.stretches(heads if len(parts) == 1 else 1)
        partial = table.memory(batch * heads * stretches, group, width + 2)
        answered = {"stretches": stretches, "all_heads": heads, "partial": partial}
        for number, part in enumerate(parts):
            slots, last = part.slots, number + 1 == len(parts)
            if part.params.softcap is not None:
                raise Unknown
            asked = {}
            if slots.queries is not None:
                places = slots.queries.shape[2]
                asked = {"waiting_queries": slots.queries, "places": places}
                asked["unasked"] = slots.unasked
            own = slots.keys.shape[1]
            table.attend(
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
                ahead=weights[3].numbers,
                ahead_bytes=weights[3].numbers.nbytes if last else 0,
                **answered,
                **asked,
                **self._angles[first + number],
                **of_heads,
            )
        answered |= {"group": group, "width": width, "source": "merge"}
        self._add_product(weights[3], outs[3], norms.after_attention, **answered)

    def _add_product(self, weight: Weight, out: Tensor, norm: Norm | None, **fields: Any) -> None:
        """Add a product that is added to the hidden state, through a norm if there is one."""
        if norm is None:
            self._table.multiply([weight], [out], then="add", onto=self._x, **fields)
            return
        self._table.multiply([weight], [out], **fields)
        more = {"inputs": weight.outputs, "then": "add", "onto": self._x}
        self._table.add("norms", x=out, **more, **norm.fields())

    def _hold(self, slots: Any, params: Any, group: int) -> Any:
        """Describe a layer's slots for the kernel."""
        coded, blocks, quantized = None, (0, 0), slots.quantized
        if not all(t.is_contiguous() for t in slots.tensors()) or not is_plain(slots.keys):
            raise Unknown
        if quantized is not None:
            coded = quantized.stored
            if quantized.format.name == "int4":
                blocks = block_size(slots.keys.shape[3]), block_size(slots.values.shape[3])
            elif quantized.format.name != "int8":
                raise Unknown
        mask, *split = (slots.b,) if slots.split is None else slots.split
        sinks = params.sinks
        if sinks is not None:
            sinks = sinks.float().expand(len(slots.keys), -1, -1).contiguous()
        more = coded, blocks, group, params.scale, mask, tuple(split) or None, sinks
        return self._table.hold(slots.keys, slots.values, *more)

    def _add_mlp(self, norms: Norms, layer: Any) -> None:
        table, mlp = self._table, getattr(layer, "mlp", None)
        names = ("gate", "up", "down")
        *pair, down = (_weight(getattr(mlp, f"{name}_proj", None)) for name in names)
        activation = ACTIVATIONS.get(type(getattr(mlp, "act_fn", None)).__name__)
        if activation is None or pair[0][3:5] != pair[1][3:5]:
            raise Unknown
        *outs, gated = (table.memory(table.rows, pair[0].outputs) for _ in range(3))
        gate = {"then": "gate", "onto": gated, "activation": activation}
        table.multiply(pair, outs, x=self._x, source="norm", **gate, **norms.before_mlp.fields())
        out = table.memory(table.rows, down.outputs)
        self._add_product(down, out, norms.after_mlp, x=gated, source="plain")


def _has_form(decoder: Any) -> bool:
    """Return whether the first layer's norms and MLP are of a kind that a table can have."""
    layer = decoder.layers[0]
    mlp = getattr(layer, "mlp", None)
    try:
        _norm(decoder.norm)
        _norms(layer)
        for name in ("gate", "up", "down"):
            _weight(getattr(mlp, f"{name}_proj", None))
    except Unknown:
        return False
    return True


def _norms(layer: Any) -> Norms:
    """Read a layer's norms: two as Llama has them, or four as Gemma from its second on."""
    names = ["input_layernorm", "post_attention_layernorm"]
    if hasattr(layer, "post_feedforward_layernorm"):
        names[1:] = ["pre_feedforward_layernorm", names[1], "post_feedforward_layernorm"]
    return Norms(*(_norm(getattr(layer, name, None)) for name in names))


def _norm(module: Any) -> Norm:
    """Read an RMS norm. What it adds to its weight (Gemma's 1) is seen in an answer of its own."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if epsilon is None or not isinstance(weight, Tensor) or not is_plain(weight):
        raise Unknown
    with torch.no_grad():
        ones = torch.ones_like(weight)
        offset = round(float((module.forward(ones) - weight).mean()))  # hooks are a user's
    if offset not in (0, 1):
        raise Unknown
    return Norm(weight, float(epsilon), float(offset))


def _weight(module: Any) -> Weight:
    """Read a linear layer. Another kind of weight is another branch."""
    if not isinstance(module, nn.Linear) or not runs_as_linear(module):
        raise Unknown
    bias = module.bias
    if bias is not None and not is_plain(bias):
        raise Unknown
    sizes = module.out_features, module.in_features
    if isinstance(module, BlockLinear):
        function = kernels.block_function(module.kind, module.codes.device)
        if not function:
            raise Unknown
        return Weight(module.codes, module.scales, bias, *sizes, function)
    if isinstance(module, Int8Linear):
        numbers, scales = module.numbers, module.scales
        if numbers is None or scales is None or not (numbers.is_cpu and numbers.is_contiguous()):
            raise Unknown
        return Weight(numbers, scales.float().contiguous(), bias, *sizes)
    if type(module) is not nn.Linear or not is_plain(module.weight):
        raise Unknown
    return Weight(module.weight, None, bias, *sizes)


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
