"""Native decode steps: a decoder of Llama's form as one table of operations for a kernel.

A step of a small model spends most of its time on calls: of modules, of PyTorch's operations, of
compiled programs. If weir knows all modules of a decoder, their weights and a cache's slots go into
a table (`weir.native.kernels.step`), and a step is one call.

Before the first step, the decoder's form is read (`form`) and proved, module by module (`proof`).
Before the first step for a cache's sizes, the table's operations are compared with PyTorch's
(`check`). Afterwards, `watch` notices replaced modules. If there is a module that weir does not
understand, the model runs its own steps, and `NativeStep.why_not` names the module.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from weir import kernels
from weir.models import (
    CACHE,
    Given,
    ModelSpec,
    OwnForward,
    RunWhole,
    attention_modules,
    has_hooks,
    say_once,
)
from weir.native import dispatch
from weir.native.check import check_program
from weir.native.form import DecoderForm, NotNative, read_decoder, read_model
from weir.native.program import OutOfDate, StepProgram, Whole
from weir.native.proof import prove, prove_model
from weir.native.watch import Watch
from weir.slab import AttentionParams, Step, StepSlots

PATIENCE = 1.0
"""Seconds to wait for the kernel, once, unless `NativeStep.wait` is true: in the first step, or in
the first call of `why_not` if that comes before. That is enough if the kernel is in numba's cache.
"""
WAITING = (
    "compiling the decode step for this machine, once, which takes half a minute; until it is "
    "compiled, steps run in PyTorch"
)
UNFINISHED = "the kernel is still being compiled; steps are native when it is ready"
"""The reason why steps are not native yet."""
MOST_ROWS = 16
"""Largest number of rows with native steps. With more rows, PyTorch is faster, because it is made
for products of many rows.
"""


class NativeStep:
    """A decoder's native steps: a `StepEngine`, which reads the decoder again if a module changes.

    Attributes:
        run: see `StepEngine`.
        wait: whether to wait until the kernel is compiled, however long that takes.

    Args:
        spec: the description of the model.
        wait: see the attribute.
    """

    run: Literal["native", "compiled"] = "native"
    wait = False

    def __init__(self, spec: ModelSpec, wait: bool = False) -> None:
        if wait:
            self.wait = True
        self._spec = spec
        self._decoder = spec.decoder
        self._watch: Watch | None = None
        self._form: DecoderForm | None = None
        self._params: Sequence[AttentionParams] = ()
        self._reason: str | None = None
        self._compiling: threading.Thread | None = None
        self._waited = False
        self._proved: set[Hashable] = set()
        self._whole: tuple[weakref.ref[nn.Module], Whole | None] | None = None
        # Start to compile the kernel now, so that it is often ready before the first step.
        try:
            read_decoder(self._decoder, self._attentions())
        except NotNative:
            return
        self._start_compiling()

    def prepare(self) -> None:
        """Read the decoder's form and prove it, unless the last proof still holds; see
        `StepEngine.prepare`.
        """
        if self._watch is not None and self._watch.holds():
            return
        parts = (getattr(self._decoder, name, None) for name in ("layers", "norm"))
        rotary = getattr(self._decoder, "rotary_emb", None)  # caches watch its other attributes
        # The decoder's own hooks run around every kind of step.
        self._watch = Watch(self._decoder, parts, [rotary] if isinstance(rotary, nn.Module) else [])
        self._whole = None
        self._form, self._reason, self._proved = None, None, set()
        try:
            with torch.no_grad():
                form = read_decoder(self._decoder, self._attentions())  # the current ones
                self._params = prove(self._spec, form)
            self._form = form
        except NotNative as error:
            self._reason = str(error)
        except Exception as error:  # modules of others can raise anything
            self._reason = f"trying its modules failed: {_first_line(error)}"

    @property
    def reason(self) -> str | None:
        """Why the decoder's modules do not support native steps; None if they do, and before
        `prepare` was called.
        """
        return self._reason

    def step(self, step: Step, given: Given, own: OwnForward) -> BaseModelOutputWithPast | None:
        """Return the decoder's output for one token of each row; see `StepEngine.step`."""
        batch, slots = len(step.waiting), step.slots
        if batch > MOST_ROWS or kernels.is_compiling() or torch.is_autocast_enabled("cpu"):
            return None
        self.prepare()
        form, watch = self._form, self._watch
        if form is None or watch is None:
            return None
        if not self._is_compiled():
            say_once(WAITING)
            return own(**given)
        program = slots.program if isinstance(slots.program, StepProgram) else None
        if program is None or not program.fits(watch, step):
            slots.program = None
            key = watch, batch, *(len(slab) for slab in slots.slabs)
            if slots.refused is not None and slots.refused[0] == key:
                return None
            try:
                program = self._make_program(form, watch, step, given)
            except OutOfDate:
                return own(**given)
            except Exception as error:
                known = isinstance(error, NotNative)
                reason = str(error) if known else f"making the step failed: {_first_line(error)}"
                slots.refused = key, reason
                return own(**given)
            slots.program, slots.refused = program, None
            if program.kind not in self._proved:
                # The model runs this step, which overwrites what trials have written to the slots.
                self._proved.add(program.kind)
                output = own(**given)
                hidden = output.last_hidden_state
                if hidden is None or hidden.dtype != program.dtype:
                    slots.program, slots.refused = (
                        None,
                        (
                            key,
                            "its output has another dtype than the weight of its last norm",
                        ),
                    )
                return output
        hidden = program.run(self._embedded(given), step)
        step.largest, step.top = program.largest, program.top
        return BaseModelOutputWithPast(last_hidden_state=hidden, **{CACHE: given.get(CACHE)})

    def whole_step(self, model: nn.Module, slots: StepSlots) -> RunWhole | None:
        """Return a function that runs a model's steps; see `StepEngine.whole_step`."""
        program = slots.program
        if slots.asker is None or slots.asker() is not model:
            slots.asker, slots.program = weakref.ref(model), None
            return None
        if not isinstance(program, StepProgram) or program.whole is None:
            return None
        return partial(self._run_whole, program)

    def _run_whole(self, program: StepProgram, step: Step, tokens: list[int]) -> Tensor | None:
        whole, watch = program.whole, self._watch
        assert whole is not None
        if kernels.is_compiling() or torch.is_autocast_enabled("cpu"):
            return None
        if watch is None or not watch.holds() or not program.fits(watch, step):
            return None
        if not whole.watch.holds():
            self._whole = step.slots.program = None
            return None
        logits = program.run_whole(tokens, step)
        step.largest, step.top = program.largest, program.top
        return logits

    def _make_program(
        self, form: DecoderForm, watch: Watch, step: Step, given: Given
    ) -> StepProgram:
        """Make the table of whole steps if logits are wanted and such steps are supported; if not,
        make that of the decoder's steps. Check it if none of its kind was checked before.
        """
        whole = self._read_whole(form, step.slots)
        while True:
            try:
                program = StepProgram(form, self._params, watch, step, whole)
                if program.kind not in self._proved:
                    embedded = self._trial_embedding(given, len(step.waiting))
                    check_program(program, form, step, embedded, not self._proved)
                return program
            except NotNative:
                if whole is None:
                    raise
            # Perhaps only the part around the decoder differs.
            self._whole, whole = (whole.model, None), None

    def _read_whole(self, form: DecoderForm, slots: StepSlots) -> Whole | None:
        """Return the model whose logits are wanted. Return None if only hidden states are wanted,
        or if the model computes more than its decoder and its head, so that it has to be called.
        """
        model = None if slots.asker is None else slots.asker()
        if model is None:
            return None
        known = self._whole
        if known is None or known[0]() is not model:
            reference, made = weakref.ref(model), None
            with suppress(Exception), torch.no_grad():  # modules of others can raise anything
                found = read_model(model, self._decoder, form)
                prove_model(model, self._decoder, found, form.norm.width)
                parts = found.embedding, found.head.module
                made = Whole(reference, found, Watch(model, parts, [model, self._decoder]))
            self._whole = known = reference, made
        return known[1]

    def why_not(self, slots: StepSlots, rows: int) -> str | None:
        """Return why the model runs its own steps over a cache's slots; see
        `StepEngine.why_not`.
        """
        if self._reason is not None:
            return self._reason
        if slots.reason is not None:
            return slots.reason
        if rows > MOST_ROWS:
            return f"it has {rows} rows, and native steps have {MOST_ROWS} at most"
        if slots.refused is not None:
            return slots.refused[1]
        # If the first step waits for the kernel, no step runs without it.
        return None if self.wait or self._is_compiled() else UNFINISHED

    def _attentions(self) -> list[nn.Module]:
        return attention_modules(self._decoder) if hasattr(self._decoder, "layers") else []

    def _trial_embedding(self, given: Given, batch: int) -> Tensor:
        """Return the step's embeddings, or random ones if a user's hook would be called."""
        module = self._embedding()
        hooked = has_hooks(module._forward_hooks, module._forward_pre_hooks)
        if given.get("inputs_embeds") is None and hooked:
            assert self._form is not None
            return torch.randn(batch, 1, self._form.norm.width, generator=torch.Generator())
        return self._embedded(given)

    def _is_compiled(self) -> bool:
        """Return whether the kernel is ready. A thread compiles it, and the first call waits."""
        thread = self._compiling or self._start_compiling()
        if not self._waited:
            self._waited = True
            thread.join(None if self.wait else PATIENCE)
        return not thread.is_alive()

    def _start_compiling(self) -> threading.Thread:
        make = dispatch.decode_step(torch.device("cpu"))
        assert make is not None  # otherwise no engine is chosen
        self._compiling = threading.Thread(target=make.compile, daemon=True)
        self._compiling.start()
        return self._compiling

    def _embedding(self) -> nn.Module:
        return cast(nn.Module, self._decoder.embed_tokens)

    def _embedded(self, given: Given) -> Tensor:
        """Return embeddings as the first layer gets them."""
        embedded: Tensor | None = given.get("inputs_embeds")
        if embedded is None:
            embedded = cast(Tensor, self._embedding()(given["input_ids"]))
        assert self._form is not None
        return embedded if self._form.factor == 1 else embedded * self._form.factor


def _first_line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"
