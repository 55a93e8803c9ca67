"""Bodies of items, in responses and conversations, and pages of lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Query
from pydantic import Discriminator, Field, StringConstraints, Tag, field_validator

from weir.serve.api.errors import not_found
from weir.serve.api.schemas.base import (
    Arguments,
    Lenient,
    ListOf,
    Name,
    Strict,
    bounded_dict,
    unsupported,
)
from weir.serve.messages import Call, StrayResult
from weir.serve.sessions import Item, call_item, input_item, new_id, result_item

Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
    bounded_dict(16),
]


class ItemPart(Lenient):
    """Text content of a message or of a tool result."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class MessageItem(Lenient):
    """A message. Unknown fields are ignored, so that output items can be sent back."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | ListOf[ItemPart]

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        # The discriminator treats an item of unknown type as a message.
        if value != "message":
            raise unsupported("it is to be 'message', 'function_call' or 'function_call_output'")
        return value

    def item(self) -> Item:
        """Convert to an item with a new id."""
        content = self.content
        texts = [content] if isinstance(content, str) else [part.text for part in content]
        return input_item(self.role, texts)


CallId = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class CallItem(Lenient):
    """A function call that the model has made."""

    type: Literal["function_call"]
    call_id: CallId
    name: Name
    arguments: Arguments

    def item(self) -> Item:
        """Convert to an item with a new id."""
        return call_item(new_id("fc"), Call(self.call_id, self.name, self.arguments), "completed")


class ResultItem(Lenient):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: str | ListOf[ItemPart]

    def item(self) -> Item:
        """Convert to an item with a new id."""
        output = self.output
        if not isinstance(output, str):
            return result_item(self.call_id, [part.model_dump() for part in output])
        return result_item(self.call_id, output)


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    known = {"function_call": "a call", "function_call_output": "a result"}
    return known.get(kind, "a message") if isinstance(kind, str) else "a message"


# Tags that are not identifiers are left out of error paths.
AnyItem = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[CallItem, Tag("a call")]
    | Annotated[ResultItem, Tag("a result")],
    Discriminator(_kind),
]


class ConversationBody(Strict):
    """Request body of `POST /v1/conversations`."""

    items: Annotated[ListOf[AnyItem], Field(max_length=20)] | None = None
    metadata: Metadata | None = None


class MetadataBody(Strict):
    """Request body of `POST /v1/conversations/{name}`."""

    metadata: Metadata | None


class ItemsBody(Strict):
    """Request body of `POST /v1/conversations/{name}/items`."""

    items: Annotated[ListOf[AnyItem], Field(min_length=1, max_length=20)]


@dataclass(frozen=True)
class PageQuery:
    """The page of a list that a client asks for; a dependency of routes.

    Attributes:
        after: id of the item before the page.
        limit: number of items.
        order: oldest or newest first.
        include: further fields; there are none.
    """

    after: Annotated[str | None, Query()] = None
    limit: Annotated[int, Query(ge=1, le=100)] = 20
    order: Annotated[Literal["asc", "desc"], Query()] = "desc"
    include: Annotated[list[str] | None, Query(alias="include[]")] = None

    what: ClassVar[str] = "item"

    def cut(self, items: Sequence[Item]) -> list[Item]:
        """Cut the page from items in oldest-first order, plus one more if there is one."""
        wanted = list(items) if self.order == "asc" else list(reversed(items))
        if self.after is not None:
            at = next((n for n, item in enumerate(wanted) if item["id"] == self.after), None)
            if at is None:
                raise not_found(self.what)
            wanted = wanted[at + 1 :]
        return wanted[: self.limit + 1]

    def to_json(self, found: Sequence[Item]) -> dict[str, Any]:
        """The page as JSON, from its items plus one more if there is one."""
        return list_object(found[: self.limit], more=len(found) > self.limit)


def list_object(items: Sequence[Item], *, more: bool = False) -> dict[str, Any]:
    """Items as a JSON list object; `more` says whether others follow."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": more,
    }


def result_param(field: str, items: Sequence[Item], error: StrayResult) -> str | None:
    """The path of a stray result, for errors.

    Args:
        field: field of the request with the items.
        items: the items that were checked last.
        error: the error, with the number of results that follow.

    Returns:
        None if the result comes before these items.
    """
    results = [n for n, item in enumerate(items) if item["type"] == "function_call_output"]
    at = len(results) - 1 - error.behind
    return None if at < 0 else f"{field}[{results[at]}].call_id"
