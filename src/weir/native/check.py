"""Checks the operations of a step table, before the first step with this table takes effect.

`proof` has shown what a decoder computes. This file shows that the kernel computes the same, with
the real weights and slots. Of the tables for slots of the same sizes (`StepProgram.kind`), only the
first is checked.

Each operation's result is compared with PyTorch's, in float32 or float64 and from the same inputs
that the operation read, so that errors do not accumulate over operations. Therefore weights in 16
bits need no wider tolerance. Neither do weights in blocks, because their inputs are rounded to 8
bits from the same numbers, and so in the same way. There is one exception: the kernel of attention
reads the slots of a head in several parts, and the product that follows merges their answers. So a
few of this product's inputs may be rounded to the neighboring step.

The first layer of each kind runs over random hidden states, with its rows at several places of the
stream, some of them beyond the windows of nearly all models. It then runs over the step's own
hidden states, at the step's own places. The other layers have only this run, which is not always
compared (`every`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from weir.native.block_weights import BlockEmbedding, BlockLinear, write_out
from weir.native.form import (
    DecoderForm,
    LayerForm,
    ModelForm,
    Norm,
    NotNative,
    Projection,
)
from weir.native.module_trials import activate, is_rounding
from weir.native.program import LayerOperations, StepProgram
from weir.native.proof import normalized, rotated
from weir.slab import Step

PLACES = (7, 1_000_003)
"""Offsets that are added to the places of rows in trials; the second is beyond the
windows of nearly all models.
"""
FLIPS = 4
"""Number of inputs that two computations may round to different, neighboring 8-bit steps."""
ROWS_LOOKED_UP = 8
"""Smallest number of embeddings that are looked up in a check."""
_EPS = torch.finfo(torch.float32).eps


def check_program(
    program: StepProgram, form: DecoderForm, step: Step, embedded: Tensor, every: bool
) -> None:
    """Compare the operations of a program with PyTorch's; the last run is at the rows' own places.

    Args:
        program: the table.
        form: the form that it was made from.
        step: the step that the program is for.
        embedded: its embeddings [batch, 1, width].
        every: whether to check all layers; otherwise, one of each kind.

    Raises:
        NotNative: an operation computes something else.
    """
    known: set[Hashable] = set()
    if program.whole is not None:
        _check_embedding(program, program.whole.form, form.factor)
    program.hidden.copy_(embedded[:, 0])
    draw = torch.Generator().manual_seed(0)
    for index, layer in enumerate(form.layers):
        kind = _kind(layer, program.layers[index])
        first = kind not in known
        known.add(kind)
        trial = _Trial(f"layers.{index}", layer, program.layers[index], step)
        own = program.hidden.clone()
        if first:
            for further in PLACES:
                program.hidden.copy_(torch.randn(own.shape, generator=draw))
                trial.run(program, index, torch.from_numpy(step.places) + further)
            program.hidden.copy_(own)
        if first or every:
            trial.run(program, index, torch.from_numpy(step.places))
        else:
            program.run_attention(index, step, torch.from_numpy(step.places))
            program.run_mlp(index)
    hidden, out = program.hidden[step.busy].double(), program.run_norm()[step.busy]
    if not is_rounding(out, form.norm(hidden), form.norm.width):
        raise NotNative("the native norm does not match the model's")
    if program.whole is not None:
        assert program.logits is not None
        head = program.whole.form.head
        _compare_product(head, program.logits, head(program.normed), program.normed, step.busy)


def _check_embedding(program: StepProgram, form: ModelForm, factor: float) -> None:
    """Compare the native look-up with the model's, for the first token, the last and others."""
    rows, count = len(program.hidden), form.embedding.num_embeddings
    draw = torch.Generator().manual_seed(count)
    ids = torch.randint(count, (max(ROWS_LOOKED_UP, rows),), generator=draw)
    ids[0], ids[1:2] = count - 1, 0
    for some in ids.split(rows):
        some = torch.cat([some, some.new_zeros(rows - len(some))])
        wanted = _embeddings(form.embedding, some).double() * factor
        off = _EPS * wanted.abs()
        if not bool(((program.look_up(some).double() - wanted).abs() <= off).all()):
            raise NotNative("the native look-up of embeddings does not match the model's")


def _embeddings(module: Any, ids: Tensor) -> Tensor:
    """Return the embeddings that a module looks up. Those from blocks are in float32, before they
    are rounded to the module's dtype, or NaN if rounding does not give the module's answer.
    """
    found: Tensor = module(ids)
    if not isinstance(module, BlockEmbedding):
        return found
    exact = write_out(module.codes, module.scales, module.kind, module.outputs, ids)
    return exact if torch.equal(exact.to(found.dtype), found) else found.fill_(torch.nan)


def _compare_product(
    part: Projection,
    got: Tensor,
    wanted: Tensor,
    x: Tensor,
    busy: list[int],
    *,
    scale: float | Tensor = 1.0,
    flips: int = 0,
) -> None:
    """Compare a product of x [rows, inputs] with PyTorch's.

    The rounding error of a sum of products is proportional to the sizes of its terms, of which some
    cancel. For all outputs together, these sizes are |W| |x|, and |W| is estimated by the product
    of the weight with random signs.

    Args:
        part: the projection.
        got, wanted: [rows, outputs].
        x: the input.
        busy: the rows that are compared.
        scale: the factor by which the product was multiplied afterwards [rows].
        flips: how many inputs may be rounded to neighboring steps, if inputs are rounded.
    """
    inputs = x.shape[1]
    draw = torch.Generator().manual_seed(inputs)
    signs = torch.randint(2, (1, inputs), generator=draw).float() * 2 - 1
    off = _EPS * (32 + 4 * math.sqrt(inputs))
    if isinstance(part.module, BlockLinear):
        off += flips / 127 / math.sqrt(inputs)
    bound = part(signs).norm() * off * x.norm(dim=1) * scale
    over = (got - wanted).norm(dim=1) > bound
    if bool(over[busy].any()) or not bool(got[busy].isfinite().all()):
        raise NotNative(f"the native product of {part.name} does not match the model's")


def _kind(form: LayerForm, layer: LayerOperations) -> Hashable:
    """Return a key that is the same for layers whose operations run the same code."""
    parts = (
        (type(part.module), part.outputs, part.module.in_features, part.module.bias is None)
        for part in form.projections
    )
    norms = tuple(norm.name.rpartition(".")[2] for norm in form.norms)
    slots = tuple((part.slots.sizes, part.rotary is None) for part in layer.parts)
    blocks = tuple(getattr(p.module, "kind", None) for p in form.projections)
    return tuple(parts), norms, slots, blocks, form.activation, form.factor


class _Trial:
    """Runs one layer's operations next to PyTorch's."""

    def __init__(self, name: str, form: LayerForm, layer: LayerOperations, step: Step) -> None:
        self._name, self._form, self._layer, self._step = name, form, layer, step

    def run(self, program: StepProgram, index: int, places: Tensor) -> None:
        """Run the layer over the program's hidden state, and compare."""
        form, layer, busy = self._form, self._layer, self._step.busy
        before = program.hidden.clone()
        program.run_attention(index, self._step, places)
        middle = program.hidden.clone()
        program.run_mlp(index)
        y = self._normalize(program, form.before_attention, before)
        asked = (form.q, layer.q, form.q_norm), (form.k, layer.k, form.k_norm)
        for part, got, norm in (*asked, (form.v, layer.v, None)):
            made = part(y)
            normed = made if norm is None or not form.heads_together else norm(made)
            self._compare(part, got, normed, y, scale=normed.norm(dim=1) / made.norm(dim=1))
        answers = self._answers(places)
        self._compare(form.o, layer.o, form.o(answers), answers, flips=FLIPS)
        x = before.double() + form.factor * normalized(form.after_attention, layer.o.double())
        self._compare_sums(middle, x)
        y = self._normalize(program, form.before_mlp, middle)
        self._compare(form.gate, layer.gate, form.gate(y), y)
        self._compare(form.up, layer.up, form.up(y), y)
        gated = activate(form.activation, layer.gate.double()) * layer.up.double()
        if not is_rounding(layer.gated[busy], gated[busy], 1):
            raise NotNative(f"{self._name}: the native activation does not match the model's")
        self._compare(form.down, layer.down, form.down(layer.gated), layer.gated)
        x = middle.double() + form.factor * normalized(form.after_mlp, layer.down.double())
        self._compare_sums(program.hidden, x)

    def _compare_sums(self, got: Tensor, wanted: Tensor) -> None:
        """Compare hidden states, to which a product was added."""
        if not is_rounding(got[self._step.busy], wanted[self._step.busy], wanted.shape[1]):
            raise NotNative(f"{self._name}: the native sum does not match the model's")

    def _normalize(self, program: StepProgram, norm: Norm | None, x: Tensor) -> Tensor:
        """Compute a norm by the table's own operation, and compare it with the norm's formula.

        The result is bit-identical to the input of the table's products, so that PyTorch's products
        round the same numbers to 8 bits.
        """
        found = program.normalize(norm, x)
        wanted = normalized(norm, x.double())
        if not is_rounding(found[self._step.busy], wanted[self._step.busy], x.shape[1]):
            raise NotNative(f"{self._name}: a native norm does not match the model's")
        return found

    def _compare(
        self, part: Projection, got: Tensor, wanted: Tensor, x: Tensor, **more: Any
    ) -> None:
        _compare_product(part, got, wanted, x, self._step.busy, **more)

    def _answers(self, places: Tensor) -> Tensor:
        """Return the answers of attention to the queries in memory [rows, heads * width].

        Compares them, and the keys and values that were stored, with PyTorch's.
        """
        form, layer, step = self._form, self._layer, self._step
        heads = sum(part.slots.keys.shape[1] for part in layer.parts)
        dim, batch = layer.parts[0].slots.keys.shape[3], len(places)
        width = form.o.module.in_features // heads
        found, apart = torch.zeros(batch, heads, width), 0.0
        for part, span in zip(layer.parts, layer.spans, strict=True):
            slots = part.slots
            numbers = list(range(heads) if part.heads is None else part.heads)
            made = []
            for got, norm in ((layer.q, form.q_norm), (layer.k, form.k_norm)):
                t = got.double().view(batch, heads, -1, dim)[:, numbers].flatten(1, 2)
                if norm is not None and not form.heads_together:
                    t = norm(t)
                made.append(t if part.rotary is None else rotated(part.rotary, t, places))
            queries, keys = made
            values = layer.v.double().view(batch, heads, -1)[:, numbers]
            first = 0 if slots.quantized is None else len(slots.quantized)
            ends = torch.from_numpy(step.spans[span, 1:].copy())
            stored = [
                t[torch.arange(batch), :, ends - first].float() for t in (slots.keys, slots.values)
            ]
            for got, want, what in zip(stored, (keys, values), ("keys", "values"), strict=True):
                eps = torch.finfo(slots.keys.dtype).eps
                size = want.abs().flatten(1).amax(1)[:, None, None]
                off = eps * want.abs() + _EPS * (32 + 4 * dim**0.5) * size
                if not bool(((got - want).abs() <= off)[step.busy].all()):
                    raise NotNative(f"{self._name}: native steps store different {what}")
            wide: dict[str, Any] = {"keys": slots.keys.float(), "values": slots.values.float()}
            if slots.quantized is not None:
                quantized = slots.quantized
                kind = type(quantized)
                wide["quantized"] = kind(quantized.format, quantized.buffers, torch.float32)
            held = dataclasses.replace(slots, queries=None, **wide)
            given = queries[:, :, None].float(), stored[0][:, :, None], stored[1][:, :, None]
            waiting = torch.from_numpy(step.waiting)
            answers = held.decode(*given, part.params, ends, waiting, torch.zeros(batch))
            answers = answers.view(batch, len(numbers), -1)
            found[:, numbers] = answers
            # The relative error of an attention weight is the absolute error of its logit.
            logit = float(wide["keys"].norm(dim=3).max() * queries.norm(dim=2).max())
            share = _EPS * (32 + 4 * dim**0.5 * (1 + logit * abs(part.params.scale)))
            longest = float(wide["values"].norm(dim=3).max())
            apart += share * longest * queries.shape[1] ** 0.5
        got = self._merged(heads)
        over = (got - found).flatten(1).norm(dim=1) > apart
        if bool(over[step.busy].any()) or not bool(got[step.busy].isfinite().all()):
            raise NotNative(f"{self._name}: native attention does not match the model's")
        return got.flatten(1)

    def _merged(self, heads: int) -> Tensor:
        """Merge the answers of each head's stretches (`kernels.step`).

        Returns [rows, heads, group * width].
        """
        layer = self._layer
        batch, group = len(layer.q), layer.partial.shape[1]
        stretches = len(layer.partial) // (batch * heads)
        found = layer.partial.view(batch, heads, -1).double()
        answers, sums = found.split(
            [found.shape[2] - 2 * group * stretches, 2 * group * stretches], dim=2
        )
        answers = answers.view(batch, heads, stretches, group, -1)
        top, total = sums.view(batch, heads, stretches, group, 2).unbind(4)
        share = (top - top.amax(2, keepdim=True)).exp()
        whole = (share * total).sum(2)
        merged = (share[..., None] * answers).sum(2) / whole[..., None]
        return merged.flatten(2).float()
