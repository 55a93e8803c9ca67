"""Pools of other packages are found by entry point, by module name and by file. Errors say which
package or file failed.
"""

from __future__ import annotations

import os
import sys

import pytest

from weir.errors import PolicyError, WeirError
from weir.policies import VARIABLE, import_plugin, load_plugins, policy
from weir.policies import registry as room
from weir.pools import POOLS

POOL = """
from dataclasses import dataclass
from weir.pools import Recent, pool

@pool("{name}")
@dataclass(frozen=True)
class Mine(Recent):
    '''The newest, under a name of their own.'''
"""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Begin as in a new process, without plugins. Afterwards, remove what the test has registered
    and imported.
    """
    pools, modules = dict(POOLS), set(sys.modules)
    monkeypatch.setattr(room, "_loaded", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    POOLS.clear()
    POOLS.update(pools)
    for name in set(sys.modules) - modules:
        if name.startswith("mine_"):
            del sys.modules[name]


def package(folder, name: str, module: str) -> None:
    """Write the metadata of an installed package whose entry point names a module."""
    facts = folder / f"{name}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[weir.pools]\n{name} = {module}\n")


def test_a_pool_of_an_installed_package_is_a_word_of_a_policy(tmp_path, monkeypatch):
    package(tmp_path, "mine_installed", "mine_installed")
    (tmp_path / "mine_installed.py").write_text(POOL.format(name="mine_a"))
    monkeypatch.syspath_prepend(tmp_path)
    policy("sink(4) | recent(8)")
    assert "mine_installed" not in sys.modules, "nobody asked for it"
    assert policy("sink(4) | mine_a(8)").slots == 12


def test_a_package_that_fails_is_named_each_time_and_hurts_no_policy_that_does_without(
    tmp_path, monkeypatch
):
    package(tmp_path, "mine_broken", "mine_broken")
    (tmp_path / "mine_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    assert policy("recent(8)").slots == 8
    for _ in range(2):
        with pytest.raises(WeirError, match=r"entry point mine_broken = .*ZeroDivisionError"):
            policy("mine_b(8)")


@pytest.mark.parametrize("by", ["name", "file"])
def test_a_module_of_ones_own_is_imported_by_its_name_from_here_or_as_a_file(
    tmp_path, monkeypatch, by
):
    (tmp_path / f"mine_{by}.py").write_text(POOL.format(name=f"mine_{by}"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError, match=f"unknown pool or policy 'mine_{by}'"):
        policy(f"mine_{by}(8)")
    named = f"mine_{by}" if by == "name" else str(tmp_path / "mine_file.py")
    monkeypatch.setenv(VARIABLE, os.pathsep.join(["", named]))
    assert policy(f"mine_{by}(8)").slots == 8
    load_plugins()  # loading twice does no harm
    import_plugin(named)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("mine_nowhere", None, "there is no module 'mine_nowhere' to import."),
        ("nowhere/mine_file.py", None, "mine_file.py cannot be imported: the file does not exist"),
        ("mine_wrong", "import mine_needed", "mine_wrong cannot be imported: No module named"),
        ("mine_odd.py", "def", "mine_odd.py cannot be imported: SyntaxError"),
        ("mine_taken", POOL.format(name="sink"), "mine_taken cannot be imported: .*sink"),
    ],
)
def test_what_cannot_be_imported_is_said_in_a_sentence(tmp_path, monkeypatch, name, text, sentence):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / f"{name.removesuffix('.py')}.py").write_text(text)
    with pytest.raises(WeirError, match=sentence):
        import_plugin(name)
    assert name.removesuffix(".py") not in sys.modules
