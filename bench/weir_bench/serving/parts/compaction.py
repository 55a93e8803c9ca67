"""Compare endless sessions with a common alternative: summarizing a conversation that gets long.

A client of a server with a context window asks for a summary when the conversation has reached 80 %
of the window, and continues with the summary alone. While the user waits, the summary is written
and then read again, because the cache of the old conversation is of no use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weir_bench.figure import Row
from weir_bench.serving.load import Heard, percentiles, together
from weir_bench.serving.part import Plan, part, take_turns
from weir_bench.serving.server import Server, weir_serves
from weir_bench.serving.talk import Reply, Talk

FULL = 0.8
"""The share of the window at which a conversation is summarized."""
SUMMARY = 0.2
"""The largest share of the window that a summary takes."""
ASK = "Summarize all of this."


@dataclass
class Compacting(Talk):
    """A conversation whose client summarizes it to stay within a window."""

    window: int = 2048
    _held: int = 0
    compactions: int = 0

    async def turn(self, words: str, tokens: int) -> Reply:
        """Send a message and return the answer, after a summary if the window is nearly full.

        The time to the first token then includes the summary.
        """
        began: float | None = None
        if self._held + tokens > FULL * self.window:
            asked = await super().turn(ASK, max(1, int(SUMMARY * self.window)))
            began, self.compactions = asked.asked, self.compactions + 1
            self.messages = [
                {"role": "user", "content": f"What was said so far: {asked.text}"},
                {"role": "assistant", "content": "I see."},
            ]
        reply = await super().turn(words, tokens)
        self._held = reply.prompt + reply.tokens
        return reply if began is None else replace(reply, asked=began)


@part("compaction")
def compaction(plan: Plan) -> Iterator[Row | Heard]:
    """Compare endless and summarizing clients of the same server, with the budget as the window."""
    few = max(1, plan.sessions // 4)
    with weir_serves(plan.folder, *plan.options, "--rows", few) as server:
        ours = [Talk(server.port, server.model) for _ in range(few)]
        theirs = [Compacting(server.port, server.model, window=plan.budget) for _ in range(few)]
        plan.say(f"{few} clients, endless and summarizing")
        clients: dict[str, tuple[Server, Sequence[Talk]]] = {
            "endless": (server, ours),
            "summarizing": (server, theirs),
        }
        heards = take_turns(plan, clients)
        made = sum(talk.compactions for talk in theirs)
    endless = together(f"{few} endless sessions", heards["endless"])
    other = together(f"{few} clients that summarize, {made} times", heards["summarizing"])
    yield endless
    yield other
    if not made or not endless.first or not other.first:
        return
    for at in ("p50", "p99"):
        slow, quick = percentiles(other.first)[at], percentiles(endless.first)[at]
        what = f"{at} of the first token, summarizing at 80 % of {plan.budget:,} tokens ÷ endless"
        yield Row(what, quick, slow, "ms", slow / quick)
