"""The pages of methods: every policy is on one, with its pipe, parameters, use and figures."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from weir.errors import format_value
from weir.policies.grammar import policy
from weir.policies.registry import NAMED
from weir.pools import POOLS

METHODS = Path(__file__).parents[2] / "docs" / "methods"
PAGES = {path.stem: path.read_text("utf-8") for path in METHODS.glob("*.md")}
PIPE = re.compile(r"^```text\n(\w+)(\(.*?\))\s+=\s+(.+?)\n", re.MULTILINE)
WITHOUT_A_PIPE = {"dense", "window", "recompute", "kvzip", "pinned", "quantized", "pyramid"}
SECTIONS = {
    name: (f"{name}{arguments}", pipe, part)
    for text in PAGES.values()
    # A page is about one method, or has a section for each.
    for part in (re.split(r"^(?=## )", text, flags=re.M) if text.count("**Use it**") else [text])
    for name, arguments, pipe in PIPE.findall(part)
    if name in NAMED
}
policies = pytest.mark.parametrize("name", sorted(NAMED.keys() - WITHOUT_A_PIPE))


def parameters(section: str) -> dict[str, str]:
    """Return each parameter of the section's table with what the table says of its default."""
    found = {}
    for row in re.findall(r"^\| (`.*?) \| (.*?) \| .* \|$", section, re.MULTILINE):
        names = re.findall(r"`(\w+)`", row[0].split("(of")[0])
        defaults = row[1].replace("`", "").split(", ")
        for place, name in enumerate(names):
            found.setdefault(name, defaults[place] if len(defaults) == len(names) else row[1])
    return found


def test_every_policy_with_a_pipe_has_its_section():
    assert set(SECTIONS) == set(NAMED) - WITHOUT_A_PIPE


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_page_has_papers_use_and_figures_with_their_command(page):
    text = PAGES[page]
    assert "arXiv:" in text
    assert re.search(r"(\*\*|## )Use it", text) and re.search(r"(\*\*|## )Do not use\s+it", text)
    ours = re.split(r"\*\*Ours\b", text, maxsplit=1)[1]
    assert re.search(r"^weir (eval|stream|attention-error) ", ours, re.MULTILINE)


@policies
def test_the_pipe_of_a_section_is_the_policys(name):
    written_as, pipe, _ = SECTIONS[name]
    made, shown = policy(written_as), policy(pipe)
    for layer in range(3):
        assert made.for_layer(layer, 3).pools == shown.for_layer(layer, 3).pools


@policies
def test_all_parameters_are_in_the_table_with_their_defaults(name):
    section = SECTIONS[name][2]
    found = parameters(section)
    for key, parameter in inspect.signature(NAMED[name].make).parameters.items():
        assert key in found, key
        # If the default is None, the table says in words how it is computed.
        if parameter.default is not None:
            default = format_value(parameter.default).removesuffix(".0")
            said = found[key].replace("`", "").removesuffix(".0")
            assert re.match(rf"{re.escape(default)}\b", said), f"{key}: {found[key]}"
    for pool in {pool.name for pool in NAMED[name].make().for_layer(0, 1).pools}:
        if pool in {"sink", "recent", "heavy", "snap"} and pool not in name:
            continue
        for key in inspect.signature(POOLS[pool]).parameters:
            assert re.search(rf"[`(]{key}\b|\b{key}=", section), f"{key} of {pool}"
