"""The formats in which models write calls of functions: enforcing and parsing them."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest
import torch
from servers import CHATML, make_tokenizer

from weir.errors import WeirError
from weir.serve import Sampler, SamplingParams
from weir.serve.engine.sampler import sample
from weir.serve.messages import Call, Message, hash_prefixes
from weir.serve.structured import GrammarCompiler
from weir.serve.tools.formats import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    CallFormat,
    Tool,
    format_of,
)
from weir.serve.tools.grammar import tool_grammar
from weir.serve.tools.parser import CallEnd, CallParser, CallStart, TextDelta, join_parts
from weir.stream import Sampling

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 4}},
}
WEATHER, CLOCK = Tool("get_weather", "Of a city.", CITY), Tool("clock")
TOOLS = [WEATHER, CLOCK]
NAMES = {tool.name for tool in TOOLS}
PLAIN = replace(HERMES, in_template=False)
FORMS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "args": MISTRAL_ARGS}

ROME = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
WRITTEN = {
    "hermes": (
        f"<tool_call>\n{ROME}\n</tool_call>\n"
        '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
        2,
    ),
    "llama": ('{"name": "get_weather", "parameters": {"city": "Rome"}}', 1),
    "args": ('[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]clock[ARGS]{}', 2),
    "mistral": (f'[TOOL_CALLS] [{ROME}, {{"name": "clock", "arguments": {{}}}}]', 2),
}


def read_calls(form, tools, text, make_id, *, cut=False, calls_only=False) -> Message:
    """Parse a whole answer into a message."""
    parser = CallParser(form, {tool.name for tool in tools}, calls_only)
    return join_parts([*parser.feed(text), *parser.finish(cut=cut)], make_id)


def parts_of(form: CallFormat, text: str, size: int) -> tuple[list, CallParser]:
    reader = CallParser(form, NAMES)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [part for piece in pieces for part in reader.feed(piece)] + reader.finish(), reader


def name(number: int) -> str:
    return f"call_{number}"


# --- reading


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_however_they_come(form, size):
    text, count = WRITTEN[form]
    for before in ("", "Let me see.\n") if form != "llama" else ("",):
        parts, reader = parts_of(FORMS[form], before + text, size)
        assert "".join(p.text for p in parts if isinstance(p, TextDelta) and p.call is None) == (
            before.strip()
        )
        starts = [part for part in parts if isinstance(part, CallStart)]
        assert starts == [CallStart(0, "get_weather"), CallStart(1, "clock")][:count]
        own = "".join(part.text for part in parts if isinstance(part, TextDelta) and part.call == 0)
        assert own == '{"city": "Rome"}'
        assert sum(isinstance(part, CallEnd) for part in parts) == reader.num_complete == count
    if size == 1 and form != "mistral":
        assert sum(isinstance(p, TextDelta) and p.call == 0 for p in parts) == len(
            '{"city": "Rome"}'
        )


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        " a < b and <tool_cal, \n",
        "<tool_call>no</tool_call>",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": 7}</tool_call>',
        "[1, 2] <tool_call",
        "  ",
    ],
)
def test_what_is_no_call_is_text_and_nothing_is_lost(text, size):
    parts, reader = parts_of(HERMES, text, size)
    assert all(isinstance(part, TextDelta) and part.call is None for part in parts)
    assert "".join(part.text for part in parts) == text
    assert reader.num_complete == 0


def test_quotes_and_brackets_in_arguments_do_not_end_them():
    own = json.dumps({"city": 'a}"\\]{', "more": [{"x": "</tool_call>"}, []]})
    text = f'<tool_call>{{"name": "clock", "arguments": {own}}}</tool_call> Bye'
    for size in (1, 7):
        parts, _ = parts_of(HERMES, text, size)
        assert "".join(p.text for p in parts if isinstance(p, TextDelta) and p.call == 0) == own
    message = read_calls(HERMES, TOOLS, text, name)
    assert message.content.strip() == "Bye"
    assert message.calls == (Call("call_0", "clock", own),)


def test_a_call_that_is_cut_short_has_what_there_is_of_it():
    text = WRITTEN["hermes"][0][:60]
    message = read_calls(HERMES, TOOLS, text, name)
    assert message.calls == (Call("call_0", "get_weather", '{"city": "R'),)
    assert message.content == ""
    parts, reader = parts_of(HERMES, text, 5)
    assert reader.num_complete == 0


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("form", FORMS)
def test_wherever_an_answer_is_cut_no_markup_of_a_call_is_text(form, size):
    text, _ = WRITTEN[form]
    known = text.index("get_weather") + len("get_weather")
    own = '{"city": "Rome"}'
    for at in range(1, len(text) + 1):
        for alone in (True, False):
            reader = CallParser(FORMS[form], NAMES, alone)
            pieces = [text[:at][n : n + size] for n in range(0, at, size)]
            parts = [part for piece in pieces for part in reader.feed(piece)]
            parts += reader.finish(cut=True)
            assert not [part for part in parts if isinstance(part, TextDelta) and part.call is None]
            message = join_parts(parts, name)
            assert [call.name for call in message.calls[:1]] == ["get_weather"][: at > known]
            if message.calls:
                come = text[text.index(own) : at]
                assert message.calls[0].arguments == come[: len(own)]


@pytest.mark.parametrize("text", ["a <tool_c", "<", "if a <"])
def test_what_may_begin_a_call_is_text_where_the_model_has_ended(text):
    said = Message("assistant", text)
    assert read_calls(HERMES, TOOLS, text, name) == said
    assert (
        read_calls(HERMES, TOOLS, text, name, cut=True).content == text[: text.index("<")].rstrip()
    )
    assert read_calls(HERMES, TOOLS, f"{text}!", name, cut=True) == replace(
        said, content=f"{text}!"
    )
    assert "<" not in read_calls(HERMES, TOOLS, text, name, calls_only=True).content


def test_a_stop_within_a_call_leaves_no_markup_either():
    for text in ("<tool_call>", '<tool_call>{"name": "cl'):
        assert read_calls(HERMES, TOOLS, text, name) == Message("assistant", "")
    begun = Call("call_0", "clock", "")
    stopped = read_calls(HERMES, TOOLS, '<tool_call>{"name": "clock", "arg', name)
    assert stopped == Message("assistant", "", calls=(begun,))
    no_call = '<tool_call>{"name": "cat"'
    assert read_calls(HERMES, TOOLS, no_call, name, cut=True).content == no_call


# --- what an answer may contain


TOKENIZER = make_tokenizer()
(END,) = ENDS = frozenset([TOKENIZER.convert_tokens_to_ids("<|im_end|>")])
GRAMMARS = GrammarCompiler(TOKENIZER, ENDS, len(TOKENIZER))


def shape_of(
    form,
    choice,
    tools=TOOLS,
    *,
    parallel=True,
    newlines=True,
    schema=None,
    special=None,
    own=(),
):
    grammar = tool_grammar(
        form,
        tools,
        choice,
        parallel=parallel,
        newlines=newlines,
        special=special or {},
        schema=schema,
        own=own,
    )
    return GRAMMARS.compile(grammar, stop_when_complete=choice == "required")


def accepts(shape, text: str) -> bool:
    """Whether a whole text is allowed, and the answer can end after it."""
    mask = shape()
    for token in [*TOKENIZER(text)["input_ids"], END]:
        if mask.done:
            return token == END
        if mask.allow(torch.zeros(len(TOKENIZER)))[token] == -torch.inf:
            return False
        mask.accept(token)
    return True


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_text_or_calls_as_the_choice_says(form):
    calls, count = WRITTEN[form]
    own = FORMS[form]
    auto, required, none = (shape_of(own, choice) for choice in ("auto", "required", "none"))
    assert accepts(auto, "Hello {} <b>")
    assert accepts(auto, "")
    assert accepts(auto, calls)
    assert not accepts(auto, calls.replace("get_weather", "get_money"))
    assert not accepts(auto, calls.replace('"Rome"', '"Jerusalem"'))
    assert accepts(required, calls)
    assert not accepts(required, "Hello")
    assert not accepts(required, "")
    assert not accepts(none, calls)
    assert accepts(none, "Hello <b>")
    if form != "llama":
        assert accepts(auto, f"See: {calls}")
        assert not accepts(none, f"See: {calls}")
    once = shape_of(own, "auto", parallel=False)
    assert accepts(once, calls) == (count == 1)
    one = shape_of(own, "required", [WEATHER], parallel=False)
    assert not accepts(one, calls.replace("get_weather", "clock"))


def test_arguments_have_no_properties_that_a_schema_does_not_list_unless_it_says_so():
    said = '{"name": "get_weather", "parameters": {"city": "Rome", "land": "Italy"}}'
    silent = {name: value for name, value in CITY.items() if name != "additionalProperties"}
    for more, accepted in (
        ({}, False),
        ({"additionalProperties": True}, True),
        ({"additionalProperties": {"type": "string"}}, True),
        ({"additionalProperties": {"type": "number"}}, False),
        ({"patternProperties": {"^l": {"type": "string"}}}, True),
        ({"properties": {}, "required": []}, True),
    ):
        tool = Tool("get_weather", None, {**silent, **more})
        assert accepts(shape_of(LLAMA, "required", [tool]), said) == accepted, more
    own = said.replace(', "land": "Italy"', "")
    assert accepts(shape_of(LLAMA, "required", [Tool("get_weather", None, silent)]), own)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_model_says_can_be_read_as_calls_of_these_tools(form, seed):
    mask = shape_of(FORMS[form], "required", parallel=False)()
    sampler = Sampler(
        SamplingParams(sampling=Sampling(temperature=1.0), seed=seed), constraint=mask
    )
    tokens = []
    logits = torch.zeros(len(TOKENIZER))
    logits[TOKENIZER('"}')["input_ids"]] = 3.0  # makes the call end soon
    while not sampler.done and len(tokens) < 1500:
        (token,) = sample([sampler], logits[None])
        tokens.append(token.id)
    text = TOKENIZER.decode(tokens, skip_special_tokens=True)
    message = read_calls(FORMS[form], TOOLS, text, name)
    (call,) = message.calls
    tool = next(tool for tool in TOOLS if tool.name == call.name)
    jsonschema.validate(json.loads(call.arguments), dict(tool.schema))
    assert message.content == ""


def test_a_trigger_that_is_a_special_token_is_one():
    special = {"[TOOL_CALLS]": TOKENIZER.convert_tokens_to_ids("<s>")}
    auto = shape_of(MISTRAL, "auto", special=special)
    assert accepts(auto, f"Hm. <s> [{ROME}]")
    assert not accepts(auto, f"Hm. <s> [{ROME}")
    assert accepts(auto, f"[TOOL_CALLS] [{ROME}")  # without the special token, it is plain text
    assert not accepts(shape_of(MISTRAL, "none", special=special), f"<s> [{ROME}]")


def test_what_stands_between_a_name_and_arguments_may_be_a_special_token_too():
    starts = TOKENIZER.convert_tokens_to_ids("<s>")
    special = {"[TOOL_CALLS]": starts, "[ARGS]": TOKENIZER.convert_tokens_to_ids("<|im_start|>")}
    auto = shape_of(MISTRAL_ARGS, "auto", special=special)
    call = '<s>get_weather<|im_start|>{"city": "Rome"}'
    assert accepts(auto, f"Hm. {call}{call} So.")
    assert not accepts(auto, call.replace("<|im_start|>", "[ARGS]"))
    assert not accepts(auto, call.replace("Rome", "Jerusalem"))


def test_an_answer_without_calls_may_be_held_to_a_schema_too():
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    both = shape_of(HERMES, "auto", schema=schema)
    assert accepts(both, '{"a": 1}')
    assert accepts(both, WRITTEN["hermes"][0])
    assert not accepts(both, "Hello")
    assert not accepts(shape_of(HERMES, "none", schema=schema), WRITTEN["hermes"][0])


# --- templates

HERMES_LIKE = (
    """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": ...}</tool_call><|im_end|>
{% endif %}"""
    + CHATML
)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, PLAIN),
        (CHATML, PLAIN),
        (HERMES_LIKE, HERMES),
        ({"default": CHATML, "tool_use": HERMES_LIKE}, HERMES),
        ("{% if tools %}{{ '[AVAILABLE_TOOLS]' }}{% endif %}[TOOL_CALLS] [", MISTRAL),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]{{ x }}[ARGS]", MISTRAL_ARGS),
        ("{% if tools is not none %}{{ '<|python_tag|>' }}{% endif %}", LLAMA),
        (
            "{% if tools %}{% break %}{% generation %}<tool_call>{% endgeneration %}{% endif %}",
            HERMES,
        ),
    ],
)
def test_the_template_tells_the_form(template, form):
    tokenizer = make_tokenizer(template)
    assert format_of(tokenizer) == form


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if tools %}<tool_call><function={% endif %}", "as XML .*Qwen 3.5"),
        ("{{ tools }}<|tool_call>call:{{ x }}", "as Gemma 4 does"),
        ("{{ tools }}[TOOL_CALLS]{{ x }}[CALL_ID]{{ x }}[ARGS]", "ids that the model writes"),
        ("{{ tools }}", "in an unknown format"),
    ],
)
def test_a_form_that_is_not_known_is_refused(template, words):
    with pytest.raises(WeirError, match=f"{words}.*, which this server does not support"):
        format_of(make_tokenizer(template))


def history() -> list[Message]:
    calls = (Call("call_a", "get_weather", '{"city":"Rome"}'), Call("call_b", "clock", "{}"))
    return [
        Message("user", "Weather?"),
        Message("assistant", "", calls=calls),
        Message("tool", "Sunny", "get_weather", result="call_a", place=0),
        Message("tool", "Noon", "clock", result="call_b", place=1),
    ]


def test_without_a_template_for_them_tools_are_told_in_words():
    said, told = PLAIN.for_template([Message("system", "Be kind."), *history()], TOOLS)
    assert told == []
    assert [message["role"] for message in said] == ["system", "user", "assistant", "user"]
    assert said[0]["content"].startswith("Be kind.\n\n")
    for tool in TOOLS:
        assert json.dumps(tool.for_template()["function"]) in said[0]["content"]
    assert (
        read_calls(PLAIN, TOOLS, said[2]["content"], lambda n: f"call_{'ab'[n]}") == (history()[1])
    )
    assert said[3] == {
        "role": "user",
        "content": "<tool_response>Sunny</tool_response>\n<tool_response>Noon</tool_response>",
    }
    assert len(PLAIN.for_template(history(), ())[0]) == 3


def test_templates_get_arguments_as_values_and_ids_as_they_want_them():
    said, told = HERMES.for_template(history(), TOOLS)
    assert told == [tool.for_template() for tool in TOOLS]
    assert said[1]["tool_calls"][0] == {
        "id": "call_a",
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Rome"}},
    }
    assert said[2] == {
        "role": "tool",
        "content": "Sunny",
        "name": "get_weather",
        "tool_call_id": "call_a",
    }
    short, _ = MISTRAL.for_template(history(), TOOLS)
    first, second = (call["id"] for call in short[1]["tool_calls"])
    assert len(first) == 9 and first.isalnum() and first != second
    assert [short[2]["tool_call_id"], short[3]["tool_call_id"]] == [first, second]
    cut = Message("assistant", "", calls=(Call("x", "clock", '{"a'),))
    assert HERMES.for_template([cut], ())[0][0]["tool_calls"][0]["function"]["arguments"] == '{"a'


# --- histories with calls are recognized


def end_of(messages: list[Message]) -> str:
    return hash_prefixes("root", messages)[-1]


def test_calls_and_results_are_part_of_what_a_history_is_known_by():
    known = end_of(history())
    other = history()
    other[1] = replace(
        other[1], calls=(Call("x", "get_weather", '{"city" : "Rome"}'), Call("y", "clock", "{ }"))
    )
    other[2], other[3] = replace(other[2], result="x"), replace(other[3], result="y")
    assert end_of(other) == known
    changes = [
        (1, {"calls": (Call("call_a", "get_weather", '{"city":"Rom"}'), Call("b", "clock", "{}"))}),
        (1, {"calls": history()[1].calls[:1]}),
        (1, {"content": "Hm"}),
        (2, {"content": "Rain"}),
        (2, {"place": 1}),
    ]
    for at, change in changes:
        other = history()
        other[at] = replace(other[at], **change)
        assert end_of(other) != known
    swapped = history()
    swapped[2:] = [replace(swapped[2], content="Noon"), replace(swapped[3], content="Sunny")]
    assert end_of(swapped) != known


def test_messages_are_kept_as_they_are():
    for message in history():
        assert Message.from_json(json.loads(json.dumps(message.to_json()))) == message
    assert history()[0].to_json() == ["user", "Weather?", None]
