"""Packages that only some measurements need, asked for where they are."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from weir.errors import WeirError, describe_missing


def needed(module: str, what: str, extra: str = "eval") -> Any:
    """A module of an optional package.

    Args:
        module: its name, as in an import.
        what: what needs it, as an error begins.
        extra: of weir's extras, the one that brings it.

    Raises:
        WeirError: it is not installed, or cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        reason = "" if error.name == module.partition(".")[0] else str(error)
        raise WeirError(describe_missing(what, module, reason=reason, extra=extra)) from None
