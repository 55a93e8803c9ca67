"""Chooses the engine for a model's decode steps: `weir.compile_steps(model)`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from weir.errors import WeirError
from weir.models import (
    NOT_ASKED,
    OWN_FAMILIES,
    Chosen,
    CompiledStep,
    ModelSpec,
    attention_name,
    choose_engine,
    describe,
    forward_lock_of,
    input_device,
    say,
    transformers_model,
)
from weir.native import dispatch
from weir.native.engine import NativeStep
from weir.native.linear_kernels import choose_products


def compile_steps(
    model: PreTrainedModel,
    *,
    on: bool = True,
    strict: bool = False,
    torch_compile: bool = True,
    **options: Any,
) -> bool:
    """Let an engine run a model's decode steps with all its weir caches, existing and later ones.

    A decode step is one token for each row. On a CPU, a step is one call of a kernel if weir knows
    what the decoder computes; otherwise, the model runs the step itself. `stream.report()["steps"]`
    says which, and why. The kernel is compiled once for each machine, in a thread. This function
    also calls `choose_products`.

    On a GPU, a step runs under `torch.compile`, which compiles each batch size and cache size at
    its first use, up to PyTorch's limit. The first step waits for the compilation, and a notice on
    standard error says so. If compilation fails, steps run uncompiled, and another notice says why.

    Rows can be at different positions of their streams. Outputs differ only by rounding. After
    weights are loaded, trained or moved, or modules of the model are replaced, an engine finds out
    again what it can run.

    Args:
        model: the causal language model.
        on: False lets the model run its steps itself again; the products that `choose_products` has
            chosen stay.
        strict: raise a WeirError if steps cannot be compiled. Nothing is written to standard error,
            and on a CPU, the first step waits until the kernel is compiled. Use it if the caller
            tells the user about the wait.
        torch_compile: with False, `torch.compile` is not used on a GPU, and `strict` does not raise
            on a CPU.
        options: for `torch.compile`, only on a GPU: `mode`, `backend`, `options`.

    Returns:
        Whether `torch.compile` is used.

    Raises:
        WeirError: weir does not support the model, `torch.compile` has no such option, options are
            given although `torch.compile` is turned off or not used on this device, or `strict` is
            true and steps cannot be compiled.
    """
    if not on:
        # This must also work for a model that was changed so that weir no longer supports it.
        choose_engine(transformers_model(model).get_decoder(), NOT_ASKED)
        return False
    spec = describe(model)
    if options and not torch_compile:
        raise WeirError(
            f"torch_compile=False turns torch.compile off, but {', '.join(options)} is for "
            "torch.compile. Leave out torch_compile=False, or leave out the options."
        )
    on_cpu = input_device(model).type == "cpu"
    if options and on_cpu:
        raise WeirError(
            f"{', '.join(options)} is for torch.compile, which weir uses only on a GPU. This "
            "model is on a CPU, where steps are native or run in PyTorch. Leave out the options."
        )
    # This moves weights, so no other thread may be in a call that reads their old memory.
    with forward_lock_of(spec.config):
        choose_products(model)
    if on_cpu:
        _choose_native(spec, strict, torch_compile)
        return False
    if not torch_compile:
        turned_off = Chosen(None, "weir.compile_steps was called with torch_compile=False")
        choose_engine(spec.decoder, turned_off)
        return False
    return _choose_compiled(spec, options, strict)


def _choose_native(spec: ModelSpec, wait: bool, required: bool) -> None:
    """Let the CPU engine run steps. With both `wait` and `required`, raises a WeirError if it
    cannot.
    """
    kernel = dispatch.decode_step(torch.device("cpu"))
    chosen = Chosen(None, NO_KERNEL) if kernel is None else Chosen(partial(NativeStep, wait=wait))
    choose_engine(spec.decoder, chosen)
    if not (wait and required):
        return
    reason: str | None = NO_KERNEL
    if kernel is not None:
        engine, lock = NativeStep(spec, wait), forward_lock_of(spec.config)
        with lock, lock.attention(attention_name(spec)):
            engine.prepare()
        reason = engine.reason
    if reason is not None:
        choose_engine(spec.decoder, NOT_ASKED)
        raise WeirError(f"the steps of this model cannot be compiled here: {reason}")


def _choose_compiled(spec: ModelSpec, options: dict[str, Any], strict: bool) -> bool:
    """Let steps run under `torch.compile`; returns whether the decoder can be compiled."""
    engine = CompiledStep(options, strict)  # checks the options
    if spec.kind in OWN_FAMILIES:
        reason = f"{spec.kind} has its own attention code"
        choose_engine(spec.decoder, Chosen(None, reason))
        failed = f"the steps of this model cannot be compiled here: {reason}"
        if strict:
            raise WeirError(failed)
        say(f"{failed}; they run uncompiled")
        return False
    choose_engine(spec.decoder, Chosen(lambda _: engine))
    return True


NO_KERNEL = "numba is not installed or does not work here, or WEIR_KERNELS chooses other kernels"
"""The reason why no step is native."""
