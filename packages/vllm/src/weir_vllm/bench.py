"""Figures: `python -m weir_vllm.bench speed|sessions|memory|perplexity|client`.

Each command prints a line of JSON for each measurement, so that a run that is cut off keeps what it
has. Engines run in this process, on the model and the blocks that you name.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def say(**figures: Any) -> None:
    """Print a measurement."""
    print(json.dumps(figures), flush=True)


def resident() -> float:
    """Return the memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def make_engine(options: argparse.Namespace, policy: str | None, **more: Any) -> Any:
    """Make an engine of vLLM in this process."""
    from vllm import LLM

    settings = {
        "model": options.model,
        "dtype": options.dtype,
        "block_size": options.block,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "max_model_len": options.length,
        "enforce_eager": not options.compile,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        **more,
    }
    if options.blocks:
        settings.setdefault("num_gpu_blocks_override", options.blocks)
    if policy is not None:
        settings["additional_config"] = {"weir": policy}
    return LLM(**settings)


def pool_of(engine: Any) -> Any:
    """Return the pool of blocks of an engine in this process."""
    return engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


def sampling(tokens: int, **more: Any) -> Any:
    """Return parameters that draw exactly so many tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more
    )


def random_prompt(count: int, vocabulary: int, seed: int) -> list[int]:
    """Return token numbers that are probably no special tokens."""
    draw = random.Random(seed)
    return [draw.randrange(100, vocabulary) for _ in range(count)]


def run_steps(engine: Any) -> Iterator[tuple[int, list[Any]]]:
    """Run an engine until it has no requests, and yield the blocks held after each step."""
    pool = pool_of(engine)
    while engine.llm_engine.has_unfinished_requests():
        outputs = engine.llm_engine.step()
        yield pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), outputs


def speed(options: argparse.Namespace) -> None:
    """Time prompts and decode steps of 1, 4 and 16 sequences, with the policy or without."""
    policy = None if options.side == "stock" else options.policy
    engine = make_engine(options, policy)
    vocabulary = engine.model_config.get_vocab_size()
    for sequences in options.sequences:
        best: dict[str, float] = {}
        for turn in range(options.repeat + 1):  # the first warms up
            for at in range(sequences):
                prompt = random_prompt(options.prompt, vocabulary, seed=turn * 100 + at)
                engine.llm_engine.add_request(
                    f"{sequences}-{turn}-{at}",
                    {"prompt_token_ids": prompt},
                    sampling(options.steps + 1),
                )
            began, first, steps, peak = time.perf_counter(), 0.0, 0, 0
            answered: set[str] = set()
            for held, outputs in run_steps(engine):
                peak = max(peak, held)
                answered |= {o.request_id for o in outputs if o.outputs[0].token_ids}
                if len(answered) == sequences:
                    if not first:
                        first = time.perf_counter()
                    else:
                        steps += 1
            ended = time.perf_counter()
            if turn:
                found = {"prompt_s": first - began, "step_ms": 1000 * (ended - first) / steps}
                best = {key: min(value, best.get(key, value)) for key, value in found.items()}
        say(
            side=options.side,
            sequences=sequences,
            prompt=options.prompt,
            policy=policy,
            **{key: round(value, 3) for key, value in best.items()},
            prompt_tokens_per_s=round(sequences * options.prompt / best["prompt_s"]),
            tokens_per_s=round(1000 * sequences / best["step_ms"], 1),
            peak_blocks=peak,
            resident_mib=round(resident()),
        )


def sessions(options: argparse.Namespace) -> None:
    """Run endless sessions in a fixed pool, a turn each in rounds.

    With the plug-in, a session goes on in the prefix cache. Without it, its history is cut to what
    fits in the model's window, as clients do today. A cut history has another beginning, so that
    its prefix is in no cache, and all of it is computed again.
    """
    stock = options.side == "stock"
    engine = make_engine(
        options,
        None if stock else options.policy,
        enable_prefix_caching=True,
        max_num_seqs=options.sequences[0],
        max_model_len=options.window if stock else options.length,
    )
    vocabulary = engine.model_config.get_vocab_size()
    count = options.sequences[0]
    histories = [random_prompt(options.prompt, vocabulary, seed=n) for n in range(count)]
    for turn in range(options.turns):
        began, peak, cached, sent = time.perf_counter(), 0, 0, 0
        for at, history in enumerate(histories):
            history += random_prompt(options.said, vocabulary, seed=1000 * turn + at)
            room = options.window - options.steps
            prompt = history[-room:] if stock else history
            engine.llm_engine.add_request(
                f"{turn}-{at}", {"prompt_token_ids": prompt}, sampling(options.steps)
            )
        for held, outputs in run_steps(engine):
            peak = max(peak, held)
            for output in outputs:
                if output.finished:
                    histories[int(output.request_id.split("-")[1])] += output.outputs[0].token_ids
                    cached += output.num_cached_tokens or 0
                    sent += len(output.prompt_token_ids)
        seconds = time.perf_counter() - began
        say(
            side=options.side,
            sessions=count,
            turn=turn,
            history=len(histories[0]),
            s=round(seconds, 2),
            new_tokens_per_s=round(count * (options.said + options.steps) / seconds, 1),
            found_in_cache=round(cached / sent, 3),
            peak_blocks=peak,
            resident_mib=round(resident()),
        )


def memory(options: argparse.Namespace) -> None:
    """Read and write a stream of `--tokens` tokens, and print blocks and memory on the way."""
    policy = None if options.side == "stock" else options.policy
    engine = make_engine(options, policy, max_model_len=max(options.length, options.tokens + 1))
    vocabulary = engine.model_config.get_vocab_size()
    prompt = random_prompt(options.tokens - options.steps, vocabulary, seed=0)
    engine.llm_engine.add_request("one", {"prompt_token_ids": prompt}, sampling(options.steps))
    length, peak, last, began = len(prompt), 0, 0, time.perf_counter()
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    say(seen=0, resident_mib=round(resident()))
    for held, _ in run_steps(engine):
        peak = max(peak, held)
        request = scheduler.requests.get("one") or next(iter(scheduler.requests.values()), None)
        seen = length if request is None else request.num_computed_tokens
        if seen - last >= options.every or request is None:
            last = seen
            say(
                seen=seen,
                blocks=held,
                peak_blocks=peak,
                resident_mib=round(resident(), 1),
                s=round(time.perf_counter() - began, 1),
            )
    pool = pool_of(engine)
    say(
        done=options.tokens,
        peak_blocks=peak,
        free=pool.get_num_free_blocks(),
        of=pool.num_gpu_blocks - 1,
        resident_mib=round(resident(), 1),
    )


def perplexity(options: argparse.Namespace) -> None:
    """Compare the perplexity of a text with that of weir, with the same blocks.

    weir reads the text in another process: in that of `--python`, if you name one.
    """
    import math

    from transformers import AutoTokenizer

    text = open_text(options.text)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokens = tokenizer(text[: 12 * options.tokens]).input_ids[: options.tokens]
    if options.reference:
        import torch
        import weir
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
        stream = weir.Stream(model, options.policy, chunk=options.block)
        total = 0.0
        for at in range(0, len(tokens), 2048):
            scores = stream.score(torch.tensor([tokens[at : at + 2048]]))[0]
            total += float(scores.double().nan_to_num().sum())
        say(side="weir", tokens=len(tokens), perplexity=math.exp(total / (len(tokens) - 1)))
        return
    began = time.perf_counter()
    engine = make_engine(options, options.policy)
    (answer,) = engine.generate(
        [{"prompt_token_ids": tokens}], sampling(1, prompt_logprobs=0), use_tqdm=False
    )
    pairs = zip(answer.prompt_logprobs[1:], tokens[1:], strict=True)
    total = -sum(said[token].logprob for said, token in pairs)
    ours = math.exp(total / (len(tokens) - 1))
    say(
        side="weir-vllm",
        policy=options.policy,
        tokens=len(tokens),
        perplexity=ours,
        s=round(time.perf_counter() - began, 1),
    )
    command = [options.python, "-m", "weir_vllm.bench", *sys.argv[1:], "--reference"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    theirs = json.loads(done.stdout.splitlines()[-1])
    say(**theirs)
    say(difference=abs(ours / theirs["perplexity"] - 1))


def open_text(path: str) -> str:
    """Read a text file, compressed or not."""
    import lzma

    if path.endswith(".xz"):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            return file.read()
    return Path(path).read_text(encoding="utf-8")


def client(options: argparse.Namespace) -> None:
    """Time a server of OpenAI's API, with so many requests at once: vLLM's, or weir's."""
    import urllib.request

    def post(text: str, tokens: int) -> dict[str, Any]:
        body = {"model": options.served, "prompt": text, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True} if options.side != "weir" else {}
        request = urllib.request.Request(
            f"{options.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    text = open_text(options.text)

    def run(sequences: int, tokens: int, salt: int) -> tuple[float, int, int]:
        used: list[dict[str, int]] = []

        def one(at: int) -> None:
            start = 40_000 + (salt * 64 + at) * 3_000
            used.append(post(text[start : start + 4 * options.prompt], tokens)["usage"])

        threads = [threading.Thread(target=one, args=(at,)) for at in range(sequences)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        return (
            seconds,
            sum(u["prompt_tokens"] for u in used),
            sum(u["completion_tokens"] for u in used),
        )

    run(1, 2, 0)
    for place, sequences in enumerate(options.sequences):
        short, prompt, few = run(sequences, 1, 2 * place + 1)
        long, _, many = run(sequences, options.steps, 2 * place + 2)
        say(
            side=options.side,
            sequences=sequences,
            prompt_tokens=prompt // sequences,
            prompt_tokens_per_s=round(prompt / short),
            step_ms=round(1000 * (long - short) / max(1, (many - few) / sequences), 1),
            tokens_per_s=round((many - few) / (long - short), 1),
        )


COMMANDS = {
    "speed": speed,
    "sessions": sessions,
    "memory": memory,
    "perplexity": perplexity,
    "client": client,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m weir_vllm.bench", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--model", help="a folder of Hugging Face's format, or a name on the hub")
    parser.add_argument("--policy", default="sink(32) | recent(224)")
    parser.add_argument("--side", default="plug-in", help="stock: vLLM without the plug-in")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--block", type=int, default=32, help="tokens of a block")
    parser.add_argument("--blocks", type=int, help="blocks of the pool")
    parser.add_argument("--length", type=int, default=1_000_000, help="--max-model-len")
    parser.add_argument("--window", type=int, default=2048, help="the window without the plug-in")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--said", type=int, default=64, help="new tokens of a turn")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of a stream")
    parser.add_argument("--every", type=int, default=50_000, help="tokens between two lines")
    parser.add_argument("--text", help="a text file, or one compressed by xz")
    parser.add_argument("--python", default=sys.executable, help="the Python that has weir")
    parser.add_argument("--reference", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--served", default="default", help="the name of the served model")
    options = parser.parse_args(arguments)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    COMMANDS[options.command](options)


if __name__ == "__main__":
    main()
