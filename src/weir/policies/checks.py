"""What a pool may say and return: its place in a pipe, its number of slots, and what a fold gives.

Pools are written by anyone, so what one hands over is looked at before the slab is: types, shapes
and numbers of slots, never the contents, so that a fold costs nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from weir.errors import WeirError, quote
from weir.pools import Pool, fits
from weir.slab import FORMATS, QuantizedSlots, Slots


def check_place(pool: Pool, before: tuple[Pool, ...]) -> None:
    """Refuse a pool in a place that makes no sense.

    Args:
        pool: the one.
        before: the pools in front of it.

    Raises:
        WeirError: with the reason.
    """
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
    """The name of a format of slots, if there is one of that name.

    Raises:
        WeirError: there is none.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise WeirError(
            f"slots can be {' or '.join(FORMATS)}, not {quote(name)}; without any they are exact"
        )
    return name


def check_formats(pools: tuple[Pool, ...], formats: tuple[str, ...], run: tuple[int, ...]) -> None:
    """Refuse formats of slots that a slab cannot have.

    Args:
        pools: of a pipe.
        formats: of each; "" for exact slots.
        run: which of them hold the newest tokens, the oldest tokens' pool first.

    Raises:
        WeirError: with the reason.
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
    held = [bool(formats[place]) for place in run]
    if held != sorted(held, reverse=True):
        raise WeirError(
            "of the newest tokens the older are quantized and the newer exact: write "
            "recent(64) | recent(64):int8, and not the other way round"
        )


def check_fold(
    pool: Pool, folded: Any, held: Slots, new: Slots, like: Mapping[str, Tensor]
) -> tuple[Slots, Slots]:
    """What a pool returned, if it is what a fold returns.

    Args:
        pool: the one.
        folded: what its `fold` returned.
        held: what it held.
        new: what arrived.
        like: tensors of the shapes that all slots of the layer have, by name.

    Returns:
        `folded`: (kept, overflow).

    Raises:
        WeirError: it is no pair of slots, one of them has tensors that do not go together, or more
            is kept than the pool may hold.
    """
    name = pool.name
    if not isinstance(folded, tuple) or [isinstance(it, Slots) for it in folded] != [True, True]:
        what = f"not {type(folded).__name__}"
        if isinstance(folded, tuple):
            what = f"not ({', '.join(type(it).__name__ for it in folded)})"
        raise WeirError(f"the fold of the pool {name} returns two Slots, (kept, overflow), {what}")
    kept, overflow = folded
    for what, slots in (("kept", kept), ("let go of", overflow)):
        if slots is not held and slots is not new:
            _check_tensors(f"what the pool {name} {what}", slots, held, like)
    limit = pool.slots()
    if limit is not None and len(kept) > limit:
        raise WeirError(f"the pool {name} kept {len(kept)} slots and may hold {limit}")
    return kept, overflow


def _check_tensors(owner: str, slots: Slots, held: Slots, like: Mapping[str, Tensor]) -> None:
    """Refuse slots without tensors shaped as `like`, or of another dtype than it and `held`."""
    # To look at what is still as it was stored would be to read it, and it is made of parts of
    # slots that were there.
    there = slots.others() if _stored(slots) else like
    count = slots.position.shape[2:3] if isinstance(slots.position, Tensor) else ()
    for name, one in like.items():
        if name not in there:
            continue
        shape = (*one.shape[:2], *count, *one.shape[3:])
        found = getattr(slots, name)
        if (
            isinstance(found, Tensor)
            and (found.shape, found.dtype) == (shape, one.dtype)
            and found.device == one.device
        ):
            continue
        was = held.others() if _stored(held) else held.tensors()
        if not isinstance(found, Tensor):
            raise WeirError(f"{name} of {owner} is no tensor")
        if found.shape != shape:
            raise WeirError(
                f"{name} of {owner} has the shape {list(found.shape)} instead of {list(shape)}"
            )
        dtypes = (one.dtype, was.get(name, one).dtype)
        if found.dtype not in dtypes or found.device != one.device:
            raise WeirError(
                f"{name} of {owner} is {found.dtype} on {found.device} instead of {one.dtype} on "
                f"{one.device}"
            )
    if "mass" not in like and slots.mass is not None:
        raise WeirError(f"mass of {owner} is not kept here; the class says needs_mass = True")


def _stored(slots: Slots) -> bool:
    """Whether keys and values are still as they are stored."""
    return isinstance(slots, QuantizedSlots) and slots.pieces is not None


def check_state(pool: Pool, before: Mapping[str, Tensor], after: Mapping[str, Any]) -> None:
    """Refuse what a pool is to remember if it has other names or dtypes than `Pool.state` gave.

    Shapes are looked at where it is written down, in the slab.

    Raises:
        WeirError: naming pool and tensor.
    """
    if before.keys() != after.keys():
        names = [", ".join(sorted(names)) or "nothing" for names in (after, before)]
        raise WeirError(f"the pool {pool.name} remembers {names[0]} instead of {names[1]}")
    for name, was in before.items():
        now = after[name]
        kind = f"{now.dtype}" if isinstance(now, Tensor) else type(now).__name__
        if not isinstance(now, Tensor) or (now.dtype, now.device) != (was.dtype, was.device):
            raise WeirError(
                f"the pool {pool.name} remembers {name} as {kind} instead of {was.dtype} on "
                f"{was.device}"
            )
