"""What clients say of the form of an answer: `response_format`, tools and the choice among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from weir.serve.app.strict import Name, Strict, refused

Description = Annotated[str, StringConstraints(max_length=65_536)]


class JsonSchema(Strict):
    """A schema with a name."""

    name: Name
    description: Description | None = None
    of: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refused("json_schema goes with type: json_schema, and neither without the other")
        return self
