"""`weir serve --cluster`: what it refuses before anything is loaded."""

from __future__ import annotations

import pytest

from weir.cli.serve import serve
from weir.errors import WeirError


def test_replicas_need_a_place_that_they_share(tmp_path):
    with pytest.raises(WeirError, match="--cluster needs --data"):
        serve(model_name="nano", cluster="local")
    with pytest.raises(WeirError, match="--disk is for one server"):
        serve(model_name="nano", cluster="local", data=str(tmp_path), disk="1GB")
