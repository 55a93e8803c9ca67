"""Modules of other people's that register pools, policies or tasks, imported when they are needed.

A package that is installed names its module in the entry-point group `weir.pools`; a file or module
of one's own is named to `weir --import`, which hands it on to other processes in `WEIR_IMPORT`.
What a module registers is a word of the language then. Knows nothing about what that is.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from weir.errors import WeirError, quote

GROUP = "weir.pools"
"""The group of entry points that are imported."""
VARIABLE = "WEIR_IMPORT"
"""Modules or files that are imported beside them, parted as the system parts folders in `PATH`."""


_asked: set[str] = set()
"""What `WEIR_IMPORT` said when plugins were loaded; nothing before they were."""


def load_plugins() -> None:
    """Import every module that an installed package or `WEIR_IMPORT` names, once in a process.

    Raises:
        WeirError: one cannot be imported; the message says which and why.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted in _asked:
        return
    _asked.add(wanted)  # before, for what is imported may read policies itself
    try:
        _load(wanted)
    except BaseException:
        _asked.discard(wanted)
        raise


def _load(wanted: str) -> None:
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            raise WeirError(
                f"the entry point {point.name} = {point.value} of {GROUP} cannot be imported: "
                f"{type(error).__name__}: {error}; mend or uninstall its package"
            ) from error
    for name in wanted.split(os.pathsep):
        if name:
            import_plugin(name)


def import_plugin(name: str) -> None:
    """Import a module by its name, from the working folder too, or a file that ends in `.py`.

    Raises:
        WeirError: there is none, or it cannot be imported.
    """
    path = Path(name)
    try:
        if path.suffix == ".py":
            _import_file(path)
            return
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise WeirError(f"{name} cannot be imported: {error}") from None
        raise WeirError(
            f"there is no module {quote(name)} to import here; name one that Python finds, or a "
            "file that ends in .py"
        ) from None
    except WeirError as error:
        raise WeirError(f"{name} cannot be imported: {error}") from None
    except Exception as error:
        raise WeirError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> None:
    """Import a file under its own name, as if its folder were on Python's path."""
    if not path.is_file():
        raise WeirError("there is no such file")
    if path.stem in sys.modules:
        return
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
