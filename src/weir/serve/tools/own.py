"""The server's own tools: a model calls them, and the server runs the calls within the answer.

A request turns them on by name. To add one, put an `OwnTool` into `EngineClient.own_tools`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weir.serve.tools.formats import Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from weir.serve.engine.engine import Engine
    from weir.serve.engine.sequence import TokenSequence
    from weir.serve.prompts import Prompt
    from weir.serve.structured import GrammarConstraint

MAX_CALLS = 8
"""The most calls of the server's tools in one answer. After these, the model cannot make more."""
MAX_RESULT = 8192
"""The most characters of a result. The rest is left out."""
CUT = " [cut]"
"""Suffix of a result that was cut."""


@dataclass(frozen=True)
class ToolContext:
    """The session in which a call was made.

    Attributes:
        engine: the engine that generates the answer; `engine.store` has the turns of all owners.
        tokenizer: the model's tokenizer.
        prompt: the prompt of the answer: its owner, its session, the saved turn before it, and the
            messages that are new since then.
        sequence: the answer. It keeps its row while it waits for the result of the call.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    prompt: Prompt
    sequence: TokenSequence


@dataclass(frozen=True)
class OwnTool:
    """A tool that the server runs.

    Attributes:
        tool: its name, its description and the JSON schema of its arguments, as the model reads
            them.
        run: called in a thread with the session and the arguments, which fit the schema; returns
            the text that the model reads. If `run` raises a WeirError, the model reads the error.
    """

    tool: Tool
    run: Callable[[ToolContext, Mapping[str, Any]], str]


@dataclass(frozen=True)
class OwnTools:
    """The server's tools in one request.

    Attributes:
        tools: the server's tools that the model may call, by name.
        described: all tools that the model knows, including those of the client.
        variables: further variables of the chat template.
        again: makes the grammar that the answer follows after a call, if more calls are allowed.
        last: makes the grammar that the answer follows after the last call that is allowed.
    """

    tools: Mapping[str, OwnTool]
    described: tuple[Tool, ...]
    again: Callable[[], GrammarConstraint]
    last: Callable[[], GrammarConstraint]
    variables: Mapping[str, Any] = field(default_factory=dict)


DROP_TOOL_OUTPUT = Tool(
    "drop_tool_output",
    "Forget the output of a tool that is not needed any more, to make room in memory. It cannot be "
    "read again.",
    {
        "type": "object",
        "properties": {
            "back": {
                "type": "integer",
                "minimum": 1,
                "maximum": 256,
                "description": "Which output: 1 is the newest that is still there, 2 the one "
                "before it, and so on.",
            }
        },
        "required": ["back"],
        "additionalProperties": False,
    },
)
"""Drops the output of one of the client's tools.

Most chat templates do not show the ids of calls to the model, so the model names an output by its
age.
"""
KEEP_TOOL_OUTPUT = Tool(
    "keep_tool_output",
    "Keep the output of a tool in memory for the rest of the conversation, because it will be "
    "needed later. There is little room: keep what matters only.",
    DROP_TOOL_OUTPUT.schema,
)
"""Pins the output of one of the client's tools. The model names it by its age, too."""


def clip_result(text: str) -> str:
    """Return a result as a text that can be tokenized, cut if it is too long."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_RESULT else text[: MAX_RESULT - len(CUT)] + CUT
