"""What is said to a model: what comes after an answer ends what the template makes of all."""

from __future__ import annotations

import pytest
from test_conversation import CHATML, INST, KIND, make_tokenizer

from weir.errors import WeirError
from weir.stream import Turns

HISTORY = [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}]
MORE = [
    {"role": "user", "content": "Three"},
    {"role": "assistant", "content": "Four"},
    {"role": "user", "content": "Five"},
]
ALTERNATE = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.content }}]{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (KIND + CHATML, "<|im_end|>"), (INST, "</s>")]
)
@pytest.mark.parametrize("count", [1, 3])
def test_what_comes_after_an_answer_is_the_end_of_the_whole(template, end, count):
    tokenizer = make_tokenizer(template)
    stop = tokenizer.convert_tokens_to_ids(end)
    turns = Turns(tokenizer, {stop})
    whole = turns.whole([*HISTORY, *MORE[:count]])
    cut = turns.after(MORE[:count], tokenizer("o")["input_ids"][-1])
    assert cut == whole[-len(cut) :]
    assert stop in cut
    ended = turns.after(MORE[:count], stop)
    assert ended == cut[cut.index(stop) + 1 :]
    assert turns.templated


def test_without_a_template_each_message_is_a_line():
    tokenizer = make_tokenizer(None)
    turns = Turns(tokenizer, set())
    assert tokenizer.decode(turns.whole(HISTORY)) == "<s>One\nTwo"
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    assert tokenizer.decode(turns.after(MORE, newline)) == "Three\nFour\nFive"
    assert tokenizer.decode(turns.after(MORE, None)) == "\nThree\nFour\nFive"
    assert not turns.templated


def test_what_a_template_refuses_is_an_error_with_its_words():
    turns = Turns(make_tokenizer(ALTERNATE), set())
    assert turns.after(MORE, None)
    with pytest.raises(WeirError, match="template refuses these messages: roles must alternate"):
        turns.after(HISTORY[1:], None)
    with pytest.raises(WeirError, match="roles must alternate"):
        turns.whole(HISTORY[1:])


def test_a_template_that_hides_what_was_said_cannot_be_gone_on_with():
    turns = Turns(make_tokenizer("{{ messages[-1].content }}"), set())
    assert turns.after(MORE, None) is None
