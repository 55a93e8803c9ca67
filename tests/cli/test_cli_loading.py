"""How a model is loaded: the same options in every command that loads one."""

from __future__ import annotations

import json

import pytest
from terminal import make_model, run
from typer.main import get_command

from weir.cli.app import app
from weir.cli.loading import OPTIONS

WORDS = "The prince was silent, but she looked at him significantly, awaiting a reply. "


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(WORDS * 8)
    return path


@pytest.mark.parametrize(
    "name", ["advise", "attention-error", "chat", "eval", "inspect", "serve", "stream"]
)
def test_a_command_that_loads_a_model_has_all_of_them(name):
    found = {it.name for it in get_command(app).get_command(None, name).params}
    assert found >= set(OPTIONS)


def test_a_stream_in_half_precision_takes_half_of_the_bytes(capsys, model, text):
    words = ("stream", "--text", text, "--model", model, "--policy", "sink(4) | recent(20)")
    words += ("--tokens", 200, "--json")
    whole, half = (
        json.loads(run(capsys, *words, *more).out)["bytes_by_block"][0]
        for more in ((), ("--dtype", "bfloat16", "--device", "cpu"))
    )
    assert whole / 2 <= half < 0.6 * whole  # log-weights and positions keep their size


@pytest.mark.slow
def test_results_say_how_their_model_was_loaded_and_do_not_go_on_with_another(
    capsys, model, text, tmp_path
):
    words = ("eval", "--model", model, "--tasks", f"ppl(tokens=200, text={text})")
    words += ("--policies", "h2o(24), dense", "--out", tmp_path / "r.jsonl")
    assert run(capsys, *words, "--dtype", "bfloat16").code == 0
    grid, *cells = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())
    assert [it["loading"] for it in (*grid["cells"], *cells)] == [{"dtype": "bfloat16"}] * 4
    other = run(capsys, *words, "--resume")
    assert other.code == 1 and "has the results of another grid" in other.err
    more = run(capsys, *words, "--dtype", "bfloat16", "--seeds", "0", "--add")
    assert (more.code, len((tmp_path / "r.jsonl").read_text().splitlines())) == (0, 3)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--dtype", "float31"), "dtype must be 'auto', 'float32'"),
        (("--device", "nosuch"), "cannot be put on the device 'nosuch'"),
        (("--device", "cpu", "--device-map", "auto"), "Give only one of them"),
        (
            ("--weights", "int3"),
            "q8_0, q4_0, q4_1, gguf, got 'int3'",
        ),
        (("--weights", "int8", "--device-map", "auto"), "for a model on one device"),
    ],
)
def test_what_no_model_can_be_loaded_with_is_one_line(capsys, model, text, words, says):
    ended = run(capsys, "stream", "--text", text, "--model", model, *words)
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert says in ended.err
