"""The package keeps the rules of docs/house.md, such as who may import whom.

The imports are read from the source with `ast`, without importing anything. Imports inside
functions and imports only for types count, too, because readers must know them as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "weir"

ORDER = (
    "errors < kernels < slab < pools, models < policies < cache < native < loading, stream < weir"
    " < train, serve < evals < cli < __main__"
)
"""Rooms import to their left only. `weir` and `__main__` stand for the two files at the root."""
LEVEL = {room: n for n, level in enumerate(ORDER.split(" < ")) for room in level.split(", ")}
ROOMS = LEVEL.keys() - {"errors", "weir", "__main__"}

RIDDLES = ("Who ", "Whose ", "What is ", "Nobody ")


@dataclass(frozen=True)
class Import:
    """One import.

    Attributes:
        line: the line that it is on.
        target: the file or folder that it names.
        waits: whether it is in a function or only for types, so that importing its file does not
            load the target.
    """

    line: int
    target: str
    waits: bool


@dataclass(frozen=True)
class House:
    """The modules of a package by their dotted names. A folder's module is its `__init__.py`."""

    root: Path

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        found = {}
        for path in sorted(self.root.rglob("*.py")):
            parts = path.relative_to(self.root.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text("utf-8"))
        return found

    @cached_property
    def folders(self) -> set[str]:
        paths = (path.parent.relative_to(self.root.parent) for path in self.root.rglob("*.py"))
        return {".".join(path.parts) for path in paths}

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        return {
            name: [
                Import(node.lineno, target, waits)
                for node, waits in imports_in(tree)
                for target in self._targets(node)
            ]
            for name, tree in self.trees.items()
        }

    def _targets(self, node: ast.Import | ast.ImportFrom) -> set[str]:
        """Return what an import names in the package: a file if there is one, else the folder."""
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        else:
            assert not node.level, "imports within weir must have the whole path"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names = {name if name in self.trees else str(node.module) for name in whole}
        return names & self.trees.keys()

    def loaded(self, name: str) -> set[str]:
        """Return the modules that importing a module loads, including itself."""
        found, waiting = set(), [name]
        while waiting:
            if (each := waiting.pop()) not in found:
                found.add(each)
                waiting += [it.target for it in self.imports.get(each, ()) if not it.waits]
        return found

    # --- the rules; each method yields what breaks its rule

    def climbs(self) -> Iterator[str]:
        """A room imports only rooms to its left in `ORDER`."""
        for name, imports in self.imports.items():
            for it in imports:
                ours, theirs = room_of(name), room_of(it.target)
                if ours != theirs and LEVEL.get(ours, -1) <= LEVEL.get(theirs, -1):
                    yield f"{name}:{it.line} imports {it.target}, and {theirs} is not below {ours}"

    def behind_faces(self) -> Iterator[str]:
        """Code elsewhere imports a folder's `__init__.py`, or a file that it does not load."""
        for name, imports in self.imports.items():
            for it in imports:
                folder = it.target.rpartition(".")[0]
                inside = f"{name}.".startswith(f"{folder}.")
                if it.target in self.folders or inside:
                    continue
                if it.target in self.loaded(folder):
                    yield f"{name}:{it.line} imports {it.target}, not from the face {folder}"

    def circles(self) -> Iterator[str]:
        """No file imports itself, directly or through other files."""
        left = {name: {it.target for it in found} for name, found in self.imports.items()}
        while free := {name for name, targets in left.items() if not targets & left.keys()}:
            left = {name: targets for name, targets in left.items() if name not in free}
        while free := left.keys() - {target for targets in left.values() for target in targets}:
            left = {name: targets for name, targets in left.items() if name not in free}
        if left:
            yield f"in a circle, or on the way from one to the next: {', '.join(left)}"

    def root_files(self) -> Iterator[str]:
        """The root has only the thirteen rooms, `assets`, and the files listed in rule 5."""
        here = {path.name for path in self.root.iterdir()} - {"__pycache__"}
        files = {"errors.py", "__init__.py", "__main__.py", "py.typed"}
        for name in sorted(here - ROOMS - {"assets"} - files):
            yield f"{name} has no place at the root"

    def class_names(self) -> Iterator[str]:
        """No two classes have the same name."""
        places: dict[str, list[str]] = {}
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(f"{name}:{node.lineno}")
        for name, found in places.items():
            if len(found) > 1:
                yield f"{name} is several classes: {', '.join(found)}"

    def first_lines(self) -> Iterator[str]:
        """A docstring begins with what a thing is or does, and not with a word such as "Who"."""
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    said = (ast.get_docstring(node) or "").lstrip()
                    if said.startswith(RIDDLES):
                        yield f"{name}:{getattr(node, 'lineno', 1)} begins with {said[:20]!r}"

    def faces(self) -> Iterator[str]:
        """An `__init__.py` begins with one sentence, and exports no name that is also a file's."""
        for folder in sorted(self.folders):
            if (tree := self.trees.get(folder)) is None:
                yield f"{folder} has no face"
                continue
            first, _, _ = (ast.get_docstring(tree) or "").partition("\n\n")
            sentence = " ".join(first.split())
            if not sentence.endswith(".") or ". " in sentence:
                yield f"{folder} does not say in one sentence what it is"
            for node in tree.body[1:]:
                if isinstance(node, ast.ImportFrom):
                    for name in (alias.name for alias in node.names):
                        if f"{folder}.{name}" in self.trees and node.module != folder:
                            yield f"{folder}:{node.lineno} hides its file {name} by a name"
                # weir's own `__init__.py` loads names only on demand, for which it needs a
                # function.
                elif folder != self.root.name and "__all__" not in ast.unparse(node):
                    yield f"{folder}:{node.lineno} is more than names"


def room_of(module: str) -> str:
    """Return `cache` for `weir.cache.layer.attention`, and `weir` for weir's own `__init__.py`."""
    return module.split(".")[1] if "." in module else module


def imports_in(tree: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield every import in a module, and whether it waits (see `Import.waits`)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, False
            continue
        waits = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        yield from ((found, waits or already) for found, already in imports_in(node))


RULES = (
    "climbs",
    "behind_faces",
    "circles",
    "root_files",
    "class_names",
    "first_lines",
    "faces",
)


def broken(house: House, *rules: str) -> list[str]:
    return [wrong for rule in rules for wrong in getattr(house, rule)()]


@pytest.fixture(scope="module")
def ours() -> House:
    """Return the house of weir itself, parsed once."""
    return House(SOURCE)


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_its_rules(ours: House, rule: str) -> None:
    assert broken(ours, rule) == []


TYPED = ("weir.slab.", "weir.cache.layer.", "weir.cache.forward", "weir.models.streamed_call")
"""Modules on a token's path in which all types must be known: the layers, and the protocols through
which hooks use a cache.
"""


def test_layers_and_the_protocols_of_hooks_know_the_types_of_everything(ours: House) -> None:
    typed = [name for name in ours.trees if name.startswith(TYPED)]
    assert len(typed) > 15
    for name in typed:
        names = {node.id for node in ast.walk(ours.trees[name]) if isinstance(node, ast.Name)}
        assert "Any" not in names, name


@pytest.mark.parametrize("rule", ["circles", "class_names", "first_lines", "faces"])
def test_the_bench_beside_the_package_keeps_them_too(rule: str) -> None:
    assert broken(House(SOURCE.parents[1] / "bench" / "weir_bench"), rule) == []


def test_there_are_thirteen_rooms_and_a_place_for_each(ours: House) -> None:
    assert len(ROOMS) == 13
    assert {room_of(name) for name in ours.trees} >= LEVEL.keys() - {"serve"}


def test_a_face_of_the_library_lists_what_the_api_page_does(ours: House) -> None:
    page = (SOURCE.parents[1] / "docs" / "api.md").read_text("utf-8")
    public = set(re.findall(r"^::: (weir\.\w+)\.(\w+)$", page, re.M))
    values = {
        name: {
            ast.unparse(node.targets[0]): node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
        }
        for name, tree in ours.trees.items()
    }
    handed_out = ast.literal_eval(values["weir"]["_HANDED_OUT_BY"])
    public |= {(f"weir.{room}", name) for name, room in handed_out.items()}
    rooms = {f"weir.{room}" for room in handed_out.values()} | {"weir.pools", "weir.slab"}
    listed = {(room, name) for room in rooms for name in ast.literal_eval(values[room]["__all__"])}
    assert listed == {(room, name) for room, name in public if room in rooms}


# --- the rules themselves, on a small house

SOUND = {
    "__init__.py": '"""All."""\nif TYPE_CHECKING:\n    import weir.cache\ndef f(): ...\n',
    "errors.py": "",
    "slab/__init__.py": '"""Slots."""\nfrom weir.slab.slots import Slots\n__all__ = ["Slots"]\n',
    "slab/slots.py": "import torch\nfrom weir.errors import WeirError\n",
    "models/__init__.py": '"""Models."""\n',
    "models/model_spec.py": "from weir.slab import Slots\n",
    "pools/__init__.py": '"""Pools."""\nfrom weir.pools.heavy import Heavy\n',
    "pools/heavy.py": "from weir.pools.balance import halve\n",
    "pools/balance/__init__.py": '"""Halves."""\nfrom weir.pools.balance.halving import halve\n',
    "pools/balance/halving.py": "",
    "cache/__init__.py": '"""A cache."""\nfrom weir.cache.cache import Cache\n',
    "cache/cache.py": "from weir.cache.rows import Rows\nfrom weir.slab import Slots\n",
    "cache/rows.py": "from weir.models.model_spec import describe\nimport weir.pools\n",
    "cache/plot.py": "from weir.cache.cache import Cache\n",
    "cli/__init__.py": '"""Commands."""\n',
    "cli/show.py": "def show():\n    import weir\n    from weir.cache.plot import plot\n",
}


def house_of(folder: Path, files: dict[str, str]) -> House:
    for name, text in files.items():
        (folder / "weir" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "weir" / name).write_text(text)
    return House(folder / "weir")


def test_a_sound_house_is_one(tmp_path: Path) -> None:
    assert broken(house_of(tmp_path, SOUND), *RULES) == []


FACE = '"""A cache."""\n'
PLANTED = {
    "up": ("climbs", "slab/slots.py", "from weir.cache import Cache"),
    "up in a function": ("climbs", "slab/slots.py", "def f():\n    import weir.cache"),
    "up for types": ("climbs", "slab/slots.py", "if TYPE_CHECKING:\n    import weir.cache"),
    "sideways": ("climbs", "pools/heavy.py", "from weir.models.model_spec import describe"),
    "the face from below": ("climbs", "cache/rows.py", "from weir import Cache"),
    "errors from above": ("climbs", "errors.py", "from weir.slab import Slots"),
    "a file": ("behind_faces", "cli/show.py", "from weir.cache.rows import Rows"),
    "a file by another way": ("behind_faces", "cli/show.py", "from weir.cache import rows"),
    "a file whole": ("behind_faces", "cli/show.py", "def f():\n    import weir.cache.rows"),
    "a file of a folder inside": (
        "behind_faces",
        "pools/heavy.py",
        "from weir.pools.balance.halving import halve",
    ),
    "a circle of two": ("circles", "cache/rows.py", "from weir.cache.cache import Cache"),
    "a circle over the face": ("circles", "cache/rows.py", "from weir.cache import Cache"),
    "a circle in a function": ("circles", "cache/rows.py", "def f():\n    import weir.cache.cache"),
    "a file at the root": ("root_files", "helpers.py", ""),
    "a folder at the root": ("root_files", "utils/__init__.py", '"""Utilities."""'),
    "a class twice": (
        "class_names",
        "cache/plot.py",
        "class Rows: ...\ndef f():\n    class Rows: ...",
    ),
    "a riddle": ("first_lines", "cache/plot.py", 'def f():\n    """What is a plot."""'),
    "no face": ("faces", "cache/layer/mask.py", ""),
    "no sentence": ("faces", "cache/__init__.py", "from weir.cache.cache import Cache"),
    "two sentences": ("faces", "cache/__init__.py", '"""A cache. It is small."""'),
    "code in a face": ("faces", "cache/__init__.py", f"{FACE}LIMIT = 3"),
    "a name that hides a file": ("faces", "cache/__init__.py", f"{FACE}from torch import rows"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_breaks_a_rule_is_found(tmp_path: Path, planted: str) -> None:
    rule, name, text = PLANTED[planted]
    assert len(broken(house_of(tmp_path, {**SOUND, name: text}), rule)) == 1


def test_no_test_imports_from_a_conftest() -> None:
    """There are several, and pytest's arguments decide which of them the name refers to."""
    texts = {path: path.read_text("utf-8") for path in sorted(Path(__file__).parent.rglob("*.py"))}
    named = {path: text for path, text in texts.items() if "conftest" in text}
    sources = {path: ast.walk(ast.parse(text)) for path, text in named.items()}
    found = [
        path.name
        for path, nodes in sources.items()
        for node in nodes
        if (isinstance(node, ast.ImportFrom) and node.module == "conftest")
        or (isinstance(node, ast.Import) and "conftest" in [name.name for name in node.names])
    ]
    assert found == []
