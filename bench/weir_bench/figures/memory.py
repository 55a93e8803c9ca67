"""The figure of memory: what reading a long prompt takes beside the model, at its peak.

Each way is measured in a process of its own, by the system's own count of its largest memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from weir.stream import Stream
from weir_bench.figure import Row, Setting, Sizes, Skipped, figure
from weir_bench.model import model_of

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
CHILD = f"""
import sys
sys.path.append({str(Path(__file__).parents[2])!r})
from weir_bench.figures.memory import child
child()
"""


@figure("prefill", "peak memory of reading a long prompt, chunked beside full", bound="bytes")
def prefill(setting: Setting) -> Iterator[Row]:
    """Extra memory of `prefill="chunked"` against `prefill="full"`."""
    if not STATUS.exists():
        raise Skipped("peak memory is read from /proc, which only Linux has")
    peak = {}
    for way in ("chunked", "full"):
        setting.say(f'{setting.sizes.fed:,} tokens with prefill="{way}"')
        peak[way] = _in_a_process(way, setting) / 1e6
    yield Row(
        f"peak extra memory while {setting.sizes.fed:,} tokens are fed, "
        f"`streaming_llm({setting.sizes.slots})`, chunked ÷ full",
        peak["chunked"],
        peak["full"],
        "MB",
        peak["chunked"] / peak["full"],
        0.1,
    )


def _in_a_process(way: str, setting: Setting) -> int:
    what = {
        "way": way,
        "sizes": asdict(setting.sizes),
        "dtype": str(setting.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(what), capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise Skipped(f'prefill="{way}" failed in its process: {last}')
    return int(json.loads(done.stdout)["bytes"])


def child() -> None:
    """What the process does: read what is to be fed from standard input, feed it, tell the peak."""
    what = json.load(sys.stdin)
    torch.set_num_threads(what["threads"])
    # Tuples again, though none is needed here.
    sizes = Sizes(**{**what["sizes"], "dense": (), "prompts": ()})
    model = model_of(Setting(sizes, getattr(torch, what["dtype"])))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(sizes.vocabulary, (1, sizes.fed), generator=generator)
    # What libraries allocate once, at their first call, is not the prompt's.
    Stream(model, "streaming_llm(16)", chunk=8).feed(ids[:, :32])
    stream = Stream(model, f"streaming_llm({sizes.slots})", chunk=sizes.chunk, prefill=what["way"])
    before = _kilobytes("VmRSS")
    CLEAR.write_text("5")  # the peak is counted from here on
    stream.feed(ids)
    json.dump({"bytes": 1024 * (_kilobytes("VmHWM") - before)}, sys.stdout)


def _kilobytes(name: str) -> int:
    """A line of the process's status, in kB."""
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[name].split()[0])
