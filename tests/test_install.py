"""The package as pip installs it: a wheel, built from the source distribution.

The environment is empty at first. If a test needs other packages, it sees those of the environment
in which the tests run. To test an extra, it sees only those that pip would have installed for it.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import weir
from weir.errors import EXTRAS, describe_missing
from weir.models import versions

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "weir"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def done(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command that must succeed, and return its output."""
    ran = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source distribution of this tree, and the wheel built from it."""
    out = tmp_path_factory.mktemp("built")
    done(sys.executable, "-m", "build", "--no-isolation", "--outdir", out)
    return out


@pytest.fixture(scope="module")
def files(built: Path) -> set[str]:
    """Return the files in the wheel."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


@pytest.fixture(scope="module")
def source(built: Path) -> set[str]:
    """Return the files in the source distribution, relative to its folder."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


@pytest.fixture(scope="module")
def place(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment in which only the wheel is installed, without pip."""
    made = tmp_path_factory.mktemp("environment")
    venv.create(made, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(made), "--disable-pip-version-check"]
    options = ["--no-deps", "--no-index", "--no-compile", "--quiet"]
    done(*pip, "install", *options, next(built.glob("*.whl")))
    return made


# --- what is in it


def tracked(*others: str) -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("this tree is not a git checkout, so its files are not known")
    return set(done("git", "ls-files", "-z", *others).split("\0")) - {""}


@pytest.mark.slow
def test_the_wheel_is_the_package_its_licenses_and_nothing_else(files: set[str]) -> None:
    mine = {p for p in SOURCE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    inside = {f"weir/{p.relative_to(SOURCE).as_posix()}" for p in mine}
    facts = {"METADATA", "RECORD", "WHEEL", "entry_points.txt"}
    facts |= {"licenses/LICENSE", "licenses/NOTICE"}
    assert files == inside | {f"weir_kv-{weir.__version__}.dist-info/{name}" for name in facts}


@pytest.mark.slow
def test_its_readme_is_the_one_for_an_index(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
        facts = wheel.read(name).decode("utf-8")
    assert "Description-Content-Type: text/markdown" in facts
    assert "# weir\n" in facts and "](docs/" not in facts


@pytest.mark.slow
def test_the_packaged_model_and_book_and_the_mark_of_types_are_in_it(files: set[str]) -> None:
    assert "weir/py.typed" in files
    assert "weir/assets/war-and-peace.txt.xz" in files
    assert {
        f"weir/assets/nano/{name}" for name in ("config.json", "model.safetensors", "weir.toml")
    } <= files


@pytest.mark.slow
def test_the_source_distribution_holds_what_belongs_to_the_tree_and_nothing_else(
    source: set[str],
) -> None:
    belong = tracked("--cached", "--others", "--exclude-standard")
    assert source - belong == {"PKG-INFO"}
    assert tracked() & belong - source == set()


# --- its dependencies


@functools.cache
def asked_for(name: str) -> list[Requirement]:
    """Return the requirements of a distribution."""
    return [Requirement(line) for line in importlib.metadata.requires(name) or []]


def needed(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """Yield what a distribution requires on this machine, with some of its extras."""
    for wanted in asked_for(name):
        marker = wanted.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in extras or {""}):
            yield wanted


version_of = functools.cache(importlib.metadata.version)


def brought(extra: str | None) -> dict[str, Requirement]:
    """Return the distributions that pip installs with weir and one of its extras, by name."""
    lines = [*PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] if extra else ())]
    waiting = [Requirement(line) for line in lines]
    found: dict[str, Requirement] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        it = waiting.pop()
        name, extras = canonicalize_name(it.name), frozenset(it.extras)
        if (it.marker is not None and not it.marker.evaluate()) or (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name == "weir-kv":
            for each in extras:
                more = PROJECT["optional-dependencies"][each]
                waiting += [Requirement(line) for line in more]
            continue
        found[name] = it
        version = version_of(name)
        assert it.specifier.contains(version, prereleases=True), f"{it}, but got {version}"
        waiting += needed(name, extras)
    return found


WITHOUT = {"gpu", "quant"}
"""Extras that are not installed for the tests. On a machine without a GPU, `gpu` may be impossible,
because triton comes with PyTorch for CUDA. With `quant`, transformers starts differently."""
EACH = sorted(PROJECT["optional-dependencies"].keys() - WITHOUT - {"dev", "docs"})


@pytest.mark.parametrize("extra", [None, *EACH, "dev", "docs"])
def test_all_that_it_asks_for_fits_together(extra: str | None) -> None:
    """Like `pip check`, but also for extras and what they require."""
    if extra == "dev" and "triton" not in {d.name for d in importlib.metadata.distributions()}:
        pytest.skip("dev has the extra gpu, and this PyTorch came without triton")
    found = brought(extra)
    assert found.keys() >= {"numpy", "safetensors", "tokenizers", "torch", "transformers"}
    if extra is None:
        assert not found.keys() & {"matplotlib", "ray", "fastapi", "scikit-learn"}


@pytest.mark.slow
def test_the_environment_begins_empty_and_weir_says_what_it_misses(place: Path) -> None:
    python, alone = place / "bin" / "python", {"PATH": os.defpath}
    said = done(
        python, "-I", "-c", "import weir; print(weir.__version__, weir.__file__)", env=alone
    )
    assert said.startswith(f"{weir.__version__} {place}")
    ran = subprocess.run([place / "bin" / "weir"], capture_output=True, text=True, env=alone)
    wanted = f"weir: {describe_missing('this', 'typer')}\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", wanted)


PROBE = """
import importlib, json, os, pkgutil, sys, types

sys.path += json.loads(sys.argv[1])
sys.modules |= dict.fromkeys(json.loads(sys.argv[2]))
import torch
import weir
assert weir.__file__.startswith(sys.prefix), weir.__file__

out, into = os.pipe()
if (child := os.fork()) == 0:
    old = types.ModuleType("transformers")
    old.__version__, old.PreTrainedModel = "4.57.0", type("PreTrainedModel", (), {})
    sys.modules["transformers"] = old
    try:
        weir.StreamingCache
    except weir.WeirError as error:
        os.write(into, str(error).encode())
    os._exit(0)
os.close(into)
old = os.fdopen(out).read()
os.waitpid(child, 0)

from weir.models import ASSETS
assert (ASSETS / "nano" / "model.safetensors").is_file()
missing = []
for it in pkgutil.walk_packages(weir.__path__, "weir."):
    try:
        importlib.import_module(it.name)
    except ModuleNotFoundError as error:
        missing.append([it.name, error.name])
print(json.dumps({"old": old, "missing": missing}))
"""
"""Without extras: what weir says about an old transformers, and which package each file lacks."""


@pytest.fixture(scope="module")
def probed(place: Path) -> dict[str, Any]:
    """Return what `PROBE` found in the environment, with the dependencies of the core available."""
    paths = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    asked = json.dumps(paths), json.dumps([*EXTRAS])
    said = done(place / "bin" / "python", "-I", "-c", PROBE, *asked)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


@pytest.mark.slow
def test_without_extras_every_file_is_imported_or_says_what_to_install(
    probed: dict[str, Any],
) -> None:
    missing = probed["missing"]
    for file, package in missing:
        assert package.partition(".")[0] in EXTRAS, f"{file} needs {package}, which no extra has"
    rooms = {file.split(".")[1] for file, *_ in missing}
    assert rooms == {"cli", "evals", "kernels", "native", "serve"}
    assert {file for file, *_ in missing if ".evals." in file} == {"weir.evals.harness"}


@pytest.mark.slow
def test_an_old_transformers_is_named_and_not_a_name_that_it_misses(probed: dict[str, Any]) -> None:
    assert ", but torch " in probed["old"]
    assert "transformers 4.57.0 are installed: pip install" in probed["old"]


PARTS = {
    "cli": ("cli",),
    "cluster": ("serve",),
    "eval": ("evals", "cli"),
    "fast": ("kernels/cpu",),
    "images": ("models/images",),
    "inspect": ("evals/inspect", "cli/inspect"),
    "plots": ("evals/results", "evals/demo", "evals/report", "evals/attention_error"),
    "ray": ("evals/grid",),
    "serve": ("serve/api", "serve/structured", "serve/engine", "serve/client", "cli/serve"),
    "train": ("train/processes", "cli/train"),
}
"""The files of weir that need an extra, by how their paths begin."""


distributions_by_module = functools.cache(importlib.metadata.packages_distributions)


def imported(file: Path) -> set[str]:
    """Return the packages that a file imports, also in functions, but not those only for types."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(file.read_text("utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
        waiting += ast.iter_child_nodes(node)
    return found


@pytest.mark.parametrize("extra", PARTS)
@pytest.mark.slow
def test_an_extra_brings_all_that_its_files_import(extra: str) -> None:
    by = distributions_by_module()
    names = brought(extra).keys()
    there = {it for it in by if names & {canonicalize_name(n) for n in by[it]}}
    there |= {*sys.stdlib_module_names, "weir"}
    files = [
        path
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).as_posix().startswith(PARTS[extra])
    ]
    assert files
    misses = {str(path.relative_to(SOURCE)): imported(path) - there for path in files}
    assert not {name: found for name, found in misses.items() if found}


# --- the versions it works with


def specifier(name: str) -> SpecifierSet:
    return next(r.specifier for r in map(Requirement, PROJECT["dependencies"]) if r.name == name)


def test_the_versions_that_are_checked_are_those_that_are_asked_for() -> None:
    assert specifier("torch") == SpecifierSet(f">={versions.TORCH}")
    first, beyond = versions.TRANSFORMERS
    assert specifier("transformers") == SpecifierSet(f">={first},<{beyond}")
    text = (ROOT / "src" / "weir" / "models" / "__init__.py").read_text("utf-8")
    imported = re.findall(r"^from (\S+)", text, re.MULTILINE)
    assert imported[0] == "weir.models.versions"  # before imports that other versions do not have


@pytest.mark.parametrize(
    ("torch", "transformers", "served"),
    [
        ("2.9.0", "5.12.0", True),
        ("2.13.0+cpu", "5.23.0.dev0", True),
        ("2.9.0a0+gitabc", f"{versions.TESTED}.7", True),
        ("2.8.1", "5.23.0", False),
        ("2.13.0", "5.11.9", False),
    ],
)
def test_versions_out_of_range_are_refused_with_both(
    torch: str, transformers: str, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions.torch, "__version__", torch)
    monkeypatch.setattr(versions.transformers, "__version__", transformers)
    if served:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            versions.check_versions()
        return
    with pytest.raises(weir.WeirError) as refused:
        versions.check_versions()
    assert str(refused.value) == (
        "weir works with torch>=2.9 and transformers>=5.12,<6, but torch "
        f"{torch} and transformers {transformers} are installed: "
        "pip install 'torch>=2.9' 'transformers>=5.12,<6'"
    )


@pytest.mark.parametrize("newer", ["5.99", "6.0.0rc1"])
def test_a_transformers_newer_than_any_tested_is_tried_and_said_once(
    newer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions.transformers, "__version__", newer)
    with pytest.warns(UserWarning, match=r"weir: transformers .* is newer than") as said:
        versions.check_versions()
    assert [str(one.message) for one in said] == [
        f"weir: transformers {newer} is newer than {versions.TESTED}, the newest version that this "
        "weir was tested with. If something fails, run "
        f"pip install 'transformers=={versions.TESTED}.*'"
    ]


def test_the_newest_tested_transformers_is_the_one_that_make_installs() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    (pinned,) = (line.partition("==")[2] for line in lines if line.startswith("transformers=="))
    assert Version(pinned).release[:2] == Version(versions.TESTED).release


# --- where the versions of Python are listed


def test_every_python_is_told_in_the_same_way_everywhere() -> None:
    wanted = SpecifierSet(PROJECT["requires-python"])
    minors = [f"3.{n}" for n in range(30) if wanted.contains(f"3.{n}")]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert named == minors
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text("utf-8"))
    assert flow["jobs"]["test"]["strategy"]["matrix"]["python"] == minors
    first, last = minors[0], minors[-1]
    for page in ("docs/quickstart.md", "CONTRIBUTING.md", "Makefile"):
        assert f"Python {first} to {last}" in (ROOT / page).read_text("utf-8"), page
    makefile = (ROOT / "Makefile").read_text("utf-8")
    low, high = ((int(n) for n in minor.split(".")) for minor in (first, last))
    assert f"{tuple(low)} <= sys.version_info[:2] <= {tuple(high)}" in makefile


def test_the_workflow_does_what_continuous_integration_does() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text("utf-8"))
    steps = [step["run"] for step in flow["jobs"]["test"]["steps"] if "run" in step]
    assert steps == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_a_workflow_looks_every_week_at_what_users_install() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "versions.yml").read_text("utf-8"))
    assert flow[True]["schedule"]  # YAML reads the key "on" as True
    steps = {
        name: [step["run"] for step in job["steps"] if "run" in step]
        for name, job in flow["jobs"].items()
    }
    assert steps["supported"] == ["make test-versions"]
    unpin, *rest = steps["newest"]
    assert rest == ["make test-versions RELEASES=newest", "make test-all"]
    pattern = unpin.partition("'/")[2].partition("/d'")[0]
    text = (ROOT / "constraints.txt").read_text("utf-8")
    gone = {line.partition("==")[0] for line in text.splitlines() if re.search(pattern, line)}
    assert gone == {"torch", "transformers", "tokenizers"}


def test_every_test_of_a_release_is_there_and_the_releases_are_those_supported() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    releases = re.search(r"^RELEASES \?= (.+)$", makefile, re.MULTILINE)
    assert releases is not None
    oldest, *others, newest = releases[1].split()
    assert Version(oldest) == Version(versions.TRANSFORMERS[0]) and newest == "newest"
    assert all(versions.TRANSFORMERS[0] < other < versions.TESTED for other in others)
    listed = makefile.partition("VERSION_TESTS ?=")[2].partition("\n\n")[0]
    paths = re.findall(r"tests/[\w/]+\.py", listed)
    assert len(paths) > 15 and all((ROOT / path).exists() for path in paths)


# --- the citation


def test_the_citation_names_the_version_and_the_five_papers() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert Version(found["version"]) == Version(weir.__version__)
    assert (found["cff-version"], found["license"]) == ("1.2.0", PROJECT["license"])
    assert all(found.get(key) for key in ("authors", "message", "title", "type"))
    titles = [paper["title"] for paper in found["references"]]
    assert len(titles) == 5
    for title in titles:
        # Titles are in the pages: BalanceKV's page and the others name each paper by its title.
        pages = (p.read_text("utf-8") for p in (ROOT / "docs").rglob("*.md"))
        assert any(title in " ".join(text.replace("*", "").split()) for text in pages), title
