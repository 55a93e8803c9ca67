"""Native decode steps: a decoder of Llama's form as one table of operations for a kernel.

A step of a small model is mostly calls: of modules, of PyTorch's operations, of compiled programs.
Where all modules of a decoder are known, their weights and a cache's slots go into a table
(`weir.kernels.cpu.step`), and a step is one call.

Before the first step the decoder's form is read (`native_form`) and proved, module by module
(`native_proof`), and before the first step of a cache's sizes the table's operations are compared
with PyTorch's (`native_check`). Afterwards `native_watch` notices what is replaced. What is not
understood is refused by name, and the model's own steps run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from weir import kernels
from weir.errors import WeirError
from weir.models import compiling
from weir.models.cache_name import CACHE
from weir.models.model_spec import ModelSpec, attention_modules
from weir.models.native_check import check_program
from weir.models.native_form import DecoderForm, NotNative, read_decoder
from weir.models.native_program import OutOfDate, StepProgram
from weir.models.native_proof import prove
from weir.models.native_watch import Watch
from weir.slab import AttentionParams

PATIENCE = 1.0
"""Seconds that the first step waits for the kernel, which is enough where numba has kept it."""
WAITING = (
    "compiling the decode step for this machine, which takes half a minute, once; until then "
    "tokens come uncompiled"
)
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
        self._refused: dict[Any, str] = {}
        self._proved: set[Any] = set()
        try:  # the kernel is often there before the first step is
            read_decoder(self._decoder, attention_modules(self._decoder))
        except NotNative:
            return
        self._start_compiling()

    def prepare(self) -> str | None:
        """Prove the decoder's form, unless nothing changed since it was proved; returns why its
        steps are its own, None if they are native. See `StepEngine.prepare`.
        """
        if self._watch is not None and self._watch.holds():
            return self._reason
        self._watch, self._form, self._reason = None, None, None
        self._refused, self._proved = {}, set()
        try:
            with torch.no_grad():
                attentions = attention_modules(self._decoder)  # those of now
                form = read_decoder(self._decoder, attentions)
                self._params = prove(self._spec, form, attentions)
            self._form = form
        except NotNative as error:
            self._reason = str(error)
        except WeirError:
            raise
        except Exception as error:  # whatever modules of others raise when they are tried
            first = (str(error).strip().splitlines() or [""])[0]
            self._reason = f"trying its modules failed: {type(error).__name__}: {first}"
        if hasattr(self._decoder, "layers") and hasattr(self._decoder, "norm"):
            self._watch = Watch(self._decoder)
        return self._reason

    def step(self, rows: Any, given: dict[str, Any], usual: Callable[[], Any]) -> Any:
        """Return the decoder's output for one token of each row; see `StepEngine.step`."""
        batch, stack = len(rows.waiting), rows.stack
        if batch > MOST_ROWS or kernels.is_compiling() or torch.is_autocast_enabled("cpu"):
            return None
        if not self._is_compiled():
            return usual()
        watch = self._watch
        reason = self._reason if watch is not None and watch.holds() else self.prepare()
        if reason is not None:
            return None
        program = stack.program
        if program is not None and program.fits(self._watch, rows):
            hidden = program.run(self._embedded(given), rows)
            rows.largest = program.largest.amax(2)
            return BaseModelOutputWithPast(last_hidden_state=hidden, **{CACHE: given.get(CACHE)})
        stack.program = None
        key = batch, *(len(slab) for slab in rows.slabs)
        stack.why_not_native = self._refused.get(key)
        if stack.why_not_native is not None:
            return None
        assert self._form is not None and self._watch is not None
        embedded = self._embedded(given)
        try:
            program = StepProgram(self._form, self._params, self._watch, rows)
            proved = program.sizes in self._proved
            if not proved:
                check_program(program, self._form, rows, embedded, whole=not self._proved)
        except OutOfDate:
            return usual()
        except NotNative as error:
            stack.why_not_native = self._refused[key] = str(error)
            return usual()
        stack.program = program
        if not proved:  # what it has written into slots is written again
            self._proved.add(program.sizes)
            return usual()
        hidden = program.run(embedded, rows)
        rows.largest = program.largest.amax(2)
        return BaseModelOutputWithPast(last_hidden_state=hidden, **{CACHE: given.get(CACHE)})

    def why_not(self, stack: Any) -> str | None:
        """Return why steps over a cache's layers are the model's own; see `StepEngine.why_not`."""
        reason = self.prepare()
        return stack.why_not_native if reason is None else reason

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
        """Return embeddings as the first layer gets them."""
        embedded: Tensor | None = given.get("inputs_embeds")
        if embedded is None:
            embedded = self._decoder.embed_tokens(given["input_ids"])
        assert self._form is not None
        return embedded if self._form.factor == 1 else embedded * self._form.factor
