"""A desk between text and tokens."""

from __future__ import annotations

from servers import make_desk

from weir.models import set_sink
from weir.serve import Desk, Limits, Message


def test_a_learned_sink_stands_in_front_of_what_is_read_first():
    plain = make_desk()
    set_sink(plain.engine.model.config, "learnable", (7, 8))
    desk = Desk(plain.engine, plain.store, plain.tokenizer, "small", Limits())
    messages = [Message("user", "Hi")]
    chat, without = (one.plan_chat("", messages, None).ids for one in (desk, plain))
    assert chat == [7, 8, *without]
    assert desk.plan_text("", "Hi").ids == [7, 8, *plain.plan_text("", "Hi").ids]
    assert desk.plan_text("", [1, 2]).ids == [1, 2]  # who names tokens names them all
