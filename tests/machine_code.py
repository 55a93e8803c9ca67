"""Where numba keeps the machine code of kernels while they are tested."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path


def kernels_at_hand() -> str:
    """A folder for the kernels as they are: numba looks at the file of the function alone that is
    called, and not at those of others that this calls.
    """
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].glob("src/weir/kernels/numba_*.py")):
        found.update(path.read_bytes())
    return str(Path(tempfile.gettempdir()) / f"weir-kernels-{found.hexdigest()[:16]}")
