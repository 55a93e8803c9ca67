"""Figures of prompts: the time under each policy compared with exact attention, and peak memory.

Every token of a prompt is multiplied with every weight, whatever the policy is. A policy only
changes the time of attention, which otherwise grows with the prompt, and adds the time of folds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

import torch
from transformers import DynamicCache

from weir.stream import Stream
from weir_bench.caches import Decoding, Weir, feed_prompt, hold_prompt
from weir_bench.figure import Row, Setting, Sizes, Skipped, compare, figure, run_python
from weir_bench.figures.policies import budgeted, wanted
from weir_bench.model import model_of
from weir_bench.timing import in_turns, status_bytes

TARGETS = {8192: 0.75, 32768: 0.3}
ROUNDS = 3
"""How often each prompt is read. Times of the same prompt have differed by a fifth."""
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
CHILD = f"""
import sys
sys.path.append({str(Path(__file__).parents[2])!r})
from weir_bench.figures.prompts import child
child()
"""
"""The code of a process that feeds a prompt and prints its peak memory."""


@figure("prompts", asked=True)
def prompts(setting: Setting) -> Iterator[Row]:
    """Time prompts of several lengths, and extrapolate to one that is far longer."""
    sizes, model = setting.sizes, model_of(setting)
    policies = {
        name: Weir(model, f"{name}(budget={sizes.slots})", sizes.chunk)
        for name in wanted(setting, budgeted())
    }
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(sizes.vocabulary, (1, max(sizes.prompts)), generator=generator)
    exact = Decoding(model, DynamicCache(config=model.config))
    found: dict[str, list[float]] = {name: [] for name in ("exact", *policies)}
    for tokens in sizes.prompts:
        setting.say(f"prompts of {tokens:,} tokens")
        ways = {
            name: partial(feed_prompt, cache, ids[:, :tokens]) for name, cache in policies.items()
        }
        ways["exact"] = partial(hold_prompt, exact, ids[:, :tokens])
        rounds = min(ROUNDS, sizes.slow)
        took = in_turns(ways, rounds, warm=0)
        for name, taken in took.items():
            found[name].append(median(taken))
        yield from _beside_exact(setting, tokens, {name: each[-1] for name, each in found.items()})
    far = {name: _beyond(sizes.prompts, taken, sizes.far) for name, taken in found.items()}
    far["exact"] = _beyond_squared(sizes.prompts, found["exact"], sizes.far)
    measured = " and ".join(f"{tokens:,}" for tokens in sizes.prompts)
    yield from _beside_exact(setting, sizes.far, far, f"extrapolated from {measured} tokens")


def _beside_exact(
    setting: Setting, tokens: int, took: Mapping[str, float], note: str = ""
) -> Iterator[Row]:
    """Yield a row for each policy. `took` has the seconds by policy, and under "exact"."""
    for name, own in took.items():
        if name == "exact":
            continue
        yield compare(
            f"prompt of {tokens:,} tokens, `{name}` at {setting.sizes.slots:,} slots ÷ exact "
            "attention",
            own,
            took["exact"],
            TARGETS.get(tokens),
            unit="s",
            note=note,
        )


def _beyond(tokens: tuple[int, ...], took: list[float], far: int) -> float:
    """Extrapolate the seconds of a longer prompt, whose time grows linearly past the budget."""
    pace = (took[-1] - took[-2]) / (tokens[-1] - tokens[-2])
    return took[-1] + (far - tokens[-1]) * pace


def _beyond_squared(tokens: tuple[int, ...], took: list[float], far: int) -> float:
    """Extrapolate the seconds of a longer prompt under exact attention, as p n + q n²."""
    first, second = (seconds / n for n, seconds in zip(tokens[-2:], took[-2:], strict=True))
    growth = max(0.0, (second - first) / (tokens[-1] - tokens[-2]))
    return far * (second + growth * (far - tokens[-1]))


@figure("prefill")
def prefill(setting: Setting) -> Iterator[Row]:
    """Compare the peak extra memory of `prefill="chunked"` and `prefill="full"`."""
    if not STATUS.exists():
        raise Skipped("peak memory is read from /proc, which only Linux has")
    peak = {}
    for way in ("chunked", "full"):
        setting.say(f'{setting.sizes.fed:,} tokens with prefill="{way}"')
        peak[way] = _in_a_process(way, setting)
    what = f"`streaming_llm({setting.sizes.slots})`, chunked ÷ full"
    yield compare(
        f"peak extra memory while {setting.sizes.fed:,} tokens are fed, {what}",
        peak["chunked"],
        peak["full"],
        0.1,
        unit="MB",
    )


def _in_a_process(way: str, setting: Setting) -> int:
    what = {
        "way": way,
        "sizes": asdict(setting.sizes),
        "dtype": str(setting.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
    said = run_python(CHILD, said=json.dumps(what), name=f'prefill="{way}"')
    return int(json.loads(said)["bytes"])


def child() -> None:
    """Feed the prompt that standard input describes, and print the peak extra memory in bytes."""
    what = json.load(sys.stdin)
    torch.set_num_threads(what["threads"])
    # JSON has turned `prompts` into a list, which `Sizes` cannot hash. It is not needed here.
    sizes = Sizes(**{**what["sizes"], "prompts": ()})
    model = model_of(Setting(sizes, getattr(torch, what["dtype"])))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(sizes.vocabulary, (1, sizes.fed), generator=generator)
    # This first call lets libraries allocate what they need once, which must not be counted.
    Stream(model, "streaming_llm(16)", chunk=8).feed(ids[:, :32])
    stream = Stream(model, f"streaming_llm({sizes.slots})", chunk=sizes.chunk, prefill=what["way"])
    before = status_bytes("self", "VmRSS")
    CLEAR.write_text("5")  # reset the peak (VmHWM)
    stream.feed(ids)
    json.dump({"bytes": status_bytes("self", "VmHWM") - before}, sys.stdout)
