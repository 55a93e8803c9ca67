"""A desk whose model says anything at all, for what holds it to something."""

from __future__ import annotations

from reference.naive import make_llama
from servers import CHATML, POLICY, make_tokenizer

from weir.serve import Desk, Engine, Limits, MemoryStore


def random_desk(template: str | None = CHATML, rows: int = 3) -> Desk:
    """Its model has random weights, and no token that ends an answer where there is no template."""
    tokenizer = make_tokenizer(template)
    model = make_llama(layers=1, vocab_size=len(tokenizer), tie_word_embeddings=False)
    if template is not None:
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    store = MemoryStore(64)
    engine = Engine(model, POLICY, rows, store, chunk=32)
    return Desk(engine, store, tokenizer, "small", Limits(prompt=20_000))
