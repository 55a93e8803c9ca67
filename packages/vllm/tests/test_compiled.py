"""Compiled models, which is what `vllm serve` runs without --enforce-eager."""

import json
import os
import subprocess
import sys

import pytest
import torch

from reference import allowed, weir_says
from small_models import random_tokens

POLICY = "sink(32) | recent(128)"
SCRIPT = """
import json, sys
import conftest
from engines import ask, engine
folder, policy, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokens = json.loads(sys.stdin.read())
with engine(folder, policy or None, enforce_eager=False, max_model_len=length) as llm:
    ((said, logprobs, _),) = ask(llm, [tokens], tokens=40, prompt_logprobs=0)
print(json.dumps([said, logprobs.tolist()]))
"""


def run(folder, policy, tokens, length=8_000, **variables):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder, policy, str(length)],
        input=json.dumps(tokens),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | variables | {"PYTHONPATH": os.path.dirname(__file__)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said, logprobs = json.loads(done.stdout.splitlines()[-1])
    return said, torch.tensor(logprobs)


@pytest.mark.slow
def test_compiled_code_is_not_taken_from_a_run_without_a_policy(models, tmp_path):
    """vLLM keeps compiled code; one without a policy must not be found by one with, or reversed."""
    folder = models("gemma3")
    cache = {"VLLM_CACHE_ROOT": str(tmp_path)}
    tokens = random_tokens(700)
    run(folder, "", tokens[:100], **cache)
    said, ours = run(folder, "", tokens, **cache, WEIR_VLLM=POLICY)
    theirs = weir_says(folder, POLICY, tokens + said)
    assert (ours - theirs).abs().max() <= allowed(folder)
    # Found again.
    again, same = run(folder, POLICY, tokens, **cache)
    assert again == said
    assert (same - ours).abs().max() <= allowed(folder)
    said, ours = run(folder, "", tokens[:100], **cache)
    theirs = weir_says(folder, "dense", tokens[:100] + said)
    assert (ours - theirs).abs().max() <= allowed(folder)
