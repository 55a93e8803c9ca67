"""Measure how fast and how well servers answer in a chat far longer than the context window.

weir's client sends the whole history. llama.cpp's server refuses a history that is longer than its
context, even with context shift. Its client therefore leaves out the oldest turns, and the server
moves the cached tokens of the other turns to their new positions (cache reuse).
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from weir.errors import WeirError
from weir_bench.peers.engines import POLICY, EngineSetup, model_file
from weir_bench.serving.server import weir_serves
from weir_bench.serving.talk import Reply, Talk

SYSTEM = "You are a helpful assistant named Max."
NAME, NAMED = "What is your name?", "max"
"""A question about the system prompt, and the word that a correct answer contains."""
QUESTIONS = (
    "Which flowers are red?",
    "What is the largest ocean?",
    "What can I cook with eggs?",
    "Name three animals that live in the sea.",
    "Why is the sky blue?",
    "When should I water tomatoes?",
    "What is a good name for a dog?",
    "How many days are in a week?",
    "What do bees make?",
    "Tell me something about the moon.",
)
ANSWER = 48
"""The largest number of tokens of an answer."""
OFTEN = 5
"""Every fifth turn asks for the name."""
JUDGED = 5
"""The number of answers at the end of a chat that are checked with `is_sane`."""
PLAIN_TURNS = 10
"""Turns past the window for a server that reads the whole window again in every turn."""

Chat = Callable[[int], dict[str, Any]]


@dataclass
class Shifting(Talk):
    """A conversation whose client leaves out the oldest turns when the server refuses its length.

    Attributes:
        left_out: the number of turns (pairs of messages) that were left out.
    """

    left_out: int = 0

    async def turn(self, words: str, tokens: int) -> Reply:
        """Send a message and return the answer. Its time includes requests that were refused."""
        asked: float | None = None
        while True:
            began = asyncio.get_running_loop().time()
            try:
                reply = await super().turn(words, tokens)
            except WeirError as error:
                if not re.search(r"request \(\d+ tokens\)", str(error)) or len(self.messages) < 3:
                    raise
                del self.messages[1:3]
                self.left_out += 1
                asked = began if asked is None else asked
                continue
            return reply if asked is None else replace(reply, asked=asked)


def endless_chats(
    engines: Sequence[EngineSetup], threads: int, window: int
) -> Iterator[tuple[str, Chat]]:
    """Yield the name and the function of each chat, for those of the engines that take part."""
    for each in engines:
        if each.name == "weir q4_1":
            yield "weir serve, q4_1", functools.partial(_weir, window)
        if each.name == "llama.cpp Q4_1":
            for shift in (True, False):
                name = f"{each.name}, {'context shift' if shift else 'as it is'}"
                yield name, functools.partial(_llamacpp, each, threads, window, shift)


def _weir(window: int, turns: int) -> dict[str, Any]:
    options = ("--policy", POLICY.format(window=window), "--rows", "1", "--weights", "gguf")
    with weir_serves(model_file("Q4_1"), *options) as server:
        talk = Talk(server.port, server.model, more={})
        return asyncio.run(_talked(talk, lambda: server.memory, window, turns))


def _llamacpp(
    each: EngineSetup, threads: int, window: int, shift: bool, turns: int
) -> dict[str, Any]:
    with each.start(threads, window, shift=shift, context=window) as peer:
        talk = Shifting(int(peer.ask("url").rpartition(":")[2]), "model", more={})
        turns = turns if shift else min(turns, PLAIN_TURNS)
        return asyncio.run(_talked(talk, lambda: peer.memory, window, turns))


async def _talked(talk: Talk, memory: Callable[[], int], window: int, turns: int) -> dict[str, Any]:
    """Chat until `turns` turns are past the window, and return the measurements.

    The name is asked for in the first turn, in every fifth turn after it, and in the last turn.
    """
    talk.messages = [{"role": "system", "content": SYSTEM}]
    replies: list[Reply] = []
    past = 0
    named: dict[bool, list[bool]] = {False: [], True: []}
    try:
        while past < turns:
            name = past == turns - 1 or len(replies) % OFTEN == 0
            asked = NAME if name else QUESTIONS[len(replies) % len(QUESTIONS)]
            replies.append(await talk.turn(asked, ANSWER))
            beyond = replies[-1].prompt > window or getattr(talk, "left_out", 0) > 0
            past += beyond
            if name:
                named[beyond].append(NAMED in replies[-1].text.lower())
    finally:
        talk.close()
    late = replies[-turns:]
    return {
        "turns": len(replies),
        "past": turns,
        "first_seconds": median(reply.first for reply in late),
        "last_first_seconds": replies[-1].first,
        "read": median(reply.read for reply in late),
        "tokens_per_second": median(_pace(reply) for reply in late),
        "memory": memory(),
        "sane": sum(is_sane(reply.text) for reply in replies[-JUDGED:]) / JUDGED,
        "obeyed_before": mean(named[False]),
        "obeyed": mean(named[True]),
        "obeyed_last": named[True][-1],
        "answer": replies[-1].text,
        "before": replies[-2].text,
        "firsts": [round(reply.first, 4) for reply in replies],
        "left_out": getattr(talk, "left_out", 0),
    }


def _pace(reply: Reply) -> float:
    """Return the tokens per second of an answer after its first token."""
    took = reply.arrived[-1] - reply.arrived[0]
    return (reply.tokens - 1) / took if took and reply.tokens > 1 else 0.0


def is_sane(text: str) -> bool:
    """Return whether a text consists mostly of words, and does not repeat itself much."""
    words = re.findall(r"[a-z']+", text.lower())
    threes = list(zip(words, words[1:], words[2:], strict=False))
    if not threes:
        return bool(words)
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return len(set(threes)) > 0.6 * len(threes) and letters > 0.7 * len(text)
