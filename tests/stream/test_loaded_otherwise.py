"""Streams of models that are offloaded or quantized: fed, saved, restored and copied."""

from __future__ import annotations

import copy

import pytest
import torch
from roundings import close_runs

import weir

POLICY = "streaming_llm(24)"


def goes_on(model, plain, like, ids, tmp_path) -> None:
    """Check that a saved and a copied stream continue like the original, and like a plain model's.

    They are equal up to the rounding of `like`, which has the same weights and can be inspected.
    They are not bit-identical, because offloaded weights are at another place in memory each time.
    """
    stream, reference = (weir.Stream(it, POLICY, chunk=8) for it in (model, plain))
    for it in (stream, reference):
        it.feed(ids(1, 75))
    stream.save(tmp_path / "session")
    others = [weir.Stream.restore(model, tmp_path / "session"), copy.deepcopy(stream)]
    expected = reference.feed(ids(1, 40, seed=1), all_logits=True)
    for it in (stream, *others):
        found = it.feed(ids(1, 40, seed=1), all_logits=True)
        close_runs(found, expected, like)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_model(fresh_llama, ids, tmp_path, where):
    accelerate = pytest.importorskip("accelerate")
    model, cpu = fresh_llama(), torch.device("cpu")
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=cpu)
    else:
        accelerate.disk_offload(model, str(tmp_path / "weights"), execution_device=cpu)
    goes_on(model, fresh_llama(), fresh_llama(), ids, tmp_path)


def test_a_model_that_torchao_quantized(fresh_llama, ids, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    models = [fresh_llama(), fresh_llama()]
    for model in models:
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    goes_on(*models, fresh_llama(), ids, tmp_path)
