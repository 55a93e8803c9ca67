"""Each method's page: what a reader looks for is there, and its parameters are the policy's."""

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
PAGES = {
    "streaming-llm": ("streaming_llm",),
    "h2o": ("h2o",),
    "buzz": ("buzz",),
    "reservoir": ("reservoir",),
    "uniform": ("uniform",),
    "kcenter": ("kcenter",),
    "subgen": ("subgen",),
    "balancekv": ("balancekv",),
    "snapkv": ("snapkv",),
    "defensivekv": ("defensivekv",),
    "pyramidkv": ("pyramidkv", "pyramid"),
    "weir": ("weir",),
    "certified": ("certified",),
    "reskv": ("reskv",),
    "attention-matching": ("attention_matching",),
    "scores": ("tova", "keydiff", "keyformer", "lacache"),
}
pages = pytest.mark.parametrize("page", PAGES)


def text(page: str) -> str:
    return (METHODS / f"{page}.md").read_text("utf-8")


def parameters(page: str) -> dict[str, str]:
    """From the page's table: each parameter and what it says of its default."""
    table = text(page).split("## Parameters")[1].split("\n## ")[0]
    found = {}
    for row in re.findall(r"^\| (`.*?) \| (.*?) \| .* \|$", table, re.MULTILINE):
        names = re.findall(r"`(\w+)`", row[0].split("(of")[0])
        defaults = row[1].replace("`", "").split(", ")
        for place, name in enumerate(names):
            found[name] = defaults[place] if len(defaults) == len(names) else row[1]
    return found


def test_every_method_has_a_page():
    assert {path.stem for path in METHODS.glob("*.md")} == set(PAGES)
    described = {name for names in PAGES.values() for name in names}
    assert described | {"dense", "window", "recompute", "pinned", "quantized"} == set(NAMED)


@pages
def test_a_page_has_rule_formula_pipe_use_and_figures_with_their_command(page):
    found = text(page)
    for heading in ("## The rule", "## The formula", "## Parameters", "## Use it", "## Do not use"):
        assert f"\n{heading}" in found, heading
    assert re.search(r"^## .*[Pp]aper.*(report|figures)", found, re.MULTILINE)
    assert "arXiv:" in found or "section" in found[:600]
    ours = re.split(r"\*\*Ours\b", found, maxsplit=1)[1]
    assert re.search(r"^weir (eval|stream|attention-error) ", ours, re.MULTILINE)


@pages
def test_the_pipe_of_a_page_is_the_policys(page):
    left, right = re.search(r"```text\n(.+?)\s+=\s+(.+?)\n", text(page)).groups()
    made, pipe = policy(left), policy(right)
    for layer in range(3):
        assert made.for_layer(layer, 3).pools == pipe.for_layer(layer, 3).pools


@pages
def test_all_parameters_of_a_policy_are_on_its_page_with_their_defaults(page):
    found = parameters(page)
    for name in PAGES[page]:
        for key, parameter in inspect.signature(NAMED[name].make).parameters.items():
            assert key in found, f"{key} of {name}"
            # What a default is worked out from is told in words.
            if parameter.default is not None:
                default = format_value(parameter.default).removesuffix(".0")
                said = found[key].replace("`", "").removesuffix(".0")
                assert re.match(rf"{re.escape(default)}\b", said), f"{key} of {name}: {found[key]}"


@pages
def test_parameters_that_only_the_pool_has_are_on_its_page(page):
    pools = {pool.name for name in PAGES[page] for pool in NAMED[name].make().for_layer(0, 1).pools}
    for name in pools - {"sink", "recent"}:
        for key in inspect.signature(POOLS[name]).parameters:
            assert re.search(rf"[`(]{key}\b|\b{key}=", text(page)), f"{key} of {name}"
