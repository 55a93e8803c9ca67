"""Models with images: read with weir's cache, and compared with loops that do not use weir."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference.models import make, shared, tokens
from reference.naive import pipe_of, recent_of, sink_of
from reference.seeing import CAUSAL, CONFIGS, IMAGE, Prompt, make_seeing, prompt, seeing
from reference.streaming import streaming_logits
from roundings import close_runs
from torch import Tensor
from transformers import PreTrainedModel

from weir import Stream, StreamingCache, WeirError

pytestmark = pytest.mark.thinned(4, least=2)

families = pytest.mark.parametrize("name", CAUSAL)


@torch.no_grad()
def logits(model: PreTrainedModel, given: dict[str, Any], **more: Any) -> Tensor:
    return model(**given, **more).logits


@torch.no_grad()
def by_hand(model: PreTrainedModel, asked: Prompt) -> Tensor:
    """The embeddings of a prompt: words looked up, each image's features in place of its tokens."""
    embeddings = model.get_input_embeddings()(asked.ids)
    if asked.pictures:
        features = model.base_model.get_image_features(**asked.pictures, return_dict=True)
        found = features.pooler_output
        flat = found.flatten(0, 1) if isinstance(found, Tensor) else torch.cat(list(found))
        embeddings[asked.ids == IMAGE] = flat
    return embeddings


@families
def test_below_the_budget_a_prompt_with_images_is_the_plain_model(name: str) -> None:
    model, asked = seeing(name), prompt(name, [5, 0, 3, 0, 2], [3, 0, 4, 1, 0, 2])
    cache = StreamingCache(model, "streaming_llm(100)", chunk=3)
    ours = logits(model, asked.given, past_key_values=cache)
    close_runs(ours, logits(model, asked.given, use_cache=False), model)
    # Other images give other logits.
    other = prompt(name, [5, 0, 3, 0, 2], [3, 0, 4, 1, 0, 2], seed=1)
    unlike = logits(model, {**asked.given, **other.pictures}, use_cache=False)
    assert float((ours - unlike).abs().max()) > 0.1


@families
def test_a_stream_with_images_is_streaming_llm_to_the_letter(name: str) -> None:
    model, asked = seeing(name), prompt(name, [9, 0, 3, 0, 0, 11, 0, 4])
    cache = StreamingCache(model, "streaming_llm(budget=10)", chunk=1)
    ours = logits(model, asked.given, past_key_values=cache)
    close_runs(ours, streaming_logits(model, by_hand(model, asked), 4, 10), model)
    assert cache.slots(0).position.max() == asked.ids.shape[1] - 1


def naive_of(
    naive: Callable[..., Any], model: PreTrainedModel, embeddings: Tensor, **how: Any
) -> Tensor:
    """The naive loop over embeddings [tokens, width]: token n is row n of them."""
    decoder = model.get_decoder()
    read = SimpleNamespace(
        embed_tokens=lambda token: embeddings[token],
        layers=decoder.layers,
        norm=decoder.norm,
        rotary_emb=decoder.rotary_emb,
    )
    seen = SimpleNamespace(model=read, lm_head=model.lm_head)
    return naive(seen, **how).feed(range(len(embeddings)))


@families
@pytest.mark.thinned(4, least=2, repeats="one loop in each family with images")
def test_a_pipe_of_pools_with_images_is_the_naive_loop(name: str, naive: Any) -> None:
    model, asked = seeing(name), prompt(name, [9, 0, 3, 0, 0, 11, 0, 4], seed=2)
    fold = pipe_of(sink_of(3), recent_of(8))
    wanted = naive_of(naive, model, by_hand(model, asked)[0], fold=fold, pools=2, chunk=5)
    cache = StreamingCache(model, "sink(3) | recent(8)", chunk=5)
    close_runs(logits(model, asked.given, past_key_values=cache)[0], wanted, model)


KEEPING = [
    "snapkv(budget=16, window=4)",
    "h2o(budget=16)",
    "sink(2) | recent(8) | balance(8)",
    "subgen(budget=24)",
]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        (name, policy)  # every second pair
        for family, name in enumerate(CAUSAL)
        for number, policy in enumerate(KEEPING)
        if (family + number) % 2 == 0
    ],
)
@pytest.mark.thinned(8)
def test_policies_keep_of_images_what_the_decoder_alone_keeps(name: str, policy: str) -> None:
    # A text model with the same decoder that reads the embeddings, one after the other.
    model, asked = seeing(name), prompt(name, [9, 0, 3, 0, 0, 11, 0, 4], seed=3)
    if name == "internvl":
        alone = make("qwen2", bos_token_id=None, eos_token_id=None)
    elif name in ("pixtral", "mistral3"):
        alone = make("mistral", bos_token_id=None, eos_token_id=None, head_dim=8)
    else:
        alone = make("llama", bos_token_id=None, eos_token_id=None)
    alone.model.load_state_dict(model.get_decoder().state_dict())
    alone.lm_head.load_state_dict(model.lm_head.state_dict())
    theirs, given = StreamingCache(alone, policy, chunk=4), by_hand(model, asked)
    wanted = torch.cat(
        [
            logits(alone, {"inputs_embeds": one}, past_key_values=theirs)
            for one in given.split(1, 1)
        ],
        dim=1,
    )
    ours = StreamingCache(model, policy, chunk=4)
    close_runs(logits(model, asked.given, past_key_values=ours), wanted, model)
    assert torch.equal(ours.slots(1).position, theirs.slots(1).position)


@families
def test_rows_with_and_without_images_are_what_they_are_alone(name: str) -> None:
    model, parts = seeing(name), ([5, 0, 3, 0, 9], [6], [2, 0, 4])
    both = prompt(name, *parts)
    mask = torch.ones_like(both.ids)
    lengths = [both.ids.shape[1], 6, 6 + CONFIGS[name][2]]
    for row, length in enumerate(lengths):
        mask[row, : mask.shape[1] - length] = 0
    cache = StreamingCache(model, "streaming_llm(budget=10)", chunk=4)
    ours = logits(model, {**both.given, "attention_mask": mask}, past_key_values=cache)
    embeddings = by_hand(model, both)
    for row, length in enumerate(lengths):
        alone = StreamingCache(model, "streaming_llm(budget=10)", chunk=4)
        only = {"inputs_embeds": embeddings[row : row + 1, -length:]}
        wanted = logits(model, only, past_key_values=alone)
        close_runs(ours[row, -length:], wanted[0], model)
    assert cache.seen == lengths


@families
def test_generation_after_images_and_a_second_turn_with_another(name: str) -> None:
    model, asked = seeing(name), prompt(name, [5, 0, 3], [2, 0, 6])
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(asked.ids)
    plain = model.generate(**asked.given, attention_mask=mask, **given)
    cache = StreamingCache(model, "streaming_llm(100)", chunk=4)
    ours = model.generate(**asked.given, attention_mask=mask, past_key_values=cache, **given)
    assert torch.equal(ours, plain)
    # The second turn passes the whole conversation again, but only the pixels of the new image.
    more = prompt(name, [4, 0, 2], [3, 0, 3], seed=5)
    both = torch.cat([ours, more.ids], dim=1)
    given["attention_mask"] = torch.ones_like(both)
    second = model.generate(both, **more.pictures, past_key_values=cache, **given)
    everything = {
        key: torch.cat([asked.pictures[key], more.pictures[key]], dim=1)
        if name in ("idefics3", "smolvlm")
        else torch.stack([asked.pictures[key], more.pictures[key]], dim=1).flatten(0, 1)
        for key in more.pictures
    }
    assert torch.equal(second, model.generate(both, **everything, **given))


@pytest.mark.parametrize("name", [*CAUSAL, "qwen2-vl", "qwen2.5-vl", "gemma3-multimodal"])
def test_generation_from_text_alone_is_the_plain_model(name: str) -> None:
    model, ids = (seeing(name) if name in CONFIGS else shared(name)), tokens(1, 9, seed=2)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    plain = model.generate(ids, **given, pad_token_id=0)
    cache = StreamingCache(model, "streaming_llm(100)", chunk=4)
    assert torch.equal(model.generate(ids, **given, pad_token_id=0, past_key_values=cache), plain)


def test_generation_refuses_image_tokens_without_an_image() -> None:
    model, asked = seeing("llava"), prompt("llava", [5, 0, 3])
    cache = StreamingCache(model, "window(40)")
    with pytest.raises(WeirError, match="the call has no image"):
        model.generate(asked.ids, past_key_values=cache, max_new_tokens=2, pad_token_id=0)
    assert cache.seen == []


def test_images_without_their_tokens_and_tokens_without_their_images() -> None:
    model, asked = seeing("llava"), prompt("llava", [5, 0, 3])
    cache = StreamingCache(model, "window(40)")
    words = torch.full_like(asked.ids, 7)
    with pytest.raises(WeirError, match=rf"no image token \(id {IMAGE}\)"):
        logits(model, {"input_ids": words, **asked.pictures}, past_key_values=cache)
    with pytest.raises(WeirError, match="the call has no image"):
        logits(model, {"input_ids": asked.ids}, past_key_values=cache)
    part = {"input_ids": asked.ids[:, :20], **asked.pictures}
    with pytest.raises(WeirError, match=r"do not match its image tokens .*tokens: 15, features"):
        logits(model, part, past_key_values=cache)
    assert cache.seen == []
    # In a later call, as if the model had generated it, an image token is a token like any other.
    logits(model, {"input_ids": words}, past_key_values=cache)
    logits(model, {"input_ids": asked.ids[:, 6:7]}, past_key_values=cache)
    assert cache.seen == [words.shape[1] + 1]


def test_models_whose_images_attend_both_ways_are_refused_by_name() -> None:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", **sizes, "num_attention_heads": 2},
        text_config={"model_type": "gemma", "vocab_size": 20, **sizes, **heads},
        image_token_index=19,
        projection_dim=16,
    )
    with pytest.raises(WeirError, match="both directions in paligemma"):
        StreamingCache(PaliGemmaForConditionalGeneration(config), "window(20)")


def test_a_model_that_weir_streams_the_text_of_only() -> None:
    model = shared("gemma3-multimodal")
    cache = StreamingCache(model, "window(20)")
    given = {"input_ids": tokens(1, 5), "pixel_values": torch.zeros(1, 3, 28, 28)}
    with pytest.raises(WeirError, match="in gemma3, and weir streams only its text"):
        logits(model, given, past_key_values=cache)


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl"])
def test_the_text_of_models_with_three_axes_of_positions(name: str) -> None:
    model, ids = seeing(name), prompt(name, [70]).ids
    cache = StreamingCache(model, "streaming_llm(budget=20)", chunk=1)
    ours = logits(model, {"input_ids": ids}, past_key_values=cache)
    close_runs(ours, streaming_logits(model, ids, 4, 20), model)


def test_bytes_of_a_video_without_end_stay_as_they_are() -> None:
    model = make_seeing("internvl")
    stream = Stream(model, "streaming_llm(budget=32)", chunk=8)
    sizes = set()
    for frame in range(60):
        stream.feed(prompt("internvl", [2, 0, 1], seed=frame).given)
        sizes.add(stream.nbytes)
        assert list(stream.generate(1, stop=[]))
    assert len(sizes) == 1
    assert stream.seen == 60 * 8
