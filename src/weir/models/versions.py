"""Checks the versions of PyTorch and transformers before anything is imported from them."""

from __future__ import annotations

import warnings

import torch
import transformers
from packaging.version import Version

from weir.errors import WeirError

TORCH = "2.9"
"""The first release of PyTorch that weir works with."""
TRANSFORMERS = ("5.12", "6")
"""The first release of transformers that weir supports, and the first that weir's requirements
exclude. `check_versions` does not refuse the latter, but warns of it.
"""
TESTED = "5.24"
"""The newest release of transformers that weir is tested with, without the patch number."""


def check_versions() -> None:
    """Refuse versions of PyTorch and transformers that are too old (WeirError), and warn of a
    transformers that is newer than any that weir was tested with.
    """
    first, beyond = map(Version, TRANSFORMERS)
    # Pre-releases and builds from source count as the release.
    ours = Version(Version(transformers.__version__).base_version)
    torch_is = Version(Version(torch.__version__).base_version)
    if ours < first or torch_is < Version(TORCH):
        wanted = f"torch>={TORCH}", f"transformers>={first},<{beyond}"
        raise WeirError(
            f"weir works with {wanted[0]} and {wanted[1]}, but torch {torch.__version__} and "
            f"transformers {transformers.__version__} are installed: pip install '{wanted[0]}' "
            f"'{wanted[1]}'"
        )
    if ours.release[:2] > Version(TESTED).release:
        # The warning must not point at weir: if warnings in weir were errors, weir could not be
        # imported.
        warnings.warn_explicit(
            f"weir: transformers {transformers.__version__} is newer than {TESTED}, the newest "
            "version that this weir was tested with. If something fails, run pip install "
            f"'transformers=={TESTED}.*'",
            UserWarning,
            filename=transformers.__file__ or "transformers",
            lineno=1,
            module="transformers",
        )


check_versions()
