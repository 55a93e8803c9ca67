"""Parse policies of weir, and refuse those whose tokens vLLM cannot store in whole blocks.

This module imports neither weir nor vLLM. `tests/test_policy.py` compares it with weir's own parser
and library, so that the two cannot differ unnoticed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

from weir_vllm.errors import StreamPolicyError

WORKING = (
    "sink(4) | recent(4092)",
    "recent(4096)",
    "streaming_llm(budget=4096, sinks=4)",
    "window(budget=4096)",
    "dense",
    "[sink(4) | recent(1020), sink(4) | recent(4092)] with a policy for each layer",
)
"""Examples of what the plug-in can serve, for error messages."""

SINGLE = "it chooses single tokens, and vLLM stores and frees whole blocks"
MADE = "it holds computed keys and values, and vLLM stores those of tokens only"
WEIGHTED = "it changes the weights of tokens, and vLLM's attention gives all tokens the same weight"
MARKS = "it depends on marks in the text, which vLLM does not pass on"
REASONS = {
    "attention_matching": WEIGHTED,
    "balance": SINGLE,
    "balancekv": SINGLE,
    "beginning": MARKS,
    "buzz": SINGLE,
    "caote": SINGLE,
    "centers": SINGLE,
    "certified": SINGLE,
    "chunks": SINGLE,
    "critical": SINGLE,
    "curdkv": SINGLE,
    "defend": SINGLE,
    "defensivekv": SINGLE,
    "expected": SINGLE,
    "gated": SINGLE,
    "h2o": SINGLE,
    "header": MARKS,
    "heavy": SINGLE,
    "hive": SINGLE,
    "kcenter": SINGLE,
    "kept": MARKS,
    "keydiff": SINGLE,
    "keyformer": SINGLE,
    "knorm": SINGLE,
    "kvzip": "it reads a whole text into a full cache and has the model repeat it",
    "lacache": SINGLE,
    "ladder": SINGLE,
    "lagkv": SINGLE,
    "match": WEIGHTED,
    "outliers": SINGLE,
    "pinned": MARKS,
    "pyramid": "its sizes depend on the number of layers. Write the policy of each layer in a list",
    "pyramidkv": SINGLE,
    "qfilters": SINGLE,
    "quantized": "it stores 8-bit or 4-bit slots, and the plug-in supports only exact slots",
    "recompute": "it reads the window again for every token, and caches nothing",
    "reservoir": SINGLE,
    "residue": MADE,
    "reskv": MADE,
    "rkv": SINGLE,
    "scissorhands": SINGLE,
    "snap": SINGLE,
    "snapkv": SINGLE,
    "subgen": SINGLE,
    "tail": SINGLE,
    "tova": SINGLE,
    "tri": SINGLE,
    "uniform": SINGLE,
    "vase": SINGLE,
    "weir": (
        "it has 4-bit slots and different slots per head, and the plug-in supports only exact "
        "slots that are the same for all heads"
    ),
}
"""Why a pool or policy of weir cannot be served, by name."""

FORMATTED = "quantized slots (`:int8`) are not supported; the plug-in supports only exact slots"
BY_HEAD = (
    "policies that differ by KV head are not supported, because all heads of a layer share their "
    "blocks"
)
SHOWN = 60
"""The most characters that an error message quotes before, and after, the faulty character."""

_WORD = re.compile(r"[^\W\d]\w*")
_NUMBER = re.compile(r"[-+]?([0-9]+(_[0-9]+)*(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SPACE = re.compile(r"\s*")
_PARAMETERS = {
    "sink": {"n": 4},
    "recent": {"n": ...},
    "streaming_llm": {"budget": 256, "sinks": 4},
    "window": {"budget": 256},
    "dense": {},
}
"""Accepted pools and policies, and their parameters with defaults. `...` means no default."""


@dataclass(frozen=True)
class Ends:
    """The tokens that a layer keeps: the first of the stream and the newest.

    Attributes:
        sinks: how many of the first tokens stay.
        recent: how many of the newest tokens stay; None for all.
    """

    sinks: int
    recent: int | None

    def __str__(self) -> str:
        """Return the policy in weir's grammar."""
        newest = f"recent({'none' if self.recent is None else self.recent})"
        return f"sink({self.sinks}) | {newest}" if self.sinks else newest

    def whole_blocks(self, block: int) -> Ends:
        """Round sinks and window up to whole blocks of `block` tokens."""
        if self.recent is None:
            return self
        return Ends(-(-self.sinks // block) * block, -(-self.recent // block) * block)


@dataclass(frozen=True)
class StreamPolicy:
    """A policy that vLLM's blocks can hold.

    Attributes:
        text: the policy as it was written.
        layers: one element for all layers, or one for each layer in which the model has no sliding
            window.
    """

    text: str
    layers: tuple[Ends, ...]

    @property
    def is_list(self) -> bool:
        """Whether layers have separate policies."""
        return self.text.lstrip().startswith("[")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever evicted, as in vLLM without the plug-in."""
        return all(ends.recent is None for ends in self.layers)


def parse_policy(text: str) -> StreamPolicy:
    """Read a policy in weir's grammar, or refuse it with the reason and with what works.

    Raises:
        StreamPolicyError: the text is no policy of weir, or one that vLLM's blocks cannot hold.
    """
    if not isinstance(text, str):
        raise StreamPolicyError(
            f"a policy must be text like 'sink(4) | recent(4092)', got {text!r}"
        )
    if text.strip().endswith(".toml"):
        raise StreamPolicyError(
            f"policy files are not served, got {text!r}. {_what_works()} Write the policy of each "
            "layer in a list."
        )
    reader = _Reader(text)
    layers = reader.policy(depth=0)
    reader.skip()
    if reader.at < len(text):
        reader.refuse("expected '|' or the end")
    kept = {ends.recent is None for ends in layers}
    if len(kept) > 1:
        reader.refuse(
            "recent(none) in some layers lets their memory grow. Give every layer a limit",
            at=0,
        )
    return StreamPolicy(text, layers)


def _what_works() -> str:
    return "The plug-in serves " + ", ".join(f"'{each}'" for each in WORKING) + "."


class _Reader:
    """A recursive-descent parser of one policy."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def refuse(self, problem: str, at: int | None = None, advice: bool = True) -> NoReturn:
        """Raise an error that shows the character at which the problem is."""
        at = self.at if at is None else at
        shown = "".join(c if c.isprintable() else " " for c in self.text)
        before, after = shown[:at], shown[at:]
        if len(before) > SHOWN:
            before = f"…{before[-SHOWN:]}"
        if len(after) > SHOWN:
            after = f"{after[:SHOWN]}…"
        more = f" {_what_works()}" if advice else ""
        raise StreamPolicyError(f"{problem} (character {at + 1}: {before}»{after}).{more}")

    def skip(self) -> None:
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def take(self, mark: str) -> bool:
        self.skip()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def word(self, what: str) -> tuple[str, int]:
        self.skip()
        found = _WORD.match(self.text, self.at)
        if found is None:
            self.refuse(f"expected {what}", advice=False)
        at, self.at = self.at, found.end()
        return found.group(), at

    def policy(self, depth: int) -> tuple[Ends, ...]:
        """Read a pipe, a named policy, or a list of them."""
        self.skip()
        start = self.at
        if self.take("["):
            if depth:
                self.refuse(BY_HEAD, at=start)
            layers = list(self.policy(depth + 1))
            while not self.take("]"):
                if not self.take(","):
                    self.refuse("expected ',' or ']'", advice=False)
                layers += self.policy(depth + 1)
            return tuple(layers)
        calls = [self.call()]
        while self.take("|"):
            calls.append(self.call())
        return (self.ends(calls, start),)

    def ends(self, calls: list[tuple[str, int, dict[str, Any]]], start: int) -> Ends:
        """Return which tokens the calls of a pipe keep."""
        name, at, given = calls[0]
        if len(calls) == 1 and name in ("streaming_llm", "window", "dense"):
            if name == "dense":
                return Ends(0, None)
            sinks = given.get("sinks", 0)
            budget = given["budget"]
            if name == "window" and budget < 1:
                self.refuse(f"budget of window must be at least 1, got {budget}", at, advice=False)
            if sinks < 0:
                self.refuse(f"sinks must be at least 0, got {sinks}", at, advice=False)
            if budget - sinks < 1:
                self.refuse(
                    f"a budget of {budget} leaves no room for recent tokens next to {sinks} sinks",
                    at,
                    advice=False,
                )
            return Ends(sinks, budget - sinks)
        sinks, recent = 0, 0
        unlimited = False
        for place, (name, at, given) in enumerate(calls):
            if name not in ("sink", "recent"):
                self.refuse(f"{name} is a whole policy, not a pool of a pipe", at)
            n = given["n"]
            if n is not None and n < 1:
                self.refuse(f"n of {name} must be at least 1, got {n}", at, advice=False)
            if name == "sink":
                if place:
                    self.refuse("sink keeps the first tokens, so it must come first", at)
                sinks = n
            elif unlimited:
                self.refuse("nothing can follow recent(none)", at)
            elif n is None:
                unlimited = True
            else:
                recent += n
        if unlimited:
            return Ends(0, None)
        if not recent:
            self.refuse("a pipe needs recent(n): sinks alone keep no new tokens", start)
        return Ends(sinks, recent)

    def call(self) -> tuple[str, int, dict[str, Any]]:
        """Read a call and its arguments, or refuse it by name."""
        name, at = self.word("a pool or a policy")
        if name not in _PARAMETERS:
            why = REASONS.get(name)
            if why is None:
                self.refuse(f"no pool or policy is called {name!r}", at)
            self.refuse(f"{name} cannot be served by vLLM: {why}", at)
        parameters = _PARAMETERS[name]
        given: dict[str, Any] = {}
        named = False
        if self.take("(") and not self.take(")"):
            while True:
                self.skip()
                here = self.at
                key = self.key()
                if key is None:
                    if named:
                        self.refuse("a value without a name cannot follow one with a name", here)
                    if len(given) >= len(parameters):
                        takes = ", ".join(parameters) or "none"
                        self.refuse(f"{name} has no such parameter (it has {takes})", here)
                    key = list(parameters)[len(given)]
                elif key not in parameters:
                    self.refuse(f"{name} has no parameter {key!r}", here)
                else:
                    named = True
                if key in given:
                    self.refuse(f"{name} is given {key!r} twice", here)
                given[key] = self.number(name, key)
                if self.take(")"):
                    break
                if not self.take(","):
                    self.refuse("expected ',' or ')'", advice=False)
        for key, default in parameters.items():
            if key not in given and default is ...:
                self.refuse(f"{name} needs {key!r}", at, advice=False)
        if self.take(":"):
            self.refuse(FORMATTED)
        return name, at, {**parameters, **given}

    def key(self) -> str | None:
        """Read `name=`, if it comes next."""
        found = _WORD.match(self.text, self.at)
        if found is None:
            return None
        before, self.at = self.at, found.end()
        if self.take("="):
            return found.group()
        self.at = before
        return None

    def number(self, name: str, key: str) -> int | None:
        """Read a whole number, or `none` for the window of `recent`."""
        self.skip()
        at = self.at
        found = _WORD.match(self.text, at)
        if found is not None and name == "recent" and found.group().lower() == "none":
            self.at = found.end()
            return None
        written = _NUMBER.match(self.text, at)
        if written is None or re.search(r"[.eE]", written.group()):
            self.refuse(f"{key} of {name} must be a whole number", at, advice=False)
        self.at = written.end()
        value = int(written.group())
        if abs(value) > 2**53:
            self.refuse("no number here can be this large", at, advice=False)
        return value
