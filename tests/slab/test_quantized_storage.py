"""Quantized slots are moved as they are stored, and pools treat them like exact ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weir.slab import FORMATS, Heads, QuantizedSlots, Slab, SlabSpec, Slots, copy_if_shared

SLOTS, CODED, FRONT, DIM = 24, 16, 6, 32
NAMES = ("keys", "values", "a", "b", "position")


def filled(name: str, dtype: torch.dtype = torch.float32) -> Slab:
    """Return a slab of two rows whose first 16 slots are quantized, six of them at the front."""
    heads = Heads(3, 1, DIM, DIM, dtype)
    spec = SlabSpec(
        heads, SLOTS, masters=4, format=FORMATS[name], quantized=CODED, quantized_masters=FRONT
    )
    slab = Slab(spec, 2)
    slab.write(0, some(FRONT, dtype), front=True)
    slab.write(FRONT, some(CODED - FRONT, dtype, FRONT), front=False)
    slab.write(CODED, some(SLOTS - CODED, dtype, CODED), front=False)
    return slab


def some(count: int, dtype: torch.dtype, first: int = 0) -> Slots:
    """Return tokens from a position on, with random keys and values."""
    drawn = torch.Generator().manual_seed(first)
    keys, values = (torch.randn(2, 3, count, DIM, generator=drawn).to(dtype) for _ in range(2))
    weights = torch.rand(2, 3, count, generator=drawn)
    place = torch.arange(first, first + count).expand(2, 3, -1)
    return Slots(keys, values, weights, weights, place)


def as_read(slots: Slots) -> Slots:
    """Return the same slots with exact tensors."""
    return Slots(**{name: t.clone() for name, t in slots.tensors().items()})


def assert_same(one: Slots, other: Slots) -> None:
    for name in NAMES:
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("front", [False, True])
def test_what_is_moved_as_it_is_stored_is_what_reading_and_quantizing_gives(name, dtype, front):
    one, other = filled(name, dtype), filled(name, dtype)
    new = some(5, dtype, 40)
    for slab, way in ((one, lambda slots: slots), (other, as_read)):
        held = slab.front(0, FRONT) if front else slab.run(FRONT, CODED)
        kept = way(held).join(new)
        kept = kept.part(3, 3 + len(held))
        slab.write(0 if front else FRONT, copy_if_shared(kept, slab.storages()), front=front)
    for label, t in one.tensors().items():
        assert torch.equal(t, other.tensors()[label]), label


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (8, 15), (9, 14), (12, 12), (0, 21), (15, 20)])
def test_a_part_of_several_pieces_is_that_part_of_what_is_read(start, stop):
    slab = filled("int8")
    both = slab.run(0, CODED).join(some(5, torch.float32, 40))
    assert isinstance(both, QuantizedSlots) and both.pieces is not None and len(both.pieces) == 2
    assert_same(both.part(start, stop), as_read(both).part(start, stop))
    assert both.part(start, stop).keys.shape[2] == stop - start


def test_what_a_pool_picks_stays_as_it_is_stored():
    slab = filled("int8")
    both = slab.front(0, FRONT).join(slab.run(FRONT, CODED))
    mask = torch.rand(2, 3, CODED, generator=torch.Generator().manual_seed(1)) < 0.5
    kept = both.only(mask)
    assert isinstance(kept, QuantizedSlots) and kept.pieces is not None
    assert_same(kept, as_read(both).only(mask))
    assert torch.equal(kept.a.isneginf(), kept.position < 0)


def test_other_keys_or_weights_take_the_place_of_what_is_stored():
    slab = filled("int8")
    held = slab.run(2, 9)
    values = held.values
    held.keys = torch.ones_like(held.keys)
    assert torch.equal(held.values, values) and bool((held.keys == 1).all())
    assert_same(held.part(1, 4), as_read(held).part(1, 4))
    heavier = replace(slab.run(2, 9), a=values[..., 0])
    assert torch.equal(heavier.a, values[..., 0]) and torch.equal(heavier.values, values)
    assert torch.equal(heavier.join(held).keys[:, :, 7:], held.keys)
    stored = slab.run(2, 9).weighed(values[..., 0], held.b)
    assert isinstance(stored, QuantizedSlots) and stored.pieces is not None
    assert_same(stored, replace(heavier, b=held.b))
