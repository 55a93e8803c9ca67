"""The figure of start times, which is measured on processes that run to their end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weir_bench.figure import QUICK, Setting, Skipped, run_python
from weir_bench.figures import start as figure
from weir_bench.figures.start import start


def test_a_process_that_fails_is_told_by_its_last_word(tmp_path):
    run_python(
        f"import sys; open({str(tmp_path / 'said')!r}, 'w').write(input() + sys.argv[1])",
        "b",
        said="a",
    )
    assert (tmp_path / "said").read_text() == "ab"
    with pytest.raises(Skipped, match="a script failed: ZeroDivisionError"):
        run_python("1 / 0")


def test_each_command_stands_beside_what_nobody_can_do_without(monkeypatch):
    ran = []
    monkeypatch.setattr(
        figure, "run_python", lambda code, *words, said="": ran.append((words, said))
    )
    assert len(list(start(Setting(QUICK)))) == 2
    ran.clear()
    rows = list(start(Setting(replace(QUICK, nano=True))))
    assert [row.what.split(" ÷ ")[0] for row in rows] == [
        "`weir --help`",
        '`weir.load("nano")` and a token',
        "`weir stream` of a line",
        "`weir chat`, an answer of one token",
    ]
    assert [row.target for row in rows] == [1.5, 1.1, 1.1, 1.1]
    assert [words[:1] for words, _ in ran if words] == [("--help",), ("stream",), ("chat",)]
    assert ran[-1] == ((), "") or ran[-1][1] == "Hello\n"
