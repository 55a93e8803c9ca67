"""Figures of starting: from the command to its first word, beside what nobody can do without.

Each is a process of its own. PyTorch and transformers take seconds to import, whoever asks for
them; the peer of a command that loads a model is a script that imports them, loads the same model
and makes one token.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import resources
from pathlib import Path

from weir_bench.figure import Row, Setting, Skipped, compare, figure
from weir_bench.timing import Doing, in_turns, middle

ROUNDS = 3
HELP = "import typer, typer.core, click"
"""What a help page is made with."""
NANO = str(resources.files("weir") / "assets" / "nano")
ONE_TOKEN = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = {NANO!r}
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
given = tokenizer("Once there was a river", return_tensors="pt")
model.generate(**given, max_new_tokens=1)
"""
OURS = """
import weir
model, tokenizer = weir.load("nano")
stream = weir.Stream(model, "streaming_llm(budget=64)")
stream.feed(tokenizer("Once there was a river", return_tensors="pt").input_ids)
next(stream.generate(max_new_tokens=1))
"""
MAIN = "from weir.cli import main; main()"
TARGETS = {"`weir --help`": 1.5}
LOADED = 1.1
"""The most that a command which loads a model may take beside its peer."""


@figure("start", "from a command to its first word", by_dtype=False)
def start(setting: Setting) -> Iterator[Row]:
    """`weir --help`, a first token in Python, of `weir stream` and of `weir chat`."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("Once there was a river that nobody had seen the end of.\n", "utf-8")
        stream = ("stream", "--model", "nano", "--text", str(text), "--json")
        chat = "chat --model nano --policy streaming_llm(budget=64) --max-tokens 1".split()
        ways = {
            "`weir --help`": (partial(run, MAIN, "--help"), partial(run, HELP)),
            '`weir.load("nano")` and a token': (partial(run, OURS), partial(run, ONE_TOKEN)),
            "`weir stream` of a line": (partial(run, MAIN, *stream), partial(run, ONE_TOKEN)),
            "`weir chat`, an answer of one token": (
                partial(run, MAIN, *chat, said="Hello\n"),
                partial(run, ONE_TOKEN),
            ),
        }
        # Each start takes seconds, whatever the model; without nano one way with a model will do.
        for name, (ours, peer) in list(ways.items())[: None if setting.sizes.nano else 2]:
            setting.say(name)
            both = {"ours": Doing(ours), "peer": Doing(peer)}
            took = middle(in_turns(both, min(ROUNDS, setting.sizes.slow), warm=0))
            what = "importing typer" if peer.args[0] == HELP else "the same by transformers alone"
            target = TARGETS.get(name, LOADED)
            yield compare(f"{name} ÷ {what}", took["ours"], took["peer"], target, unit="s")


def run(code: str, *arguments: str, said: str = "") -> None:
    """Run Python code in a process of its own, to its end.

    Args:
        code: what it runs.
        arguments: of its command line.
        said: its standard input.

    Raises:
        Skipped: it failed, and what it said last.
    """
    words: Sequence[str] = (sys.executable, "-c", code, *arguments)
    done = subprocess.run(words, input=said, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise Skipped(f"{' '.join(arguments) or 'a script'} failed: {last}")
