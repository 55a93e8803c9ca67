"""What an answer must look like, made of what a client asks for: a schema, tools, or both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request

from weir.errors import WeirError
from weir.serve.api.errors import Refused
from weir.serve.api.schemas.formats import Offer, ResponseFormat
from weir.serve.client import EngineClient, Wish
from weir.serve.structured import SPACES, BadSchema, Grammars, check_schema, guided
from weir.serve.tools import Tool
from weir.serve.tools.grammar import CallMode, rules_of

SCHEMA = "response_format.json_schema.schema"


@dataclass(frozen=True)
class Tooling:
    """The tools of a request.

    Attributes:
        tools: all that the model is told of.
        callable: those that it may call.
        choice: whether it calls any.
        several: whether it may call more than once.
        places: where the schema of each of the callable stands in the request, for errors.
    """

    tools: Sequence[Tool] = ()
    callable: Sequence[Tool] = ()
    choice: CallMode = "none"
    several: bool = True
    places: Sequence[str] = ()


def tooling_of(desk: EngineClient, offer: Offer) -> Tooling:
    """The tools that a client offers.

    Raises:
        Refused: they do not fit to each other, or to the model.
    """
    tools = offer.tools
    if not tools:
        if offer.names is not None or offer.choice == "required":
            raise Refused(400, "there are no tools to choose", param="tool_choice")
        return Tooling()
    if len({tool.name for tool in tools}) < len(tools):
        raise Refused(400, "two tools have the same name", param="tools")
    for number, tool in enumerate(tools):
        if tool.schema.get("type", "object") != "object":
            raise Refused(
                400,
                f"the parameters of {tool.name} are to have the type object",
                param=offer.schemas.format(number),
                code="invalid_json_schema",
            )
    try:
        form = desk.wording.form
    except WeirError as error:
        raise Refused(400, str(error), param="tools", code="unsupported") from None
    names = [tool.name for tool in tools] if offer.names is None else offer.names
    unknown = next((name for name in names if name not in [tool.name for tool in tools]), None)
    if unknown is not None:
        raise Refused(400, f"there is no tool {unknown} among the tools", param=offer.chosen)
    numbers = [number for number, tool in enumerate(tools) if tool.name in names]
    return Tooling(
        tools,
        [tools[number] for number in numbers],
        offer.choice or "auto",
        offer.several and form.several,
        [offer.schemas.format(number) for number in numbers],
    )


async def shaped(
    request: Request, wanted: ResponseFormat | None, tooling: Tooling, wish: Wish, param: str
) -> Wish:
    """A wish for answers that look like what a client asks for.

    Args:
        request: to this server.
        wanted: the form of an answer; None for text.
        tooling: what the model may call.
        wish: for answers that may be anything.
        param: where the form's schema stands, for errors.

    Raises:
        Refused: nothing can be held to it.
    """
    desk: EngineClient = request.app.state.desk
    free = (wanted is None or wanted.type == "text") and tooling.choice != "required"
    if desk.wording.lines and free:
        wish = wish.ending_with("\n")
    if free and not tooling.tools:
        return wish
    grammars: Grammars = request.app.state.grammars
    return await asyncio.to_thread(_held, desk, grammars, wanted, tooling, wish, param)


def _held(
    desk: EngineClient,
    grammars: Grammars,
    wanted: ResponseFormat | None,
    tooling: Tooling,
    wish: Wish,
    param: str,
) -> Wish:
    schema, strict = _schema(wanted)
    if not tooling.tools:
        assert schema is not None
        try:
            return replace(wish, constraint=grammars.of_schema(schema, strict=strict).mask)
        except BadSchema as error:
            raise _bad("the schema", error, param) from None
    try:
        if schema is not None:
            check_schema(schema)
    except BadSchema as error:
        raise _bad("the schema", error, param) from None
    for tool, place in zip(tooling.callable, tooling.places, strict=True):
        _check(tool, place)
    grammar = rules_of(
        desk.wording.form,
        tooling.callable,
        tooling.choice,
        several=tooling.several,
        lines=not desk.wording.lines,
        special=desk.wording.special,
        schema=None if schema is None else guided(schema, SPACES, strict=strict),
    )
    whole = tooling.choice == "required" or schema is not None
    try:
        shape = grammars.of_grammar(grammar, whole=whole)
    except BadSchema as error:
        raise _blamed(grammars, schema, strict, tooling, error, param) from None
    calls = tuple(tooling.callable) if tooling.choice != "none" else ()
    alone = tooling.choice == "required"
    return replace(wish, constraint=shape.mask, tools=calls, alone=alone)


def _schema(wanted: ResponseFormat | None) -> tuple[dict[str, object] | None, bool]:
    """The schema that an answer is to be valid to, and whether all of it counts."""
    if wanted is None or wanted.type == "text":
        return None, False
    named = wanted.json_schema
    if named is None or named.of is None:
        return {"type": "object"}, True
    return named.of, bool(named.strict)


def _check(tool: Tool, place: str) -> None:
    try:
        check_schema(tool.schema)
    except BadSchema as error:
        raise _bad(f"the parameters of {tool.name}", error, place) from None


def _blamed(
    grammars: Grammars,
    schema: dict[str, object] | None,
    strict: bool,
    tooling: Tooling,
    error: BadSchema,
    param: str,
) -> Refused:
    """Which of several schemas it is that cannot be held to."""
    if schema is not None:
        try:
            grammars.of_schema(schema, strict=strict)
        except BadSchema as own:
            return _bad("the schema", own, param)
    for tool, place in zip(tooling.callable, tooling.places, strict=True):
        try:
            grammars.of_schema(tool.schema, strict=tool.strict)
        except BadSchema as own:
            return _bad(f"the parameters of {tool.name}", own, place)
    return _bad("all tools together", error, "tools")


def _bad(what: str, error: BadSchema, param: str) -> Refused:
    """Nothing can be held to a schema."""
    return Refused(
        400, f"{what} cannot be held to: {error}", param=param, code="invalid_json_schema"
    )
