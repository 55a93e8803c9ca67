"""Figures: `python -m weir_vllm.bench speed|sessions|memory|perplexity|client`.

Each command prints a line of JSON after each measurement, so an interrupted run still has printed
its earlier figures. Engines run in this process, with the model and the number of blocks that you
choose.
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
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

Rounds = Iterator[tuple[str, dict[str, Any]]]
"""Measurements of one side, each with the name of the group that it belongs to."""
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


class Clock:
    """A moment, by the clock and by the processor time of this process."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def since(self, earlier: Clock) -> tuple[float, float]:
        """Return the elapsed seconds and the processor seconds since an earlier moment."""
        return self.wall - earlier.wall, self.cpu - earlier.cpu


def pool_of(engine: Any) -> Any:
    """Return the pool of blocks of an engine in this process."""
    return engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool


def sampling(tokens: int, **more: Any) -> Any:
    """Return parameters that generate exactly `tokens` tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more
    )


def random_prompt(count: int, vocabulary: int, seed: int) -> list[int]:
    """Return random token ids that are probably not special tokens."""
    draw = random.Random(seed)
    return [draw.randrange(100, vocabulary) for _ in range(count)]


def run_steps(engine: Any) -> Iterator[tuple[int, list[Any]]]:
    """Run an engine until it has no requests, and yield the blocks held after each step."""
    pool = pool_of(engine)
    while engine.llm_engine.has_unfinished_requests():
        outputs = engine.llm_engine.step()
        yield pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), outputs


def speed(options: argparse.Namespace) -> Rounds:
    """Time prompts and decode steps of 1, 4 and 16 sequences, with the policy or without."""
    stock = options.side == "stock"
    room = max(options.window, options.prompt + options.steps + 1)
    engine = make_engine(
        options,
        None if stock else options.policy,
        max_num_seqs=max(options.sequences),
        max_model_len=room if stock else options.length,
    )
    vocabulary = engine.model_config.get_vocab_size()
    for sequences in options.sequences:
        for turn in range(options.repeat + 1):  # the first warms up
            for at in range(sequences):
                prompt = random_prompt(options.prompt, vocabulary, seed=turn * 100 + at)
                engine.llm_engine.add_request(
                    f"{sequences}-{turn}-{at}",
                    {"prompt_token_ids": prompt},
                    sampling(options.steps + 1),
                )
            began, first, steps, peak, held_by_steps = Clock(), None, 0, 0, 0
            answered: set[str] = set()
            for held, outputs in run_steps(engine):
                peak = max(peak, held)
                answered |= {o.request_id for o in outputs if o.outputs[0].token_ids}
                if len(answered) == sequences:
                    if first is None:
                        first = Clock()
                    else:
                        steps += 1
                        held_by_steps = max(held_by_steps, held)
            ended = Clock()
            assert first is not None
            figures = {"sequences": sequences, "prompt": options.prompt, "policy": options.policy}
            if stock:
                del figures["policy"]
            prompt_s, prompt_cpu_s = first.since(began)
            steps_s, steps_cpu_s = ended.since(first)
            yield (
                ("warm-up" if not turn else f"{sequences} sequences"),
                figures
                | {
                    "prompt_s": round(prompt_s, 4),
                    "prompt_cpu_s": round(prompt_cpu_s, 4),
                    "step_ms": round(1000 * steps_s / steps, 3),
                    "step_cpu_ms": round(1000 * steps_cpu_s / steps, 3),
                    "blocks": held_by_steps,
                    "peak_blocks": peak,
                    "resident_mib": round(resident()),
                },
            )


def sessions(options: argparse.Namespace) -> Rounds:
    """Run endless sessions in a fixed pool. Each round has one turn of every session.

    With the plug-in, a session continues from the prefix cache. Without it, the history is cut to
    what fits in the model's window, as clients do today. A cut history has a different beginning,
    so nothing of it is in the prefix cache, and all of it is computed again.
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
        began, peak, cached, sent = Clock(), 0, 0, 0
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
        seconds, cpu_seconds = Clock().since(began)
        yield (
            ("later turns" if turn else "first turn"),
            {
                "sessions": count,
                "turn": turn,
                "history": len(histories[0]),
                "turn_s": round(seconds, 3),
                "turn_cpu_s": round(cpu_seconds, 3),
                "found_in_cache": round(cached / sent, 3),
                "peak_blocks": peak,
                "resident_mib": round(resident()),
            },
        )


def run_rounds(options: argparse.Namespace) -> None:
    """Run the rounds of one side, or of both sides in turns."""
    if options.side == "both":
        alternate(options)
        return
    rounds = ROUNDS[options.command](options)
    # Under `alternate`, a round begins with a line on standard input.
    while not options.follow or sys.stdin.readline():
        found = next(rounds, None)
        if found is None:
            return
        group, figures = found
        say(side=options.side, group=group, **figures)


def alternate(options: argparse.Namespace) -> None:
    """Run rounds of stock vLLM and of the plug-in in turns, in two processes, and compare them.

    Other load on the machine then slows both rounds of a pair. The sides take turns in going first.
    The ratios are medians of the ratios of pairs.
    """
    command = [sys.executable, "-m", "weir_vllm.bench", *sys.argv[1:], "--follow", "--side"]
    with ExitStack() as stack:
        sides = {
            side: stack.enter_context(
                subprocess.Popen(
                    [*command, side], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for side in ("stock", "plug-in")
        }

        def run(side: str) -> dict[str, Any] | None:
            process = sides[side]
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
            return None

        pairs: dict[str, list[dict[str, dict[str, Any]]]] = {}
        for order in cycle((("stock", "plug-in"), ("plug-in", "stock"))):
            pair = {side: run(side) for side in order}
            if None in pair.values():
                break
            done = {side: figures for side, figures in pair.items() if figures is not None}
            for figures in done.values():
                say(**figures, load=round(os.getloadavg()[0], 1))
            pairs.setdefault(done["stock"]["group"], []).append(done)
    compare(pairs, "stock")


def compare(pairs: dict[str, list[dict[str, dict[str, Any]]]], base: str) -> None:
    """Print, for each group of pairs, medians of the figures and of their ratios to the base."""
    for group, found in pairs.items():
        if group == "warm-up":
            continue
        medians: dict[str, Any] = {}
        for key, value in found[0][base].items():
            if type(value) not in (int, float) or key in ("sequences", "prompt", "turn", "load"):
                continue
            for side in found[0]:
                middle = median(pair[side][key] for pair in found)
                medians.setdefault(side, {})[key] = round(middle, 3)
            if key.endswith(("_s", "_ms")):
                for side in found[0]:
                    if side != base:
                        ratios = sorted(pair[side][key] / pair[base][key] for pair in found)
                        medians.setdefault(f"{side} / {base}", {})[key] = {
                            "median": round(median(ratios), 3),
                            "least": round(ratios[0], 3),
                            "most": round(ratios[-1], 3),
                        }
        say(group=group, pairs=len(found), **medians)


def memory(options: argparse.Namespace) -> None:
    """Read and write a stream of `--tokens` tokens, and print blocks and memory on the way."""
    policy = None if options.side == "stock" else options.policy
    engine = make_engine(options, policy, max_model_len=max(options.length, options.tokens + 1))
    vocabulary = engine.model_config.get_vocab_size()
    prompt = random_prompt(options.tokens - options.steps, vocabulary, seed=0)
    engine.llm_engine.add_request("one", {"prompt_token_ids": prompt}, sampling(options.steps))
    peak, last, began = 0, 0, time.perf_counter()
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    say(seen=0, resident_mib=round(resident()))
    for held, _ in run_steps(engine):
        peak = max(peak, held)
        request = scheduler.requests.get("one") or next(iter(scheduler.requests.values()), None)
        seen = options.tokens if request is None else request.num_computed_tokens
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

    weir reads the text in another process, which runs the Python that `--python` names.
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
    """Time servers with OpenAI's API in turns, with `--sequences` requests at once."""
    import urllib.request

    servers = dict(server.split("=", 1) for server in options.server)

    def post(url: str, text: str) -> tuple[float, dict[str, int]]:
        """Return when the first token came, and the usage."""
        body = {"model": options.served, "prompt": text, "max_tokens": options.steps + 1}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        first, usage = 0.0, None
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line.removeprefix(b"data: "))
                    first = first or time.perf_counter()
                    usage = chunk.get("usage") or usage
        assert usage is not None
        return first, usage

    text = open_text(options.text)

    def run(url: str, sequences: int, salt: int) -> dict[str, Any]:
        found: list[tuple[float, dict[str, int]]] = []

        def one(at: int) -> None:
            start = 40_000 + (salt * max(options.sequences) + at) * 4 * options.prompt
            found.append(post(url, text[start : start + 4 * options.prompt]))

        threads = [threading.Thread(target=one, args=(at,)) for at in range(sequences)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended = time.perf_counter()
        if len(found) != sequences:
            sys.exit(f"{sequences - len(found)} of {sequences} requests to {url} failed")
        answered = max(first for first, _ in found)
        if any(used["completion_tokens"] != options.steps + 1 for _, used in found):
            sys.exit(f"{url} gave answers that do not have {options.steps + 1} tokens")
        return {
            "sequences": sequences,
            "prompt": sum(used["prompt_tokens"] for _, used in found) // sequences,
            "prompt_s": round(answered - began, 3),
            "step_ms": round(1000 * (ended - answered) / options.steps, 2),
        }

    salt = 0
    for sequences in options.sequences:
        pairs = []
        for turn in range(options.repeat + 1):  # the first warms up
            pair = {}
            for name in (*servers,) if turn % 2 else reversed((*servers,)):
                pair[name] = run(servers[name], sequences, salt)
                say(side=name, **pair[name], load=round(os.getloadavg()[0], 1))
            salt += 1
            pairs.append(pair)
        compare({f"{sequences} sequences": pairs[1:]}, next(iter(servers)))


ROUNDS = {"speed": speed, "sessions": sessions}
COMMANDS = {
    "speed": run_rounds,
    "sessions": run_rounds,
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
    parser.add_argument(
        "--side",
        choices=("both", "plug-in", "stock"),
        help="stock: vLLM without the plug-in. By default, speed and sessions compare both",
    )
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--block", type=int, default=32, help="tokens of a block")
    parser.add_argument("--blocks", type=int, help="blocks of the pool")
    parser.add_argument("--length", type=int, default=1_000_000, help="--max-model-len")
    parser.add_argument(
        "--window", type=int, default=2048, help="the window of vLLM without the plug-in"
    )
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
    parser.add_argument(
        "--server",
        nargs="+",
        metavar="NAME=URL",
        help="client: servers to compare in turns; ratios are to the first",
    )
    parser.add_argument("--served", default="default", help="the name of the served model")
    options = parser.parse_args(arguments)
    if options.side is None:
        options.side = "both" if options.command in ROUNDS else "plug-in"
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    COMMANDS[options.command](options)


if __name__ == "__main__":
    main()
