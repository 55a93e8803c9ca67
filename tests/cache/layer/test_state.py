"""The state that pools have besides their slots: where it is stored, and its fixed shape."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import weir
from weir.errors import WeirError
from weir.pools import POOLS, Fold, Pool, pool
from weir.slab.slots import Slots


@dataclass(frozen=True)
class Counting(Pool):
    """A pool that holds no token, and counts the tokens it receives and its folds."""

    wrong: bool = False

    def slots(self) -> int:
        return 0

    def state(self, like: Slots) -> dict[str, Tensor]:
        shape = like.position.shape[:2]
        return {"came": like.position.new_zeros(shape), "sum": like.values.new_zeros(*shape, 3)}

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        fold.state["came"] = fold.state["came"] + new.held.sum(dim=2)
        fold.state["sum"] = fold.state["sum"] + 1
        if self.wrong:
            fold.state["came"] = fold.state["came"][:, :1]
        return held, new


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    """Register the pool `counting` while a test runs."""
    pool("counting")(Counting)
    yield
    del POOLS["counting"]


PIPE = "sink(1) | counting | recent(4) | counting"


def remembered(cache: weir.StreamingCache, layer: int = 0) -> dict[str, list]:
    """The counts of tokens in the state of a layer's pools, for the first head."""
    state = cache.stack[layer].state.slab.state
    return {name: t[:, 0].tolist() for name, t in state.items() if name.endswith("came")}


def test_each_pool_of_each_row_has_its_own(llama, ids):
    cache = weir.StreamingCache(llama, PIPE, chunk=3)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :7] = 0
    with torch.no_grad():
        llama(ids(2, 20), attention_mask=mask, past_key_values=cache)
    # The rows have folded 12 of 13 tokens, and 18 of 20. `sink` keeps one, and `recent` four more.
    assert remembered(cache) == remembered(cache, 1)
    assert remembered(cache) == {"1.came": [11, 17], "3.came": [7, 13]}
    assert cache.stack[0].state.slab.state["1.sum"][:, 0, 0].tolist() == [4.0, 6.0]
    cache.batch_select_indices(torch.tensor([1, 0, 1]))
    assert remembered(cache) == {"1.came": [17, 11, 17], "3.came": [13, 7, 13]}


def test_it_is_counted_in_the_bytes(llama, ids):
    stream = weir.Stream(llama, PIPE, chunk=3)
    stream.feed(ids(1, 1))
    slab = stream.cache.stack[0].state.slab
    slots = [t.nbytes for t in vars(slab).values() if isinstance(t, Tensor)]
    # Two pools and two heads, each with a number in int64 and three in float32.
    assert slab.nbytes - sum(slots) == 2 * 2 * (8 + 3 * 4)


def test_it_goes_into_sessions_and_copies_and_a_reset_forgets_it(llama, ids, tmp_path):
    stream = weir.Stream(llama, PIPE, chunk=3)
    stream.feed(ids(1, 20))
    stream.save(tmp_path / "session")
    copied = copy.deepcopy(stream.cache)
    with torch.inference_mode():
        stream.feed(ids(1, 4))
    restored = weir.Stream.restore(llama, tmp_path / "session")
    assert remembered(restored.cache) == remembered(copied) == {"1.came": [17], "3.came": [13]}
    restored.feed(ids(1, 4))
    assert remembered(restored.cache) == remembered(stream.cache)
    assert remembered(stream.cache) == {"1.came": [23], "3.came": [19]}
    assert remembered(copied) == {"1.came": [17], "3.came": [13]}
    stream.cache.reset()
    stream.feed(ids(1, 3))
    assert remembered(stream.cache) == {"1.came": [2], "3.came": [0]}


def test_its_shape_is_kept(llama, ids):
    stream = weir.Stream(llama, "counting(wrong=true) | recent(4)", chunk=3)
    with pytest.raises(WeirError, match=r"came of the pool counting .* \[1, 2\], got \[1, 1\]"):
        stream.feed(ids(1, 9))
