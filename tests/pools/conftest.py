"""A fixture for tests that register pools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weir.pools import POOLS


@pytest.fixture
def pools_as_before() -> Iterator[None]:
    """Remove the pools that a test registers."""
    before = dict(POOLS)
    yield
    POOLS.clear()
    POOLS.update(before)
