"""Images at places in time, height and width: Qwen2-VL and Qwen2.5-VL against naive loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import compiled
from reference.heavy import heavy_of
from reference.models import shared
from reference.naive import pipe_of, recent_of, sink_of
from reference.seeing import (
    BEGIN,
    END,
    IMAGE,
    THREE_AXES,
    VIDEO,
    Prompt,
    make_seeing,
    prompt,
    seeing,
)
from reference.three_axes import NaiveOnAxes, Spot, spots, streaming_on_axes
from roundings import close_runs
from torch import Tensor
from transformers import PreTrainedModel

from weir import Stream, StreamingCache, WeirError
from weir.models import embed, offsets

pytestmark = pytest.mark.thinned(4, least=2)

families = pytest.mark.parametrize("name", THREE_AXES)


@torch.no_grad()
def logits(model: PreTrainedModel, given: dict[str, Any], **more: Any) -> Tensor:
    return model(**given, **more).logits


def spots_of(asked: Prompt) -> list[Spot]:
    return spots(asked.ids[0].tolist(), IMAGE, 2, 3)


@families
@pytest.mark.parametrize(
    ("policy", "how"),
    [
        ("window(100)", {"chunk": 64}),
        ("h2o(budget=70)", {"chunk": 1}),
        ("subgen(budget=90)", {"chunk": 5}),
        ("streaming_llm(budget=70)", {"chunk": 5, "positions": "original"}),
        ("snapkv(budget=70)", {"chunk": 5, "prefill": "full"}),
    ],
)
def test_below_the_budget_a_stream_is_the_plain_model(
    name: str, policy: str, how: dict[str, Any]
) -> None:
    model, asked = seeing(name), prompt(name, [9, 0, 3, 0, 0, 11, 0, 4])
    cache = StreamingCache(model, policy, **how)
    ours = logits(model, asked.given, past_key_values=cache)
    close_runs(ours, logits(model, asked.given, use_cache=False), model)
    words = torch.tensor([[3, 4, 5, 6, 7, 8]])
    more = logits(model, {"input_ids": words}, past_key_values=cache)
    whole = Prompt(torch.cat([asked.ids, words], dim=1), asked.pictures)
    close_runs(more, logits(model, whole.given, use_cache=False)[:, -6:], model)
    # Positions in time, height and width matter: with plain positions, logits are different.
    words = torch.arange(asked.ids.shape[1])[None]
    flat = logits(model, {**asked.given, "position_ids": words}, use_cache=False)
    assert float((ours - flat).abs().max()) > 0.1


@families
@pytest.mark.parametrize("parts", [[9, 0, 3, 0, 0, 11, 0, 4], [0, 2, 0, 0, 7]])
def test_a_stream_with_images_is_streaming_llm_to_the_letter(name: str, parts: list[int]) -> None:
    # In the second case, sinks are parts of an image that is still being read.
    model, asked = seeing(name), prompt(name, parts)
    cache = StreamingCache(model, "streaming_llm(budget=10)", chunk=1)
    ours = logits(model, asked.given, past_key_values=cache)
    given = embed(model, asked.given)
    close_runs(ours, streaming_on_axes(model, given, spots_of(asked), 4, 10), model)


def naive_of(model: PreTrainedModel, embeddings: Tensor, **how: Any) -> Tensor:
    """The naive loop over embeddings [tokens, width]: token n is row n of them."""
    decoder: Any = model.get_decoder()
    read = SimpleNamespace(
        embed_tokens=lambda token: embeddings[token],
        layers=decoder.layers,
        norm=decoder.norm,
        rotary_emb=decoder.rotary_emb,
        config=decoder.config,
    )
    seen = SimpleNamespace(model=read, lm_head=model.lm_head)
    return NaiveOnAxes(seen, **how).feed(range(len(embeddings)))


@pytest.mark.parametrize(
    ("name", "policy", "pools", "chunk"),
    [
        ("qwen2-vl", "sink(3) | recent(8)", [sink_of(3), recent_of(8)], 1),
        ("qwen2.5-vl", "sink(3) | recent(8)", [sink_of(3), recent_of(8)], 5),
        ("qwen2-vl", "sink(13)", [sink_of(13)], 5),  # no run: new tokens touch the front
        ("qwen2.5-vl", "heavy(10)", [heavy_of(10)], 5),  # nor here; each head keeps other tokens
        ("qwen2-vl", "recent(6) | heavy(7)", [recent_of(6), heavy_of(7)], 1),
        ("qwen2.5-vl", "window(11)", [recent_of(11)], 7),
    ],
)
@pytest.mark.thinned(4, least=2, repeats="one loop in each family with three axes")
def test_a_pipe_of_pools_with_images_is_the_naive_loop(
    name: str, policy: str, pools: list[Any], chunk: int
) -> None:
    model, asked = seeing(name), prompt(name, [7, 0, 3, 0, 0, 11, 0, 4], seed=2)
    how = {"fold": pipe_of(*pools), "pools": len(pools), "chunk": chunk}
    wanted = naive_of(model, embed(model, asked.given)[0], stream=spots_of(asked), **how)
    cache = StreamingCache(model, policy, chunk=chunk)
    close_runs(logits(model, asked.given, past_key_values=cache)[0], wanted, model)
    assert cache.seen == [asked.ids.shape[1]]


@families
@pytest.mark.parametrize("policy", ["streaming_llm(budget=10)", "h2o(budget=14)", "window(9)"])
def test_rows_with_and_without_images_are_what_they_are_alone(name: str, policy: str) -> None:
    model, parts = seeing(name), ([5, 0, 3, 0, 9], [6], [2, 0, 4])
    both = prompt(name, *parts)
    mask, lengths = torch.ones_like(both.ids), [5 + 8 + 3 + 8 + 9, 6, 2 + 8 + 4]
    for row, length in enumerate(lengths):
        mask[row, : mask.shape[1] - length] = 0
    cache = StreamingCache(model, policy, chunk=4)
    ours = logits(model, {**both.given, "attention_mask": mask}, past_key_values=cache)
    more = torch.tensor([[3], [4], [5]])
    later = logits(model, {"input_ids": more}, past_key_values=cache)
    pixels, done = both.pictures["pixel_values"].split(24), 0
    for row, length in enumerate(lengths):
        count = parts[row].count(0)
        own = Prompt(both.ids[row : row + 1, -length:], {})
        if count:
            patches = torch.cat(pixels[done : done + count])
            own.pictures["pixel_values"] = patches
            own.pictures["image_grid_thw"] = both.pictures["image_grid_thw"][:count]
        done += count
        alone = StreamingCache(model, policy, chunk=4)
        close_runs(ours[row, -length:], logits(model, own.given, past_key_values=alone)[0], model)
        wanted = logits(model, {"input_ids": more[row : row + 1]}, past_key_values=alone)
        close_runs(later[row], wanted[0], model)
        assert cache.rows.drift[row] == alone.rows.drift[0] == -3 * count
    assert cache.seen == [length + 1 for length in lengths]


@families
def test_generation_and_a_second_turn_with_another_image(name: str) -> None:
    model, asked = seeing(name), prompt(name, [5, 0, 3], [2, 0, 6])
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(asked.ids)
    plain = model.generate(**asked.given, attention_mask=mask, **given)
    cache = StreamingCache(model, "streaming_llm(100)", chunk=4)
    ours = model.generate(**asked.given, attention_mask=mask, past_key_values=cache, **given)
    assert torch.equal(ours, plain)
    # Pass only what is new, with a mask over everything so far.
    more = prompt(name, [4, 0, 2], [3, 0, 3], seed=5)
    new = torch.cat([ours[:, -1:], more.ids], dim=1)  # the last token that was said is not fed yet
    both = Prompt(torch.cat([ours, more.ids], dim=1), {})
    said = {**more.given, "input_ids": new}
    said["mm_token_type_ids"] = (new == IMAGE).int()
    said["attention_mask"] = torch.ones_like(both.ids)
    second = model.generate(**said, past_key_values=cache, **given)
    for key in more.pictures:  # for each row, its first image and then its second
        old, its = (t.pictures[key].chunk(2) for t in (asked, more))
        both.pictures[key] = torch.cat([old[0], its[0], old[1], its[1]])
    given["attention_mask"] = said["attention_mask"]
    wanted = model.generate(**both.given, **given)
    assert torch.equal(second[:, new.shape[1] :], wanted[:, both.ids.shape[1] :])


@families
def test_beams_and_several_answers_are_the_plain_models(name: str) -> None:
    model, asked = seeing(name), prompt(name, [5, 0, 3], [2, 0, 6])
    given = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "num_beams": 3}
    given |= {"attention_mask": torch.ones_like(asked.ids), "num_return_sequences": 2}
    plain = model.generate(**asked.given, **given)
    cache = StreamingCache(model, "streaming_llm(100)", chunk=4)
    assert torch.equal(model.generate(**asked.given, past_key_values=cache, **given), plain)


@families
def test_videos(name: str) -> None:
    model = seeing(name)
    ids = torch.tensor([[5, 6, BEGIN, *[VIDEO] * 12, END, 7, 8, BEGIN, *[IMAGE] * 6, END, 9]])
    given: dict[str, Any] = {
        "pixel_values_videos": torch.randn(48, 12),
        "video_grid_thw": torch.tensor([[2, 4, 6]]),
        "pixel_values": torch.randn(24, 12),
        "image_grid_thw": torch.tensor([[1, 6, 4]]),
        "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
    }
    if name == "qwen2.5-vl":
        given["second_per_grid_ts"] = torch.tensor([1.5])  # some versions read this as 1
    for chunk in (1, 64):
        cache = StreamingCache(model, "streaming_llm(budget=60)", chunk=chunk)
        ours = logits(model, {"input_ids": ids, **given}, past_key_values=cache)
        wanted = logits(model, {"input_ids": ids, **given}, use_cache=False)
        close_runs(ours, wanted, model)
    within = offsets(model, {"input_ids": ids, **given})
    assert within is not None
    frames = within[0, 3:15, 0].tolist()
    assert frames == [0] * 6 + [frames[-1]] * 6 and frames[-1] > 0


@families
def test_far_out_a_stream_is_what_it_is_at_its_beginning(name: str) -> None:
    model, asked = seeing(name), prompt(name, [9, 0, 3, 0, 0, 11, 0, 4])
    near = StreamingCache(model, "streaming_llm(budget=10)", chunk=3)
    far = StreamingCache(model, "streaming_llm(budget=10)", chunk=3, origin=40_000_000)
    wanted = logits(model, asked.given, past_key_values=near)
    close_runs(logits(model, asked.given, past_key_values=far), wanted, model)


@families
def test_rows_move_between_caches_in_the_middle_of_an_image(name: str) -> None:
    model, asked = seeing(name), prompt(name, [9, 0, 3, 0, 0, 4])
    vectors, within = embed(model, asked.given), offsets(model, asked.given)
    assert within is not None

    def feed(cache: StreamingCache, start: int, stop: int) -> Tensor:
        some = {"inputs_embeds": vectors[:, start:stop], "weir_offsets": within[:, start:stop]}
        return logits(model, some, past_key_values=cache)

    policy, inside = "h2o(budget=12)", 24
    assert asked.ids[0, inside - 1] == asked.ids[0, inside] == IMAGE
    one = StreamingCache(model, policy, chunk=5)
    feed(one, 0, inside)
    other = StreamingCache(model, policy, chunk=5, batch=2)
    other.put_row(1, one.take_row(0))
    wanted = feed(one, inside, vectors.shape[1])
    with other.only(1, 2):
        assert torch.equal(feed(other, inside, vectors.shape[1]), wanted)
    other.reset_row(1)
    with other.only(1, 2):
        fresh = StreamingCache(model, policy, chunk=5)
        assert torch.equal(feed(other, 0, 20), feed(fresh, 0, 20))


@pytest.mark.parametrize(
    ("said", "drift", "column", "value"),
    [
        ("drift is missing", None, 0, 0),
        ("drift is -99, which is impossible after 36 tokens", -99, 0, 0),
        ("drift must be a whole number", 0.5, 0, 0),
        ("span begins at places that are not among 0 to 30", -6, 0, 31),
        ("span begins at places", -6, 0, -1),
        ("span has lengths that no token and no image can have", -6, 1, 0),
    ],
)
def test_a_state_that_no_row_can_have(said: str, drift: Any, column: int, value: int) -> None:
    model, asked = seeing("qwen2-vl"), prompt("qwen2-vl", [9, 0, 3, 0, 8])
    cache = StreamingCache(model, "sink(3) | recent(8)", chunk=5)
    logits(model, asked.given, past_key_values=cache)
    state = cache.take_row(0)
    assert state.facts["drift"] == -6
    cache.put_row(0, state)
    if value or column:
        state.tensors["1.span"][0, 1, 2, column] = value
    state.facts["drift"] = drift
    if drift is None:
        del state.facts["drift"]
    with pytest.raises(WeirError, match=said):
        cache.put_row(0, state)


@pytest.mark.slow
def test_compiled_steps_after_images() -> None:
    name = "qwen2.5-vl"
    model, asked = make_seeing(name), prompt(name, [5, 0, 3, 0, 2], [0, 4, 1, 0, 5])
    words = torch.randint(1, END, (2, 14), generator=torch.Generator().manual_seed(3))

    def read() -> Tensor:
        cache = StreamingCache(model, "streaming_llm(budget=12)", chunk=4)
        parts = [logits(model, asked.given, past_key_values=cache)]
        for step in words.split(1, dim=1):
            parts.append(logits(model, {"input_ids": step}, past_key_values=cache))
        return torch.cat(parts, dim=1)

    usual = read()
    with compiled(model) as taken:
        close_runs(read(), usual, model)
    assert taken


def test_models_with_one_axis_and_policies_that_move_nothing_pay_nothing() -> None:
    def buffers(model: PreTrainedModel, policy: str) -> set[str]:
        return set(StreamingCache(model, policy).plans[0].slab.tensors())

    assert "span" not in buffers(shared("llama"), "streaming_llm(20)")
    assert "span" not in buffers(seeing("internvl"), "streaming_llm(20)")
    assert "span" not in buffers(seeing("qwen2-vl"), "window(20)")
    assert "span" in buffers(seeing("qwen2-vl"), "streaming_llm(20)")


@families
def test_images_and_tokens_that_do_not_go_together(name: str) -> None:
    model, asked = seeing(name), prompt(name, [5, 0, 3, 0])
    cache = StreamingCache(model, "streaming_llm(budget=40)")

    def refused(said: str, **changes: Any) -> None:
        with pytest.raises(WeirError, match=said):
            logits(model, {**asked.given, **changes}, past_key_values=cache)
        assert cache.seen == []

    sizes = asked.pictures["image_grid_thw"]
    refused("more image tokens than pieces of images", image_grid_thw=sizes[:1])
    refused("more images than image tokens", image_grid_thw=sizes[[0, 1, 1]])
    refused("an image has 8 pieces", image_grid_thw=torch.tensor([[1, 4, 8], [1, 4, 6]]))
    refused(
        "at least one patch in each direction", image_grid_thw=torch.tensor([[1, 0, 6], [1, 4, 6]])
    )
    refused(r"must be a tensor \[images, 3\]", image_grid_thw=[[1, 4, 6]])
    refused("more image tokens than pieces of images", image_grid_thw=None)
    refused("the call has no image", pixel_values=None)
    vectors = embed(model, asked.given)
    refused("need token ids", input_ids=None, inputs_embeds=vectors)
    stream = Stream(model, "streaming_llm(budget=40)")
    for said, wrong in (
        ("pixel_values came without image_grid_thw", None),
        (r"must be a tensor \[images, 3\]", sizes.float()),
        ("declares 99 patches, but pixel_values has", torch.tensor([[1, 9, 11]])),
    ):
        with pytest.raises(WeirError, match=said):
            stream.feed({**asked.given, "image_grid_thw": wrong})
        assert stream.seen == 0
    chunked = {"prefill_chunk_size": 9, "max_new_tokens": 2, "pad_token_id": 0}
    # transformers 5.12 passes no image features with the later pieces of a prompt.
    with pytest.raises(WeirError, match=r"prefill_chunk_size|the call has no image"):
        model.generate(**asked.given, past_key_values=cache, **chunked)


@pytest.mark.parametrize("seconds", [[], [float("nan")], [float("inf")], [-1.0], [1e12]])
def test_a_video_of_no_length_of_time_is_refused(seconds: list[float]) -> None:
    model = seeing("qwen2.5-vl")
    ids = torch.tensor([[5, 6, BEGIN, *[VIDEO] * 12, END, 7]])
    given = {
        "input_ids": ids,
        "pixel_values_videos": torch.randn(48, 12),
        "video_grid_thw": torch.tensor([[2, 4, 6]]),
        "second_per_grid_ts": torch.tensor(seconds),
    }
    stream = Stream(model, "streaming_llm(budget=60)")
    with pytest.raises(WeirError, match="second_per_grid_ts"):
        stream.feed(given)
    assert stream.seen == 0
    kinds = {"mm_token_type_ids": 2 * (ids == VIDEO).int()}
    cache = StreamingCache(model, "streaming_llm(budget=60)")
    with pytest.raises(WeirError, match="second_per_grid_ts"):
        logits(model, {**given, **kinds}, past_key_values=cache)


def test_bytes_of_a_video_without_end_stay_as_they_are() -> None:
    model = seeing("qwen2.5-vl")
    stream = Stream(model, "streaming_llm(budget=32)", chunk=8)
    sizes = set()
    for frame in range(40):
        stream.feed(prompt("qwen2.5-vl", [2, 0, 1], seed=frame).given)
        sizes.add(stream.nbytes)
        assert list(stream.generate(1, stop=[]))
    assert len(sizes) == 1
    assert stream.seen == 40 * 12
