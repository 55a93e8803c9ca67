"""The format that an answer is held to: a JSON schema, tool calls, or both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request

from weir.errors import WeirError
from weir.serve.api.errors import APIError
from weir.serve.api.schemas.formats import ResponseFormat, ToolOffer
from weir.serve.client import EngineClient, GenerationRequest
from weir.serve.structured import ANY_SPACE, BadSchema, GrammarCompiler, add_guidance, check_schema
from weir.serve.tools import Tool
from weir.serve.tools.grammar import CallMode, tool_grammar


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, checked.

    Attributes:
        params: for each of the callable, the field of the request with its schema, for errors.
    """

    tools: Sequence[Tool] = ()
    callable: tuple[Tool, ...] = ()
    choice: CallMode = "none"
    parallel: bool = True
    params: Sequence[str] = ()


def check_tools(client: EngineClient, offer: ToolOffer) -> ToolUse:
    """Check the tools that a client offers; APIError if they contradict each other, or the model's
    call format is not known.
    """
    tools = offer.tools
    if not tools:
        if offer.names is not None or offer.choice == "required":
            raise APIError(400, "there are no tools to choose", param="tool_choice")
        return ToolUse()
    known = [tool.name for tool in tools]
    if len(set(known)) < len(tools):
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
        form = client.renderer.call_format
    except WeirError as error:
        raise APIError(400, str(error), param="tools", code="unsupported") from None
    names = known if offer.names is None else offer.names
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        message = f"there is no tool {unknown} among the tools"
        raise APIError(400, message, param=offer.choice_param)
    numbers = [number for number, name in enumerate(known) if name in names]
    return ToolUse(
        tools,
        tuple(tools[number] for number in numbers),
        offer.choice or "auto",
        offer.parallel and form.parallel,
        [offer.schema_param.format(number) for number in numbers],
    )


async def add_constraint(
    http: Request,
    response_format: ResponseFormat | None,
    use: ToolUse,
    request: GenerationRequest,
    param: str,
) -> GenerationRequest:
    """Hold the answers of a request to a format, whose schema is the field `param`."""
    client: EngineClient = http.app.state.client
    is_text = response_format is None or response_format.type == "text"
    if client.renderer.is_line_based and is_text and use.choice != "required":
        request = replace(request, stops=(*request.stops, "\n"))
    schema, strict = _schema_of(response_format)
    grammars: GrammarCompiler = http.app.state.grammars
    if use.tools:
        arguments = (client, grammars, schema, strict, use, request, param)
        return await asyncio.to_thread(_compile_tools, *arguments)
    if schema is None:
        return request
    try:
        compiled = await asyncio.to_thread(grammars.compile_schema, schema, strict=strict)
    except BadSchema as error:
        raise _invalid_schema("the schema", error, param) from None
    return replace(request, constraint=compiled)


def _schema_of(response_format: ResponseFormat | None) -> tuple[dict[str, object] | None, bool]:
    """The schema of a format, and whether unknown keywords are refused."""
    if response_format is None or response_format.type == "text":
        return None, False
    named = response_format.json_schema
    if named is None or named.schema_ is None:
        return {"type": "object"}, True
    return named.schema_, bool(named.strict)


def _compile_tools(
    client: EngineClient,
    grammars: GrammarCompiler,
    schema: dict[str, object] | None,
    strict: bool,
    use: ToolUse,
    request: GenerationRequest,
    param: str,
) -> GenerationRequest:
    """Hold answers to tool calls, and to a schema where they are not calls."""
    schemas = [] if schema is None else [("the schema", schema, strict, param)]
    schemas += [
        (f"the parameters of {tool.name}", dict(tool.schema), tool.strict, place)
        for tool, place in zip(use.callable, use.params, strict=True)
    ]
    for what, one, _, place in schemas:
        try:
            check_schema(one)
        except BadSchema as error:
            raise _invalid_schema(what, error, place) from None
    grammar = tool_grammar(
        client.renderer.call_format,
        use.callable,
        use.choice,
        parallel=use.parallel,
        newlines=not client.renderer.is_line_based,
        special=client.renderer.call_tokens,
        schema=None if schema is None else add_guidance(schema, ANY_SPACE, strict=strict),
    )
    stop_when_complete = use.choice == "required" or schema is not None
    try:
        compiled = grammars.compile(grammar, stop_when_complete=stop_when_complete)
    except BadSchema as error:
        # Which of the schemas is it?
        for what, one, one_strict, place in schemas:
            try:
                grammars.compile_schema(one, strict=one_strict)
            except BadSchema as own:
                raise _invalid_schema(what, own, place) from None
        raise _invalid_schema("all tools together", error, "tools") from None
    return replace(
        request,
        constraint=compiled,
        tools=use.callable if use.choice != "none" else (),
        calls_only=use.choice == "required",
    )


def _invalid_schema(what: str, error: BadSchema, param: str) -> APIError:
    return APIError(
        400, f"{what} cannot be held to: {error}", param=param, code="invalid_json_schema"
    )
