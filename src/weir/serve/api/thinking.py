"""Options for a model's thoughts, passed as variables of its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from transformers import PreTrainedTokenizerBase

from weir.errors import shorten
from weir.serve.api.errors import APIError
from weir.serve.api.schemas.chat import GenerationBody
from weir.serve.client import EngineClient

RESERVED = frozenset(
    {
        *signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
        "messages",
        "raise_exception",
        "strftime_now",
    }
)
"""Variables of chat templates that clients cannot set."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables with which templates turn thoughts on and off."""


def find_variables(client: EngineClient, body: GenerationBody) -> dict[str, Any]:
    """Find the template variables that a request sets.

    Raises APIError for a variable that the template does not use or that clients cannot set, and
    for `enable_thinking` if the template cannot turn thoughts on and off.

    A reasoning effort is passed to the template's variable for efforts. If the template can only
    turn thoughts on and off, the effort "none" turns them off, and any other effort turns them on.
    If it cannot do that either, the effort has no effect. A warning names what has no effect. An
    effort is never refused, because agents send one with every request.
    """
    own = client.renderer.variables - RESERVED
    known = {name for name in own if not name.endswith("_token")}
    given: Mapping[str, Any] = body.chat_template_kwargs or {}
    for name in given:
        if name not in known:
            has = ", ".join(sorted(known & {*SWITCHES, "reasoning_effort"})) or "none"
            raise APIError(
                400,
                f"the chat template of this model has no variable {shorten(name)!r} that a request "
                "can set. Leave it out. "
                f"Variables about thoughts that the template uses: {has}.",
                param=f"chat_template_kwargs.{shorten(name)}",
                code="unsupported",
            )
    found = dict(given)
    effort = body.effort
    switch = next((name for name in SWITCHES if name in known), None)
    if body.enable_thinking is not None:
        if switch is None:
            raise APIError(
                400,
                "the chat template of this model cannot turn thoughts on or off. Leave out "
                "enable_thinking.",
                param="enable_thinking",
                code="unsupported",
            )
        found.setdefault(switch, body.enable_thinking)
    if effort is not None:
        if "reasoning_effort" in known:
            found.setdefault("reasoning_effort", effort)
        elif switch is not None:
            found.setdefault(switch, effort != "none")
            if effort != "none":
                body.note(f"the degree of {body.effort_field}")
        elif effort != "none":
            body.note(body.effort_field)
    return found


def note_without_template(body: GenerationBody) -> None:
    """Note that options for thoughts have no effect on a prompt that is continued without a chat
    template.
    """
    if body.enable_thinking:
        body.note("enable_thinking")
    if body.chat_template_kwargs:
        body.note("chat_template_kwargs")
    if body.effort not in (None, "none"):
        body.note(body.effort_field)
