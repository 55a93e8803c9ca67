"""Grammars of answers with tools, which consist of text, of calls, or of both.

The arguments of a call must fit the parameters of its function, so that every call can be parsed.
Grammars are written in llguidance's variant of Lark.
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
    own: Sequence[Tool] = (),
) -> dict[str, Any]:
    """Make the grammar of an answer, for `GrammarCompiler.compile`.

    Args:
        form: the format of calls.
        tools: the functions of the client.
        choice: whether the answer has no calls, may have calls, or consists of calls.
        parallel: whether the client allows more than one call in an answer.
        newlines: whether a call may have line ends around its JSON.
        special: the texts of the format that are special tokens, with their ids.
        schema: the schema of an answer without calls, in llguidance's form; None for text.
        own: functions that the server runs. A call of such a function ends a part of the answer,
            and the next part begins after its result. A part can have calls of `tools`, or one
            call of `own`, but not both.
    """
    trigger, close, between = (
        f"<[{special[text]}]>" if text in special else json.dumps(text) if text else ""
        for text in (form.trigger, form.close, form.between)
    )
    several = parallel and form.parallel
    space = '"\\n"?' if newlines else ""
    again = several and not form.is_list

    def body(call: str, *, several: bool) -> str:
        """Return the rule for what follows a trigger: a call or the list of all calls, and then the
        format's `close`. In a format without a trigger, this is a call alone.
        """
        if form.is_list:
            more = f'("," " "? {call})*' if several else ""
            return f'" "? "[" {call} {more} {close}'
        return f"{space} {call} {space} {close}" if trigger else call

    theirs = [body("call", several=several)] if tools else []
    ours = [body("own_call", several=False)] if own else []
    if choice == "none":
        start = "QUIET" if schema is None else "@answer"
    elif choice == "required" or schema is not None:
        calls = [f"{trigger} {one}" for one in theirs]
        ways = [f"{one} ({space} {one})*" if again else one for one in calls]
        ways += [f"{trigger} {one}" for one in ours]
        start = " | ".join(ways if choice == "required" else ["@answer", *ways])
    elif not trigger:
        start = " | ".join(["TEXT", *theirs, *ours])
    else:
        # Everything up to the first trigger is text, and a call follows.
        until = f"TEXT {trigger}" if form.trigger in special else "until"
        ways = [f"({until} {one})* TEXT" if again else f"{until} {one}" for one in theirs]
        start = " | ".join(["TEXT", *ways, *(f"{until} {one}" for one in ours)])
    grammars = [] if schema is None else [{"name": "answer", "json_schema": dict(schema)}]
    rules = [f"start: {start}", *_terminals(form.trigger, is_token=form.trigger in special)]
    for rule, those in (("call", tools), ("own_call", own)) if choice != "none" else ():
        if those:
            rules.append(f"{rule}: {' | '.join(f'{rule}_{n}' for n in range(len(those)))}")
        for n, tool in enumerate(those):
            head, end = json.dumps(form.head(tool.name)), ' "}"'
            if between:
                head, end = f"{json.dumps(tool.name)} {between}", ""
            rules.append(f"{rule}_{n}: {head} @{rule}_{n}_arguments{end}")
            arguments = add_guidance(_close(tool.schema), ONE_SPACE, strict=tool.strict)
            grammars.append({"name": f"{rule}_{n}_arguments", "json_schema": arguments})
    return {"grammars": [{"lark_grammar": "\n".join([*rules, ""])}, *grammars]}


def _close(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Allow only the properties that the schema of arguments lists, unless it lists none or says
    otherwise.

    By JSON Schema, an object may have any other properties, too. Functions fail on those, and a
    small model may add them until its answer is cut off.
    """
    if not schema.get("properties") or _OPENING & schema.keys():
        return schema
    return {**schema, "additionalProperties": False}


_OPENING = {
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "dependentSchemas",
    "$ref",
}
"""Keywords with which a schema says which other properties an object has."""


def _terminals(trigger: str, *, is_token: bool) -> list[str]:
    """Return the terminals: TEXT is any text, QUIET has no trigger of a call, and `until` ends with
    the first trigger.

    In a format without a trigger, TEXT and QUIET do not begin like a call, and there is no `until`.
    """
    anything, escaped = r"(.|\n)*", re.escape(trigger)
    if not trigger:
        return [rf"TEXT: /([^{{]{anything})?/", rf"QUIET: /([^{{]{anything})?/"]
    without = "" if is_token else f" & ~/{anything}{escaped}{anything}/"
    return [
        f"TEXT: /{anything}/",
        f"QUIET: /{anything}/{without}",
        f"until[lazy]: /{anything}{escaped}/",
    ]
