"""Calibration of budgets by layer, from a text to a policy file."""

from __future__ import annotations

import tomllib

import pytest
import torch

import weir
from weir import __version__
from weir.errors import WeirError
from weir.evals import calibration
from weir.evals.calibration import calibrate
from weir.models import fingerprint

POLICY = "sink(2) | recent(14)"


class Letters:
    """A tokenizer for the small Llama: each letter is a token."""

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 61 for letter in text]}


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch):
    monkeypatch.setattr(calibration, "EIGHTHS", (4, 6, 8, 10, 12, 16))


@pytest.fixture
def model(fresh_llama):
    """A small Llama with a small window."""
    return fresh_llama(max_position_embeddings=64)


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "story.txt"
    path.write_text("It was a bright morning, and they walked on; nobody knew where to. " * 4)
    return str(path)


def test_a_layer_that_needs_nothing_leaves_its_slots_to_the_others(model, text, tmp_path):
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.zero_()  # its attention adds nothing
    told: list[float] = []
    found = calibrate(model, Letters(), text, POLICY, chunk=4, tokens=150, on_step=told.append)
    assert [it.pipe.slots for it in found.layers] == [2 + 7, 2 + 21]
    assert (found.passages, found.length, told[-1]) == (2, 64, 1)
    assert found.nbytes == found.before == sum(it.nbytes for it in found.layers)
    stream = weir.Stream(model, found.policy, chunk=4)
    stream.feed([1, 2, 3])
    assert stream.nbytes == found.nbytes
    idle, busy = found.layers
    assert idle.error == idle.before == 0
    assert busy.error < busy.before
    assert dict(busy.tried)[POLICY] == busy.before
    assert dict(busy.tried)[busy.pipe.stands_for] == busy.error
    assert found.errors == (busy.before / 2, busy.error / 2)

    path = tmp_path / "budgets.toml"
    found.write(path)
    read = weir.policy(str(path))
    assert read == found.policy
    assert read.origin.model == fingerprint(model)
    facts = tomllib.loads(path.read_text())
    assert (facts["weir"], facts["calibrated"], facts["chunk"]) == (__version__, POLICY, 4)
    assert facts["text"]["name"] == "story.txt"
    assert [it["slots"] for it in facts["layers"]] == [9, 23]
    assert [it.name for it in tmp_path.iterdir()].count("budgets.toml.part") == 0
    by_hand = weir.Stream(model, "[sink(2) | recent(7), sink(2) | recent(21)]", chunk=4)
    tokens = torch.arange(150)[None] % 61
    got = weir.Stream(model, str(path), chunk=4).feed(tokens, all_logits=True)
    assert torch.equal(got, by_hand.feed(tokens, all_logits=True))


def test_what_lowers_no_error_is_left_as_it_was(model, text):
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.zero_()
    found = calibrate(model, Letters(), text, POLICY, chunk=4, tokens=64)
    assert found.policy.pipes == (weir.policy(POLICY),) * 2


@pytest.mark.slow
def test_bytes_are_shared_out_and_not_slots(model, text):
    policy = "recent(8) | snap(8, window=4)"
    found = calibrate(model, Letters(), text, policy, chunk=4, tokens=64, splits=True)
    assert found.nbytes <= found.before
    assert found.errors[1] <= found.errors[0]
    stream = weir.Stream(model, "recent(8) | snap(8, window=4)", chunk=4)
    stream.feed([1, 2, 3])
    assert stream.nbytes == found.before


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        ("dense", {}, "dense has no limit"),
        ("recompute(8)", {}, "recompute caches nothing"),
        ("recent(60)", {}, "60 slots and a chunk of 4, so nothing is evicted from 64 tokens"),
        ("sink(4)", {}, "'sink(4)' has only one size"),
        (POLICY, {"tokens": 40}, "40 tokens are too few, because a passage has 64"),
        (POLICY, {"tokens": 400}, "the text has only 268 tokens, but 400 are needed"),
        ("streaming_llm(4)", {}, "leaves no slots for recent tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, text, policy, options, said):
    with pytest.raises(WeirError) as raised:
        calibrate(model, Letters(), text, policy, **{"chunk": 4, **options})
    assert said in str(raised.value)


def test_a_file_that_cannot_be_written_is_named(model, text, tmp_path):
    found = calibrate(model, Letters(), text, POLICY, chunk=4, tokens=64)
    with pytest.raises(WeirError, match=r"must end with \.toml, got budgets\.txt"):
        found.write(tmp_path / "budgets.txt")
    with pytest.raises(WeirError, match=r"nowhere for budgets\.toml does not exist\. Create it"):
        found.write(tmp_path / "nowhere" / "budgets.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(WeirError, match=r"cannot write the policy file .*folder\.toml: Is a dir"):
        found.write(tmp_path / "folder.toml")
