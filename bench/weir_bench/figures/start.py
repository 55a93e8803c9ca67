"""Figures of starting: the time from a command to its end, compared with a minimal script.

Each runs in a separate process. Importing PyTorch and transformers takes seconds, which weir cannot
avoid. A command that loads a model is therefore compared with a script that imports them, loads the
same model and generates one token.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from importlib import resources
from pathlib import Path

from weir_bench.figure import Row, Setting, compare, figure, run_python
from weir_bench.timing import in_turns, middle

ROUNDS = 3
HELP = "import typer, typer.core, click"
"""The script that `weir --help` is compared with: it imports what printing help needs."""
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
"""The target of commands that load a model: their time ÷ that of the script."""


@figure("start", by_dtype=False)
def start(setting: Setting) -> Iterator[Row]:
    """Time `weir --help`, and a first token in Python, by `weir stream` and by `weir chat`."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("Once there was a river that nobody had seen the end of.\n", "utf-8")
        stream = ("stream", "--model", "nano", "--text", str(text), "--json")
        chat = "chat --model nano --policy streaming_llm(budget=64) --max-tokens 1".split()
        one_token = partial(run_python, ONE_TOKEN)
        ways = {
            "`weir --help`": (partial(run_python, MAIN, "--help"), partial(run_python, HELP)),
            '`weir.load("nano")` and a token': (partial(run_python, OURS), one_token),
            "`weir stream` of a line": (partial(run_python, MAIN, *stream), one_token),
            "`weir chat`, an answer of one token": (
                partial(run_python, MAIN, *chat, said="Hello\n"),
                one_token,
            ),
        }
        # Each start takes seconds, however small the model. So without `sizes.nano`, only the help
        # and one way to load a model are timed.
        for name, (ours, peer) in list(ways.items())[: None if setting.sizes.nano else 2]:
            setting.say(name)
            both = {"ours": ours, "peer": peer}
            took = middle(in_turns(both, min(ROUNDS, setting.sizes.slow), warm=0))
            what = "importing typer" if peer.args[0] == HELP else "the same by transformers alone"
            target = TARGETS.get(name, LOADED)
            yield compare(f"{name} ÷ {what}", took["ours"], took["peer"], target, unit="s")
