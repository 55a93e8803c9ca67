"""`weir serve --cluster`: what it refuses before anything is loaded."""

from __future__ import annotations

import pytest

from weir.cli.app import run
from weir.errors import WeirError

GIVEN = ["serve", "nano", "--cluster", "local"]


def test_replicas_need_a_place_that_they_share(tmp_path):
    with pytest.raises(WeirError, match="Add --data with a folder or an address"):
        run(GIVEN)
    with pytest.raises(WeirError, match="--disk is for a single server"):
        run([*GIVEN, "--data", str(tmp_path), "--disk", "1GB"])
