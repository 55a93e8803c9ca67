"""The forms in which models write calls, and which of them a model was made for.

The chat template tells: it is what the model saw in training. Where it takes no tools, or there is
none, calls are asked for in words, in the first of these forms.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.serve.messages import Call, Message
from weir.serve.tools.tool import Tool


@dataclass(frozen=True)
class CallFormat:
    """How calls are written: each as JSON with a name and arguments, or as a name before them.

    Attributes:
        trigger: what comes before a call, or before the list of all; empty where nothing does, so
            that an answer is either text or a call.
        close: what comes after it.
        key: what the arguments are called.
        between: what stands between a name and arguments where a call is no JSON as a whole.
        several: whether an answer may have more than one.
        listed: whether all of an answer stand in one list.
        told: whether the chat template takes tools; otherwise a system turn describes them.
        short: whether the template wants ids of nine letters and digits.
    """

    trigger: str
    close: str
    key: str = "arguments"
    between: str = ""
    several: bool = True
    listed: bool = False
    told: bool = True
    short: bool = False

    def head(self, name: str) -> str:
        """A call that is JSON, up to its arguments."""
        return f'{{"name": {json.dumps(name)}, "{self.key}": '

    def rendered(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Messages and tools as the chat template takes them."""
        if not self.told:
            messages, tools = self._in_words(messages, tools), ()
        said = [message.for_template() for message in messages]
        if self.short:
            for message in said:
                for call in message.get("tool_calls", ()):
                    call["id"] = _short(call["id"])
                if "tool_call_id" in message:
                    message["tool_call_id"] = _short(message["tool_call_id"])
        return said, [tool.told() for tool in tools]

    def _in_words(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Messages without calls and results: those are texts, and a system turn has the tools."""
        said: list[Message] = []
        for message in messages:
            if message.role == "tool":
                content = f"<tool_response>{message.content}</tool_response>"
                if said and said[-1].role == "user" and said[-1].name == "tool":
                    content = f"{said.pop().content}\n{content}"
                said.append(Message("user", content, "tool"))
            elif message.calls:
                calls = "".join(self._written(call) for call in message.calls)
                said.append(replace(message, content=message.content + calls, calls=()))
            else:
                said.append(message)
        said = [replace(each, name=None) if each.name == "tool" else each for each in said]
        if not tools:
            return said
        first = [said.pop(0).content] if said and said[0].role == "system" else []
        return [Message("system", "\n\n".join([*first, self._described(tools)])), *said]

    def _written(self, call: Call) -> str:
        return f"{self.trigger}{self.head(call.name)}{call.arguments}}}{self.close}"

    def _described(self, tools: Sequence[Tool]) -> str:
        call = f'{self.trigger}{{"name": NAME, "{self.key}": {{...}}}}{self.close}'
        return "\n".join(
            [
                "You can call these functions; their parameters are given as JSON schemas.",
                *(json.dumps(tool.told()["function"], ensure_ascii=False) for tool in tools),
                f"To call one, write {call}",
                "What it returns comes as <tool_response>...</tool_response>",
            ]
        )


HERMES = CallFormat("<tool_call>", "</tool_call>")
"""Of Hermes and Qwen 2.5 and 3: `<tool_call>{"name": …, "arguments": …}</tool_call>`."""
LLAMA = CallFormat("", "", key="parameters", several=False)
"""Of Llama 3: an answer that is `{"name": …, "parameters": …}`."""
MISTRAL = CallFormat("[TOOL_CALLS]", "]", listed=True, short=True)
"""Of Mistral up to Nemo: `[TOOL_CALLS] [{"name": …, "arguments": …}, …]`."""

MISTRAL_ARGS = CallFormat("[TOOL_CALLS]", "", between="[ARGS]", short=True)
"""Of newer ones, as Devstral 2 and Ministral 3: `[TOOL_CALLS]name[ARGS]{…}` for each call."""


def form_of(tokenizer: PreTrainedTokenizerBase) -> CallFormat:
    """The form that a model was made for.

    Raises:
        WeirError: its chat template takes tools, and calls in a form that is not known.
    """
    if tokenizer.chat_template is None:
        return replace(HERMES, told=False)
    try:
        template = str(tokenizer.get_chat_template(tools=[{}]))
        # Only read, to see what it asks for; transformers renders it, in a sandbox.
        asks = find_undeclared_variables(
            jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
                template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
            )
        )
    except (TemplateError, ValueError):
        asks, template = set(), ""
    if "tools" not in asks:
        return replace(HERMES, told=False)
    # Where the model names its calls itself, a result would have to repeat that name.
    if "[TOOL_CALLS]" in template and "[CALL_ID]" not in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "<|python_tag|>" in template or '"name": function name, "parameters"' in template:
        return LLAMA
    raise WeirError(
        f"this model's chat template writes calls {_unknown(template)}, a form that is not served "
        "here; those of Hermes and Qwen up to 3, Llama 3 and Mistral are"
    )


def _unknown(template: str) -> str:
    """How a template writes calls that nobody here reads."""
    for mark, words in _OTHERS.items():
        if mark in template:
            return words
    return "in a way of its own"


_OTHERS = {
    "<function=": "as XML (<function=…>, as Qwen 3.5 and Qwen 3 Coder do)",
    "<|tool_call>": "as <|tool_call>call:…, as Gemma 4 does",
    "[CALL_ID]": "with ids of the model's own ([CALL_ID], as Mistral Small 3.2 does)",
}


def _short(name: str) -> str:
    """An id as Mistral's templates want it; always the same for the same."""
    return hashlib.sha256(name.encode()).hexdigest()[:9]
