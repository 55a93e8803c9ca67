"""The format that an answer is held to: a JSON schema, tool calls, or both."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from weir.errors import WeirError
from weir.serve.api.errors import APIError
from weir.serve.api.schemas.formats import ToolOffer
from weir.serve.client import EngineClient, GenerationRequest
from weir.serve.structured import ANY_SPACE, BadSchema, GrammarCompiler, add_guidance, check_schema
from weir.serve.tools.grammar import tool_grammar


def check_tools(client: EngineClient, offer: ToolOffer) -> None:
    """Check the tools that a client offers; APIError if they contradict each other, or the model's
    call format is not known.
    """
    tools = offer.tools
    if not tools:
        if offer.names is not None or offer.choice == "required":
            raise APIError(400, "there are no tools to choose", param="tool_choice")
        return
    known = {tool.name for tool in tools}
    if len(known) < len(tools):
        raise APIError(400, "two tools have the same name", param="tools")
    for number, tool in enumerate(tools):
        if tool.schema.get("type", "object") != "object":
            raise APIError(
                400,
                f"the parameters of {tool.name} are to have the type object",
                param=offer.schema_param.format(number),
                code="invalid_json_schema",
            )
    try:
        _ = client.renderer.call_format
    except WeirError as error:
        raise APIError(400, str(error), param="tools", code="unsupported") from None
    for name in offer.names or ():
        if name not in known:
            message = f"there is no tool {name} among the tools"
            raise APIError(400, message, param=offer.choice_param)


async def add_constraint(
    http: Request,
    held_to: tuple[dict[str, Any], bool] | None,
    offer: ToolOffer,
    request: GenerationRequest,
    param: str,
) -> GenerationRequest:
    """Hold the answers of a request to its tools, and to the schema in the field `param`, if any.

    Args:
        held_to: the schema, and whether unknown keywords are refused.
    """
    client: EngineClient = http.app.state.client
    if client.renderer.is_line_based and held_to is None and offer.choice != "required":
        request = replace(request, stops=(*request.stops, "\n"))
    grammars: GrammarCompiler = http.app.state.grammars
    if offer.tools:
        arguments = (client, grammars, held_to, offer, request, param)
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
) -> GenerationRequest:
    """Hold answers to tool calls, and to a schema where they are not calls."""
    choice, tools = offer.choice or "auto", tuple(tool for tool, _ in offer.callable)
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
    grammar = tool_grammar(
        client.renderer.call_format,
        tools,
        choice,
        parallel=offer.parallel,
        newlines=not client.renderer.is_line_based,
        special=client.renderer.call_tokens,
        schema=held_to and add_guidance(held_to[0], ANY_SPACE, strict=held_to[1]),
    )
    stop_when_complete = choice == "required" or held_to is not None
    try:
        compiled = grammars.compile(grammar, stop_when_complete=stop_when_complete)
    except BadSchema as error:
        # Which of the schemas is it?
        for what, one, strict, place in schemas:
            try:
                grammars.compile_schema(one, strict=strict)
            except BadSchema as own:
                raise _invalid_schema(what, own, place) from None
        raise _invalid_schema("all tools together", error, "tools") from None
    return replace(
        request,
        constraint=compiled,
        tools=tools if choice != "none" else (),
        calls_only=choice == "required",
    )


def _invalid_schema(what: str, error: BadSchema, param: str) -> APIError:
    return APIError(
        400, f"{what} cannot be held to: {error}", param=param, code="invalid_json_schema"
    )
