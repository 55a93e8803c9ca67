"""A table of operations that computes something other than the model is not run, in any precision.

Each case changes one field of a correct table, which has the effect of an error in a table or in a
kernel. The check before the first step must notice it. Correct tables must pass, with weights and
slots of every kind: if the check refused them, steps would only be slow, without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from reference.models import make, tokens
from transformers import PreTrainedModel

from weir import StreamingCache, compile_steps
from weir.native import engine as native_step
from weir.native import quantize_weights
from weir.native.program import StepProgram

pytest.importorskip("numba", reason="not installed: pip install 'weir-kv[fast]'")
pytestmark = pytest.mark.own_kernels
step = pytest.importorskip("weir.native.kernels.step")
blocks = pytest.importorskip("weir.native.kernels.linear_blocks")
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
POLICY = "sink(2) | recent(10)"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, kernel_compiled: None) -> list[int]:
    """A list that gets a 1 for each native step that took effect."""
    found: list[int] = []
    own = StepProgram.run
    monkeypatch.setattr(StepProgram, "run", lambda *given: (found.append(1), own(*given))[1])
    return found


def steps_of(model: PreTrainedModel, policy: str = POLICY) -> dict[str, str | None]:
    """Run three steps of two rows, and return the report of how they ran."""
    compile_steps(model, torch_compile=False)
    cache = StreamingCache(model, policy, chunk=4)
    ids = tokens(2, 44)
    with torch.no_grad():
        for part in (ids[:, :41], *ids[:, 41:].split(1, dim=1)):
            model(input_ids=part, past_key_values=cache)
    found: dict[str, str | None] = cache.report()["steps"]
    compile_steps(model, on=False)
    return found


def model_of(kind: str, family: str = "llama") -> PreTrainedModel:
    """A model with weights of some kind."""
    wide = WIDE if family == "llama" else {}
    if kind in ("float32", "bfloat16"):
        return make(family, getattr(torch, kind), **wide)
    if not blocks.SUPPORTED:
        pytest.skip("needs VNNI or AVX2")
    model = make(family, **wide)
    quantize_weights(model, kind)
    return model


KINDS = ["float32", "bfloat16", "q8_0", "q4_0", "q4_1"]


@pytest.mark.parametrize("slots", ["", ":int8", ":int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_right_passes(kind: str, slots: str, ran) -> None:
    policy = f"sink(2) | recent(6) | recent(20){slots}"
    assert steps_of(model_of(kind), policy) == {"run": "native", "reason": None}
    assert len(ran) == 2


@pytest.mark.parametrize(
    "policy", ["sink(2) | recent(6) | heavy(6)", "sink(2) | recent(6) | subgen(8, 4, 2)"]
)
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo2", "phi3", "llama-zero-sink"])
def test_families_of_other_forms_pass(family: str, policy: str, ran) -> None:
    assert steps_of(model_of("bfloat16", family), policy) == {"run": "native", "reason": None}
    assert len(ran) == 2


def last(operations: np.ndarray, kind: int, **wanted: int) -> Any:
    """Return the last operation of a kind, which is the second layer's if every layer has one."""
    fits = operations["kind"] == kind
    for name, value in wanted.items():
        fits &= operations[name] == value
    return operations[np.flatnonzero(fits)[-1]]


def _exchange(pair: np.ndarray) -> None:
    pair[:] = pair[::-1].copy()


def _products(operation: Any) -> np.ndarray:
    """Return the products of an operation, read from the memory at their address."""
    import ctypes

    size = int(operation["count"]) * step.PRODUCT.itemsize
    memory = (ctypes.c_char * size).from_address(int(operation["products"]))
    return np.frombuffer(memory, step.PRODUCT)


def _gated(operations: np.ndarray) -> Any:
    return last(operations, step.PRODUCTS, then=step.GATE)


def _added(operations: np.ndarray) -> Any:
    return last(operations, step.PRODUCTS, then=step.ADD, source=step.PLAIN)


def _stored(operations: np.ndarray) -> Any:
    return last(operations, step.PRODUCTS, then=step.STORE)


def put(where: Callable[[np.ndarray], Any], name: str, value: Any) -> Callable[[np.ndarray], None]:
    """Return a fault that gives a field another value."""

    def fault(operations: np.ndarray) -> None:
        operation = where(operations)
        operation[name] = value(operation[name]) if callable(value) else value

    return fault


def _attention(operations: np.ndarray) -> Any:
    return last(operations, step.ATTENTION)


FAULTS: dict[str, Callable[[np.ndarray], None]] = {
    "a norm's epsilon": put(_gated, "epsilon", lambda e: e + 0.01),
    "what a norm adds to its weight": put(_gated, "offset", 1.0),
    "the last norm's epsilon": put(lambda t: last(t, step.NORMS), "epsilon", lambda e: e + 0.01),
    "an activation": put(_gated, "activation", lambda a: 1 - a),
    "gate and up exchanged": lambda t: _exchange(_products(_gated(t))),
    "queries and values exchanged in size": put(_attention, "query_width", 32),
    "a multiplier of what is added": put(_added, "factor", 0.97),
    "a product that replaces": put(_added, "then", step.STORE),
    "frequencies": put(lambda t: last(t, step.ANGLES), "scaling", 1.02),
    "fewer rotated pairs": put(_attention, "half", lambda half: half - 1),
    "no rotation": put(_attention, "half", 0),
    "a window": put(_attention, "window", 3),
    "an input without its norm": put(_stored, "source", step.PLAIN),
    "values of the keys' memory": put(_attention, "values", 0),
    "a bias that is not there": lambda t: _products(_stored(t)).__setitem__(
        "bias", _products(_stored(t))["weight"]
    ),
    "keys and values exchanged": lambda t: _exchange(_products(_stored(t))["out"][1:]),
}


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q8_0"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_table_is_refused(
    name: str, kind: str, ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = native_step.check_program

    def check(program: StepProgram, *given: Any, **more: Any) -> None:
        if name == "values of the keys' memory":
            attention = _attention(program.table.operations)
            attention["values"] = attention["keys"]
        else:
            FAULTS[name](program.table.operations)
        own(program, *given, **more)

    monkeypatch.setattr(native_step, "check_program", check)
    steps = steps_of(model_of(kind))
    assert not ran
    assert steps["run"] == "eager"
    assert steps["reason"] is not None
    assert "native" in steps["reason"], steps["reason"]
    assert "failed" not in steps["reason"], steps["reason"]
