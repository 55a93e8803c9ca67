"""Beginnings that conversations share are loaded from disk after a restart, or read again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from test_engine import CHUNK, MODEL, engine, turn, words, work
from test_prefixes import POLICY, cancelled

from weir.errors import WeirError
from weir.serve import Engine
from weir.serve.sessions.prefix_folder import PrefixFolder
from weir.serve.sessions.snapshot_folder import SnapshotFolder
from weir.serve.sessions.store_format import StoreFormat

START = words(1, 13)
GIVEN = {"owner": "me", "beginning": 13, "header": 2}


def opened(folder: Path, **given) -> tuple[Engine, PrefixFolder]:
    """Return an engine and its folder of prefixes, as after the start of a server."""
    place = PrefixFolder(folder, StoreFormat.of(MODEL, POLICY, CHUNK))
    return engine(policy=POLICY, prefix_place=place, **given), place


def answer(served: Engine, name: str, ids, **given):
    one = turn(name, ids, **{**GIVEN, **given})
    work(served, one)
    return one


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_a_beginning_is_found_again_after_a_restart_and_answers_the_same(tmp_path):
    served, place = opened(tmp_path / "prefixes")
    assert answer(served, "a", [*START, *words(2, 20)]).reused == 0
    place.close()
    served, place = opened(tmp_path / "prefixes")
    again = answer(served, "b", [*START, *words(3, 20)])
    assert again.reused == len(START)
    fresh = answer(engine(policy=POLICY), "b", [*START, *words(3, 20)])
    assert again.listener.tokens == fresh.listener.tokens
    assert answer(served, "c", [*START, *words(3, 20)], owner="you").reused == 0
    assert answer(served, "d", [*words(9, 13), *words(3, 20)]).reused == 0
    place.close()
    assert len(files(tmp_path / "prefixes")) == 3


def test_only_so_many_are_kept_and_the_least_recently_used_goes(tmp_path):
    served, place = opened(tmp_path / "prefixes", prefixes=2)
    beginnings = [words(n, 13) for n in range(3)]
    for n, start in enumerate(beginnings[:2]):
        answer(served, f"a{n}", [*start, *words(9, 20)])
        place.wait()
    for n, file in enumerate(files(tmp_path / "prefixes")):
        os.utime(file, (n + 1, n + 1))
    # Uses the first one, so the second is deleted next.
    answer(served, "again", [*beginnings[0], *words(8, 20)])
    answer(served, "third", [*beginnings[2], *words(9, 20)])
    place.close()
    assert len(files(tmp_path / "prefixes")) == 2
    served, place = opened(tmp_path / "prefixes", prefixes=2)
    reused = [answer(served, f"b{n}", [*beginnings[n], *words(7, 20)]).reused for n in (0, 2)]
    assert reused == [13, 13]
    place.close()
    served, place = opened(tmp_path / "prefixes", prefixes=1)  # restart with a smaller limit
    assert len(served.prefixes) == 1
    place.close()
    assert len(files(tmp_path / "prefixes")) == 1


def test_a_used_one_stays_longer_after_a_restart(tmp_path):
    served, place = opened(tmp_path / "prefixes")
    for n in (1, 2):
        answer(served, f"a{n}", [*words(n, 13), *words(9, 20)])
        place.wait()
        for file in files(tmp_path / "prefixes"):
            os.utime(file, (n, n))
    answer(served, "used", [*words(1, 13), *words(8, 20)])
    place.close()
    served, place = opened(tmp_path / "prefixes", prefixes=1)
    assert answer(served, "b", [*words(1, 13), *words(7, 20)]).reused == 13
    place.close()


@pytest.mark.parametrize("damage", ["bytes", "short", "empty", "link", "name"])
def test_a_damaged_one_is_read_again_and_that_is_said(tmp_path, caplog, damage):
    folder = tmp_path / "prefixes"
    served, place = opened(folder)
    answer(served, "a", [*START, *words(2, 20)])
    place.close()
    (file,) = files(folder)
    data = bytearray(file.read_bytes())
    if damage == "bytes":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "short":
        file.write_bytes(data[:-7])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.rename(folder / f"{'0' * 32}.safetensors")
    served, place = opened(folder)
    assert "read again" in caplog.text
    assert not files(folder)
    one = answer(served, "b", [*START, *words(3, 20)])
    assert one.reused == 0
    fresh = answer(engine(policy=POLICY), "b", [*START, *words(3, 20)])
    assert one.listener.tokens == fresh.listener.tokens
    place.close()
    assert len(files(folder)) == 1


def test_one_of_another_policy_is_ignored(tmp_path, caplog):
    served, place = opened(tmp_path / "prefixes")
    answer(served, "a", [*START, *words(2, 20)])
    place.close()
    other = "pinned(sink(2) | recent(7) | heavy(4), n=12, header=3)"
    place = PrefixFolder(tmp_path / "prefixes", StoreFormat.of(MODEL, other, CHUNK))
    assert place.read_all() == []
    assert "policy" in caplog.text
    place.close()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "prefixes").write_text("x")
    with pytest.raises(WeirError, match="prefixes must be a folder, not a file or a link"):
        opened(tmp_path / "prefixes")


def test_a_full_disk_costs_no_answer(tmp_path, caplog, monkeypatch):
    def refuse(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SnapshotFolder, "write", refuse)
    served, place = opened(tmp_path / "prefixes")
    answer(served, "a", [*START, *words(2, 20)])
    assert answer(served, "b", [*START, *words(3, 20)]).reused == 13
    place.close()
    assert "No space left on device" in caplog.text
    assert not files(tmp_path / "prefixes")


def test_an_interrupted_prompt_is_not_kept_on_disk(tmp_path):
    served, place = opened(tmp_path / "prefixes")
    cancelled(served, words(5, 40), 3, owner="me")
    assert len(served.prefixes) == 1
    place.close()
    assert not files(tmp_path / "prefixes")
