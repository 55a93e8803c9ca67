"""The command line as a user meets it: one process each, its output and its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = [sys.executable, "-c", "from weir.cli import main; main()"]
BOOK = Path(__file__).parents[2] / "src/weir/assets/war-and-peace.txt.xz"


def weir(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [*RUN, *words], capture_output=True, text=True, timeout=120, **options
    )


def test_stream_prints_one_json_object_and_nothing_else() -> None:
    done = weir("stream", "--text", str(BOOK), "--tokens", "1200", "--json")
    facts = json.loads(done.stdout)
    assert done.returncode == 0
    assert {"model", "policy", "tokens", "ppl", "ppl_by_block", "kv_bytes", "tokens_per_s"} <= set(
        facts
    )
    assert facts["tokens"] == 1200
    assert len(facts["ppl_by_block"]) == 2


def test_policies_are_listed_as_json() -> None:
    facts = json.loads(weir("policies", "--json").stdout)
    assert "streaming_llm" in {row["name"] for row in facts["policies"]}
    assert {"sink", "recent"} <= {row["name"] for row in facts["pools"]}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--text", str(BOOK), "--policy", "sink(4) | recnet(4)"], "did you mean 'recent'"),
        (["--text", str(BOOK), "--policy", "streaming_llm(budget=4)"], "no room"),
        (["--text", "there-is-no-such-file.txt"], "there-is-no-such-file.txt"),
        (["--text", str(BOOK), "--model", "./no/such/model"], "no/such/model"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_1(words: list[str], says: str) -> None:
    done = weir("stream", *words)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("weir: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_a_text_that_is_empty_or_not_utf8_is_refused(tmp_path: Path) -> None:
    for name, raw in (("empty.txt", b"\n \n"), ("latin.txt", "naïve".encode("latin-1"))):
        (tmp_path / name).write_bytes(raw)
        done = weir("stream", "--text", str(tmp_path / name))
        assert done.returncode == 1
        assert name in done.stderr
        assert done.stderr.count("\n") == 1


def test_wrong_usage_has_exit_code_2() -> None:
    assert weir("stream", "--text", str(BOOK), "--tokens", "0").returncode == 2
    assert weir("stream").returncode == 2
    assert weir("no-such-command").returncode == 2


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_reports_what_was_read_so_far() -> None:
    slow = "recompute(budget=256)"
    words = ["stream", "--text", str(BOOK), "--tokens", "30000", "--policy", slow, "--json"]
    process = subprocess.Popen(
        [*RUN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(15)  # past loading, and far from the end
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    facts = json.loads(out)
    assert process.returncode == 0
    assert facts["interrupted"] is True
    assert 0 < facts["tokens"] < 30000


def test_a_conversation_is_saved_and_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "talk.safetensors"
    words = ("chat", "--max-tokens", "8", "--temperature", "0")
    first = weir(*words, input=f"It was a dark night\n/report\n/nonsense\n/save {file}\n/quit\n")
    assert first.returncode == 0
    assert file.exists()
    assert "tokens seen" in first.stderr
    assert "weir: " in first.stderr  # about /nonsense, and the conversation went on
    again = weir(*words, input=f"/load {file}\nAnd then\n")
    assert again.returncode == 0
    assert again.stdout.strip()
