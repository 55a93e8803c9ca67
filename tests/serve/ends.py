"""How many answers still end, and end where the system turn says, after 1, 10 and 100 windows.

    python tests/serve/ends.py [--json]

Trains the model of `toychat`, and lets an engine of `weir serve` hold endless sessions with it
under several policies with few slots. A window is as many tokens as the first policy has slots.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass

import torch
from bare_record import bare_record
from toychat import END, HEADER, OPEN, USER, answer, asked, beginning, train
from transformers import PreTrainedModel

from weir.serve import Engine, SampledToken, Sampler, SamplingParams, SessionStore, TokenSequence
from weir.stream import Sampling

WINDOW = 16
POLICIES = {
    "as it is": f"streaming_llm(budget={WINDOW})",
    "as many slots as pinned": f"streaming_llm(budget={WINDOW + 20})",
    "beginning alone": f"beginning(16) | sink(4) | recent({WINDOW - 4})",
    "header alone": f"sink(4) | recent({WINDOW - 4}) | header(4)",
    "pinned": f"pinned(streaming_llm(budget={WINDOW}), n=16, header=4)",
}
WINDOWS = (1, 10, 100)
LIMIT = 40
"""Tokens after which an answer is cut off; none should have more than 25."""


@dataclass
class Share:
    """How many of some answers ended, and how many were right."""

    ended: int = 0
    right: int = 0
    count: int = 0

    def add(self, said: list[int], wanted: list[int]) -> None:
        self.ended += said[-1] == END
        self.right += list(said) == list(wanted)
        self.count += 1


class Heard:
    """A listener that collects the tokens of an answer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: Exception | None = None

    def on_token(self, token: SampledToken) -> str | None:
        self.tokens.append(token.id)
        return None

    def on_finish(self, reason: str) -> None:
        pass

    def on_failure(self, error: Exception) -> None:
        raise error


def shares(
    model: PreTrainedModel,
    policy: str,
    windows: list[int] = WINDOWS,
    sessions: int = 8,
    turns: int = 5,
    *,
    read: bool = False,
) -> dict[int, Share]:
    """For each number of windows, check the next answers of sessions that have seen that many.

    Args:
        model: a model from `train`.
        policy: the policy of all sessions.
        windows: the numbers of windows after which answers are checked.
        sessions: how many sessions there are at the same time.
        turns: how many turns of each session are checked after each number of windows.
        read: whether turns that are not checked are read together with their right answers, many
            in one prompt, instead of being generated.
    """
    engine = Engine(model, policy, sessions, SessionStore(keep=2 * sessions), chunk=4)
    dice = random.Random(0)
    stops = [dice.randrange(24) for _ in range(sessions)]
    seen, number = [0] * sessions, 0
    found = {each: Share() for each in windows}
    left = {each: [turns] * sessions for each in windows}
    while any(any(each) for each in left.values()):
        asks = [asked(dice) for _ in range(sessions)]
        heard = [Heard() for _ in range(sessions)]
        for session, said in enumerate(asks):
            start = [*beginning(stops[session])] if not number else [OPEN, USER]
            near = [each * WINDOW for each in windows if left[each][session]]
            while read and near and seen[session] + len(start) < min(near):
                before = asked(dice)
                start += [*before, *HEADER, *answer(before, stops[session]), OPEN, USER]
            ids = [*start, *said, *HEADER]
            engine.submit(
                TokenSequence(
                    id=f"{session}.{number}",
                    parent=f"{session}.{number - 1}" if number else None,
                    prompt_ids=ids,
                    max_tokens=LIMIT,
                    stop_ids=frozenset([END]),
                    sampler=Sampler(SamplingParams(Sampling(temperature=0))),
                    listener=heard[session],
                    beginning=len(beginning(0)),
                    header=len(HEADER),
                    record=bare_record,
                )
            )
            seen[session] += len(ids)
        while engine.load().busy or engine.load().waiting:
            engine.step()
        for session, said in enumerate(asks):
            told = heard[session].tokens
            for each in windows:
                if left[each][session] and seen[session] > each * WINDOW:
                    left[each][session] -= 1
                    found[each].add(told, answer(said, stops[session]))
            seen[session] += len(told)
        number += 1
    return found


def main() -> None:
    """Print a table, or with --json its numbers."""
    torch.set_num_threads(1)
    model = train()
    found = {name: shares(model, policy, turns=10) for name, policy in POLICIES.items()}
    if "--json" in sys.argv:
        print(json.dumps({n: {w: vars(s) for w, s in it.items()} for n, it in found.items()}))
        return
    for name, by_window in found.items():
        print(f"{name}: {POLICIES[name]}")
        for windows, share in by_window.items():
            of = f"of {share.count} answers"
            print(f"  after {windows:>3} windows {share.ended} {of} ended, {share.right} rightly")


if __name__ == "__main__":
    main()
