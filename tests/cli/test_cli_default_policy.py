"""Which policy `weir chat` and `weir serve` use if none is given, and what they print about it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from terminal import CHATML, make_model, run

import weir
from weir.cache import DEFAULT
from weir.cli import options
from weir.models import fingerprint
from weir.policies import format_policy_file


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> str:
    """A model with a policy file next to it, calibrated for it."""
    folder = tmp_path_factory.mktemp("measured")
    model, _ = weir.load(make_model(folder, CHATML))
    layers = [{"policy": "sink(1) | recent(8) | recent(11):int8"}]
    (folder / "weir.toml").write_text(format_policy_file({}, fingerprint(model), layers))
    return str(folder)


@pytest.fixture
def chat(capsys, monkeypatch, measured):
    """A function that says Hello in a chat and asks for a report; what the command has printed."""

    def talk(*words: object):
        monkeypatch.setattr(
            sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n/report\n"), "utf-8")
        )
        words = ("chat", "--model", measured, "--chunk", 8, "--max-tokens", 4, *words)
        return run(capsys, *words)

    return talk


def test_a_conversation_says_where_its_policy_comes_from(chat, measured):
    told = chat().err.splitlines()
    by = f"from {measured}/weir.toml next to the model"
    kept = "the first 1 and the newest 19 tokens in 8 bits"
    assert told[0] == f"{measured} keeps {kept}, {by}. /help for help."
    assert any(line.startswith("[sink(1) | recent(8) | recent(11):int8]: ") for line in told)
    pinned = chat("--system", "Be brief.").err
    assert f"8 bits, {by}." in pinned
    assert "pinned([sink(1) | recent(8) | recent(11):int8], " in pinned


@pytest.mark.parametrize("given", [("--policy", "h2o(20)"), ("--slots", "exact")])
def test_what_is_given_goes_before_it(chat, given, measured):
    told = chat(*given).err
    assert f"by {measured}/weir.toml" not in told
    assert "recent(8)" not in told
    # --slots alone names no policy, so chat says which policy file it replaces.
    aside = (
        f"--slots replaces the policy file {measured}/weir.toml next to the model with the default "
    )
    assert told.count(aside) == (given[0] == "--slots")


@pytest.mark.parametrize(
    ("given", "free", "form", "said"),
    [
        ((), 10**9, "exact ", "weir(slots=exact, budget=504)"),
        ((), 4 * 73_000, "quantized ", "weir(budget=504)"),
        (("--slots", "int8"), 10**9, "", "weir(slots=int8, budget=504)"),
    ],
)
def test_without_any_it_is_the_default_as_large_as_the_window_and_exact_if_that_fits(
    chat, tmp_path, monkeypatch, given, free, form, said
):
    monkeypatch.setattr("weir.models.free_memory", lambda device: free)
    monkeypatch.setattr("weir.cache.default_policy.FILE", "nothing.toml")
    told = chat(*given).err
    allowed = "as many as fit in the window and a quarter of the free memory, up to 8,192"
    assert f". It has 504 {form}slots, {allowed}. /help" in told
    assert f"\n{said}: " in told


def test_commands_name_the_default_that_caches_take():
    assert options.DEFAULT == DEFAULT


def test_a_saved_conversation_keeps_its_policy(chat, measured, tmp_path):
    model, _ = weir.load(measured)
    stream = weir.Stream(model, "h2o(20)")
    stream.feed([1, 2, 3])
    stream.save(tmp_path / "session")
    told = chat("--session", tmp_path / "session").err
    assert told.startswith(f"{measured} keeps the newest 10 and 10 tokens by heavy. /help")
    assert "weir.toml" not in told


def test_a_damaged_one_ends_it_in_a_sentence(chat, measured, monkeypatch):
    Path(measured, "damaged.toml").write_text("format =")
    monkeypatch.setattr("weir.cache.default_policy.FILE", "damaged.toml")
    ended = chat()
    assert ended.code == 1
    assert "damaged.toml is not a policy file" in ended.err
    assert "or give a policy" in ended.err


def test_a_server_says_where_its_policy_comes_from(capsys, measured, tmp_path):
    words = ("serve", measured, "--port", 0, "--data", tmp_path / "a", "--disk", "1KB", "--pin", 0)
    alone = run(capsys, *words).err.splitlines()
    assert alone[0] == f"using the policy file {measured}/weir.toml next to the model"
    other = run(capsys, *words, "--policy", "[sink(1) | recent(8) | recent(11):int8]")
    assert other.err.splitlines() == alone[1:]  # what a turn takes, and that there is no room
    held = run(capsys, *words, "--slots", "exact").err
    assert held.startswith(f"--slots replaces the policy file {measured}/weir.toml next")


def test_a_server_says_of_one_of_another_model_why_it_is_taken(capsys, measured, monkeypatch):
    text = Path(measured, "weir.toml").read_text()
    Path(measured, "foreign.toml").write_text(text.replace("vocabulary = ", "vocabulary = 1"))
    monkeypatch.setattr("weir.cache.default_policy.FILE", "foreign.toml")
    ended = run(capsys, "serve", measured, "--port", 0)
    assert ended.code == 1
    assert "foreign.toml was calibrated for another model" in ended.err
    assert ended.err.count("It is used by default, because it is next") == 1


def test_a_server_logs_how_steps_run(capsys, measured, monkeypatch, caplog):
    monkeypatch.setattr("weir.serve.api.run_app", lambda *given: None)
    monkeypatch.setattr("weir.serve.api.log_json", lambda: None)
    with caplog.at_level("INFO", "weir.serve"):
        assert run(capsys, "serve", measured, "--port", 0).code == 0
        assert run(capsys, "serve", measured, "--port", 0, "--deterministic").code == 0
    logged = [each.fields for each in caplog.records if each.message == "decode steps"]
    assert [each["run"] for each in logged] == ["native", "eager"]
    assert [each["reason"] for each in logged] == [
        None,
        "weir.compile_steps(model) has not been called",
    ]


def test_a_server_takes_native_steps_unless_answers_are_to_be_the_same(
    capsys, measured, monkeypatch
):
    asked: list[object] = []
    monkeypatch.setattr(weir.native, "compile_steps", lambda model, **given: asked.append(given))
    monkeypatch.setattr("weir.serve.api.run_app", lambda *given: None)
    # The handler of this log would outlive the file that `capsys` uses as standard error.
    monkeypatch.setattr("weir.serve.api.log_json", lambda: None)
    assert run(capsys, "serve", measured, "--port", 0, "--deterministic").code == 0
    assert not asked
    assert run(capsys, "serve", measured, "--port", 0).code == 0
    assert asked == [{"torch_compile": False, "strict": True}]
