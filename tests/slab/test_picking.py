"""Rows are picked by their numbers, from tensors with any memory layout."""

from __future__ import annotations

import pytest
import torch

from weir.slab.slots import pick

WAYS = {
    "a tensor of its own": lambda t: t,
    "slots of a longer slab": lambda t: torch.cat([t, t, t], dim=2)[:, :, 5:14],
    "heads of a projection": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "one row for the whole batch": lambda t: t[:1].expand(3, -1, -1, -1),
    "every other number of a row": lambda t: torch.cat([t, t], dim=3)[..., ::2],
    "rows with something between them": lambda t: torch.cat([t, t], dim=3)[..., :3],
    "turned rows": lambda t: t.mT.contiguous().mT,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_that_were_named(way: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    t = WAYS[way](torch.randn(3, 2, 9, 4, generator=generator).to(dtype))
    index = torch.randint(0, t.shape[2], (3, 2, 5), generator=generator)
    picked = pick(t, index)
    for row in range(3):
        for head in range(2):
            for place in range(5):
                assert torch.equal(picked[row, head, place], t[row, head, index[row, head, place]])


def test_none_of_nothing() -> None:
    none = torch.empty(2, 1, 0, dtype=torch.int64)
    assert pick(torch.empty(2, 1, 0, 4), none).shape == (2, 1, 0, 4)
    assert pick(torch.ones(2, 1, 3, 4), none).shape == (2, 1, 0, 4)
