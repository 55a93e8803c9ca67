"""Images and embeddings in a stream: cut anywhere, saved in the middle, refused by name."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import shared, tokens
from reference.seeing import CAUSAL, CONFIGS, IMAGE, THREE_AXES, Prompt, prompt, seeing
from roundings import close_runs
from torch import Tensor

import weir
from weir import Stream, WeirError
from weir.models import embed, offsets
from weir.models.embedding import mismatch
from weir.stream.inputs import pieces_of

pytestmark = pytest.mark.thinned(3, least=2)

FAMILIES = [*CAUSAL, *THREE_AXES]
families = pytest.mark.parametrize("name", FAMILIES)
POLICIES = ("streaming_llm(budget=10)", "snapkv(budget=16, window=4)", "subgen(budget=24)")


def asked(name: str, seed: int = 0) -> Prompt:
    return prompt(name, [5, 0, 3, 0, 0, 7], seed=seed)


def given_of(name: str, given: Prompt, start: int, stop: int | None) -> dict[str, Any]:
    """Return the tokens from `start` to `stop` as embeddings, with what their model needs."""
    model = seeing(name)
    these = {"embeddings": embed(model, given.given)[:, start:stop]}
    within = offsets(model, given.given)
    assert (within is not None) == (name in THREE_AXES)
    if within is not None:
        these["offsets"] = within[:, start:stop]
    return these


@pytest.mark.parametrize(("name", "policy"), [*zip(FAMILIES, cycle(POLICIES), strict=False)])
def test_a_stream_cut_anywhere_also_inside_an_image_is_one_stream(name: str, policy: str) -> None:
    model, given = seeing(name), asked(name)
    whole = Stream(model, policy, chunk=5)
    at_once = whole.feed(given.given, all_logits=True)
    whole_of = given_of(name, given, 0, None)
    vectors = whole_of["embeddings"]
    assert vectors.shape == (1, given.ids.shape[1], 32)
    for sizes in ([1] * vectors.shape[1], [7, 1, 2], [6, 3]):
        cut = Stream(model, policy, chunk=5)
        done, parts = 0, []
        for size in [*sizes, vectors.shape[1] - sum(sizes)]:
            if size:
                piece = {key: t[0, done : done + size] for key, t in whole_of.items()}
                parts.append(cut.feed(**piece, all_logits=True))
                done += size
        close_runs(torch.cat(parts, dim=1), at_once, model)
        assert torch.equal(cut.slots(1).position, whole.slots(1).position)


def test_images_longer_than_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = seeing("llava"), asked("llava")
    whole = Stream(model, "streaming_llm(budget=10)", chunk=5)
    wanted = whole.feed(given.given, all_logits=True)
    monkeypatch.setattr("weir.stream.stream.PIECE", 7)
    cut = Stream(model, "streaming_llm(budget=10)", chunk=5)
    close_runs(cut.feed(given.given, all_logits=True), wanted, model)


@families
def test_saved_and_restored_in_the_middle_of_an_image(name: str, tmp_path: Path) -> None:
    model, given = seeing(name), asked(name)
    inside = 5 + CONFIGS[name][2] // 2
    assert given.ids[0, inside - 1] == given.ids[0, inside] == IMAGE
    stream = Stream(model, "h2o(budget=12)", chunk=4, seed=3)
    stream.feed(**given_of(name, given, 0, inside))
    assert stream.last == [None]
    stream.save(tmp_path / "half")
    again = Stream.restore(model, tmp_path / "half")
    assert again.last == [None]
    for one in (stream, again):
        one.feed(given.ids[:, inside:], **given_of(name, given, inside, None))
    ours, theirs = (list(one.generate(8, temperature=1.0, stop=[])) for one in (stream, again))
    assert ours == theirs
    assert stream.last == again.last == [ours[-1]]


def test_a_batch_of_streams_with_images() -> None:
    model, both = seeing("llava"), prompt("llava", [5, 0, 3], [2, 0, 6])
    stream = Stream(model, "streaming_llm(budget=10)", chunk=4)
    logits = stream.feed(both.given)
    for row in range(2):
        alone = Stream(model, "streaming_llm(budget=10)", chunk=4)
        only = {
            "input_ids": both.ids[row : row + 1],
            "pixel_values": both.pictures["pixel_values"][row : row + 1],
        }
        close_runs(alone.feed(only)[0], logits[row], model)
    assert stream.last == both.ids[:, -1].tolist()


def test_scores_of_words_between_images_and_none_of_images() -> None:
    model, given = seeing("internvl"), asked("internvl")
    stream = Stream(model, "streaming_llm(100)")
    found = stream.score(given.given)[0]
    is_image = given.ids[0] == IMAGE
    nothing_before = torch.arange(len(is_image)) == 0
    assert torch.equal(found.isnan(), is_image | nothing_before)
    with torch.no_grad():
        plain = model(**given.given).logits[0].log_softmax(-1)
    at = 5 + 4 + 1  # the second word after the first image
    close_runs(found[at], -plain[at - 1, given.ids[0, at]], model)
    # Later tokens are scored after the words, as in a stream without images.
    assert bool(stream.score([3, 4]).isfinite().all())


def test_words_as_embeddings_are_the_words() -> None:
    model, ids = shared("llama"), tokens(1, 30)
    words, vectors = Stream(model, "window(12)", chunk=4), Stream(model, "window(12)", chunk=4)
    looked_up: Tensor = model.get_input_embeddings()(ids)
    ours = vectors.feed(ids, embeddings=looked_up, all_logits=True)
    close_runs(ours, words.feed(ids, all_logits=True), model)
    assert vectors.last == words.last == [int(ids[0, -1])]


@pytest.mark.parametrize(
    ("embeddings", "said"),
    [
        (torch.zeros(4, 31), r"embeddings must be \[tokens, 32\].*got \[4, 31\]"),
        (torch.zeros(32), r"got \[32\]"),
        (torch.zeros(4, 32, dtype=torch.float64), r"must be float32, got float64"),
        (torch.zeros(0, 32), "a stream needs at least one embedding, got none"),
        pytest.param(
            torch.tensor([[0.0] * 32, [float("nan")] * 32]),
            "embedding 2 of this call is infinite or",
            marks=pytest.mark.claim,
        ),
        pytest.param(
            torch.full((2, 3, 32), float("inf")),
            "embedding 1 of row 0 of this call",
            marks=pytest.mark.claim,
        ),
        ([[0.0] * 32], "embeddings must be a tensor"),
    ],
)
def test_embeddings_that_are_not_the_models(embeddings: Any, said: str) -> None:
    stream = Stream(shared("llama"), "window(12)")
    stream.feed([1, 2])
    with pytest.raises(WeirError, match=said):
        stream.feed(embeddings=embeddings)
    assert stream.seen == 2


def test_what_makes_no_sense_is_refused() -> None:
    model, given = seeing("llava"), asked("llava")
    stream = Stream(model, "window(100)")
    pixels = given.pictures["pixel_values"]
    with pytest.raises(WeirError, match="token ids must be"):
        stream.feed()
    with pytest.raises(WeirError, match="the call has no image"):
        stream.feed(given.ids)
    with pytest.raises(WeirError, match="contain no image token"):
        stream.feed({"input_ids": [1, 2], "pixel_values": pixels})
    with pytest.raises(WeirError, match="do not match its image tokens"):
        stream.feed({"input_ids": given.ids, "pixel_values": pixels[:2]})
    for wrong in (pixels[:, :1], pixels[0], pixels[..., :12], pixels.numpy(), pixels.tolist()):
        with pytest.raises(WeirError, match=r"cannot read these ids and images .*processor"):
            stream.feed({"input_ids": given.ids, "pixel_values": wrong})
    with pytest.raises(WeirError, match="does not accept pixel_values_videos"):
        stream.feed({"input_ids": given.ids, "pixel_values_videos": pixels})
    with pytest.raises(WeirError, match="needs input_ids as a tensor"):
        embed(model, {"input_ids": given.ids.tolist(), "pixel_values": pixels})
    with pytest.raises(WeirError, match="images or embeddings, not both"):
        stream.feed(given.given, embeddings=torch.zeros(given.ids.shape[1], 32))
    with pytest.raises(WeirError, match=r"ids of embeddings must have the shape \[1, 3\]"):
        stream.feed([1, 2], embeddings=torch.zeros(3, 32))
    assert stream.seen == 0
    text = Stream(shared("llama"), "window(100)")
    with pytest.raises(WeirError, match="LlamaForCausalLM sees no images"):
        text.feed(given.given)
    anew = Stream(model, "recompute(budget=16)")
    with pytest.raises(WeirError, match="recompute computes its window again"):
        anew.feed(given.given)
    gemma = shared("gemma3-multimodal")
    with pytest.raises(WeirError, match="both directions in gemma3"):
        Stream(gemma, "window(20)").feed({"input_ids": [96], "pixel_values": pixels})


@pytest.mark.parametrize(
    ("within", "said"),
    [
        (torch.zeros(4, 5), "offsets must be whole numbers"),
        (torch.zeros(4, 5, dtype=torch.int64), "must be at least 1, got 0"),
        (torch.full((4, 5), -1), "offsets must be whole numbers from 0"),
        (torch.full((4, 5), 2**20), "offsets must be whole numbers from 0 to 1,048,575"),
        (torch.ones(3, 5, dtype=torch.int64), r"must be \[1, 4, 5\], got \[1, 3, 5\]"),
        ([[0, 0, 0, 1, 1]] * 4, r"must be \[1, 4, 5\], got "),
    ],
)
def test_offsets_that_are_none(within: Any, said: str) -> None:
    stream = Stream(seeing("qwen2-vl"), "window(12)")
    with pytest.raises(WeirError, match=said):
        stream.feed(embeddings=torch.zeros(4, 32), offsets=within)
    with pytest.raises(WeirError, match="offsets are only for embeddings"):
        stream.feed([1, 2], offsets=within)
    with pytest.raises(WeirError, match="LlamaForCausalLM have one place each"):
        Stream(shared("llama"), "window(12)").feed(embeddings=torch.zeros(4, 32), offsets=within)
    assert stream.seen == 0


@pytest.mark.parametrize(
    "said",
    [
        "Image features and image tokens do not match, tokens: 1, features: 12",
        "At least one sample has <image> tokens not divisible by patch_size.",
    ],
)
def test_each_complaint_of_a_model_about_its_images_is_told_as_one(said: str) -> None:
    told = mismatch(ValueError(said))
    assert "do not match its image tokens" in str(told) and said in str(told)
    assert mismatch(RuntimeError(said)) is None
    assert mismatch(ValueError("not divisible by patch_size")) is None


def test_the_model_is_as_it_was_after_images_were_embedded() -> None:
    model, given = seeing("smolvlm"), asked("smolvlm")
    decoder = model.get_decoder()
    assert "forward" not in vars(decoder)
    embed(model, given.given)
    with pytest.raises(WeirError, match="do not match its image tokens"):
        embed(model, {**given.given, "input_ids": given.ids[:, :6]})
    assert "forward" not in vars(decoder)
    assert weir.Stream(model, "window(9)").feed([1, 2]).shape == (1, 97)


def test_an_iterator_yields_numbers_and_no_truth_values():
    with pytest.raises(WeirError, match="whole numbers, got true"):
        list(pieces_of(iter([3, True]), 4))
