"""Checks of what a pool says and returns: its place in a pipe, its slots, and the result of a fold.

Anyone may write a pool, so what one returns is checked before it reaches the slab: types, shapes
and numbers of slots, never the contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from weir.errors import WeirError, quote
from weir.pools import Pool, fits
from weir.slab import FORMATS, QuantizedSlots, Slots


def check_place(pool: Pool, before: tuple[Pool, ...]) -> None:
    """Refuse a pool in a place of a pipe that makes no sense behind the pools `before`."""
    if not isinstance(getattr(pool, "name", None), str):
        kind = type(pool).__name__
        raise WeirError(f'{kind} has no name in policies; write @pool("a_name") above its class')
    slots = pool.slots()
    if not fits(slots, int | None) or (slots is not None and slots < 0):
        raise WeirError(
            f"slots() of the pool {pool.name} is a whole number from 0 on, or None for no limit, "
            f"not {quote(slots)}"
        )
    for earlier in before:
        if earlier.ends_pipe:
            raise WeirError(
                f"{pool.name} would get no tokens: what {earlier.name} keeps is all that came, or "
                f"stands for it, so nothing flows on and {earlier.name} stands last in a pipe"
            )
    pool.check(before)


def check_format(name: object) -> str:
    """Return the name of a format of slots, if there is such a format."""
    if not isinstance(name, str) or name not in FORMATS:
        raise WeirError(
            f"slots can be {' or '.join(FORMATS)}, not {quote(name)}; without any they are exact"
        )
    return name


def check_formats(pools: tuple[Pool, ...], formats: tuple[str, ...], run: tuple[int, ...]) -> None:
    """Refuse formats of slots that a slab cannot have, "" for exact slots.

    `run` are the pools that hold the newest tokens, by place, the oldest tokens' pool first.
    """
    if len(formats) != len(pools):
        raise WeirError(f"{len(pools)} pools have {len(pools)} formats, not {len(formats)}")
    different = {check_format(name) for name in formats if name}
    if len(different) > 1:
        both = " and ".join(sorted(different))
        raise WeirError(f"the quantized slots of a pipe are all of one format, not {both}")
    for pool, name in zip(pools, formats, strict=True):
        if name and pool.synthetic:
            raise WeirError(
                f"the slots of {pool.name} change at every fold and would be quantized again each "
                f"time, so they stay exact: write {pool.name} without :{name}"
            )
    if different and any(pool.slots() is None for pool in pools):
        raise WeirError("a pipe without a limit has no quantized slots; give each pool a size")
    quantized = [bool(formats[place]) for place in run]
    if quantized != sorted(quantized, reverse=True):
        raise WeirError(
            "of the newest tokens the older are quantized and the newer exact: write "
            "recent(64) | recent(64):int8, and not the other way round"
        )


def check_mass(pools: tuple[Pool, ...]) -> None:
    """Refuse a pipe in which `Slots.mass` would have to be a sum and a largest share at once."""
    twice = [pool.name for pool in pools if pool.needs_second_reading]
    sums = [pool.name for pool in pools if pool.needs_mass]
    if twice and sums:
        raise WeirError(
            f"{twice[0]} judges by a second reading and {sums[0]} by all attention received, and a "
            "slot has one number for both; leave one of them out"
        )


def check_fold(
    pool: Pool, folded: Any, held: Slots, new: Slots, like: Mapping[str, Tensor]
) -> tuple[Slots, Slots]:
    """Return what a pool's `fold` returned, (kept, overflow), if it is such a pair of slots.

    `like` are tensors of the shapes that all slots of the layer have, by name.
    """
    name = pool.name
    parts = folded if isinstance(folded, tuple) else ()
    if len(parts) != 2 or not all(isinstance(part, Slots) for part in parts):
        found = f"({', '.join(type(part).__name__ for part in parts)})"
        found = found if isinstance(folded, tuple) else type(folded).__name__
        raise WeirError(
            f"the fold of the pool {name} returns two Slots, (kept, overflow), not {found}"
        )
    kept, overflow = parts
    for what, slots in (("kept", kept), ("let go of", overflow)):
        if slots is not held and slots is not new:
            _check_tensors(f"what the pool {name} {what}", slots, held, like)
    limit = pool.slots()
    if limit is not None and len(kept) > limit:
        raise WeirError(f"the pool {name} kept {len(kept)} slots and may hold {limit}")
    return kept, overflow


def _check_tensors(owner: str, slots: Slots, held: Slots, like: Mapping[str, Tensor]) -> None:
    """Refuse slots that lack tensors shaped as `like`, or have another dtype than it and `held`.

    Keys and values that are still as stored are not read; they are parts of slots that were there.
    """
    there = slots.others() if _is_stored(slots) else like
    count = slots.position.shape[2:3] if isinstance(slots.position, Tensor) else ()
    for name, wanted in like.items():
        if name not in there:
            continue
        shape = (*wanted.shape[:2], *count, *wanted.shape[3:])
        found = getattr(slots, name)
        if not isinstance(found, Tensor):
            raise WeirError(f"{name} of {owner} is no tensor")
        if found.shape != shape:
            raise WeirError(
                f"{name} of {owner} has the shape {list(found.shape)} instead of {list(shape)}"
            )
        if found.dtype == wanted.dtype and found.device == wanted.device:
            continue
        before = held.others() if _is_stored(held) else held.tensors()
        if found.dtype != before.get(name, wanted).dtype or found.device != wanted.device:
            raise WeirError(
                f"{name} of {owner} is {found.dtype} on {found.device} instead of {wanted.dtype} "
                f"on {wanted.device}"
            )
    if "mass" not in like and slots.mass is not None:
        raise WeirError(f"mass of {owner} is not kept here; the class says needs_mass = True")


def _is_stored(slots: Slots) -> bool:
    """Whether keys and values are still as they are stored."""
    return isinstance(slots, QuantizedSlots) and slots.pieces is not None


def check_state(pool: Pool, before: Mapping[str, Tensor], after: Mapping[str, Any]) -> None:
    """Refuse a pool's state with other names, dtypes or devices than `Pool.state` gave; the slab
    checks the shapes when it stores the state.
    """
    if before.keys() != after.keys():
        now, was = (", ".join(sorted(names)) or "nothing" for names in (after, before))
        raise WeirError(f"the pool {pool.name} remembers {now} instead of {was}")
    for name, old in before.items():
        new = after[name]
        if not isinstance(new, Tensor) or (new.dtype, new.device) != (old.dtype, old.device):
            kind = f"{new.dtype}" if isinstance(new, Tensor) else type(new).__name__
            raise WeirError(
                f"the pool {pool.name} remembers {name} as {kind} instead of {old.dtype} on "
                f"{old.device}"
            )
