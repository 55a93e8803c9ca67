"""A policy that was measured on one model is refused by another."""

from __future__ import annotations

import re

import pytest
import torch

import weir
from weir.cache import size_of
from weir.errors import WeirError
from weir.models import fingerprint
from weir.policies import format_policy_file


@pytest.fixture
def file(fresh_llama, tmp_path) -> str:
    """A policy file for the small Llama."""
    layers = [{"policy": "h2o(8)"}, {"policy": "sink(2) | recent(14)"}]
    path = tmp_path / "small.toml"
    path.write_text(format_policy_file({}, fingerprint(fresh_llama()), layers))
    return str(path)


def test_its_own_model_is_served_in_any_dtype_and_without_weights(file, fresh_llama):
    with torch.device("meta"):
        shape = fresh_llama()
    for model in (fresh_llama(), fresh_llama().to(torch.bfloat16)):
        stream = weir.Stream(model, file, slots="int8")
        stream.feed([1, 2, 3])
        assert stream.report()["policy"] == (
            "quantized([h2o(8), sink(2) | recent(14)], slots=int8)"
        )
    assert size_of(shape, file).slots == (8, 16)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 1}, "weights [0-9a-f]+, here [0-9a-f]+"),
        ({"layers": 3}, "layers 2, here 3, weights .*"),
        ({"hidden_size": 64, "vocab_size": 62}, "width 32, here 64, vocabulary 61, here 62, .*"),
    ],
)
@pytest.mark.parametrize("around", ["{}", "quantized", "pinned"])
def test_another_model_is_refused(file, fresh_llama, changes, said, around):
    policy = weir.policy(file)
    if around != "{}":
        policy = {"quantized": weir.policies.Quantized, "pinned": weir.policies.Pinned}[around](
            policy
        )
    other = fresh_llama(**changes)
    wanted = rf"{re.escape(file)} was calibrated for another model \({said}\)\. Run weir calibrate"
    with pytest.raises(WeirError, match=wanted):
        weir.StreamingCache(other, policy)
    with pytest.raises(WeirError, match=wanted):
        size_of(other, policy)


def test_as_text_it_is_a_policy_for_any_model_of_so_many_layers(file, fresh_llama):
    weir.StreamingCache(fresh_llama(seed=1), str(weir.policy(file)))


def test_a_saved_stream_needs_the_file_no_longer(file, fresh_llama, ids, tmp_path):
    model = fresh_llama()
    stream = weir.Stream(model, file, chunk=8)
    stream.feed(ids(1, 60))
    stream.save(tmp_path / "session")
    open(file, "w").close()
    restored = weir.Stream.restore(model, tmp_path / "session")
    assert str(restored.policy) == "[h2o(8), sink(2) | recent(14)]"
    more = ids(1, 40, seed=1)
    assert torch.equal(restored.feed(more), stream.feed(more))
