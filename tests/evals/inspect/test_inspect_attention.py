"""Logits and weights, block by block, compared with maps that are computed at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from reference.models import CONFIGS, OWN_ATTENTION, make, randomized, tokens
from roundings import close_runs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PreTrainedModel

from weir.cache import observing
from weir.errors import WeirError
from weir.evals.inspect import attention
from weir.evals.inspect.attention import Attention, looks_ahead, watch
from weir.models import sink_of

pytestmark = pytest.mark.thinned(3, least=2)

LENGTH = 75
"""Tokens of a sequence: read in several calls, the last one short, and longer than windows."""
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
OTHERS = {
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", SIZES),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **SIZES,
            "global_attn_every_n_layers": 2,
            "local_attention": 16,
            **dict.fromkeys(("bos_token_id", "cls_token_id"), 1),
            **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    ),
    "opt": ("OPTForCausalLM", "OPTConfig", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    "deberta": ("DebertaV2Model", "DebertaV2Config", SIZES),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
    ),
}
"""Models that weir does not stream: class, configuration class, values."""


def other(name: str) -> PreTrainedModel:
    kind, config, values = OTHERS[name]
    return randomized(getattr(transformers, kind)(getattr(transformers, config)(**values)))


def eager(model: PreTrainedModel) -> PreTrainedModel:
    """Let the model use an attention that returns its weights; that of a Zero Sink does already."""
    if sink_of(model.config).kind == "zero":
        return model
    if model.config.model_type in ("falcon", "mpt", "bloom"):
        model.config._attn_implementation = "eager"
    else:
        model.set_attn_implementation("eager")
    return model


def whole(model: PreTrainedModel, ids: Tensor, what: str = "weights") -> dict[int, Tensor]:
    """Maps of every layer [batch, heads, length, length], put together from blocks."""
    maps: dict[int, Tensor] = {}
    batch, length = ids.shape
    nowhere = 0.0 if what == "weights" else -torch.inf

    def put(it: Attention) -> None:
        heads = it.queries.shape[1] * it.queries.shape[2]
        mine = maps.setdefault(it.layer, torch.full((batch, heads, length, length), nowhere))
        for start, stop in it.blocks():
            rows = torch.arange(it.first + start, it.first + stop)
            mine[:, :, rows[:, None], it.places] = getattr(it, what)(start, stop)

    watch(model, ids, put)
    return maps


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set calls to 32 tokens, and blocks to 12 queries."""
    monkeypatch.setattr(attention, "PIECE", 32)
    monkeypatch.setattr(observing, "BLOCK", 12)


def check_weights(model: PreTrainedModel) -> None:
    ids = tokens(2, LENGTH)
    before = model.config._attn_implementation
    got = whole(model, ids)
    assert model.config._attn_implementation == before
    with torch.no_grad():
        wanted = model(input_ids=ids, output_attentions=True).attentions
    assert sorted(got) == list(range(len(wanted)))
    for layer, weights in enumerate(wanted):
        close_runs(got[layer], weights, model, LENGTH)


@pytest.mark.usefixtures("short_calls")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.thinned(4)
def test_weights_are_those_of_output_attentions(name):
    check_weights(eager(make(name)))


@pytest.mark.usefixtures("short_calls")
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "gpt2", "opt"])
def test_weights_of_models_that_weir_does_not_stream_are_too(name):
    check_weights(eager(other(name)))


@pytest.mark.usefixtures("short_calls")
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma2", "gemma3", "gpt-oss"])
def test_both_ways_into_a_model_show_the_same(name, monkeypatch):
    model, ids = make(name), tokens(2, LENGTH)
    wanted = whole(model, ids)

    def refuse(model: PreTrainedModel) -> None:
        raise WeirError("as one that weir does not stream")

    monkeypatch.setattr(attention, "describe", refuse)
    got = whole(model, ids)
    for layer, weights in wanted.items():
        close_runs(got[layer], weights, model, LENGTH)


def test_a_zero_sink_is_not_looked_past():
    model = make("llama-zero-sink")
    assert max(float(w.sum(dim=-1).max()) for w in whole(model, tokens(1, 30)).values()) < 0.999
    model.config._attn_implementation = "sdpa"
    with pytest.raises(
        WeirError, match="was trained with a Zero Sink, but its attention is 'sdpa'"
    ):
        whole(model, tokens(1, 30))


def spied(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """The logits of every layer [batch, heads, length, length], computed at once by the formula."""
    found: list[Tensor] = []

    def spy(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> Any:
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        logits = torch.einsum("bhqd,bhkd->bhqk", q, k) * given["scaling"]
        if (cap := given.get("softcap")) is not None:
            logits = cap * torch.tanh(logits / cap)
        places = torch.arange(q.shape[2])
        ahead = places[:, None] - places
        seen = ahead >= 0
        if (window := given.get("sliding_window")) is not None:
            seen &= ahead < window
        found.append(logits.masked_fill(~seen, -torch.inf))
        return (found[-1].softmax(dim=-1) @ v).transpose(1, 2), None

    AttentionInterface.register("spy", spy)
    model.set_attn_implementation("spy")
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    model.set_attn_implementation("eager")
    return found


@pytest.mark.usefixtures("short_calls")
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "gpt-neox"])
def test_logits_are_what_goes_into_the_softmax(name):
    model = eager(make(name))
    ids = tokens(2, LENGTH)
    wanted = spied(model, ids)
    got = whole(model, ids, "logits")
    for layer, logits in enumerate(wanted):
        close_runs(got[layer], logits, model, LENGTH)


def test_alibi_is_nothing_at_a_querys_own_place():
    model = make("bloom")
    ids = tokens(1, 30)
    with_bias: list[Tensor] = []
    plain: list[Tensor] = []

    def put(it: Attention) -> None:
        with_bias.append(it.logits(0, 30).diagonal(dim1=2, dim2=3))
        dots = torch.einsum("bhgqd,bhkd->bhgqk", it.queries, it.keys) * it.params.scale
        plain.append(dots.flatten(1, 2).diagonal(dim1=2, dim2=3))

    watch(model, ids, put)
    for one, another in zip(with_bias, plain, strict=True):
        close_runs(one, another, model)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is created."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("name", ["llama", "falcon", "gpt2"])
def test_nothing_is_larger_than_a_block_of_a_long_sequences_map(name):
    length = 1024
    changes = {"max_position_embeddings": length}
    if name == "gpt2":
        kind, config, values = OTHERS[name]
        made = getattr(transformers, config)(**{**values, "n_positions": length})
        model = randomized(getattr(transformers, kind)(made))
    else:
        model = make(name, **changes)
    ids = tokens(1, length)
    heads = model.config.num_attention_heads

    def every(it: Attention) -> None:
        for start, stop in it.blocks():
            it.weights(start, stop)

    with Largest() as largest:
        watch(model, ids, every)
    # A block has 64 queries of every head, or one mask of 256 queries for all heads.
    assert heads * 64 * length <= largest.numel <= max(heads * 64, 256) * length


def test_models_without_attention_to_look_at_are_refused():
    with pytest.raises(WeirError, match=r"this mamba has no attention weights to show"):
        watch(other("mamba"), tokens(1, 20), lambda it: None)
    with pytest.raises(WeirError, match=r"this deberta-v2 has no attention weights to show"):
        watch(other("deberta"), tokens(1, 20), lambda it: None)
    with pytest.raises(WeirError, match=r"t5 is an encoder-decoder"):
        watch(other("t5"), tokens(1, 20), lambda it: None)


def test_encoders_look_ahead_and_decoders_do_not():
    assert looks_ahead(other("bert"))
    assert looks_ahead(other("modernbert"))
    assert not looks_ahead(other("gpt2"))
    assert not looks_ahead(other("mamba"))
    assert not any(looks_ahead(make(name)) for name in ("llama", *OWN_ATTENTION))


def test_short_sequences_hold_room_for_few_tokens():
    def measure(it: Attention) -> None:
        held = it.keys.untyped_storage().nbytes() // (it.keys[:, :, 0].numel() * it.keys.itemsize)
        assert held <= 5 * 16

    watch(make("llama"), tokens(8, 16), measure)


def test_what_fails_on_the_way_leaves_a_model_as_it_was():
    def fail(it: Attention) -> None:
        raise ZeroDivisionError

    for model in (make("llama"), make("falcon"), other("bert")):
        before = model.config._attn_implementation
        with pytest.raises(ZeroDivisionError):
            watch(model, tokens(1, 20), fail)
        assert model.config._attn_implementation == before
        with torch.no_grad():
            model(input_ids=tokens(1, 20))
