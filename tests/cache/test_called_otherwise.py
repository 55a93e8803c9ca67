"""`generate` of models as people use them: in 16 bits, with adapters, spread over devices, in
pipelines, in TRL, and with all kinds of options.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from roundings import close_runs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    pipeline,
)

import weir
from weir.models import CACHE

POLICY = "sink(3) | recent(8)"
ASKED: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}


def cache_of(model: Any) -> weir.StreamingCache:
    """A cache that folds often."""
    return weir.StreamingCache(model, POLICY, chunk=4)


def words(rows: int) -> Tensor:
    """A prompt without the padding token, which `generate` would take for padding."""
    return torch.randint(1, 61, (rows, 20), generator=torch.Generator().manual_seed(0))


def written(model: Any, tokens: Tensor, cache: Any = None, **more: Any) -> Tensor:
    """The whole conversation after two turns that both ask `tokens`, in one cache."""
    cache = cache_of(model) if cache is None else cache
    first = model.generate(input_ids=tokens, **{CACHE: cache}, **ASKED, **more)
    again = torch.cat([first, tokens], dim=1)
    return model.generate(input_ids=again, **{CACHE: cache}, **ASKED, **more)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a word (w0, w1, …) for each token of the small models."""
    model = Tokenizer(WordLevel({f"w{n}": n for n in range(61)}, unk_token="w60"))
    model.pre_tokenizer = Whitespace()
    more = {"pad_token": "w0", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=model, **more)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_model_of_sixteen_bits(fresh_llama, dtype):
    model, like = fresh_llama().to(dtype), fresh_llama()
    like.load_state_dict({name: t.float() for name, t in model.state_dict().items()})
    cache, tokens = cache_of(model), words(2)
    out = model.generate(
        tokens,
        **{CACHE: cache},
        **ASKED,
        return_dict_in_generate=True,
        output_logits=True,
    )
    # Against the same weights in float32, in a cache that rounds nothing.
    wanted = like(out.sequences[:, :-1], **{CACHE: cache_of(like)}).logits[:, 19:]
    got = torch.stack(out.logits, dim=1)
    close_runs(got.float(), wanted, model)
    assert written(model, tokens, cache_of(model)).shape == (2, 60)


@pytest.mark.parametrize("spread", ["auto", "a device", "from a disk"])
def test_a_model_with_a_device_map(fresh_llama, tmp_path, spread):
    pytest.importorskip("accelerate")
    plain = fresh_llama()
    plain.save_pretrained(tmp_path / "model")
    where: Any = {"auto": "auto", "a device": {"": "cpu"}}.get(spread)
    if where is None:
        names = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
        where = dict.fromkeys(names, "cpu")
        where |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=where, offload_folder=tmp_path / "disk"
    )
    assert torch.equal(written(model, words(2)), written(plain, words(2)))


@pytest.fixture
def adapted(fresh_llama) -> Any:
    """A model with a LoRA adapter that changes what it says."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    torch.manual_seed(0)
    return peft.get_peft_model(fresh_llama(), config).eval()


def test_an_adapted_model_in_every_way(adapted, fresh_llama):
    tokens = words(2)
    first = adapted.generate(input_ids=tokens, **{CACHE: cache_of(adapted)}, **ASKED)
    for way in (
        adapted.generate(input_ids=tokens, cache=cache_of(adapted), **ASKED),
        adapted.generate(input_ids=tokens, past_key_values=cache_of(adapted), **ASKED),
        weir.generate(adapted, tokens, policy=POLICY, chunk=4, **ASKED),
        adapted.generate(
            input_ids=tokens, custom_generate=weir.generate, policy=POLICY, chunk=4, **ASKED
        ),
    ):
        assert torch.equal(way, first)
    assert not torch.equal(first, fresh_llama().generate(tokens, **ASKED))
    two = written(adapted, tokens)
    assert torch.equal(two, written(adapted.merge_and_unload(), tokens))


def test_a_row_of_an_adapted_model_may_end_early(adapted):
    tokens = words(2)
    rows = adapted.generate(input_ids=tokens, **{CACHE: cache_of(adapted)}, **ASKED)
    mine, others = rows[0, 20:].tolist(), rows[1, 20:].tolist()
    end = next(token for token in mine[:6] if token not in others)
    cache = cache_of(adapted)
    adapted.generate(input_ids=tokens, **{CACHE: cache}, **ASKED, eos_token_id=end)
    assert cache.seen == [20 + mine.index(end) + 1, 29]


def test_a_pipeline_in_every_way(llama, tokenizer):
    writer = pipeline("text-generation", model=llama, tokenizer=tokenizer)
    text = tokenizer.decode(words(1)[0])
    asked = {"max_new_tokens": 10, "do_sample": False, "return_tensors": True}
    plain = weir.generate(llama, words(1), policy=POLICY, chunk=4, **ASKED)[0].tolist()
    for way in (
        {"cache": cache_of(llama)},
        {"past_key_values": cache_of(llama)},
        {"custom_generate": weir.generate, "policy": POLICY, "chunk": 4},
    ):
        assert writer(text, **asked, **way)[0]["generated_token_ids"] == plain
    heard = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    more = {"policy": POLICY, "chunk": 4, "streamer": heard}
    writer(text, **asked, custom_generate=weir.generate, **more)
    assert "".join(heard).split() == tokenizer.decode(plain[20:]).split()


def test_what_trl_generates_with(fresh_llama):
    """TRL unwraps the model it trains, and overrides its configuration while it generates."""
    utils = pytest.importorskip("trl.models.utils")
    accelerate = pytest.importorskip("accelerate")
    model = fresh_llama()
    wanted = written(fresh_llama(), words(2))
    model.train()  # as a trainer does; the model has no dropout
    model.gradient_checkpointing_enable()
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    cache = cache_of(model)
    kwargs = {"temperature": 0.5, "cache_implementation": None}
    with utils.unwrap_model_for_generation(prepared, accelerator, generation_kwargs=kwargs) as it:
        assert torch.equal(written(it, words(2), cache), wanted)
    loss = model(words(2), labels=words(2), use_cache=False).loss
    loss.backward()  # training can go on afterwards
    assert all(p.grad is not None for p in model.parameters())


WAYS: dict[str, dict[str, Any]] = {
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "attention and states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "samples": {"do_sample": True, "num_return_sequences": 2, "temperature": 0.7, "min_p": 0.05},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
    "penalties": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "lengths": {
        "min_new_tokens": 4,
        "exponential_decay_length_penalty": (3, 1.1),
        "eos_token_id": 3,
    },
    "words": {"bad_words_ids": [[5]], "suppress_tokens": [7, 9], "eos_token_id": 3},
    "chunks": {"prefill_chunk_size": 6},
    "time": {"max_time": 60.0},
    "a bias": {"sequence_bias": [[[4], 2.0]]},
    "a watermark": {"renormalize_logits": True, "top_k": 5, "do_sample": True},
    "a prefix": {"prefix_allowed_tokens_fn": lambda row, seen: [1, 2, 3, 5, 8, 13, 21]},
    "guidance": {"guidance_scale": 1.3},
    "compiling": {"disable_compile": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.thinned(2)
def test_below_the_budget_every_option_gives_what_transformers_own_cache_gives(
    llama: PreTrainedModel, way: str
) -> None:
    def asked(**cache: Any) -> Tensor:
        torch.manual_seed(0)
        out = llama.generate(words(2), **{**ASKED, **WAYS[way]}, **cache)
        return out if isinstance(out, Tensor) else out.sequences

    whole = "sink(4) | recent(92)"
    wanted = asked()
    assert torch.equal(asked(**{CACHE: weir.StreamingCache(llama, whole, chunk=4)}), wanted)
    assert torch.equal(asked(custom_generate=weir.generate, policy=whole), wanted)
