"""What an answer may be where there are tools, as a grammar: text, calls, or either.

A call that is begun is held to the parameters of its function, so that whatever a model means by it
can be read. Grammars are llguidance's variant of Lark. Knows nothing about tokenizers but which of
a form's texts are single special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from weir.serve.structured import ONE_SPACE, guided
from weir.serve.tools.formats import CallFormat
from weir.serve.tools.tool import Tool

CallMode = Literal["none", "auto", "required"]


def rules_of(
    form: CallFormat,
    tools: Sequence[Tool],
    choice: CallMode,
    *,
    several: bool,
    lines: bool,
    special: Mapping[str, int],
    schema: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A grammar of answers.

    Args:
        form: of calls.
        tools: those that may be called.
        choice: "none" for no calls, "auto" for text or calls, "required" for calls alone.
        several: whether there may be more than one call, where the form knows that.
        lines: whether a call may have line ends around its JSON.
        special: the texts of the form that are special tokens, which no text can have.
        schema: what an answer must be that has no calls, as llguidance takes it; None for text.

    Returns:
        As `Grammars.of_grammar` takes it.
    """
    made = _Rules(form, lines, special)
    text = "TEXT" if schema is None else "@answer"
    grammars = [{"name": "answer", "json_schema": dict(schema)}] if schema is not None else []
    if choice == "none":
        start = text if schema is not None else "QUIET"
    else:
        several = several and form.several
        calls = made.calls(several)
        if choice == "required":
            start = calls
        elif schema is not None:
            start = f"{text} | {calls}"
        else:
            start = made.among_text(several)
        grammars += [
            {
                "name": f"arguments_{n}",
                "json_schema": guided(tool.schema, ONE_SPACE, strict=tool.strict),
            }
            for n, tool in enumerate(tools)
        ]
    rules = [f"start: {start}", *made.terminals(), "" if choice == "none" else made.call(tools)]
    return {"grammars": [{"lark_grammar": "\n".join([*rules, ""])}, *grammars]}


class _Rules:
    """Parts of a grammar for one form."""

    def __init__(self, form: CallFormat, lines: bool, special: Mapping[str, int]) -> None:
        self._form = form
        self._special = special
        self._space = '"\\n"?' if lines else ""

    def terminals(self) -> list[str]:
        """Texts, with and without what would begin a call."""
        trigger = self._form.trigger
        lazy = f"/(.|\\n)*{re.escape(trigger)}/" if trigger else ""
        if not trigger:
            text = quiet = "/([^{](.|\\n)*)?/"
        elif trigger in self._special:
            text = quiet = "/(.|\\n)*/"
        else:
            text = "/(.|\\n)*/"
            quiet = f"/(.|\\n)*/ & ~/(.|\\n)*{re.escape(trigger)}(.|\\n)*/"
        return [f"TEXT: {text}", f"QUIET: {quiet}", f"until[lazy]: {lazy}" if lazy else ""]

    def call(self, tools: Sequence[Tool]) -> str:
        """One call of any of the tools."""
        form = self._form
        each = []
        for n, tool in enumerate(tools):
            if form.between:
                head, end = f"{_quoted(tool.name)} {self._piece(form.between)}", ""
            else:
                head, end = _quoted(form.head(tool.name)), ' "}"'
            each.append(f"call_{n}: {head} @arguments_{n}{end}")
        return "\n".join([f"call: {' | '.join(f'call_{n}' for n in range(len(tools)))}", *each])

    def calls(self, several: bool) -> str:
        """Calls alone."""
        body = self._body(several)
        trigger = self._piece(self._form.trigger)
        whole = f"{trigger} {body}"
        again = several and not self._form.listed
        return f"{whole} ({self._space} {whole})*" if again else whole

    def among_text(self, several: bool) -> str:
        """Text, and calls where there are any."""
        form, body = self._form, self._body(several)
        if not form.trigger:
            return f"TEXT | {body}"
        # Up to the first trigger all is text, and what comes next is a call.
        until = f"TEXT {self._piece(form.trigger)}" if form.trigger in self._special else "until"
        if several and not form.listed:
            return f"({until} {body})* TEXT"
        return f"TEXT | {until} {body}"

    def _body(self, several: bool) -> str:
        """What comes after a trigger."""
        form = self._form
        close = self._piece(form.close)
        if not form.listed:
            return f"{self._space} call {self._space} {close}" if form.trigger else "call"
        more = '("," " "? call)*' if several else ""
        return f'" "? "[" call {more} {close}'

    def _piece(self, text: str) -> str:
        if not text:
            return ""
        return f"<[{self._special[text]}]>" if text in self._special else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text)
