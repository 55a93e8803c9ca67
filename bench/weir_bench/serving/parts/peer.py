"""Compare `weir serve` with `transformers serve --continuous-batching`, with equally large caches.

A conversation of `transformers serve` cannot be longer than its share of the cache. When it has
reached that length, its client forgets everything and begins again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weir_bench.figure import Row, Skipped
from weir_bench.serving.load import Heard, percentiles, together
from weir_bench.serving.part import Plan, compare_pace, part, take_turns
from weir_bench.serving.server import Server, transformers_serves, weir_serves
from weir_bench.serving.talk import Reply, Talk

BLOCK = 32
"""Tokens in a block of the cache of `transformers serve`."""
CHUNK = 64
"""Slots of a weir row in addition to its budget."""


@dataclass
class Forgetting(Talk):
    """A conversation that begins again when it would no longer fit into its window."""

    window: int = 1024
    _held: int = 0

    async def turn(self, words: str, tokens: int) -> Reply:
        """Send a message and return the answer, in a new conversation if there is no room."""
        if self._held + 2 * tokens > self.window:
            self.messages, self._held = [], 0
        reply = await super().turn(words, tokens)
        self._held = reply.prompt + reply.tokens
        return reply


@part("transformers")
def transformers(plan: Plan) -> Iterator[Row | Heard]:
    """Let the same number of clients talk to both servers, in turns."""
    for needed in ("fastapi", "uvicorn", "openai"):
        if importlib.util.find_spec(needed) is None:
            raise Skipped(f"transformers serve needs {needed}: pip install 'transformers[serving]'")
    many, slots = plan.sessions, plan.budget + CHUNK
    own = weir_serves(plan.folder, *plan.options, "--rows", many)
    options = ("--cb-block-size", BLOCK, "--cb-num-blocks", -(-many * slots // BLOCK))
    with own as ours, transformers_serves(plan.folder, *options) as theirs:
        talks: dict[str, tuple[Server, Sequence[Talk]]] = {
            "weir": (ours, [Talk(ours.port, ours.model) for _ in range(many)]),
            "transformers": (
                theirs,
                [Forgetting(theirs.port, theirs.model, more={}, window=slots) for _ in range(many)],
            ),
        }
        plan.say(f"{many} clients at weir serve and at transformers serve")
        heards = take_turns(plan, talks, strict=True)
    both = {
        "weir": together(f"weir serve, {many} endless sessions", heards["weir"]),
        "transformers": together(
            f"transformers serve, {many} that begin again", heards["transformers"]
        ),
    }
    yield from both.values()
    what = f"tokens per second of weir serve, {many} sessions ÷ transformers serve, same bytes"
    yield compare_pace(what, heards["weir"], heards["transformers"])
    if all(heard.first for heard in both.values()):
        quick, slow = (percentiles(heard.first)["p50"] for heard in both.values())
        what = "median first token of transformers serve ÷ of weir serve"
        yield Row(what, quick, slow, "ms", slow / quick)
