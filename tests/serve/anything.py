"""A client whose model can say anything, for tests of what restricts answers."""

from __future__ import annotations

from reference.naive import make_llama
from servers import CHATML, POLICY, make_tokenizer

from weir.serve import Engine, EngineClient, Limits, SessionStore

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "hot": {"type": "boolean"}},
    "required": ["city", "hot"],
    "additionalProperties": False,
}
TAKES_TOOLS = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TAKES_ARGS = TAKES_TOOLS.replace(
    """<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>""",
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}",
)


def random_client(
    template: str | None = CHATML, rows: int = 3, policy: str = POLICY, chunk: int = 32
) -> EngineClient:
    """A client of a model with random weights; without a template, no token ends an answer."""
    tokenizer = make_tokenizer(template)
    model = make_llama(layers=1, vocab_size=len(tokenizer), tie_word_embeddings=False)
    if template is not None:
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    store = SessionStore(keep=64)
    engine = Engine(model, policy, rows, store, chunk=chunk)
    return EngineClient(engine, tokenizer, "small", Limits(prompt=20_000))
