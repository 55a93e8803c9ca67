"""Check of the versions of PyTorch and transformers, made when it is imported.

Knows nothing else of either. It is the first file that this room's face loads: the others import
names that releases out of range may not have, and an ImportError would not say why.
"""

from __future__ import annotations

import torch
import transformers
from packaging.version import Version

from weir.errors import WeirError

TORCH = "2.9"
"""The first release of PyTorch that weir works with."""
TRANSFORMERS = ("5.12", "6")
"""The first release of transformers that weir works with, and the first it was not made for."""


def check_versions() -> None:
    """Refuse a PyTorch or a transformers that weir was not made for.

    Raises:
        WeirError: one of them is out of range; the message has both versions, and what to type.
    """
    first, beyond = map(Version, TRANSFORMERS)
    # What comes before a release, or was built from its source, is taken for it.
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
