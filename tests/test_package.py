"""The package as others get it: its metadata, its files, its dependencies and its pages."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml

import weir
from weir.errors import EXTRAS, describe_missing
from weir.models.model_spec import INTERFACE_FAMILIES, OWN_FAMILIES
from weir.policies.registry import NAMED
from weir.pools import POOLS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "weir"
BENCH = ROOT / "bench" / "weir_bench"
DOCS = ROOT / "docs"

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


class Loader(yaml.SafeLoader):
    """YAML as mkdocs reads it, but without the values of tags."""


Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def listed_pages(nav: Any) -> Iterator[str]:
    """Yield the paths in a navigation, at any depth."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for part in nav.values():
            yield from listed_pages(part)
    else:
        for part in nav:
            yield from listed_pages(part)


def test_the_version_is_the_same_everywhere() -> None:
    assert importlib.metadata.version("weir-kv") == weir.__version__
    assert f"## [{weir.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_changelog_has_the_form_that_it_says() -> None:
    """It follows Keep a Changelog 1.1.0: unreleased changes first, and only known headings."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert releases[0] == "[Unreleased]"
    for release in releases[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d|Unreleased)", release), release
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        found = re.findall(r"^### (.*)$", part, re.MULTILINE)
        assert set(found) <= kinds and len(found) == len(set(found)), found


def test_every_command_that_is_installed_is_there() -> None:
    plugins = PROJECT["entry-points"]["lm_eval.models"]
    for where in [*PROJECT["scripts"].values(), *plugins.values()]:
        module, name = where.split(":")
        assert callable(getattr(importlib.import_module(module), name))


FACE = """
import sys, types
import weir
assert not {"torch", "transformers", "weir.models"} & set(sys.modules), "what nobody asked for"
assert {*weir.__all__, "cache", "pools"} <= set(dir(weir))
for room in "cache kernels loading models native policies pools slab stream".split():
    assert isinstance(getattr(weir, room), types.ModuleType), room
for missing in ("nothing", "cli", "Cache"):
    assert not hasattr(weir, missing), missing
names = {}
exec("from weir import *", names)
assert names.keys() >= set(weir.__all__)
for name in ("load", "policy", "compile_steps"):
    assert isinstance(names[name], types.FunctionType), name
assert weir.load is weir.loading.load and weir.policy is weir.policies.policy
assert weir.Stream is names["Stream"] is weir.stream.Stream
assert weir.StreamingCache is weir.cache.StreamingCache
"""
"""A script that checks what is loaded and available after importing only weir."""


@pytest.mark.slow
def test_the_face_hands_out_its_names_when_they_are_asked_for() -> None:
    command = [sys.executable, "-c", FACE]
    done = subprocess.run(command, cwd=SOURCE.parent, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


LIGHT = """
import sys

sys.modules |= dict.fromkeys(["matplotlib", "rich", "typer", "numba", "sklearn"])
import torch, weir
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
stream = weir.Stream(model, "sink(2) | recent(4) | kcenter(4)", chunk=4)
stream.feed(torch.arange(40)[None])
assert stream.seen == 40
import weir.cli
sys.argv = ["weir", "policies"]
weir.cli.main()
"""
"""A script that cannot import the packages that weir's core does not require."""


@pytest.mark.slow
def test_the_core_needs_no_command_line_and_no_plots() -> None:
    command = [sys.executable, "-c", LIGHT]
    done = subprocess.run(command, cwd=SOURCE.parent, capture_output=True, text=True)
    said = f"weir: {describe_missing('this', 'typer')}\n"
    assert done.returncode == 1
    assert done.stderr.endswith(said)
    assert done.stderr.count("numba, which is not installed: pip install '.[fast]'") == 1
    core = {name_of(line) for line in PROJECT["dependencies"]}
    assert core == {
        "llvmlite",
        "numba",
        "numpy",
        "pydantic",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
    }


def test_every_optional_package_is_brought_by_the_extra_that_is_named() -> None:
    extras = PROJECT["optional-dependencies"]
    called = {"pil": "pillow", "sklearn": "scikit_learn"}
    for package, extra in EXTRAS.items():
        brings = {name_of(line) for line in extras[extra]}
        assert called.get(package.lower(), package.lower()) in brings, package


def test_the_readme_of_an_index_has_no_picture_and_no_link_that_leads_nowhere() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    made = runpy.run_path(str(ROOT / "hatch_build.py"))["for_an_index"](text)
    assert "](docs/" in text and not re.findall(r"\]\((?!https?:)", made)
    assert "![" not in made and "LICENSE" in made
    # Everything else stays: code blocks and tables.
    assert made.count("```") == text.count("```") and made.count("\n|") == text.count("\n|")
    kept = "[a](https://a.b) and ![p](https://a.b/p.png)\n"
    assert runpy.run_path(str(ROOT / "hatch_build.py"))["for_an_index"](kept) == kept


def test_what_to_install_is_said_in_one_place_and_in_the_words_of_the_readme() -> None:
    said = describe_missing("weir serve", "fastapi")
    line = "pip install '.[serve]'"
    assert said == f"weir serve needs fastapi, which is not installed: {line} in a clone of weir"
    assert f"\n{line}\n" in (ROOT / "README.md").read_text("utf-8")
    told = {path.name for path in SOURCE.rglob("*.py") if "'.[" in path.read_text("utf-8")}
    assert told == {"errors.py"}


def test_nothing_says_to_install_a_package_that_no_index_has() -> None:
    """weir is installed from a clone. PyPI has no weir-kv, and `weir` there is another project."""
    pages = [*ROOT.glob("*.md"), ROOT / "llms.txt"]
    for folder in ("docs", "deploy", "examples", "hub", "bench", "src"):
        pages += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    wrong = re.compile(r"pip install\b[^`#\n]*[ '\"]weir(-kv)?\b")
    read = {".md", ".txt", ".py", ".ipynb", ".service", ".yaml", ".toml", ""}
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in pages
        if path.suffix in read and path.name != "CHANGELOG.md"
        for line in path.read_text("utf-8", errors="replace").splitlines()
        if wrong.search(line.replace("in a clone of weir", ""))
    ]
    assert found == []


OPTIONAL = {
    *("lm_eval", "matplotlib", "numba", "ray", "rich", "rouge_score", "sacrebleu", "triton"),
    *("gguf", "llvmlite", "pillow", "torchao", "typer"),
    *("fastapi", "h11", "jiter", "llguidance", "prometheus_client", "starlette", "uvicorn"),
}
"""Packages that extras install."""
FOREIGN = {"kvpress_peer.py": {"kvpress"}}
"""Scripts that run in separate environments, and what they import."""


def name_of(requirement: str) -> str:
    """Return the distribution that a requirement names, spelled with underscores."""
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("-", "_")


BRINGING = ("torch", "transformers", "pydantic")
"""Packages whose own dependencies we also import."""


def test_every_import_is_a_declared_dependency() -> None:
    declared = {name_of(line) for line in PROJECT["dependencies"]} | OPTIONAL
    extras = PROJECT["optional-dependencies"]
    assert {name_of(line) for extra in extras.values() for line in extra} >= OPTIONAL
    brought = {name_of(line) for name in BRINGING for line in requires(name) or []}
    used: set[str] = set()
    # Scripts of `sides` run in separate environments.
    ours = [path for path in BENCH.rglob("*.py") if path.parent.name != "sides"]
    for path in [*SOURCE.rglob("*.py"), *ours]:
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
        used |= found - FOREIGN.get(path.name, set())
    called = {"yaml": "pyyaml", "PIL": "pillow"}
    foreign = used - set(sys.stdlib_module_names) - {"weir", "weir_bench"}
    wanted = {called.get(name, name).replace("_", "-") for name in foreign}
    assert wanted <= {name.replace("_", "-") for name in declared | brought}


def test_every_direct_dependency_is_pinned_for_make() -> None:
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    text = (ROOT / "constraints.txt").read_text("utf-8")
    pinned = {name_of(line) for line in text.splitlines() if "==" in line}
    # A CUDA build of torch requires the right triton itself.
    assert {name_of(line) for line in lines} - {"weir_kv", "triton"} <= pinned


def test_the_pages_listed_are_the_pages_there_are() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)
    listed = list(listed_pages(config["nav"]))
    assert len(listed) == len(set(listed))
    assert set(listed) == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_every_page_begins_with_what_it_is_about() -> None:
    """A page has one title, followed by a sentence and not by a list, a table or code."""
    for page in DOCS.rglob("*.md"):
        title, first = page.read_text("utf-8").split("\n\n")[:2]
        assert title.startswith("# "), page
        assert first[0].isalpha() or first[0] in "`*", page
        assert first.rstrip().endswith((".", ":")), page


def test_every_pool_and_policy_is_documented() -> None:
    text = (DOCS / "policies.md").read_text("utf-8")
    missing = [name for name in [*POOLS, *NAMED] if not re.search(rf"`{name}\b", text)]
    assert not missing


def test_the_house_is_as_its_page_says() -> None:
    text = (DOCS / "house.md").read_text("utf-8")
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^\*\*`(\w+)`\*\*", text, re.M))
    named = re.findall(r"`(\w+(?:/\w+)*(?:/|\.py))`", text)
    assert len(named) > 30
    for name in named:
        # Files are named relative to the root, to `src/weir`, or to a room.
        found = [*SOURCE.glob(name), *SOURCE.glob(f"*/{name}")]
        assert found or (ROOT / name).exists(), name


def test_every_family_weir_serves_is_documented() -> None:
    text = (DOCS / "limits.md").read_text("utf-8")
    assert not [
        name for name in sorted(INTERFACE_FAMILIES | OWN_FAMILIES) if f"`{name}`" not in text
    ]
