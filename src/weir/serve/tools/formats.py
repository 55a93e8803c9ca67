"""Tools, the formats in which models write tool calls, and how the format of a model is detected.

The format is read from the chat template, which the model saw in training. If the template does not
accept tools, or there is no template, a system message asks for calls in the format `HERMES`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.serve.messages import Call, Message, same_value


@dataclass(frozen=True)
class Tool:
    """A function that the model can call.

    Attributes:
        name, description: what the model reads about it.
        parameters: a JSON schema of an object; None if it has no parameters.
        strict: refuse a schema if some keyword in it cannot be enforced.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments of a call."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        return nothing if self.parameters is None else self.parameters

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates take it, and as clients send it."""
        description = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **description, "parameters": self.schema}
        return {"type": "function", "function": function}


def describe_tools(tools: Iterable[Tool]) -> str:
    """Return a text with everything that a model reads about some tools, to compare or hash.

    It does not depend on the order of tools or of the keys in their schemas, or on the notation of
    numbers.
    """
    described = (same_value(tool.for_template()) for tool in tools)
    return "\n".join(sorted(json.dumps(each, sort_keys=True) for each in described))


@dataclass(frozen=True)
class CallFormat:
    """The text format of calls: each is a JSON object, or a name followed by JSON arguments.

    Attributes:
        trigger: text before a call, or before the list of all calls; empty if there is none, so
            that an answer is either text or a call.
        close: text after a call, or after the list of all calls; empty if there is none.
        key: the key of the arguments, if a call is one JSON object.
        between: text between name and arguments; empty if a call is one JSON object.
        parallel: whether an answer may have more than one call.
        is_list: whether the calls of an answer are in one list.
        in_template: whether the chat template accepts tools; otherwise a system message describes
            them.
        short_ids: whether the template needs ids of nine letters and digits.
    """

    trigger: str
    close: str
    key: str = "arguments"
    between: str = ""
    parallel: bool = True
    is_list: bool = False
    in_template: bool = True
    short_ids: bool = False

    def head(self, name: str) -> str:
        """Return the text of a call up to its arguments, in a format of JSON objects."""
        return f'{{"name": {json.dumps(name)}, "{self.key}": '

    def for_template(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return messages and tools as the chat template takes them."""
        if not self.in_template:
            messages, tools = self._in_words(messages, tools), ()
        rendered = [message.for_template() for message in messages]
        if self.short_ids:
            for message in rendered:
                for call in message.get("tool_calls", ()):
                    call["id"] = _short_id(call["id"])
                if "tool_call_id" in message:
                    message["tool_call_id"] = _short_id(message["tool_call_id"])
        return rendered, [tool.for_template() for tool in tools]

    def _in_words(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Return messages with calls and results as text, and the tools in a system message."""
        found: list[Message] = []
        for message in messages:
            if message.role == "tool":
                content = f"<tool_response>{message.content}</tool_response>"
                if found and found[-1].role == "user" and found[-1].name == "tool":
                    content = f"{found.pop().content}\n{content}"
                found.append(Message("user", content, "tool"))
            elif message.calls:
                calls = "".join(self._write(call) for call in message.calls)
                found.append(replace(message, content=message.content + calls, calls=()))
            else:
                found.append(message)
        found = [replace(one, name=None) if one.name == "tool" else one for one in found]
        if not tools:
            return found
        first = [found.pop(0).content] if found and found[0].role == "system" else []
        return [Message("system", "\n\n".join([*first, self._instructions(tools)])), *found]

    def _write(self, call: Call) -> str:
        return f"{self.trigger}{self.head(call.name)}{call.arguments}}}{self.close}"

    def _instructions(self, tools: Sequence[Tool]) -> str:
        """Write the part of the system message that describes the tools."""
        functions = [tool.for_template()["function"] for tool in tools]
        call = f'{self.trigger}{{"name": NAME, "{self.key}": {{...}}}}{self.close}'
        return "\n".join(
            [
                "You can call these functions; their parameters are given as JSON schemas.",
                *(json.dumps(function, ensure_ascii=False) for function in functions),
                f"To call one, write {call}",
                "What it returns comes as <tool_response>...</tool_response>",
            ]
        )


HERMES = CallFormat("<tool_call>", "</tool_call>")
"""Format of Hermes and Qwen 2.5 and 3: `<tool_call>{"name": …, "arguments": …}</tool_call>`."""
LLAMA = CallFormat("", "", key="parameters", parallel=False)
"""Format of Llama 3: an answer that is `{"name": …, "parameters": …}`."""
MISTRAL = CallFormat("[TOOL_CALLS]", "]", is_list=True, short_ids=True)
"""Format of Mistral up to Nemo: `[TOOL_CALLS] [{"name": …, "arguments": …}, …]`."""

MISTRAL_ARGS = CallFormat("[TOOL_CALLS]", "", between="[ARGS]", short_ids=True)
"""Format of Devstral 2 and Ministral 3: `[TOOL_CALLS]name[ARGS]{…}` for each call."""


def template_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the variables that a model's chat template uses. Empty without a template, or if the
    template cannot be parsed.
    """
    if tokenizer.chat_template is None:
        return frozenset()
    try:
        template = str(tokenizer.get_chat_template(tools=[{}]))
        # The template is only parsed, for its variables. transformers renders it in a sandbox.
        return frozenset(
            find_undeclared_variables(
                jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
                    template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
                )
            )
        )
    except (TemplateError, ValueError):
        return frozenset()


def format_of(tokenizer: PreTrainedTokenizerBase) -> CallFormat:
    """Return the call format that a model was made for.

    Raises WeirError if its chat template accepts tools, but writes calls in an unknown format.
    """
    if tokenizer.chat_template is None:
        return replace(HERMES, in_template=False)
    variables = template_variables(tokenizer)
    template = str(tokenizer.get_chat_template(tools=[{}])) if variables else ""
    if "tools" not in variables:
        return replace(HERMES, in_template=False)
    # Templates with [CALL_ID] let the model name its calls, and need that name with the result.
    if "[TOOL_CALLS]" in template and "[CALL_ID]" not in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "<|python_tag|>" in template or '"name": function name, "parameters"' in template:
        return LLAMA
    how = (words for mark, words in _OTHERS.items() if mark in template)
    raise WeirError(
        f"this model's chat template writes tool calls {next(how, 'in an unknown format')}, which "
        "this server does not support. Supported are the formats of Hermes and Qwen up to 3, "
        "Llama 3, and Mistral. Leave out tools, or use a model with one of these formats."
    )


_OTHERS = {
    "<function=": "as XML (<function=…>, as Qwen 3.5 and Qwen 3 Coder do)",
    "<|tool_call>": "as <|tool_call>call:…, as Gemma 4 does",
    "[CALL_ID]": "with ids that the model writes ([CALL_ID], as Mistral Small 3.2 does)",
}
"""Descriptions of unsupported call formats, by a text in templates that use them."""


def _short_id(name: str) -> str:
    """Return an id in the form that Mistral's templates need, computed from the given one."""
    return hashlib.sha256(name.encode()).hexdigest()[:9]
