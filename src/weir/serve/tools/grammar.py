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
    trigger, close, between = (
        f"<[{special[text]}]>" if text in special else json.dumps(text) if text else ""
        for text in (form.trigger, form.close, form.between)
    )
    several = parallel and form.parallel
    space = '"\\n"?' if newlines else ""
    # What comes after a trigger; without one, the answer is either text or a call.
    body = f"{space} call {space} {close}" if trigger else "call"
    if form.is_list:
        more = '("," " "? call)*' if several else ""
        body = f'" "? "[" call {more} {close}'
    calls = f"{trigger} {body}"
    again = several and not form.is_list
    if choice == "none":
        start = "QUIET" if schema is None else "@answer"
    elif choice == "required" or schema is not None:
        start = f"{calls} ({space} {calls})*" if again else calls
        start = start if choice == "required" else f"@answer | {start}"
    elif not trigger:
        start = f"TEXT | {body}"
    else:
        # Up to the first trigger all is text, and what comes next is a call.
        until = f"TEXT {trigger}" if form.trigger in special else "until"
        start = f"({until} {body})* TEXT" if again else f"TEXT | {until} {body}"
    grammars = [] if schema is None else [{"name": "answer", "json_schema": dict(schema)}]
    rules = [f"start: {start}", *_terminals(form.trigger, is_token=form.trigger in special)]
    if choice != "none":
        rules.append(f"call: {' | '.join(f'call_{n}' for n in range(len(tools)))}")
        for n, tool in enumerate(tools):
            head, end = json.dumps(form.head(tool.name)), ' "}"'
            if between:
                head, end = f"{json.dumps(tool.name)} {between}", ""
            rules.append(f"call_{n}: {head} @arguments_{n}{end}")
            arguments = add_guidance(tool.schema, ONE_SPACE, strict=tool.strict)
            grammars.append({"name": f"arguments_{n}", "json_schema": arguments})
    return {"grammars": [{"lark_grammar": "\n".join([*rules, ""])}, *grammars]}


def _terminals(trigger: str, *, is_token: bool) -> list[str]:
    """Terminals: text with and without the trigger of a call, and text up to one."""
    anything, escaped = r"(.|\n)*", re.escape(trigger)
    if not trigger:
        return [rf"TEXT: /([^{{]{anything})?/", rf"QUIET: /([^{{]{anything})?/"]
    without = "" if is_token else f" & ~/{anything}{escaped}{anything}/"
    return [
        f"TEXT: /{anything}/",
        f"QUIET: /{anything}/{without}",
        f"until[lazy]: /{anything}{escaped}/",
    ]
