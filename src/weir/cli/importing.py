"""`weir --import MODULES COMMAND`: modules of one's own, imported before the command is looked at.

It is no option of typer's: typer imports pydantic for any that has a value, given or not.
"""

from __future__ import annotations

import os

OPTION = "--import"


def without_import(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(the arguments behind `--import`, the modules that it names): it stands in front of all.

    Args:
        arguments: of the command line.

    Raises:
        ValueError: it names nothing.
    """
    modules: list[str] = []
    while arguments and arguments[0].partition("=")[0] == OPTION:
        named, arguments = arguments[0].partition("=")[2], arguments[1:]
        if not named and arguments:
            named, arguments = arguments[0], arguments[1:]
        found = [name.strip() for name in named.split(",") if name.strip()]
        if not found:
            raise ValueError(f"{OPTION} takes modules or files of your own: {OPTION} my_pools")
        modules += found
    return arguments, modules


def import_modules(modules: list[str]) -> None:
    """Import modules here, and in the processes that this one starts.

    Raises:
        WeirError: one cannot be imported.
    """
    from weir.policies import VARIABLE, load_plugins

    before = [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    # Other processes may work in other folders.
    named = [os.path.abspath(name) if name.endswith(".py") else name for name in modules]
    os.environ[VARIABLE] = os.pathsep.join([*before, *named])
    load_plugins()
