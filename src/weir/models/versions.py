"""Check of the PyTorch and transformers versions, before anything is imported from them."""

from __future__ import annotations

import torch
import transformers
from packaging.version import Version

from weir.errors import WeirError

TORCH = "2.9"
"""The first release of PyTorch that weir works with."""
TRANSFORMERS = ("5.12", "6")
"""The first release of transformers that weir supports, and the first it does not."""


def check_versions() -> None:
    """Refuse unsupported versions of PyTorch and transformers (WeirError)."""
    first, beyond = map(Version, TRANSFORMERS)
    # Pre-releases and builds from source count as the release.
    ours = Version(Version(transformers.__version__).base_version)
    torch_is = Version(Version(torch.__version__).base_version)
    if first <= ours < beyond and torch_is >= Version(TORCH):
        return
    wanted = f"torch>={TORCH}", f"transformers>={first},<{beyond}"
    raise WeirError(
        f"weir works with {wanted[0]} and {wanted[1]}, and these are torch {torch.__version__} and "
        f"transformers {transformers.__version__}: pip install '{wanted[0]}' '{wanted[1]}'"
    )


check_versions()
