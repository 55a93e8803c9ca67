"""Streams of models that are offloaded, quantised or sharded: fed, saved, restored and copied."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from roundings import close_runs, run_off

import weir

POLICY = "streaming_llm(24)"


def goes_on(model, plain, like, ids, tmp_path) -> None:
    """A stream of the model goes on after a save as it does without, and as one of a plain model.

    To the rounding of `like`, which has the same weights and can be looked into: weights that come
    and go lie elsewhere in memory each time.
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


def test_a_model_that_torchao_quantised(fresh_llama, ids, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    models = [fresh_llama(), fresh_llama()]
    for model in models:
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    goes_on(*models, fresh_llama(), ids, tmp_path)


SHARDED = """
import sys, torch, torch.distributed as dist, weir
from transformers import LlamaForCausalLM
folder, bound = sys.argv[1], float(sys.argv[2])
plain = LlamaForCausalLM.from_pretrained(folder).eval()
model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
rank = dist.get_rank()
streams = [weir.Stream(it, "streaming_llm(24)", chunk=8) for it in (model, plain)]
for stream in streams:
    stream.feed(torch.arange(60)[None])
assert streams[0].cache.stack[0].slab.keys.shape[1] == 1  # a half of the heads
streams[0].save(f"{folder}/session{rank}")
streams.append(weir.Stream.restore(model, f"{folder}/session{rank}"))
found = [stream.feed(torch.arange(30)[None], all_logits=True) for stream in streams]
assert torch.equal(found[0], found[2])
assert (found[0] - found[1]).abs().max() < bound * found[1].abs().max()
try:
    weir.Stream.restore(model, f"{folder}/session{1 - rank}")
except weir.WeirError as error:
    assert "another model (weights " in str(error)
else:
    raise AssertionError("the other half of the heads was taken")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_each_process_of_a_sharded_model_saves_and_restores_its_heads(fresh_llama, tmp_path):
    model = fresh_llama(intermediate_size=64, vocab_size=62)
    model.save_pretrained(tmp_path)
    (tmp_path / "sharded.py").write_text(SHARDED)
    source = str(Path(weir.__file__).parents[1])
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(tmp_path / "sharded.py")),
            *(str(tmp_path), str(run_off(model))),
        ],
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
