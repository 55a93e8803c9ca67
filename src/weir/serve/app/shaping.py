"""What an answer must look like, made of what a client asks for."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from weir.serve.app.bodies import ChatBody
from weir.serve.app.errors import Refused
from weir.serve.app.formats import ResponseFormat
from weir.serve.shapes import BadSchema, Grammars, Shape

SCHEMA = "response_format.json_schema.schema"


async def shape_of(request: Request, body: ChatBody) -> Shape | None:
    """What the answers to a chat must look like; None where they may be anything.

    Raises:
        Refused: nothing can be held to it.
    """
    return await shape_of_format(request, body.response_format, SCHEMA)


async def shape_of_format(
    request: Request, wanted: ResponseFormat | None, param: str
) -> Shape | None:
    """What an answer in a form must look like; None where it may be anything.

    Args:
        request: to this server.
        wanted: the form.
        param: where its schema stands, for errors.

    Raises:
        Refused: nothing can be held to it.
    """
    if wanted is None or wanted.type == "text":
        return None
    grammars: Grammars = request.app.state.grammars
    return await asyncio.to_thread(_of_format, grammars, wanted, param)


def _of_format(grammars: Grammars, wanted: ResponseFormat, param: str) -> Shape:
    named = wanted.json_schema
    schema, strict = (named.of, bool(named.strict)) if named is not None else (None, True)
    try:
        return grammars.of_schema({"type": "object"} if schema is None else schema, strict=strict)
    except BadSchema as error:
        raise bad_schema("the schema", error, param) from None


def bad_schema(what: str, error: BadSchema, param: str) -> Refused:
    """Nothing can be held to a schema."""
    return Refused(
        400, f"{what} cannot be held to: {error}", param=param, code="invalid_json_schema"
    )
