"""An endless chat through a server: far past the window, does it still answer, soon and well?

weir's client sends its whole history. llama.cpp's server refuses a history that is longer than its
context, with context shift too, so its client leaves out the oldest turns, and the server moves
what it still has of the others (cache reuse).
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
"""What the system turn is asked for, and the word that the answer has where it is obeyed."""
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
"""Tokens of an answer at most."""
OFTEN = 5
"""Every so many turns the name is asked for."""
JUDGED = 5
"""The last so many answers are judged."""
PLAIN_TURNS = 10
"""Turns past the window of a chat whose every turn reads the whole window anew."""

Chat = Callable[[int], dict[str, Any]]


@dataclass
class Shifting(Talk):
    """A conversation whose client leaves out its oldest turns when it is refused.

    Attributes:
        left_out: pairs of messages.
    """

    left_out: int = 0

    async def turn(self, words: str, tokens: int) -> Reply:
        """Say something and hear the answer; the time begins with the first try."""
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
    """Each chat by its name, for the servers of those that are compared."""
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
    """A chat of so many turns past the window; the first question comes again and at the end."""
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
    """Tokens a second of an answer, after its first."""
    took = reply.arrived[-1] - reply.arrived[0]
    return (reply.tokens - 1) / took if took and reply.tokens > 1 else 0.0


def is_sane(text: str) -> bool:
    """Whether a text is words that do not go round in circles."""
    words = re.findall(r"[a-z']+", text.lower())
    threes = list(zip(words, words[1:], words[2:], strict=False))
    if not threes:
        return bool(words)
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return len(set(threes)) > 0.6 * len(threes) and letters > 0.7 * len(text)
