"""What the command line says when something is wrong: one line, and an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
from terminal import SOURCE, Ended, make_model, run

from weir.cli.runtime import terminable


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "book.txt").write_text("Well, Prince, so Genoa and Lucca. " * 20)
    return tmp_path / "book.txt"


def is_one_line(ended: Ended, code: int) -> bool:
    return (
        ended.code == code
        and ended.out == ""
        and ended.err.startswith("weir: ")
        and ended.err.count("\n") == 1
        and ended.err.endswith("\n")
    )


WRONG = {
    "a typo in a policy": (["--policy", "streaming_lm(64)"], "did you mean 'streaming_llm'"),
    "a typo in a pool": (["--policy", "sink(4) | recnt(6)"], "(character 11: sink(4) | »recnt(6))"),
    "a budget below its sinks": (["--policy", "streaming_llm(budget=3)"], "leaves no slots"),
    "a budget of nothing": (["--policy", "window(0)"], "a whole number of at least 1, got 0"),
    "a budget past the model's window": (
        ["--policy", "recompute(600)"],
        "the model can read only 512",
    ),
    "a policy of several lines": (["--policy", "sink(4) |\n recnt(6)"], "did you mean 'recent'"),
    "no policy": (["--policy", ""], "expected a pool or a policy"),
    "a model folder that is not there": (
        ["--model", "./nowhere"],
        ("the model folder './nowhere' does not"),
    ),
    "a model nobody has": (["--model", "nobody/nothing"], "model 'nobody/nothing' not found"),
    "a text that is not there": (["--text", "nowhere.txt"], "cannot read nowhere.txt: No such"),
    "a folder for a text": (["--text", "/"], "cannot read /: Is a directory"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_gets_one_line_and_exit_code_1(capsys, monkeypatch, model, text, name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    words, says = WRONG[name]
    ended = run(capsys, "stream", "--text", text, "--model", model, "--json", *words)
    assert is_one_line(ended, 1), ended
    assert says in ended.err


TEXTS = {
    "empty": (b"", "contains no text"),
    "nothing but space": (b"\xef\xbb\xbf \n\n\0\n", "contains no text"),
    "latin-1": ("Márya".encode("latin-1"), "is not UTF-8 text: byte 1 is 0xe1"),
    "cut.xz": (b"\xfd7zXZ\0\0", "is not a whole .xz file"),
    "no.xz": (b"Well, Prince", "is not a whole .xz file"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_cannot_be_read_gets_one_line(capsys, model, tmp_path, name):
    holds, says = TEXTS[name]
    (tmp_path / name).write_bytes(holds)
    ended = run(capsys, "stream", "--text", tmp_path / name, "--model", model)
    assert is_one_line(ended, 1), ended
    assert says in ended.err


USAGE = {
    "a model without its option": (
        ["demo", "nano"],
        "; use --model to name a model; see",
    ),
    "a typo in what is listed": (
        ["policies", "h20"],
        "did you mean 'h2o'? To find your own, import",
    ),
    "no tokens": (["stream", "--text", "x", "--tokens", "0"], "'--tokens'"),
    "half a token": (["stream", "--text", "x", "--tokens", "2.5"], "'--tokens'"),
    "no chunk": (["stream", "--text", "x", "--chunk", "0"], "'--chunk'"),
    "no block": (["stream", "--text", "x", "--block", "0"], "'--block'"),
    "a seed below zero": (["stream", "--text", "x", "--seed", "-1"], "'--seed'"),
    "positions of another kind": (["stream", "--text", "x", "--positions", "up"], "'--positions'"),
    "no text": (["stream"], "'--text'"),
    "an option there is not": (["stream", "--txt", "x"], "--txt"),
    "a word too many": (["policies", "please"], "please"),
    "a command there is not": (["strem"], "'strem'"),
    "a probability above one": (["chat", "--top-p", "1.5"], "'--top-p'"),
    "a temperature below zero": (["chat", "--temperature", "-1"], "'--temperature'"),
    "answers of no tokens": (["chat", "--max-tokens", "0"], "'--max-tokens'"),
    "a demo of too few tokens": (["demo", "--tokens", "10"], "'--tokens'"),
    "training without a text": (["train", "--out", "x"], "Missing option '--text'"),
    "steps of a text": (["train", "--out", "x", "--text", "y", "--steps", "3"], "--tokens"),
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage_gets_one_line_that_leads_to_the_help_and_exit_code_2(capsys, name):
    words, says = USAGE[name]
    ended = run(capsys, *words)
    assert is_one_line(ended, 2), ended
    assert says in ended.err
    command = "weir" if words == ["strem"] else f"weir {words[0]}"
    assert ended.err.endswith((f"; see {command} --help\n", f"? See {command} --help\n"))


@pytest.mark.parametrize("command", ["demo", "chat", "stream", "policies", "train"])
def test_every_command_says_what_it_does_and_takes(capsys, command):
    ended = run(capsys, command, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert f"weir {command} [OPTIONS]" in ended.out
    takes_json = command != "chat"
    assert ("--json" in ended.out) == takes_json


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_alone_it_lists_its_commands(capsys, words):
    ended = run(capsys, *words)
    assert ended.code == 0
    for command in ("demo", "chat", "stream", "policies", "train"):
        assert f" {command} " in ended.out


def test_it_knows_its_version(capsys):
    from weir import __version__

    assert run(capsys, "--version").out == f"weir {__version__}\n"


def test_a_reader_that_has_gone_is_no_reason_to_complain(capsys, monkeypatch):
    def gone(*words: object, **more: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("weir.cli.app.app", gone)
    monkeypatch.setattr("weir.cli.cli._drop_output", lambda: None)
    ended = run(capsys, "policies")
    assert (ended.code, ended.err) == (1, "")


def test_ctrl_c_before_there_is_anything_to_report_is_one_line(capsys, monkeypatch, text):
    def pressed(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weir.stream.read_text", pressed)
    ended = run(capsys, "stream", "--text", text)
    assert (ended.code, ended.out, ended.err) == (130, "", "weir: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_it_before_there_is_anything_to_report_is_one_line(
    capsys, monkeypatch, text, number
):
    """SIGHUP, sent when a terminal closes, is treated like SIGTERM, unless `nohup` ignores it."""
    monkeypatch.setattr("weir.stream.read_text", lambda path: os.kill(os.getpid(), number))
    outside = signal.signal(number, lambda *_: None)
    before = signal.getsignal(number)
    try:
        ended = run(capsys, "stream", "--text", text)
        assert (ended.code, ended.out, ended.err) == (143, "", "weir: terminated\n")
        assert signal.getsignal(number) == before
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with terminable():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(number, outside)


@pytest.mark.parametrize(
    ("module", "words"), [("typer", ["--help"]), ("torch", ["stream", "--text", "book.txt"])]
)
def test_ctrl_c_in_the_imports_is_one_line(tmp_path, module, words):
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        [sys.executable, "-c", "from weir.cli import main; main()", *words],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCE}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "weir: interrupted\n")


@pytest.mark.slow
def test_the_installed_command_and_a_full_disk():
    """Only visible in a separate process: an error at the last flush of standard output."""
    command = [sys.executable, "-c", "from weir.cli import main; main()", "policies", "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": SOURCE},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("weir: ")
    assert "No space left" in done.stderr
    assert done.stderr.count("\n") == 1
