"""Chat templates: what is fed after an answer equals the end of the whole rendered conversation."""

from __future__ import annotations

import sys
import time

import pytest
from test_conversation import CHATML, INST, KIND, make_tokenizer

from weir.errors import WeirError
from weir.stream import BrokenTemplate, ChatTemplate, check_template, template_bounds

HISTORY = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}]
MORE = [
    {"role": "user", "content": "Three"},
    {"role": "assistant", "content": "Four"},
    {"role": "user", "content": "Five"},
]
SYSTEM_TURN = "<|im_start|>system\nBe brief.<|im_end|>\n"
KIND_TURN = "<|im_start|>system\nBe kind.<|im_end|>\n"
ANSWER_TURN = "<|im_end|>\n<|im_start|>assistant\n"
ALTERNATE = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.content }}]{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (KIND + CHATML, "<|im_end|>"), (INST, "</s>")]
)
@pytest.mark.parametrize("count", [1, 3])
def test_what_comes_after_an_answer_is_the_end_of_the_whole(template, end, count):
    tokenizer = make_tokenizer(template)
    stop = tokenizer.convert_tokens_to_ids(end)
    turns = ChatTemplate(tokenizer, {stop})
    whole = turns.whole([*HISTORY, *MORE[:count]])
    cut = turns.after(MORE[:count], tokenizer("o")["input_ids"][-1])
    assert cut == whole[-len(cut) :]
    assert stop in cut
    ended = turns.after(MORE[:count], stop)
    assert ended == cut[cut.index(stop) + 1 :]
    assert turns.templated


def test_without_a_template_each_message_is_a_line():
    tokenizer = make_tokenizer(None)
    turns = ChatTemplate(tokenizer, set())
    assert tokenizer.decode(turns.whole(HISTORY)) == "<s>One\nTwo"
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    assert tokenizer.decode(turns.after(MORE, newline)) == "Three\nFour\nFive"
    assert tokenizer.decode(turns.after(MORE, None)) == "\nThree\nFour\nFive"
    assert not turns.templated


def test_what_a_template_refuses_is_an_error_with_its_words():
    turns = ChatTemplate(make_tokenizer(ALTERNATE), set())
    assert turns.after(MORE, None)
    with pytest.raises(WeirError, match="template refuses these messages: roles must alternate"):
        turns.after(HISTORY[1:], None)
    with pytest.raises(WeirError, match="roles must alternate"):
        turns.whole(HISTORY[1:])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
            "does not finish",
        ),
        (
            "{% for i in range(99999) %}{{ range(99999) | map('int') | sum }}{% endfor %}",
            "does not finish",
        ),
        (
            "{% for i in range(10 ** 9) %}{% endfor %}",
            r"has a range of more than 100,000 numbers\. Give the model another template\.$",
        ),
        ("{{ 1/0 }}", "fails with ZeroDivisionError"),
        ("{{ messages + 5 }}", "fails with TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails with RecursionError"),
    ],
)
def test_a_template_that_fails_or_never_ends_is_an_error_with_its_name(template, why, monkeypatch):
    monkeypatch.setattr(template_bounds, "MAX_STEPS", 20_000)
    tokenizer = make_tokenizer(template)
    tokenizer.name_or_path = "some/model"
    tracing = sys.gettrace()
    for ask in (lambda turns: turns.whole(HISTORY), lambda turns: turns.header([])):
        with pytest.raises(BrokenTemplate, match=f"template of some/model .*{why}"):
            ask(ChatTemplate(tokenizer, set()))
    assert sys.gettrace() is tracing


def test_a_template_that_hides_what_was_said_cannot_be_gone_on_with():
    turns = ChatTemplate(make_tokenizer("{{ messages[-1].content }}"), set())
    assert turns.after(MORE, None) is None


SYSTEM = {"role": "system", "content": "Be brief."}
MERGED = """<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.index0 == 1 and \
messages[0].role == 'system' %}<<{{ messages[0].content }}>> {% endif %}{{ m.content }} [/INST]\
{% elif m.role == 'assistant' %} {{ m.content }} </s>{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "messages", "beginning", "header"),
    [
        (CHATML, [SYSTEM, *HISTORY, *MORE], SYSTEM_TURN + "<|im_start|>user\n", ANSWER_TURN),
        (CHATML, HISTORY[:1], "<|im_start|>user\n", ANSWER_TURN),
        (CHATML, [SYSTEM], SYSTEM_TURN + "<|im_start|>", ANSWER_TURN),
        (CHATML, [SYSTEM, HISTORY[1], MORE[0]], SYSTEM_TURN + "<|im_start|>", ANSWER_TURN),
        (KIND + CHATML, MORE[:1], KIND_TURN + "<|im_start|>user\n", ANSWER_TURN),
        (MERGED, [SYSTEM, *MORE], "<s>[INST] <<Be brief.>> ", " [/INST]"),
        (MERGED, MORE, "<s>[INST] ", " [/INST]"),
        (CHATML, [{"role": "user", "content": "0 is a number"}], "<|im_start|>user\n", ANSWER_TURN),
        (None, [SYSTEM, *MORE], "<s>Be brief.\n", ""),
        (None, MORE, "<s>", ""),
    ],
)
def test_what_stands_before_the_first_words_and_before_the_answer(
    template, messages, beginning, header
):
    tokenizer = make_tokenizer(template)
    turns = ChatTemplate(tokenizer, set())
    ids = turns.whole(messages)
    assert tokenizer.decode(ids[: turns.beginning(messages, ids)]) == beginning
    found = turns.header(ids)
    assert tokenizer.decode(ids[len(ids) - found :]) == header
    after = turns.after(MORE[:1], None)
    assert turns.header(after) == found


def test_a_template_that_refuses_what_it_is_asked_tells_of_no_beginning():
    turns = ChatTemplate(make_tokenizer(ALTERNATE), set())
    assert turns.beginning([SYSTEM, *HISTORY], [1, 2, 3]) == 0
    turns = ChatTemplate(make_tokenizer("{{ raise_exception('never') }}"), set())
    assert turns.header([1, 2, 3]) == 0


LONG = {
    "many characters": ("a" * 70_000, "has 70,000 characters, but at most 65,536 are allowed"),
    "many words": ("{{ 1 }}" * 3000, "has 9,000 Jinja tokens, but at most 8,192 are allowed"),
    "many entries": ("{{ [" + "1," * 9000 + "] }}", "Jinja tokens, but at most 8,192"),
    "brackets": ("{{ " + "[" * 2000 + "]" * 2000 + " }}", "fails with RecursionError"),
    "more brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "Jinja tokens, but at most"),
    "a syntax error": ("{{ 1 ", "cannot be read: unexpected end of template"),
    "an unknown filter": ("{{ 1 | nosuch }}", "cannot be read: No filter named"),
}


@pytest.mark.parametrize("kind", LONG)
def test_a_template_that_cannot_be_compiled_is_found_before_any_message(kind):
    template, why = LONG[kind]
    began = time.process_time()
    with pytest.raises(BrokenTemplate, match=why):
        check_template(make_tokenizer(template))
    assert time.process_time() - began < 5


def test_a_template_that_refuses_one_turn_is_not_broken():
    check_template(make_tokenizer(ALTERNATE))
    check_template(make_tokenizer("{{ raise_exception('never') }}"))
    check_template(make_tokenizer(None))
