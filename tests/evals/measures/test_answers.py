"""How tasks ask questions: plain prompts after a start token, turns in a template, and costs."""

from __future__ import annotations

from typing import Any

import pytest
from reference.answers import plain_answer
from reference.subjects import nano

from weir.errors import WeirError
from weir.evals.answers import ask, costs, prompt_ids
from weir.models import set_sink

PROMPT = "It was late, and the old prince had gone to bed. In the house"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"


def test_an_answer_is_what_a_plain_loop_writes() -> None:
    one = nano()
    plain = plain_answer(one.model, one.tokenizer, PROMPT, 40)
    assert ask(one, PROMPT, 40).text == plain
    assert " man" in plain
    stopped = ask(one, PROMPT, 40, stops=(" man",))
    assert stopped.text == plain.split(" man")[0]
    # Decoding ended at the stop string.
    assert stopped.seen == len(one.tokenizer(f"{PROMPT}{stopped.text} man")["input_ids"])


def test_a_prompt_in_a_template_has_the_template_and_no_second_start_token() -> None:
    tokenizer = nano().tokenizer
    plain = prompt_ids(tokenizer, PROMPT, chat=False)
    assert plain[0] == tokenizer.bos_token_id and tokenizer.decode(plain[1:]) == PROMPT
    with pytest.raises(WeirError, match="no chat template, which chat=true needs"):
        prompt_ids(tokenizer, PROMPT, chat=True)
    tokenizer.chat_template = TEMPLATE
    turn = prompt_ids(tokenizer, PROMPT, chat=True)
    assert tokenizer.decode(turn) == f"<user>{PROMPT}<answer>"
    assert tokenizer.bos_token_id not in turn


def test_a_learned_sink_stands_in_front_of_a_template() -> None:
    one = nano()
    one.tokenizer.chat_template = TEMPLATE
    plain = prompt_ids(one.tokenizer, PROMPT, chat=True)
    without = ask(one, PROMPT, 1, chat=True).seen
    set_sink(one.model.config, "learnable", [one.tokenizer.bos_token_id, 7])
    assert ask(one, PROMPT, 1, chat=True).seen == without + 2
    # A plain prompt already begins with the first token of the sink.
    alone = ask(nano(), PROMPT, 1).seen
    assert ask(one, PROMPT, 1).seen == alone + 1
    assert without >= len(plain)


def test_what_was_taken_is_counted_in_slots_and_bytes() -> None:
    short, long = ask(nano(), PROMPT, 4), ask(nano(), PROMPT * 8, 4)
    both = costs([short, long])
    assert (both["share"], both["kv_bytes"]) == (1.0, long.kv_bytes)
    assert both["tokens"] == (short.seen + long.seen) / 2
    small = ask(nano("sink(4) | recent(12)", chunk=4), PROMPT * 8, 4)
    assert small.held is not None and 16 <= small.held < 20 < small.seen
    assert costs([small])["share"] == small.held / small.seen
    assert costs([ask(nano("recompute(budget=64)"), PROMPT, 4)])["share"] is None


def test_a_protocol_keeps_the_answer_and_compresses_the_prompt_once() -> None:
    options: dict[str, Any] = {"prefill": "full", "rate": 0.25, "keeps_answers": True}
    one = ask(nano("snapkv(window=4)", **options), PROMPT * 8, 30)
    prompt = len(nano().tokenizer(PROMPT * 8)["input_ids"])
    assert one.held == round(prompt / 4) + 30
