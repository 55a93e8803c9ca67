"""The format that an answer must follow: a JSON schema, tool calls, or both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from weir.errors import WeirError
from weir.serve.api.errors import APIError
from weir.serve.api.schemas.chat import GenerationBody
from weir.serve.api.schemas.formats import ToolOffer
from weir.serve.client import EngineClient, GenerationRequest
from weir.serve.prompts import NO_VARIABLES
from weir.serve.structured import (
    ANY_SPACE,
    BadSchema,
    GrammarCompiler,
    GrammarConstraint,
    add_guidance,
    check_schema,
)
from weir.serve.tools.formats import Tool
from weir.serve.tools.grammar import CallMode, tool_grammar
from weir.serve.tools.own import OwnTools


def add_own_tools(client: EngineClient, body: GenerationBody, offer: ToolOffer) -> ToolOffer:
    """Add the server's tools that a request asks for to the client's tools.

    Raises APIError if the server does not have a tool, or if two tools have the same name.
    """
    names = body.own_tools
    theirs = {tool.name for tool in offer.tools}
    for number, name in enumerate(names):
        param = f"weir.tools[{number}]"
        if name not in client.own_tools:
            known = ", ".join(map(repr, client.own_tools)) or "none"
            message = f"this server has no tool {name!r}. Its tools are {known}."
            raise APIError(400, message, param=param)
        if name in theirs:
            message = f"tools already has a tool named {name!r}. Rename that tool."
            raise APIError(400, message, param=param)
        if name in names[:number]:
            raise APIError(400, f"the tool {name!r} is named twice. Name it once.", param=param)
    own = [client.own_tools[name].tool for name in names]
    return replace(offer, tools=[*offer.tools, *own], own=names) if own else offer


def refuse_own_tools(body: GenerationBody) -> None:
    """Refuse what the field `weir` offers only for chats (APIError): the server's tools, drops,
    pins, recall and notes about forgotten text.
    """
    for name, calls in (("drop", body.drops), ("pin", body.pins)):
        if calls:
            message = f"a text prompt has no tool outputs. Leave out weir.{name}, or send a chat."
            raise APIError(400, message, param=f"weir.{name}", code="unsupported")
    for name, wanted in (("recall", body.recall), ("tell_forgotten", body.tells_forgotten)):
        if wanted:
            message = f"{name} is only for chats. Leave it out, or send a chat."
            raise APIError(400, message, param=f"weir.{name}", code="unsupported")
    if body.own_tools:
        message = "the server's tools are only for chats. Leave out weir.tools, or send a chat."
        raise APIError(400, message, param="weir.tools", code="unsupported")


def check_tools(client: EngineClient, offer: ToolOffer) -> None:
    """Check the tools that a client offers.

    Raises APIError if two tools have the same name, if the parameters of a tool are not an object,
    if the request requires or names a tool that it does not have, if the model's call format is not
    known, or if the server cannot run its own tools with this model.
    """
    tools = offer.tools
    if not tools:
        if offer.names is not None or offer.choice == "required":
            raise APIError(
                400, "tool_choice needs tools, and the request has none", param="tool_choice"
            )
        return
    known = {tool.name for tool in tools}
    if len(known) < len(tools):
        raise APIError(400, "two tools have the same name. Rename one of them.", param="tools")
    for number, tool in enumerate(tools):
        if tool.schema.get("type", "object") != "object":
            raise APIError(
                400,
                f"the parameters of {tool.name} must have the type object",
                param=offer.schema_param_of(number),
                code="invalid_json_schema",
            )
    try:
        _ = client.renderer.call_format
    except WeirError as error:
        raise APIError(400, str(error), param="tools", code="unsupported") from None
    if offer.own and not client.renderer.can_answer_calls:
        message = (
            "the chat template of this model cannot render the result of a call alone, so the "
            "server cannot run its tools within an answer. Leave out weir.tools"
        )
        raise APIError(400, message, param="weir.tools", code="unsupported")
    for name in offer.names or ():
        if name not in known:
            message = f"there is no tool {name} among tools"
            raise APIError(400, message, param=offer.choice_param)


async def add_constraint(
    http: Request,
    held_to: tuple[dict[str, Any], bool] | None,
    offer: ToolOffer,
    request: GenerationRequest,
    param: str,
    variables: Mapping[str, Any] = NO_VARIABLES,
) -> GenerationRequest:
    """Make the answers of a request follow the formats of its tools and of its schema, if any.

    Args:
        held_to: the schema, and whether unknown keywords are refused; None if there is no schema.
        param: the field with the schema, for errors.
        variables: further variables of the chat template.
    """
    client: EngineClient = http.app.state.client
    if (
        client.renderer.is_line_based
        and not request.ignores_end
        and held_to is None
        and (offer.choice != "required" or offer.own)
    ):
        request = replace(request, stops=(*request.stops, "\n"))
    grammars: GrammarCompiler = http.app.state.grammars
    if offer.tools:
        arguments = (client, grammars, held_to, offer, request, param, variables)
        return await asyncio.to_thread(_compile_tools, *arguments)
    if held_to is None:
        return request
    schema, strict = held_to
    try:
        compiled = await asyncio.to_thread(grammars.compile_schema, schema, strict=strict)
    except BadSchema as error:
        raise _invalid_schema("the schema", error, param) from None
    return replace(request, constraint=compiled)


def _compile_tools(
    client: EngineClient,
    grammars: GrammarCompiler,
    held_to: tuple[dict[str, Any], bool] | None,
    offer: ToolOffer,
    request: GenerationRequest,
    param: str,
    variables: Mapping[str, Any],
) -> GenerationRequest:
    """Make answers follow a call format, and a schema where they are not calls."""
    choice = offer.choice or "auto"
    theirs = tuple(tool for tool, _ in offer.callable if tool.name not in offer.own)
    ours = tuple(tool for tool, _ in offer.callable if tool.name in offer.own)
    schemas = [] if held_to is None else [("the schema", *held_to, param)]
    schemas += [
        (f"the parameters of {tool.name}", dict(tool.schema), tool.strict, place)
        for tool, place in offer.callable
    ]
    for what, one, _, place in schemas:
        try:
            check_schema(one)
        except BadSchema as error:
            raise _invalid_schema(what, error, place) from None

    def compile_choice(choice: CallMode, own: tuple[Tool, ...]) -> Callable[[], GrammarConstraint]:
        """Compile the format of an answer, or of its part after the server has run a call.

        A required call is needed only in the first part.
        """
        grammar = tool_grammar(
            client.renderer.call_format,
            theirs,
            choice,
            parallel=offer.parallel,
            newlines=not client.renderer.is_line_based,
            special=client.renderer.call_tokens,
            schema=held_to and add_guidance(held_to[0], ANY_SPACE, strict=held_to[1]),
            own=own,
        )
        stop_when_complete = choice == "required" or held_to is not None
        return grammars.compile(grammar, stop_when_complete=stop_when_complete)

    own_tools: OwnTools | None = None
    try:
        compiled = compile_choice(choice, ours)
        if ours and choice != "none":
            own_tools = OwnTools(
                {tool.name: client.own_tools[tool.name] for tool in ours},
                tuple(offer.tools),
                compiled if choice == "auto" else compile_choice("auto", ours),
                compile_choice("auto" if theirs else "none", ()),
                variables,
            )
    except BadSchema as error:
        # Find the schema that is wrong.
        for what, one, strict, place in schemas:
            try:
                grammars.compile_schema(one, strict=strict)
            except BadSchema as own:
                raise _invalid_schema(what, own, place) from None
        raise _invalid_schema("all tools together", error, "tools") from None
    return replace(
        request,
        constraint=compiled,
        tools=theirs if choice != "none" else (),
        calls_only=choice == "required",
        own=own_tools,
    )


def _invalid_schema(what: str, error: BadSchema, param: str) -> APIError:
    return APIError(
        400, f"answers cannot follow {what}: {error}", param=param, code="invalid_json_schema"
    )
