"""Endless conversations: AsyncLLM with StreamingInput, and the OpenAI server."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from engines import BLOCK
from reference import allowed, weir_says
from small_models import random_tokens

POLICY = "sink(32) | recent(128)"
EXAMPLES = Path(__file__).parents[1] / "examples"


async def hold_session(folder, heard):
    """Return the answers to what is heard, with log-probabilities."""
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            additional_config={"weir": POLICY},
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_num_seqs=2,
            block_size=BLOCK,
            max_model_len=100_000,
            max_num_batched_tokens=512,
            num_gpu_blocks_override=60,
            enable_prefix_caching=False,
        )
    )
    parameters = SamplingParams(
        temperature=0,
        max_tokens=20,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    answered = asyncio.Event()

    async def listen():
        for tokens in heard:
            yield StreamingInput(
                prompt={"prompt_token_ids": list(tokens)}, sampling_params=parameters
            )
            await answered.wait()
            answered.clear()

    answers = [[]]
    async for output in engine.generate(listen(), parameters, request_id="session"):
        if not output.outputs:
            continue
        (said,) = output.outputs
        for token, found in zip(said.token_ids, said.logprobs or (), strict=True):
            answers[-1].append((token, found[token].logprob))
        if len(answers[-1]) == 20:
            answers.append([])
            answered.set()
    engine.shutdown()
    return answers[:-1]


def test_a_streaming_session_is_weirs_stream(models):
    """Six turns of 700 tokens in a pool that could hold two of them."""
    folder = models("llama")
    heard = [random_tokens(700, seed=turn) for turn in range(6)]
    answers = asyncio.run(hold_session(folder, heard))
    assert len(answers) == 6
    stream, places = [], []
    for tokens, answer in zip(heard, answers, strict=True):
        stream += tokens
        places += range(len(stream) - 1, len(stream) + 18)
        # The last token of an answer has not been computed, and vLLM drops it.
        stream += [token for token, _ in answer[:-1]]
    theirs = weir_says(folder, POLICY, stream)[places]
    ours = torch.tensor([logprob for answer in answers for _, logprob in answer[:-1]])
    assert (ours - theirs).abs().max() <= allowed(folder)


@pytest.mark.slow
def test_the_voice_example_holds_100_000_tokens_in_100_blocks(models):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "voice.py", models("llama")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "done: 457 turns, 100083 tokens" in done.stdout


def post(port, path, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def read_metric(port, name):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_the_openai_server_finds_sinks_and_window_again(models, tmp_path):
    """Each turn sends the whole conversation; all but its end is found in the prefix cache.

    The policy is in the environment here, and the server is several processes.
    """
    folder = models("llama")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", "small"]
    command += ["--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "100000"]
    command += ["--max-num-seqs", "4", "--max-num-batched-tokens", "512", "--enforce-eager"]
    settings = {"WEIR_VLLM": POLICY, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = tmp_path / "server.log"
    with (
        log.open("w") as out,
        subprocess.Popen(
            command, env=os.environ | settings, stdout=out, stderr=subprocess.STDOUT
        ) as server,
    ):
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    assert server.poll() is None, log.read_text()[-4000:]
                    time.sleep(1)
            stream = random_tokens(900)
            known = 0
            for turn in range(3):
                hits = read_metric(port, "vllm:prefix_cache_hits_total")
                body = {"model": "small", "prompt": stream, "max_tokens": 24, "temperature": 0}
                body |= {"logprobs": 1, "ignore_eos": True, "return_token_ids": True}
                (choice,) = post(port, "/v1/completions", body)["choices"]
                said = choice["token_ids"]
                assert len(said) == 24
                ours = torch.tensor(choice["logprobs"]["token_logprobs"])
                theirs = weir_says(folder, POLICY, stream + said)[-24:]
                assert (ours - theirs).abs().max() <= allowed(folder)
                found = read_metric(port, "vllm:prefix_cache_hits_total") - hits
                # vLLM caches the windows at the ends of prompts, not of answers.
                assert found == known
                known = (len(stream) - 1) // BLOCK * BLOCK
                stream = stream + said + random_tokens(300, seed=turn + 1)
            assert read_metric(port, "vllm:kv_cache_usage_perc") == 0
        finally:
            server.terminate()
            server.wait(60)
    assert "keeps sink(32) | recent(128) in blocks of 32 tokens" in log.read_text()
