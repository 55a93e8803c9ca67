"""Which engine runs a model's decode steps: `weir.compile_steps(model)`."""

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
    """Run decode steps of a model with weir caches, present and future ones, by an engine.

    A decode step is one token for each row. On a CPU, a step is one call of a kernel where weir
    knows what the decoder computes, and the model's own step elsewhere; `stream.report()["steps"]`
    says which and why. The kernel is compiled once for a machine, in a thread. Matrix products are
    those of `choose_products`, which is called here.

    On a GPU, a step runs under `torch.compile`, which compiles each batch size and cache size when
    it is met, up to PyTorch's limit. The first step waits for it, and standard error says so. Where
    it fails, steps run uncompiled after one sentence there.

    Rows may be at different positions of their streams. Outputs differ by rounding only. After
    loading, training or moving weights, or after modules of the model are replaced, an engine finds
    out again what it can run.

    Args:
        model: the causal language model.
        on: False leaves steps to the model; the chosen products stay.
        strict: raise a WeirError where steps cannot be compiled, wait for the CPU's kernel, and
            write nothing to standard error; for callers that report the waiting themselves.
        torch_compile: False leaves `torch.compile` out on a GPU, and `strict` does not raise on a
            CPU.
        options: for `torch.compile`: `mode`, `backend`, `options`; on a GPU only.

    Returns:
        Whether `torch.compile` is used.

    Raises:
        WeirError: weir cannot serve the model, `torch.compile` has no such option, is left out or
            not used on this device and given options.
    """
    if not on:
        # Also a model that was changed so that weir cannot serve it.
        choose_engine(transformers_model(model).get_decoder(), NOT_ASKED)
        return False
    spec = describe(model)
    if options and not torch_compile:
        raise WeirError(
            f"torch_compile=False turns torch.compile off, so {', '.join(options)} has no effect. "
            "Leave out one of them."
        )
    on_cpu = input_device(model).type == "cpu"
    if options and on_cpu:
        raise WeirError(
            f"{', '.join(options)} is for torch.compile, which weir uses only on a GPU. This "
            "model is on a CPU, where steps are native or run in PyTorch. Leave out the options."
        )
    # Weights are moved, so no other thread may be in a call, which would read their old memory.
    with forward_lock_of(spec.config):
        choose_products(model)
    if on_cpu:
        _choose_native(spec, strict, torch_compile)
        return False
    return torch_compile and _choose_compiled(spec, options, strict)


def _choose_native(spec: ModelSpec, wait: bool, required: bool) -> None:
    """Let the CPU engine run steps; with both `wait` and `required` a WeirError where it cannot."""
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
    engine = CompiledStep(options, strict)  # refuses options
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


NO_KERNEL = "numba is not installed, or WEIR_KERNELS chooses other kernels"
"""Reason why no step is native."""
