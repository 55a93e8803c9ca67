"""Separate thoughts, `<think>…</think>`, from the answer after them.

This module knows nothing about tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from weir.stream import count_stop_prefix

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class ThoughtDelta:
    """More text of the thoughts."""

    text: str


class ThoughtParser:
    """Incremental parser of one answer.

    Args:
        is_open: whether the prompt has already opened the thoughts.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._state = "thoughts" if is_open else "start"
        self._rest = ""
        self._said = False  # whether there was a thought other than white space

    @property
    def is_thinking(self) -> bool:
        """Whether the next text belongs to the thoughts, or may begin them."""
        return self._state in ("start", "thoughts")

    def feed(self, text: str) -> tuple[str, str]:
        """Parse more text. Returns its additions to the thoughts and to the answer."""
        self._rest += text
        thought = ""
        if self._state == "start":
            begun = self._rest.lstrip()
            if begun.startswith(OPEN):
                self._state, self._rest = "thoughts", begun[len(OPEN) :]
            elif OPEN.startswith(begun):
                return "", ""
            else:
                self._state = "answer"
        if self._state == "thoughts":
            before, found, after = self._rest.partition(CLOSE)
            held = 0 if found else count_stop_prefix(before, CLOSE)
            thought, self._rest = before[: len(before) - held], before[len(before) - held :]
            if found:
                self._state, self._rest = "after", after
        if self._state == "after":
            self._rest = self._rest.lstrip()
            self._state = "answer" if self._rest else "after"
        answer = ""
        if self._state == "answer":
            answer, self._rest = self._rest, ""
        if not self._said:
            thought = thought.lstrip()
            self._said = bool(thought)
        return thought, answer

    def finish(self) -> tuple[str, str]:
        """Parse the end of the answer."""
        rest, self._rest = self._rest, ""
        return (rest, "") if self._state == "thoughts" else ("", rest)
