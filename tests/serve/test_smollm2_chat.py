"""A long conversation with a real model through the server keeps its template intact."""

from __future__ import annotations

import pytest
from servers import serving

from weir.serve import Engine, EngineClient, Limits, SessionStore
from weir.stream import BOOK, read_text, render_chat

pytestmark = pytest.mark.models
TURNS = 30
WORDS = 1_400
"""Characters of a turn. Together, the turns are longer than the window of 8,192 tokens."""


def test_thirty_turns_past_the_window_are_fed_as_the_template_has_them(smollm2):
    model, tokenizer = smollm2
    fed: list[int] = []
    noting = model.model.embed_tokens.register_forward_pre_hook(
        lambda module, given: fed.extend(given[0][0].tolist())
    )
    engine = Engine(model, "sink(4) | recent(252)", 1, SessionStore(keep=64))
    client = EngineClient(engine, tokenizer, "smollm2", Limits())
    book = read_text(BOOK)
    history = [{"role": "system", "content": "Answer in one short sentence."}]
    try:
        with serving(client) as server:
            for turn in range(TURNS):
                passage = book[turn * WORDS :][:WORDS]
                history.append({"role": "user", "content": f"{passage}\nWhat is this about?"})
                answer = server.client().chat.completions.create(
                    model="smollm2", messages=history, max_tokens=6, temperature=0
                )
                said = answer.choices[0].message.content
                assert said and "<|im" not in said
                history.append({"role": "assistant", "content": said})
    finally:
        noting.remove()
    assert len(fed) > model.config.max_position_embeddings
    wanted = render_chat(tokenizer, history, add_generation_prompt=False)
    # Nothing is read twice, and only the template's own text is between turns.
    assert str(tokenizer.decode(fed)).startswith(wanted[: wanted.rindex(history[-1]["content"])])
    assert str(tokenizer.decode(fed)).count("<|im_start|>") == 2 * TURNS + 1
