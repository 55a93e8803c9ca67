"""What bench/peers asks of every peer: one that knows the text, one that knows nothing."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

PEERS = Path(__file__).parents[2] / "bench" / "peers"
VOCABULARY = 50


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peers_{name}", PEERS / f"{name}.py")
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


class Knows:
    """A peer that has read `text` before, up to a place; behind that every token is as likely."""

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


@pytest.fixture(scope="module")
def reading():
    return module("reading")


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
    # Token 251 is predicted at place 250: from there on the second answer lacks its last two.
    asked = lambda rows, slots: Knows(facts["near.ids"], 250)  # noqa: E731
    found = reading.ask(asked, "near", facts)
    assert found["by_distance"] == {16: 1.0, 32: 0.0}
    assert found["recall"] == 0.5


def test_what_a_peer_cannot_do_is_written_down(reading, facts, tmp_path, monkeypatch) -> None:
    save_file({name: fact.clone() for name, fact in facts.items()}, tmp_path / "tasks")

    def full(rows: int, slots: int) -> Knows:
        raise IndexError(f"no more than {slots}")

    arguments = ["peer", str(tmp_path / "tasks"), str(tmp_path / "found"), "--only", "near"]
    monkeypatch.setattr("sys.argv", arguments)
    reading.main("peer", ("torch",), lambda: {"full": full})
    (line,) = (tmp_path / "found").read_text("utf-8").splitlines()
    assert '"error": "IndexError: no more than 128"' in line


def test_the_table_shows_pipes_and_failures(tmp_path, capsys) -> None:
    lines = [
        '{"peer": "weir", "what": "sink(4) | recent({most})", "task": "window", "ppl": 41.26,'
        ' "kv_bytes": 819200}',
        '{"peer": "weir", "what": "sink(4) | recent({most})", "task": "near", "recall": 0.8,'
        ' "kv_bytes": 819200}',
        '{"peer": "other", "what": "Static", "task": "window", "error": "IndexError: full"}',
    ]
    (tmp_path / "found").write_text("\n".join(lines), "utf-8")
    module("table").main([tmp_path / "found"])
    said = capsys.readouterr().out
    assert "| weir: <code>sink(4) &#124; recent(92)</code> | 41.3 | 0.80 | 819 |" in said
    assert "| other: <code>Static</code> | fails |  | fails |" in said
