"""Policy files are read as they were written, and anything else is refused in one sentence."""

from __future__ import annotations

import os
import socket
import time
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weir
from weir.errors import WeirError
from weir.policies import Pinned, Quantized, format_policy_file

MODEL = {
    "kind": "llama",
    "layers": 2,
    "width": 32,
    "vocabulary": 61,
    "dtype": "float32",
    "weights": "00ff",
}
LAYERS = [{"policy": "h2o(8)"}, {"policy": "sink(2) | recent(14)", "slots": 16}]
WHOLE = format_policy_file({}, MODEL, LAYERS)

plain = st.one_of(
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.text(st.characters(exclude_categories=("Cs",))),
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{3,8}", fullmatch=True), plain | st.lists(plain)))
def test_toml_reads_what_was_written(facts):
    facts = {f"my_{name}": value for name, value in facts.items()}
    read = tomllib.loads(format_policy_file({**facts, "text": facts}, MODEL, LAYERS))
    assert read == {"format": 1, **facts, "text": facts, "model": MODEL, "layers": LAYERS}


def test_a_home_that_nobody_knows_is_no_traceback():
    with pytest.raises(WeirError, match=r"~nobody.* names a user that does not exist"):
        weir.policy("~nobody-of-this-name/x.toml")


def test_a_path_with_a_nul_character_is_no_traceback():
    with pytest.raises(WeirError, match="is not a path: it contains a NUL character"):
        weir.policy("a\0b.toml")


def test_what_is_no_regular_file_is_not_even_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")  # opening it would wait for a writer
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "link.toml").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.toml"))
    for name, kind in (
        ("pipe", "a pipe"), ("folder", "a folder"), ("socket", "a socket"), ("link", "a device"),
    ):  # fmt: skip
        path = tmp_path / f"{name}.toml"
        with pytest.raises(WeirError) as refused:
            weir.policy(str(path))
        assert str(refused.value).startswith(f"{path} is {kind}, not a policy file")


def test_all_that_weir_puts_around_a_file_is_read_again():
    inner = weir.policy("[sink(4) | recent(60) | chunks(snap(64)), h2o(96)]")
    for around in (Quantized(Pinned(inner, 10)), Pinned(Quantized(inner), 10)):
        assert weir.policy(str(around)) == around


def test_a_policy_file_is_a_policy_and_is_not_needed_afterwards(tmp_path, monkeypatch):
    (tmp_path / "two layers.TOML").write_text(WHOLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = weir.policy(" ~/two layers.TOML ")
    assert found == weir.policy("[h2o(8), sink(2) | recent(14)]")
    assert str(found) == "[h2o(8), sink(2) | recent(14)]"
    assert (found.origin.file, found.origin.model) == ("~/two layers.TOML", MODEL)
    assert weir.policy(str(found)).origin is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weir = [", "is not a policy file: it is not valid TOML: "),
        ("a = " + "[" * 5000, "is not a policy file: it is "),
        ("\xff", "is not a policy file: it is not valid TOML: "),
        ("[tool.ruff]\nline-length = 100", "is TOML, but not a policy file"),
        (
            WHOLE.replace("format = 1", "format = 2"),
            ("has policy file format 2, but this version of weir reads"),
        ),
        (WHOLE.replace("[model]", "[models]"), "is damaged: model is missing. Run weir calibrate"),
        (
            WHOLE.replace("layers = 2", "layers = true"),
            "model.layers must be a whole number, got true",
        ),
        (
            ("format = 1\nlayers = []\n") + WHOLE.partition("[[")[0].partition("1\n")[2],
            "it has policies for 0 layers, and 1 to 2,000 are allowed",
        ),
        (WHOLE.replace('policy = "h2o(8)"', 'pipe = "h2o(8)"'), "layers[0].policy is missing"),
        (WHOLE.replace("h2o(8)", "h2o(1)"), "layer 0 that cannot be read: a budget of 1"),
        (WHOLE.replace("h2o(8)", "recompute(8)"), "which a cache cannot do"),
        (WHOLE.replace("h2o(8)", "other.toml"), "layer 0 that cannot be read: "),
    ],
)
def test_what_is_no_policy_file_is_refused(tmp_path, text, said):
    path = tmp_path / "wrong.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(WeirError) as raised:
        weir.policy(str(path))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(WeirError, match=r"cannot read the policy file .*no\.toml: No such file"):
        weir.policy(str(tmp_path / "no.toml"))


LINE = '[[layers]]\npolicy = "sink(1)"\n'
LARGE = {
    "a key of 100,000 parts": (".".join("a" * 100_000) + " = 1", "the key 'a.a.* 16 or more parts"),
    "a table of 100,000 parts": ("[" + ".".join("a" * 100_000) + "]", "16 or more parts"),
    "quoted parts": (" . ".join(["'a'", '"b"'] * 50_000) + " = 1", "16 or more parts"),
    "in a table of one line": ("a = {" + ".".join("b" * 16) + " = 1}", "16 or more parts"),
    "nested lists": ("a = " + "[" * 100_000, "nested too deeply"),
    "a long file": (
        "#" * 1_000_001,
        "has 1,000,001 bytes, and a policy file can have at most 1,000,000",
    ),
    "many layers": (
        WHOLE + LINE * 2000,
        ("has policies for 2,002 layers, and 1 to 2,000 are allowed"),
    ),
    "a long policy": (
        WHOLE + LINE.replace("sink(1)", "sink(1)|" * 2049),
        "the policy of layer 2 has 16,392 characters, and at most 16,384 are allowed",
    ),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_file_that_would_take_long_to_read_is_refused(tmp_path, kind):
    text, said = LARGE[kind]
    path = tmp_path / "large.toml"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(WeirError, match=said):
        weir.policy(str(path))
    assert time.process_time() - began < 2


def test_keys_of_some_parts_are_read(tmp_path):
    path = tmp_path / "deep.toml"
    path.write_text(WHOLE + "\n[notes]\n" + ".".join("a" * 15) + " = [0.5, 1.25]\n")
    assert weir.policy(str(path))
