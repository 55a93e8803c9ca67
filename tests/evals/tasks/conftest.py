"""nano with a chat template, for tasks that chat."""

from __future__ import annotations

from typing import Any

import pytest

import weir

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def nano() -> tuple[Any, Any]:
    model, tokenizer = weir.load("nano")
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer
