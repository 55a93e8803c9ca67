"""The tasks of `quality`, on a peer that knows the text up to some place and nothing after it."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import Tensor

from weir_bench.peers import process, quality
from weir_bench.peers.results import Results

VOCABULARY = 50


class Knows:
    """A peer that predicts `text` with certainty up to a place, and all tokens alike after it."""

    def __init__(self, text: Tensor, until: int) -> None:
        self.text, self.until, self.seen = text, until, 0

    def feed(self, ids: Tensor) -> Tensor:
        places = torch.arange(self.seen, self.seen + ids.shape[1])
        assert torch.equal(ids, self.text[:, places])
        self.seen += ids.shape[1]
        coming = self.text.roll(-1, dims=1)[:, places]
        sure = torch.nn.functional.one_hot(coming, VOCABULARY) * 1000.0
        return sure.masked_fill((places >= self.until)[:, None], 0.0)

    def nbytes(self) -> int:
        return 4 * self.seen


@pytest.fixture
def reading(monkeypatch):
    """The module `reading`, which is in the folder of the peers' scripts, outside any package."""
    monkeypatch.syspath_prepend(str(process.SIDES))
    return importlib.import_module("reading")


@pytest.fixture
def facts():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (3, 300), generator=generator)
    answers = torch.tensor([100, 250])
    numbers = torch.stack([ids[:, place : place + 3] for place in answers], dim=1)
    found = {
        "ids": ids,
        "answers": answers,
        "numbers": numbers,
        "distances": torch.tensor([16, 32]),
    }
    return {f"{task}.{name}": fact for task in ("near", "window") for name, fact in found.items()}


def test_who_knows_all_that_comes_is_never_surprised(reading, facts) -> None:
    asked = lambda rows, slots: Knows(facts["window.ids"], 300)  # noqa: E731
    found = reading.ask(asked, "window", facts)
    assert found["ppl"] == 1.0
    assert found["kv_bytes"] == 4 * 300


def test_of_a_window_only_the_last_tokens_count(reading, facts) -> None:
    begun = 300 - 1 - reading.COUNTED
    asked = lambda rows, slots: Knows(facts["window.ids"], begun + 56)  # noqa: E731
    found = reading.ask(asked, "window", facts)
    expected = math.exp(math.log(VOCABULARY) * (reading.COUNTED - 56) / reading.COUNTED)
    assert found["ppl"] == pytest.approx(expected, rel=300 * torch.finfo(torch.float32).eps)


def test_an_answer_is_right_if_all_its_tokens_are(reading, facts) -> None:
    # From place 250 on, the peer knows nothing. There it has to predict token 251, so that it lacks
    # the last two of the second answer's three tokens (250 to 252).
    asked = lambda rows, slots: Knows(facts["near.ids"], 250)  # noqa: E731
    found = reading.ask(asked, "near", facts)
    assert found["by_distance"] == {16: 1.0, 32: 0.0}
    assert found["recall"] == 0.5


READER = """
import sys; sys.path.insert(0, {sides!r})
from functools import partial
from protocol import serve
from reading import Reader

def full(rows, slots):
    raise IndexError(f"no more than {{slots}}")

serve(partial(Reader, ("torch",), lambda: {{"{{slots}}": full}}))
"""


@pytest.mark.slow
def test_what_a_peer_cannot_do_is_said(facts, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(quality, "make_tasks", lambda: {k: t.clone() for k, t in facts.items()})
    monkeypatch.setattr(quality, "READERS", {"other": "", "gone": "nowhere"})
    (tmp_path / "other_reading.py").write_text(READER.format(sides=str(process.SIDES)), "utf-8")
    monkeypatch.setattr(process, "SIDES", tmp_path)
    results = Results(None)
    quality.read_tasks(results, 1, ("near",))
    assert results.missing["other: {slots}, near"] == "IndexError: no more than 128"
    assert "nowhere is not installed" in results.missing["gone"]
    assert results.facts["versions"]["other"]["version"].startswith("torch ")


@pytest.mark.slow
def test_weirs_policies_are_read_and_not_read_again(facts, tmp_path, monkeypatch) -> None:
    ids = {name: t % 50 for name, t in facts.items()}
    monkeypatch.setattr(quality, "make_tasks", lambda: {k: t.clone() for k, t in ids.items()})
    monkeypatch.setattr(quality, "READERS", {"weir": ""})
    results = Results(None)
    quality.read_tasks(results, 1, ("near",))
    assert not results.missing
    dense = results.find("quality", who="weir: dense", task="near")
    assert dense is not None
    assert 0 <= dense["recall"] <= 1 and dense["kv_bytes"] > 0
    results.figures = [{**each, "recall": 0.5} for each in results.figures]
    quality.read_tasks(results, 1, ("near",))
    assert {each["recall"] for each in results.figures} == {0.5}


def test_the_table_shows_pipes_and_gaps() -> None:
    pipe = "weir: sink(4) | recent({most})"
    results = Results(None)
    results.add("quality", {"who": pipe, "task": "window"}, {"ppl": 41.26, "kv_bytes": 819200})
    results.add("quality", {"who": pipe, "task": "near"}, {"recall": 0.8, "kv_bytes": 819200})
    results.add("quality", {"who": "other: A", "task": "near"}, {"recall": 1.0, "kv_bytes": 1000})
    said = next(quality.quality_tables(results)).markdown()
    assert "| weir: <code>sink(4) &#124; recent(92)</code> | 41.3 | 0.80 | 819 |" in said
    assert "| other: <code>A</code> | – | 1.00 | 1 |" in said
