"""Native decode steps: a decoder of Llama's form as one table of operations for a kernel.

A step of a small model is mostly calls: of modules, of PyTorch's operations, of compiled programs.
Where all modules of a decoder are known, their weights and a cache's slots go into a table
(`weir.native.kernels.step`), and a step is one call.

Before the first step the decoder's form is read (`native_form`) and proved, module by module
(`native_proof`), and before the first step of a cache's sizes the table's operations are compared
with PyTorch's (`native_check`). Afterwards `native_watch` notices what is replaced. What is not
understood is refused by name, and the model's own steps run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from weir import kernels
from weir.models import CACHE, Given, ModelSpec, OwnForward, attention_modules, has_hooks, say_once
from weir.native import dispatch
from weir.native.check import check_program
from weir.native.form import DecoderForm, NotNative, read_decoder
from weir.native.program import OutOfDate, StepProgram
from weir.native.proof import prove
from weir.native.watch import Watch
from weir.slab import AttentionParams, Step, StepSlots

PATIENCE = 1.0
"""Seconds that the first step or report waits for the kernel: enough where numba has kept it."""
WAITING = (
    "compiling the decode step for this machine, which takes half a minute, once; until then, "
    "steps run uncompiled"
)
UNFINISHED = "the kernel is still being compiled; steps are native when it is ready"
"""Reason why steps are not native yet."""
MOST_ROWS = 16
"""Rows from which on a step is many products, for which PyTorch is made."""


class NativeStep:
    """A decoder's native steps, while its modules are as they were: a `StepEngine`.

    Attributes:
        wait: wait for the kernel to be compiled, however long that takes.

    Args:
        spec: of the model.
        wait: see the attribute.
    """

    run: Literal["native", "compiled"] = "native"
    wait = False

    def __init__(self, spec: ModelSpec, wait: bool = False) -> None:
        if wait:
            self.wait = True
        self._spec = spec
        self._decoder: Any = spec.decoder
        self._watch: Watch | None = None
        self._form: DecoderForm | None = None
        self._params: Sequence[AttentionParams] = ()
        self._reason: str | None = None
        self._compiling: threading.Thread | None = None
        self._waited = False
        self._proved: set[Any] = set()
        try:  # the kernel is often there before the first step is
            read_decoder(self._decoder, self._attentions())
        except NotNative:
            return
        self._start_compiling()

    def prepare(self) -> None:
        """Read the decoder's form and prove it, unless that holds; see `StepEngine.prepare`."""
        if self._watch is not None and self._watch.holds():
            return
        self._watch = Watch(self._decoder)
        self._form, self._reason, self._proved = None, None, set()
        try:
            with torch.no_grad():
                attentions = self._attentions()  # those of now
                form = read_decoder(self._decoder, attentions)
                self._params = prove(self._spec, form, attentions)
            self._form = form
        except NotNative as error:
            self._reason = str(error)
        except Exception as error:  # whatever others' modules raise when they are tried
            self._reason = f"trying its modules failed: {_first_line(error)}"

    @property
    def reason(self) -> str | None:
        """Why no step of the decoder is native, as far as its modules go; None if nothing speaks
        against it.
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
                program = StepProgram(form, self._params, watch, step)
                if program.sizes not in self._proved:
                    embedded, whole = self._trial_embedding(given, batch), not self._proved
                    check_program(program, form, step, embedded, whole)
            except OutOfDate:
                return own(**given)
            except Exception as error:
                known = isinstance(error, NotNative)
                reason = str(error) if known else f"making the step failed: {_first_line(error)}"
                slots.refused = key, reason
                return own(**given)
            slots.program, slots.refused = program, None
            if program.sizes not in self._proved:  # the usual step overwrites what trials wrote
                self._proved.add(program.sizes)
                output = own(**given)
                hidden = output.last_hidden_state
                if hidden is None or hidden.dtype != program.dtype:
                    slots.program, slots.refused = None, (key, "its norm has another dtype")
                return output
        hidden = program.run(self._embedded(given), step)
        step.largest = program.largest
        return BaseModelOutputWithPast(last_hidden_state=hidden, **{CACHE: given.get(CACHE)})

    def why_not(self, slots: StepSlots, rows: int) -> str | None:
        """Return why steps over a cache's slots are the model's own; see `StepEngine.why_not`."""
        if self._reason is not None:
            return self._reason
        if slots.reason is not None:
            return slots.reason
        if rows > MOST_ROWS:
            return f"it has {rows} rows, and native steps have {MOST_ROWS} at most"
        if slots.refused is not None:
            return slots.refused[1]
        # Where the first step waits for the kernel, no step runs without it.
        return None if self.wait or self._is_compiled() else UNFINISHED

    def _attentions(self) -> list[nn.Module]:
        return attention_modules(self._decoder) if hasattr(self._decoder, "layers") else []

    def _trial_embedding(self, given: Given, batch: int) -> Tensor:
        """Return the step's embeddings, or random ones where a user's hook would be called."""
        module = self._decoder.embed_tokens
        hooked = has_hooks(module._forward_hooks, module._forward_pre_hooks)
        if given.get("inputs_embeds") is None and hooked:
            assert self._form is not None
            return torch.randn(batch, 1, self._form.norm.width, generator=torch.Generator())
        return self._embedded(given)

    def _is_compiled(self) -> bool:
        """Return whether the kernel is there; a thread compiles it, and the first call waits."""
        thread = self._compiling or self._start_compiling()
        if not self._waited:
            self._waited = True
            thread.join(None if self.wait else PATIENCE)
        return not thread.is_alive()

    def _start_compiling(self) -> threading.Thread:
        make: Any = dispatch.decode_step(torch.device("cpu"))
        self._compiling = threading.Thread(target=make.compile, daemon=True)
        self._compiling.start()
        return self._compiling

    def _embedded(self, given: Given) -> Tensor:
        """Return embeddings as the first layer gets them."""
        embedded: Tensor | None = given.get("inputs_embeds")
        if embedded is None:
            embedded = self._decoder.embed_tokens(given["input_ids"])
        assert self._form is not None
        return embedded if self._form.factor == 1 else embedded * self._form.factor


def _first_line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"
