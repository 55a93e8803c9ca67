"""A stream with an archive finds what it has read and no longer holds."""

from __future__ import annotations

import copy

import pytest
import torch

import weir
from weir.errors import WeirError

LINE = "kernel: out of memory, killed process postgres"
ASK = "Which process was killed by the kernel?"


@pytest.fixture(scope="module")
def nano():
    return weir.load("nano")


def read(nano, policy: str = "sink(4) | recent(60)", **how: object) -> weir.Stream:
    """Return a stream with an archive that has read one line."""
    model, tokenizer = nano
    archive = how.pop("archive", None) or weir.Archive()
    stream = weir.Stream(model, policy, chunk=8, archive=archive, tokenizer=tokenizer, **how)
    stream.feed(tokenizer(f"The log:\n{LINE}\n").input_ids)
    return stream


def go_on(stream: weir.Stream, nano, lines: int = 20) -> None:
    for n in range(lines):
        stream.score(nano[1](f"10.0.0.{n} GET /about 200\n", add_special_tokens=False).input_ids)


def test_a_line_is_found_once_it_has_left_the_cache(nano):
    stream = read(nano)
    assert stream.recall(ASK) == []
    go_on(stream, nano)
    (found,) = stream.recall(ASK)
    assert LINE in found.text and found.role == "text"
    assert 0 <= found.start < found.stop < stream.seen - 60
    assert stream.recall("Where is the library of Zebulon?") == []


def test_it_feeds_nothing_and_changes_no_likelihood(nano):
    model, tokenizer = nano
    with_archive = read(nano)
    without = weir.Stream(model, "sink(4) | recent(60)", chunk=8)
    without.feed(tokenizer(f"The log:\n{LINE}\n").input_ids)
    ids = tokenizer("The old prince was here and asked for his carriage.\n").input_ids
    for _ in range(6):
        seen = with_archive.seen
        with_archive.recall(ASK)
        assert with_archive.seen == seen
        assert torch.equal(with_archive.score(ids), without.score(ids))


def test_embeddings_count_as_places_and_have_no_text(nano):
    stream = read(nano, archive=None)
    stream.feed(embeddings=torch.zeros(1, 3, nano[0].config.hidden_size))
    place = stream.seen
    line = nano[1]("cron: the backup of Smolensk failed\n", add_special_tokens=False).input_ids
    stream.feed(line)
    go_on(stream, nano)
    (found,) = stream.recall("Which backup failed?")
    assert "Smolensk" in found.text and "process" not in found.text
    assert (found.start, found.stop) == (place - 3, place + len(line))


def test_what_it_generates_is_archived_too(nano):
    stream = read(nano)
    said = "".join(nano[1].decode([token]) for token in stream.generate(200, stop=[]))
    go_on(stream, nano)
    stream.recall(ASK)
    rows = stream._text.archive._query("SELECT text FROM archived_passages ORDER BY number")
    assert said[-40:].strip() in "".join(row["text"] for row in rows)


def test_positions_are_those_of_the_tokens(nano):
    stream = read(nano)
    tokenizer = nano[1]
    start = stream.seen
    ids = tokenizer(f"{LINE}, and another\n", add_special_tokens=False).input_ids
    for token in ids:  # one token for each call
        stream.feed([token])
    rows = stream._text.archive._query(
        "SELECT start, stop FROM archived_passages WHERE text LIKE '%another%'"
    )
    assert [tuple(row) for row in rows] == [(start, start + len(ids))]


def test_a_batch_and_a_missing_tokenizer_are_refused(nano):
    model, tokenizer = nano
    with pytest.raises(WeirError, match="archive needs the tokenizer"):
        weir.Stream(model, "sink(4) | recent(60)", archive=weir.Archive())
    stream = weir.Stream(model, "sink(4) | recent(60)", archive=weir.Archive(), tokenizer=tokenizer)
    with pytest.raises(WeirError, match="has one row, but 2 were fed"):
        stream.feed([[1, 2], [3, 4]])
    assert stream.seen == 0
    with pytest.raises(WeirError, match="has no archive"):
        weir.Stream(model, "sink(4) | recent(60)").recall(ASK)


def test_a_copy_has_no_archive(nano):
    stream = read(nano)
    go_on(stream, nano)
    turns = stream._text.archive.turns
    other = copy.deepcopy(stream)
    go_on(other, nano, 3)
    assert stream._text.archive.turns == turns
    with pytest.raises(WeirError, match="has no archive"):
        other.recall(ASK)


def test_a_restored_stream_goes_on_with_its_archive(nano, tmp_path):
    model, tokenizer = nano
    with weir.Archive(tmp_path / "log.db") as archive:
        stream = read(nano, archive=archive)
        go_on(stream, nano)
        stream.recall(ASK)
        stream.save(tmp_path / "log.safetensors")
    with weir.Archive(tmp_path / "log.db") as archive:
        again = weir.Stream.restore(model, tmp_path / "log.safetensors")
        again.use_archive(archive, tokenizer)
        assert LINE in again.recall(ASK)[0].text


def test_a_lost_archive_is_a_warning_and_the_stream_goes_on(nano):
    stream = read(nano)
    stream._text.archive.close()
    with pytest.warns(UserWarning, match="The stream goes on"):
        go_on(stream, nano, 2)
    go_on(stream, nano, 2)
    assert stream.recall(ASK) == []
