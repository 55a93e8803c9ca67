"""Scripts of `examples/` as modules."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


def import_example(name: str) -> ModuleType:
    """Import a script by its path below `examples/`, once."""
    key = f"examples_{Path(name).stem}"
    if key not in sys.modules:
        spec = spec_from_file_location(key, EXAMPLES / name)
        assert spec is not None and spec.loader is not None
        sys.modules[key] = module = module_from_spec(spec)  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[key]
