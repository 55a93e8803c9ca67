"""Two processes that share a model's heads do the same as one process alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from roundings import run_off

import weir

POLICIES = [
    "streaming_llm(24)",
    "uniform(24)",
    "sink(4) | uniform(12, weighted=true)",
    "sink(2) | recent(8) | uniform(rate=0.3)",
    "reservoir(24)",
    "balance(40)",
    "subgen(48)",
]
"""Policies with no random draws, with draws for each head, and (`reservoir`) for a whole layer."""

SHARDED = """
import json, sys, torch, torch.distributed as dist, weir
from transformers import LlamaForCausalLM
folder, bound = sys.argv[1], float(sys.argv[2])
plain = LlamaForCausalLM.from_pretrained(folder).eval()
model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
rank = dist.get_rank()
for policy in json.loads(sys.argv[3]):
    streams = [weir.Stream(it, policy, chunk=8, seed=5) for it in (model, plain)]
    prompt = torch.arange(150)[None] * 7 % 62
    found = [stream.feed(prompt, all_logits=True) for stream in streams]
    assert (found[0] - found[1]).abs().max() < bound * found[1].abs().max(), policy
    said = [list(stream.generate(20)) for stream in streams]
    assert said[0] == said[1], (policy, said)
    for layer in range(2):
        mine, whole = (stream.slots(layer).position[0] for stream in streams)
        assert len(mine) == 1 and len(whole) == 2  # a half of the heads
        assert mine[mine >= 0].tolist() == whole[rank][whole[rank] >= 0].tolist(), (policy, layer)

session = f"{folder}/session{rank}"
stream = streams[0]
stream.save(session)
again = weir.Stream.restore(model, session)
assert torch.equal(stream.feed(prompt, all_logits=True), again.feed(prompt, all_logits=True))
dist.barrier()
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
def test_two_processes_hold_say_and_save_their_heads_of_what_one_does(fresh_llama, tmp_path):
    pytest.importorskip("accelerate")  # transformers requires it here
    model = fresh_llama(intermediate_size=64, vocab_size=62)
    model.save_pretrained(tmp_path)
    (tmp_path / "sharded.py").write_text(SHARDED)
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(tmp_path / "sharded.py")),
            *(str(tmp_path), str(run_off(model)), json.dumps(POLICIES)),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(weir.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
