"""Transcripts: what was said, in a file that grows, and what a stream still holds of it."""

from __future__ import annotations

import contextlib
import json
import resource
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import weir
from weir.errors import WeirError
from weir.stream import Transcript, Turn, held_shares, repeats


def turn(by_user: bool, start: int, ids: range, text: str = "x") -> Turn:
    return Turn(by_user, start, text, array("I", ids))


class Letters:
    """A tokenizer in which token n is the nth letter."""

    added_tokens_decoder: ClassVar[dict[int, object]] = {}

    def decode(self, ids: list[int], **more: object) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


@contextlib.contextmanager
def full_disk(path: Path, room: int) -> Iterator[None]:
    """Let files grow at most `room` bytes beyond the size of `path`, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 20])
def test_a_full_disk_is_an_error_and_the_lines_are_written_when_there_is_room_again(tmp_path, room):
    talk = Transcript(path := tmp_path / "talk.jsonl", {})
    talk.add(turn(True, 0, range(2), "one"))
    written = path.read_bytes()
    with full_disk(path, room):
        for start in (2, 4):
            with pytest.raises(WeirError, match=r"conversation .*talk\.jsonl: File too large"):
                talk.add(turn(False, start, range(2), "two"))
            assert path.read_bytes() == written  # no half line was written
        assert [said.text for said in talk.whole_turns()] == ["one", "two", "two"]
    talk.add(turn(True, 6, range(2), "three"))
    talk.close()
    again = Transcript.read(path)
    assert [(said.start, said.text) for said in again.whole_turns()] == [
        (0, "one"),
        (2, "two"),
        (4, "two"),
        (6, "three"),
    ]
    again.close()


def test_closing_writes_what_is_missing_or_says_that_it_cannot(tmp_path):
    for full in (False, True):
        talk = Transcript(path := tmp_path / f"talk-{full}.jsonl", {})
        with full_disk(path, 0), pytest.raises(WeirError):
            talk.add(turn(True, 0, range(2)))
        if full:
            with full_disk(path, 0), pytest.raises(WeirError, match="cannot write"):
                talk.close()
        else:
            talk.close()
        again = Transcript.read(path)
        assert len(again.turns) == (not full)
        again.close()


def test_a_file_has_what_was_said_and_an_interrupted_turn_ends_where_the_next_begins(tmp_path):
    path = tmp_path / "talk.jsonl"
    told = Transcript(path, {"model": "nano"})
    told.add(turn(True, 0, range(5), "a" * 200))
    told.add(turn(False, 5, range(9)))
    told.add(turn(True, 7, range(3)))  # begins after two of the nine tokens
    with pytest.raises(WeirError, match="open in another weir chat"):
        Transcript.read(path)
    told.close()
    with path.open("ab") as file:
        file.write(b'{"user": true, "at"')  # as if the process was killed while it wrote
    again = Transcript.read(path)
    assert (again.facts, again.end) == ({"model": "nano"}, 10)
    assert [(one.start, list(one.ids)) for one in again.turns] == [
        (0, [0, 1, 2, 3, 4]), (5, [0, 1]), (7, [0, 1, 2])
    ]  # fmt: skip
    assert len(again.turns[0].text) == 80
    assert [(one.start, list(one.ids)) for one in again.after(6)] == [(6, [1]), (7, [0, 1, 2])]
    again.add(turn(False, 10, range(1)))
    again.close()
    assert json.loads(path.read_bytes().splitlines()[-1])["at"] == 10


@pytest.mark.parametrize(
    "text", ["", "x\n", '{"weir": 2}\n', '{"weir": 1}\n{"user": 1, "at": 2}\n']
)
def test_what_is_no_transcript_is_refused(tmp_path, text):
    (tmp_path / "x").write_text(text)
    with pytest.raises(WeirError, match="is not a conversation"):
        Transcript.read(tmp_path / "x")


def test_passages_and_places_say_what_the_stream_holds(llama):
    stream = weir.Stream(llama, "sink(4) | recent(20)", chunk=8)
    stream.feed(torch.arange(60)[None])
    told = Transcript()
    for start, end in ((0, 4), (4, 20), (20, 30), (30, 38), (38, 60)):
        told.add(turn(start != 4, start, range(start, end), f"from {start}"))
    holding = stream.holding()
    shares = held_shares(holding)
    held = {it.token for it in holding.tokens()}
    assert np.flatnonzero(shares).tolist() == sorted(held)
    found = told.passages(holding)
    assert [(one.turns, one.held) for one in found[:2]] == [((1, 1), 0.2), ((2, 2), 0.0)]
    assert [one.text for one in found[:2]] == ["from 0", "from 20"]
    assert sum(one.tokens for one in found) == 60
    places = list(told.find("ABCD", holding, Letters()))  # type: ignore[arg-type]
    assert [(one.turn, one.by_user) for one in places] == [(4, True), (2, True), (1, True)]
    assert places[2].shares == (1.0,) * 4 and places[2].pools == ("sink",)
    assert places[1].shares == (0.0,) * 4 and places[1].pools == ()


@pytest.mark.parametrize(
    ("ids", "period"),
    [
        ([1] * 24, 1),
        ([1] * 23, 0),
        ([9, 9, *[1, 2, 3] * 8], 3),
        ([*range(64)] * 4, 64),
        ([*range(64)] * 3, 0),
        ([*[1, 2] * 20, 3], 0),
        ([], 0),
    ],
)
def test_a_repeating_end_is_found(ids, period):
    assert repeats(ids) == period
