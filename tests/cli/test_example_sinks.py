"""The example `sinks`: the experiment at toy size, its measures against direct computations."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from roundings import close
from transformers import LlamaConfig

import weir
from weir.errors import WeirError
from weir.loading.loader import ASSETS
from weir.stream import read_text
from weir.train import PRESETS, Preset, TrainingRecipe

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[2] / "examples" / "sinks"
sys.path.insert(0, str(FOLDER))
import findings  # noqa: E402
import measure  # noqa: E402
import sinks as example  # noqa: E402

sys.path.remove(str(FOLDER))

TOY = Preset(
    TrainingRecipe(
        tokens=30 * 4 * 64,
        rows=4,
        length=64,
        width=32,
        layers=2,
        heads=2,
        kv_heads=2,
        inner=64,
        optimizer="adamw",
        exercise_rows=0,
        rate=1e-2,
        sink="none",
    ),
    400,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("books") / "book.txt"
    path.write_text(read_text(ASSETS / "war-and-peace.txt.xz")[8000:38000], "utf-8")
    return path


@pytest.fixture(scope="module")
def experiment(text: Path, tmp_path_factory: Any) -> Any:
    out = tmp_path_factory.mktemp("sinks")
    return example.Experiment(text, out, TOY, read=2000, samples=8, compiled=False)


@pytest.fixture(scope="module")
def result(experiment: Any) -> dict[str, Any]:
    return example.run(experiment)


# --- the experiment


def test_every_model_is_streamed_with_every_configuration(experiment, result):
    assert list(result["models"]) == list(findings.VARIANTS)
    for sink, model in result["models"].items():
        assert set(model["ppl"]) == {"0", "1", "2", "4"}
        assert all(1 < ppl < 400 for ppl in model["ppl"].values())
        loaded, tokenizer = weir.load(str(experiment.folder(sink)))
        assert model["front"] == len(tokenizer("")["input_ids"])
        assert loaded.config.max_position_embeddings == 64 + model["front"]
    assert [model["front"] for model in result["models"].values()] == [0, 0, 1, 2]
    assert len(result["findings"]) == 11


def test_a_finished_run_computes_nothing_again(experiment, result, monkeypatch):
    def again(*given):
        raise AssertionError("measured again")

    for name in ("stream_losses", "inside_window", "attention_shares"):
        monkeypatch.setattr(measure, name, again)
    assert example.run(experiment) == result
    with pytest.raises(AssertionError, match="measured again"):
        example.run(replace(experiment, read=2500))


def test_one_command_trains_streams_and_reports(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "small", TOY)
    out = tmp_path / "out"
    words = ["--text", str(text), "--out", str(out), "--no-compiled", "--read", "2000"]
    example.main([*words, "--sink", "none, learnable:2"])
    ended = capsys.readouterr()
    assert "none: step 30 of 30" in ended.err and "learnable:2: step 30 of 30" in ended.err
    assert "2 Sink Tokens, paper" in ended.out and "25.73" in ended.out
    names = {"sinks.md", "sinks.json", "sinks.csv", "sinks-ppl.png", "sinks-loss.png"}
    assert all(str(out / name) in ended.out for name in names)
    facts = json.loads((out / "sinks.json").read_text("utf-8"))
    page = (out / "sinks.md").read_text("utf-8")
    for finding in facts["findings"]:
        assert f"| {finding['claim']} | {finding['verdict']} |" in page
    with (out / "sinks.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 4 * 2
    assert float(rows[0]["ppl"]) == facts["models"]["none"]["ppl"]["0"]
    assert rows[0]["paper_ppl"] == "27.87" and rows[0]["recent"] == "32"
    for name in ("sinks-ppl.png", "sinks-loss.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sinks": ("learnable", "learnable:1")}, "name each sink once"),
        ({"sinks": ("taught",)}, "choose learnable"),
        ({"slots": 4}, "4 slots has no room for 4 initial tokens"),
        ({"slots": 60}, "60 slots and 15 tokens between folds are more than the window of 64"),
        ({"read": 1999}, "1,999 tokens are too few to stream: choose 2,000"),
    ],
)
def test_an_experiment_that_makes_no_sense_is_refused(text, tmp_path, changes, sentence):
    with pytest.raises(WeirError, match=sentence):
        example.Experiment(text, tmp_path, TOY, **changes)


# --- what is measured


@pytest.fixture(scope="module")
def model(experiment, result):
    loaded, _ = weir.load(str(experiment.folder("learnable:2")), dtype="float32")
    return loaded


def test_stream_losses_are_those_of_plain_attention_while_everything_is_held(model):
    text = torch.randint(5, 390, (1001,), generator=torch.Generator().manual_seed(0))
    front = [0, 400]
    policy = measure.policy_of_config(4, 2000)
    got = measure.stream_losses(model, front, text, policy, 16)
    ids = torch.cat([torch.tensor(front), text])[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].double()
    # The first token of the text has only the sinks before it: it does not count.
    wanted = torch.nn.functional.cross_entropy(logits[2:-1], text[1:], reduction="none")
    close(torch.tensor(got), wanted.view(2, 500).mean(1), terms=1000)


def test_attention_shares_are_those_of_output_attentions(model, result):
    text = np.random.default_rng(0).integers(5, 390, 500)
    front = [0, 400]
    got = measure.attention_shares(model, front, text, 40, 3)
    rows = measure._with_front(front, measure._passages(text, 40, 3, np.random.default_rng(15)))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(input_ids=rows, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    for layer, found in zip(maps, got, strict=True):
        late = layer[:, :, 21:].double()
        assert found["first"] == pytest.approx(float(late[..., 0].mean()), rel=1e-4)
        assert found["first_4"] == pytest.approx(float(late[..., :4].sum(-1).mean()), rel=1e-4)
        assert found["nowhere"] == pytest.approx(0, abs=1e-5)
        assert found["even"] == pytest.approx(np.mean([1 / n for n in range(22, 43)]))
    for layer in result["models"]["zero"]["attention"]:
        assert 0.001 < layer["nowhere"] < 0.5


class Oracle(torch.nn.Module):
    """A model whose logits depend on the newest token only, by a table [50, 50]."""

    device = torch.device("cpu")
    config = LlamaConfig(vocab_size=50)

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, input_ids, use_cache):
        return type("Out", (), {"logits": self.table[input_ids]})


def following(step):
    """The logits of a model that says that n + step follows n [50, 50]."""
    return 20.0 * torch.eye(50)[(torch.arange(50) + step) % 50]


def test_abilities_are_those_of_a_model_that_knows_what_follows_and_of_one_that_does_not():
    cycle = np.arange(4000) % 50
    knows, errs = Oracle(following(1)), Oracle(following(7))
    front = [3]
    for name in ("last_word", "recall"):
        ask = measure.ABILITIES[name]
        assert ask(knows, front, cycle, 40, 64)["accuracy"] == 1
        assert ask(errs, front, cycle, 40, 64)["accuracy"] == 0
    # A model that guesses is right in one of four cases. The text is random here, because in a
    # cycle, wrong continuations differ from the right one only in their first token.
    noise = np.random.default_rng(0).integers(0, 50, 4000)
    guesses = Oracle(torch.randn(50, 50, generator=torch.Generator().manual_seed(0)))
    chosen = measure.continuation(guesses, front, noise, 40, 400)
    assert 0.15 < chosen["accuracy"] < 0.35
    # A model that finds all continuations equally likely has chosen none.
    even = Oracle(torch.zeros(50, 50))
    assert measure.continuation(even, front, noise, 40, 64)["accuracy"] == 0
    assert measure.continuation(knows, front, cycle, 40, 64)["accuracy"] > 0.9
    assert np.isclose(measure.inside_window(knows, front, cycle, 40, 5), 0, atol=1e-4).all()


# --- verdicts


def losses(*, plus=0.0, spread=0.001, count=20):
    return (3 + plus + spread * np.random.default_rng(1).standard_normal(count)).tolist()


@pytest.mark.parametrize(
    ("plus", "spread", "needs", "without"),
    [
        (0.5, 0.001, "reproduced", "not reproduced"),
        (0.0, 0.001, "not reproduced", "reproduced"),
        (0.02, 0.2, "not settled", "not settled"),
        (0.5, 5.0, "not settled", "not settled"),
    ],
)
def test_a_verdict_takes_the_whole_interval_on_one_side(plus, spread, needs, without):
    worse, base = losses(plus=plus, spread=spread), [3.0] * 20
    assert findings.judge("", worse, base, "", need=True)["verdict"] == needs
    assert findings.judge("", worse, base, "", need=False)["verdict"] == without
    assert findings.judge("", [9.0], [1.0], "", need=True)["verdict"] == "not settled"


def test_excess_is_a_factor_of_perplexity_from_paired_blocks():
    base = np.random.default_rng(0).normal(3, 1, 30)  # blocks differ more than models do
    found = findings.judge("c", (base + np.log(1.1)).tolist(), base.tolist(), "w", need=True)
    for name in ("excess", "low", "high"):
        assert found[name] == pytest.approx(0.1)


def test_the_papers_claims_are_compared_as_it_has_them():
    blocks = {
        model: {
            str(x): losses(plus=float(np.log(ppl)) - 3)
            for x, ppl in zip(findings.CONFIGS, figures, strict=True)
        }
        for model, figures in findings.PERPLEXITY.items()
    }
    inside = {model: losses() for model in findings.PERPLEXITY}
    found = findings.judge_claims(blocks, inside)
    assert {finding["verdict"] for finding in found} == {"reproduced"}
    assert len(found) == 11
    # If a model needs no sink, the claim that one sink is enough is not settled.
    same = {str(x): losses() for x in findings.CONFIGS}
    verdicts = [one["verdict"] for one in findings.judge_claims({"learnable": same}, {})]
    assert verdicts == ["not reproduced", "not settled"]
