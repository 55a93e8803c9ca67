"""Grammars of answers with tools: text, calls, or either.

The arguments of a call are held to the parameters of its function, so that every call can be
parsed. Grammars are written in llguidance's variant of Lark. Knows nothing about tokenizers but
which texts of a call format are single special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from weir.serve.structured import ONE_SPACE, add_guidance
from weir.serve.tools.formats import CallFormat, Tool

CallMode = Literal["none", "auto", "required"]


def tool_grammar(
    form: CallFormat,
    tools: Sequence[Tool],
    choice: CallMode,
    *,
    parallel: bool,
    newlines: bool,
    special: Mapping[str, int],
    schema: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the grammar of an answer, for `GrammarCompiler.compile`.

    Args:
        newlines: whether a call may have line ends around its JSON.
        special: the texts of the format that are special tokens, with their ids.
        schema: of an answer without calls, as llguidance takes it; None for text.
    """
    rules = _Rules(form, newlines, special)
    text = "TEXT" if schema is None else "@answer"
    grammars = [{"name": "answer", "json_schema": dict(schema)}] if schema is not None else []
    if choice == "none":
        start = text if schema is not None else "QUIET"
    else:
        parallel = parallel and form.parallel
        calls = rules.calls(parallel)
        if choice == "required":
            start = calls
        elif schema is not None:
            start = f"{text} | {calls}"
        else:
            start = rules.text_or_calls(parallel)
        grammars += [
            {
                "name": f"arguments_{n}",
                "json_schema": add_guidance(tool.schema, ONE_SPACE, strict=tool.strict),
            }
            for n, tool in enumerate(tools)
        ]
    call = "" if choice == "none" else rules.call(tools)
    lines = [f"start: {start}", *rules.terminals(), call, ""]
    return {"grammars": [{"lark_grammar": "\n".join(lines)}, *grammars]}


class _Rules:
    """The rules of a grammar for one call format."""

    def __init__(self, form: CallFormat, newlines: bool, special: Mapping[str, int]) -> None:
        self._form = form
        self._special = special
        self._space = '"\\n"?' if newlines else ""

    def terminals(self) -> list[str]:
        """Terminals: text with and without the trigger of a call."""
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
        rules = []
        for n, tool in enumerate(tools):
            if form.between:
                head, end = f"{json.dumps(tool.name)} {self._literal(form.between)}", ""
            else:
                head, end = json.dumps(form.head(tool.name)), ' "}"'
            rules.append(f"call_{n}: {head} @arguments_{n}{end}")
        return "\n".join([f"call: {' | '.join(f'call_{n}' for n in range(len(tools)))}", *rules])

    def calls(self, parallel: bool) -> str:
        """Calls only."""
        body = self._body(parallel)
        trigger = self._literal(self._form.trigger)
        whole = f"{trigger} {body}"
        again = parallel and not self._form.is_list
        return f"{whole} ({self._space} {whole})*" if again else whole

    def text_or_calls(self, parallel: bool) -> str:
        """Text, and calls if any."""
        form, body = self._form, self._body(parallel)
        if not form.trigger:
            return f"TEXT | {body}"
        # Up to the first trigger all is text, and what comes next is a call.
        until = f"TEXT {self._literal(form.trigger)}" if form.trigger in self._special else "until"
        if parallel and not form.is_list:
            return f"({until} {body})* TEXT"
        return f"TEXT | {until} {body}"

    def _body(self, parallel: bool) -> str:
        """The rule for the text after a trigger."""
        form = self._form
        close = self._literal(form.close)
        if not form.is_list:
            return f"{self._space} call {self._space} {close}" if form.trigger else "call"
        more = '("," " "? call)*' if parallel else ""
        return f'" "? "[" call {more} {close}'

    def _literal(self, text: str) -> str:
        """A text of the format, as a special token where it is one."""
        if not text:
            return ""
        return f"<[{self._special[text]}]>" if text in self._special else json.dumps(text)
