"""The policy file next to a model, which is used if no policy is given."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path

import huggingface_hub
import pytest
import torch
from roundings import close_runs
from transformers import AutoModelForCausalLM, GenerationConfig

import weir
from weir.cache import find_model_policy, size_of
from weir.errors import WeirError
from weir.models import ASSETS, CACHE, fingerprint, places
from weir.policies import format_policy_file

HUB = Path(__file__).parents[2] / "hub" / "custom_generate" / "generate.py"
EVERYBODYS = "weir(budget=448)"  # a window of 512, and 64 new tokens
LAYERS = [{"policy": "h2o(8)"}, {"policy": "sink(2) | recent(14)"}]
WRITTEN = "[h2o(8), sink(2) | recent(14)]"


@pytest.fixture
def folder(fresh_llama, tmp_path) -> Path:
    """A folder with a model, and a policy file that was calibrated for it."""
    model = fresh_llama()
    model.generation_config = GenerationConfig()
    model.save_pretrained(tmp_path / "model")
    text = format_policy_file({}, fingerprint(model), LAYERS)
    (tmp_path / "model" / "weir.toml").write_text(text)
    return tmp_path / "model"


def read(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_it_is_taken_by_streams_caches_and_generate(folder, ids):
    model, tokens = read(folder), ids(1, 40)
    assert str(weir.Stream(model).policy) == str(weir.StreamingCache(model).policy) == WRITTEN
    how = {"max_new_tokens": 8, "do_sample": False, "custom_generate": weir.generate}
    said, wanted = (model.generate(tokens, **how, **more) for more in ({}, {"policy": WRITTEN}))
    assert torch.equal(said, wanted)
    assert str(find_model_policy(str(folder))) == WRITTEN


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({"policy": "h2o(20)"}, "h2o(budget=20)"),
        ({"slots": "exact"}, "weir(budget=448, slots=exact)"),
        ({"slots": "fp8"}, "weir(budget=448, slots=fp8)"),
        ({"policy": "h2o(20)", "slots": "int8"}, "quantized(h2o(budget=20), slots=int8)"),
    ],
)
def test_what_is_given_goes_before_it(folder, given, policy):
    (folder / "weir.toml").write_text("not even looked at")
    assert weir.Stream(read(folder), **given).policy == weir.policy(policy)


def test_it_folds_as_often_as_when_it_was_measured_unless_somebody_says_how_often(folder):
    text = (folder / "weir.toml").read_text()
    (folder / "weir.toml").write_text(text.replace("format = 1", "format = 1\nchunk = 16"))
    model, file = read(folder), str(folder / "weir.toml")
    for stream in (
        weir.Stream(model),
        weir.Stream(model, file),
        weir.Stream(model, file, slots="int8"),
    ):
        assert stream.cache.chunk == 16
    assert weir.Stream(model, chunk=8).cache.chunk == 8
    assert weir.Stream(model, WRITTEN).cache.chunk == 64  # as text, no chunk belongs to it
    assert size_of(model, file) == size_of(model, file, chunk=16)
    assert size_of(model, file) != size_of(model, file, chunk=64)
    (folder / "weir.toml").write_text(text.replace("format = 1", "format = 1\nchunk = 0"))
    with pytest.raises(
        WeirError,
        match=r"at least 1, got 0\. Run weir calibrate again\. It is used",
    ):
        weir.Stream(model)


def test_without_one_it_is_the_policy_for_everybody(folder, llama):
    (folder / "weir.toml").unlink()
    assert str(weir.Stream(read(folder)).policy) == EVERYBODYS
    assert str(weir.StreamingCache(llama).policy) == EVERYBODYS  # never was in a folder
    assert find_model_policy(str(folder)) is None


@pytest.mark.filterwarnings("ignore:.*numba and a processor with AVX2")  # if there is none
def test_nano_comes_with_one_for_its_own_weights_however_they_are_held():
    theirs = find_model_policy("nano")
    assert theirs is not None and len(theirs.pipes) == 4
    for how in ({}, {"dtype": "bfloat16"}, {"weights": "q8_0"}, {"weights": "q4_0"}):
        model, _ = weir.load("nano", device="cpu", **how)
        assert weir.Stream(model).policy.pipes == theirs.pipes
    size = size_of(weir.load("nano", device="cpu")[0], str(ASSETS / "nano" / "weir.toml"))
    assert size.stream == 649_840  # the bytes that `weir demo` compares at


def test_nano_with_other_weights_has_none_and_is_not_refused(ids):
    """The user has not put the packaged file there, so no error asks the user to repair it."""
    model, _ = weir.load("nano", device="cpu")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    assert find_model_policy(model) is None
    assert str(weir.Stream(model).policy) == EVERYBODYS


@pytest.mark.filterwarnings("ignore:.*numba and a processor with AVX2")  # if there is none
def test_a_file_holds_for_a_model_whose_weights_are_rounded_to_blocks(tmp_path):
    """Rounded weights differ from those in the file, so only shape and vocabulary are compared."""
    model, _ = weir.load("nano", device="cpu")
    layers = [{"policy": "sink(4) | recent(60)"}] * 4
    file = tmp_path / "measured.toml"
    file.write_text(format_policy_file({}, fingerprint(model), layers))
    rounded, _ = weir.load("nano", device="cpu", weights="q8_0")
    assert [pipe.slots for pipe in weir.Stream(rounded, str(file)).policy.pipes] == [64] * 4


def test_it_reads_a_short_prompt_as_the_model_does_where_its_slots_are_exact(llama, ids):
    tokens = ids(1, 250)
    with torch.no_grad():
        plain = llama(tokens).logits
        exact, eight = (
            llama(tokens, past_key_values=weir.StreamingCache(llama, slots=slots)).logits
            for slots in ("exact", None)
        )
    close_runs(exact, plain, llama)
    first = slice(64)  # the chunk before the first fold
    assert torch.equal(eight[:, first], exact[:, first])
    assert not torch.equal(eight, exact)


def test_a_model_that_was_made_here_does_not_take_what_lies_in_the_working_folder(
    folder, fresh_llama, monkeypatch
):
    monkeypatch.chdir(folder)
    assert str(weir.Stream(fresh_llama()).policy) == EVERYBODYS


def test_of_the_hub_it_is_taken_from_the_snapshot_here_and_nothing_is_fetched(
    folder, tmp_path, monkeypatch
):
    snapshots = tmp_path / "hub" / "models--some--body"
    (snapshots / "refs").mkdir(parents=True)
    (snapshots / "refs" / "main").write_text("a" * 40)
    (snapshots / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (snapshots / "snapshots" / ("b" * 40)).mkdir(parents=True)
    (folder / "weir.toml").rename(snapshots / "snapshots" / ("a" * 40) / "weir.toml")
    look = functools.partial(huggingface_hub.try_to_load_from_cache, cache_dir=tmp_path / "hub")
    monkeypatch.setattr(places, "try_to_load_from_cache", look)
    model = read(folder)
    model.name_or_path = "some/body"
    for commit, policy in (("a" * 40, WRITTEN), ("b" * 40, EVERYBODYS), (None, WRITTEN)):
        model.config._commit_hash = commit
        assert str(weir.Stream(model).policy) == policy
    assert str(find_model_policy("some/body")) == WRITTEN
    assert find_model_policy("some/body", "b" * 40) is None
    for gone in ("some/other", "a/folder/that/is/gone", "/nowhere"):
        assert find_model_policy(gone) is None


@pytest.mark.parametrize("damaged", ["", "format = 1", "format ="])
def test_a_damaged_one_is_one_sentence_and_not_passed_over(folder, damaged):
    (folder / "weir.toml").write_text(damaged)
    wanted = (
        r"weir.toml is (TOML, but )?not a policy file.*It is used by default, because "
        r"it is next"
    )
    for ask in (lambda: weir.Stream(read(folder)), lambda: find_model_policy(str(folder))):
        with pytest.raises(WeirError, match=wanted) as told:
            ask()
        assert "\n" not in str(told.value)


def test_one_of_another_model_is_refused(folder, fresh_llama):
    other = fresh_llama(seed=1)
    other.save_pretrained(folder)  # as if it had been trained further
    with pytest.raises(WeirError, match=r"calibrated for another model .* Repair or remove it"):
        weir.Stream(read(folder))


def test_a_saved_stream_keeps_its_own(folder, tmp_path):
    stream = weir.Stream(read(folder), "h2o(20)")
    stream.feed([1, 2, 3])
    stream.save(tmp_path / "session")
    assert weir.Stream.restore(read(folder), tmp_path / "session").policy == stream.policy


def test_a_link_to_nothing_is_not_passed_over(folder):
    (folder / "weir.toml").unlink()
    (folder / "weir.toml").symlink_to("gone")
    with pytest.raises(WeirError, match=r"weir\.toml.*it is next to the model"):
        weir.Stream(read(folder))


def test_the_folder_for_the_hub_takes_its_chunk_too(folder, monkeypatch):
    text = format_policy_file({"chunk": 5}, fingerprint(read(folder)), LAYERS)
    (folder / "weir.toml").write_text(text)
    model = read(folder)
    monkeypatch.setattr(model, "generate", lambda **given: given[CACHE])
    generate = runpy.run_path(str(HUB))["generate"]
    assert (generate(model).chunk, generate(model, chunk=3).chunk) == (5, 3)
