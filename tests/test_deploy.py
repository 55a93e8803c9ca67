"""The files in deploy/ start `weir serve` with valid options, no privileges and time to end."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from weir.cli.app import app

DEPLOY = Path(__file__).parents[1] / "deploy"


def unit(*drop_ins: str) -> configparser.ConfigParser:
    """Return the unit. Settings in files of weir.service.d replace the unit's own."""
    parsed = configparser.ConfigParser(interpolation=None, strict=False)
    parsed.optionxform = str  # type: ignore[assignment]
    for name in ("weir.service", *drop_ins):
        parsed.read_string((DEPLOY / name).read_text("utf-8"))
    return parsed


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    return found["services"]["weir"]


def image() -> str:
    return (DEPLOY / "Dockerfile").read_text("utf-8")


def given(where: str) -> dict[str, Any]:
    """Return the options that a file starts the server with, as the command line parses them."""
    words = {
        "unit": lambda: shlex.split(unit()["Service"]["ExecStart"])[2:],
        "gguf": lambda: shlex.split(unit("gguf.conf")["Service"]["ExecStart"])[2:],
        "compose": lambda: compose()["command"],
        "image": lambda: yaml.safe_load(re.findall(r"^CMD (.*)$", image(), re.MULTILINE)[-1]),
    }[where]()
    serve = typer.main.get_command(app).get_command(None, "serve")  # type: ignore[attr-defined]
    return serve.make_context("serve", words).params


@pytest.mark.parametrize("where", ["unit", "compose", "image"])
def test_its_options_are_options_and_its_data_and_keys_are_named(where):
    options = given(where)
    assert options["argument"] == "nano"
    assert str(options["keys"]).endswith("/keys")
    assert options["data"].endswith("/turns")


def test_answers_have_their_time_to_end_before_anybody_is_killed():
    assert given("unit")["drain"] + 10 < float(unit()["Service"]["TimeoutStopSec"])
    assert given("compose")["drain"] + 10 < float(compose()["stop_grace_period"].removesuffix("s"))
    assert unit()["Service"]["KillSignal"] == "SIGTERM"
    assert "\nSTOPSIGNAL SIGTERM\n" in image()


def test_it_runs_as_nobody_and_writes_where_its_data_is():
    service = unit()["Service"]
    assert service["DynamicUser"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert given("unit")["data"] == "${STATE_DIRECTORY}/turns"
    last = image().rpartition("\nFROM ")[2]
    assert "\nUSER 10001\n" in last
    assert last.index("\nUSER 10001\n") < last.index("\nENTRYPOINT ")
    its = compose()
    assert its["read_only"] is True
    assert its["cap_drop"] == ["ALL"]
    assert its["volumes"] == ["turns:/data"]
    assert its["ports"] == ["127.0.0.1:8000:8000"]


def test_a_gguf_in_a_home_is_the_only_thing_that_the_service_sees_there():
    options, service = given("gguf"), unit("gguf.conf")["Service"]
    model = Path(options["argument"])
    assert model.suffix == ".gguf"
    assert model.is_relative_to("/home")
    assert service["ProtectHome"] == "tmpfs"  # "yes" hides what BindReadOnlyPaths puts there
    assert service["BindReadOnlyPaths"] == str(model.parent)
    # systemd adds a second command to the first one unless an empty line removes it.
    assert "\nExecStart=\nExecStart=/opt" in (DEPLOY / "gguf.conf").read_text("utf-8")
    assert options["data"] == given("unit")["data"]
    assert options["keys"] == given("unit")["keys"]
    assert options["drain"] + 10 < float(service["TimeoutStopSec"])


def test_what_weir_keeps_for_the_next_start_is_in_a_folder_that_it_may_write():
    pairs = dict(word.split("=", 1) for word in unit()["Service"]["Environment"].split())
    assert unit()["Service"]["CacheDirectory"] == "weir"
    assert pairs["XDG_CACHE_HOME"] == "%C"  # weir adds the folder `weir`
    assert all(pairs[name].startswith("%C/weir/") for name in ("HF_HOME", "NUMBA_CACHE_DIR"))
    assert "XDG_CACHE_HOME=/data/cache " in image()


def test_the_service_may_read_the_free_memory_and_has_a_limit():
    assert "ProcSubset" not in unit()["Service"]  # "pid" hides /proc/meminfo
    assert unit()["Service"]["MemoryMax"] == "4G"
    assert compose()["mem_limit"] == "4g"
    assert unit("gguf.conf")["Service"]["MemoryMax"] == "8G"


def test_the_image_can_read_a_gguf():
    assert "[serve,fast,gguf]" in image()
    assert "[serve,fast,gguf]" in (DEPLOY / "gguf.conf").read_text("utf-8")
