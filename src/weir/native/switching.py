"""Which engine runs a model's decode steps: `weir.compile_steps(model)`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from weir.errors import WeirError
from weir.models import (
    OWN_FAMILIES,
    Compiling,
    ModelSpec,
    StepEngine,
    choose_steps,
    describe,
    forward_lock_of,
    input_device,
    transformers_model,
)
from weir.native import dispatch
from weir.native.engine import NativeStep
from weir.native.linear_kernels import choose_products
from weir.native.quantized_weights import quantizes_inputs


def compile_steps(
    model: PreTrainedModel,
    *,
    on: bool = True,
    strict: bool = False,
    torch_compile: bool = True,
    **options: Any,
) -> bool:
    """Compile decode steps of a model with weir caches, present and future ones.

    A decode step is one token for each row. The first step compiles, reports that on standard
    error, takes as long as `torch.compile` takes for the model, and needs a C++ compiler. Without a
    compiler, or without disk space for its output, steps run uncompiled after one sentence there.
    Each batch size and cache size is compiled separately, and so are policies that keep different
    data beside keys and values. Rows may be at different positions of their streams. On a CPU,
    matrix products are those of `choose_products`, which is called here. Outputs differ by rounding
    only.

    Weights are not packed or frozen: after loading, training or moving them to another dtype, a
    step is compiled anew. The same holds after modules of the model are replaced, but not after a
    program replaces functions of libraries: call this function again then.

    Args:
        model: the causal language model.
        on: False stops compiling; the chosen products stay.
        strict: raise a WeirError where a step cannot be compiled, and write nothing to standard
            error; for callers that report the waiting themselves.
        torch_compile: False leaves `torch.compile` out: steps of decoders of Llama's form on a CPU
            are one call of a kernel, with no compiler installed, and others stay as they are.
        options: for `torch.compile`: `mode`, `backend`, `options`.

    Returns:
        Whether `torch.compile` is used; not for models whose steps it cannot make, as standard
        error then says.

    Raises:
        WeirError: weir cannot serve the model, `torch.compile` has no such option, or is left out
            and given options.
    """
    if not on:
        # Also a model that was changed so that weir cannot serve it.
        choose_steps(transformers_model(model).get_decoder(), None, ())
        return False
    facts = describe(model)
    if options and not torch_compile:
        raise WeirError(f"torch_compile=False leaves out what {', '.join(options)} is for")
    compiling = Compiling(options, strict, torch_compile, make_engine)
    inductor = options.get("backend", "inductor") == "inductor"
    if inductor:
        # Products are written as loops, which only inductor generates. Weights are moved, so no
        # other thread may be in a call, which would go on reading their old memory.
        with forward_lock_of(facts.config):
            choose_products(model)
    if torch_compile:
        if facts.kind in OWN_FAMILIES:
            compiling.give_up(f"the attention of {facts.kind} is code of its own")
        elif inductor and input_device(model).type == "cpu" and quantizes_inputs(model):
            compiling.give_up(
                "its layers quantize what they multiply, of which PyTorch's compiler gives wrong "
                "numbers for one row on a CPU"
            )
    choose_steps(facts.decoder, compiling, facts.attentions)
    return torch_compile and compiling.failed is None


def make_engine(spec: ModelSpec, wait: bool) -> StepEngine | None:
    """Make the native engine of a model; None where no kernel runs its steps.

    Args:
        spec: of the model.
        wait: the first step waits until the kernel is compiled, however long that takes.
    """
    if dispatch.decode_step(torch.device("cpu")) is None:
        return None
    return NativeStep(spec, wait)
