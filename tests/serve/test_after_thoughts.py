"""An answer follows its schema after its thoughts."""

from __future__ import annotations

import json
import re

import pytest
import torch
from servers import CHATML, make_client, make_tokenizer, serving

from weir.serve.after_thoughts import AfterThoughts, ThoughtTokens
from weir.serve.structured import GrammarCompiler
from weir.serve.thoughts import CLOSE, OPEN

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
ENDS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
USER = {"role": "user", "content": "Hi"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}


class Drawn:
    """An answer drawn from random logits, in which a short thought is likely at the beginning."""

    def __init__(self, seed: int, *, is_open: bool, tokens: int = 120) -> None:
        tokenizer = make_tokenizer()
        stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
        size = len(tokenizer)
        inner = GrammarCompiler(tokenizer, frozenset({stop}), size).compile_schema(
            SCHEMA, strict=True
        )()
        constraint = AfterThoughts(inner, ThoughtTokens(tokenizer, {stop}, size), is_open=is_open)
        generator = torch.Generator().manual_seed(seed)
        wanted = tokenizer(("" if is_open else OPEN) + "Hm." + CLOSE, add_special_tokens=False)
        wanted = list(wanted["input_ids"])
        ids: list[int] = []
        while len(ids) < tokens and not constraint.done:
            logits = torch.randn(size, generator=generator)
            logits[stop] += 30  # the model prefers to end the answer
            if len(ids) < len(wanted):
                logits[wanted[len(ids)]] += 20
            token = int(constraint.allow(logits).argmax())
            constraint.accept(token)
            if token == stop:
                break
            ids.append(token)
        self.text, self.done = tokenizer.decode(ids), constraint.done


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_the_schema_holds_after_the_thoughts(seed: int, is_open: bool) -> None:
    drawn = Drawn(seed, is_open=is_open)
    thoughts, closed, answer = drawn.text.partition(CLOSE)
    assert closed
    assert thoughts.removeprefix(OPEN) == "Hm."
    assert thoughts.startswith(OPEN) != is_open
    assert list(json.loads(answer)) == ["a"]
    assert drawn.done


def test_the_server_lets_a_model_think_before_a_schema() -> None:
    """This model generates only letters. If it can think, it never reaches the JSON."""
    body = {"model": "small", "messages": [USER], "max_tokens": 30, "response_format": FORMAT}
    said = {}
    for name, template in (("opens", OPENS), ("ends", ENDS), ("knows", CHATML)):
        with serving(make_client(template=template)) as server:
            answer = server.post("/v1/chat/completions", body).json()
            message = answer["choices"][0]["message"]
            said[name] = message["content"], message.get("reasoning_content")
    content, thoughts = said["opens"]
    assert content == ""
    assert re.fullmatch(r"[a-z .]+", thoughts)
    for name in ("ends", "knows"):
        content, thoughts = said[name]
        assert not thoughts
        assert list(json.loads(content)) == ["a"]
