"""`recall`: the server's tool with which a model asks for text that has left its cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weir.errors import WeirError
from weir.serve.tools.formats import Tool
from weir.serve.tools.own import MAX_RESULT, OwnTool, ToolContext
from weir.stream.archive import quote_excerpt

NAME = "recall"
NOTHING = "Nothing that was said earlier matches that well enough."
SPEAKERS = {"user": "The user said", "assistant": "You said", "tool": "A tool returned"}


def make_recall_tool() -> OwnTool:
    """Make the tool."""
    schema = {
        "type": "object",
        "properties": {
            "query": {
                "type": "string",
                "description": "What to look for: names, numbers and words that the text has.",
                "minLength": 1,
                "maxLength": 1000,
            }
        },
        "required": ["query"],
        "additionalProperties": False,
    }
    description = (
        "Find what was said or returned by tools earlier in this conversation and is not in your "
        "memory any more."
    )
    return OwnTool(Tool(NAME, description, schema), _recall)


def _recall(context: ToolContext, arguments: Mapping[str, Any]) -> str:
    """Search the text up to the turn that is being answered."""
    store, parent = context.engine.store, context.prompt.parent
    if store.archive is None or store.archive.problem is not None:
        raise WeirError("the archive of this server cannot be read at the moment")
    if parent is None:
        return NOTHING
    query = str(arguments["query"])
    # The query counts as a question, whatever its form.
    asked = query if query.rstrip().endswith("?") else f"{query.rstrip(' .!;:')}?"
    parts: list[str] = []
    for one in store.search_archive(context.prompt.owner, parent.node, asked):
        part = quote_excerpt(one, one.text, SPEAKERS)
        if sum(map(len, parts)) + len(part) + len(parts) > MAX_RESULT:
            break
        parts.append(part)
    return "\n".join(parts) or NOTHING
