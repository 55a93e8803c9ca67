"""Limits of the JSON schemas that clients send.

The grammar compiler bounds most of its own work, but not nested repetitions in a pattern, nor
automata that count multiples: their cost grows with the numbers in the schema. Those are bounded
here. Knows nothing about tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from weir.errors import WeirError, quote

MAX_BYTES = 65_536
"""Size of a schema, written as JSON."""
MAX_DEPTH = 48
"""Levels of nested lists and objects."""
MAX_PATTERN = 2000
"""Characters of all patterns together, repetitions written out."""
MAX_MULTIPLE = 2000
"""The least common multiple of the digits of all `multipleOf`."""

_TIMES = re.compile(r"\{(\d*),?(\d*)\}")


class BadSchema(WeirError):
    """A JSON schema or grammar that answers cannot be held to."""


def check_schema(schema: Any) -> None:
    """Check that a schema can be compiled in bounded time.

    Raises:
        BadSchema: it is too large, too deep, repeats too much, or is no JSON.
    """
    if _depth(schema) > MAX_DEPTH:
        raise BadSchema(f"it is nested deeper than {MAX_DEPTH} levels")
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except (ValueError, TypeError):
        raise BadSchema("it has numbers that JSON does not have") from None
    if size > MAX_BYTES:
        raise BadSchema(f"it has {size:,} bytes, and may have {MAX_BYTES:,}")
    weight, multiple = 0, 1
    for node in _objects(schema):
        patterns = [node.get("pattern")]
        by_name = node.get("patternProperties")
        patterns += list(by_name) if isinstance(by_name, dict) else []
        weight += sum(_weight(pattern) for pattern in patterns if isinstance(pattern, str))
        multiple = math.lcm(multiple, _digits(node.get("multipleOf")))
        if weight > MAX_PATTERN:
            raise BadSchema(f"its patterns repeat more than {MAX_PATTERN:,} characters")
        if multiple > MAX_MULTIPLE:
            raise BadSchema(f"numbers cannot be held to multiples of {multiple:,}")


def _depth(value: Any) -> int:
    """The number of levels of nested lists and objects, counted to just above the limit."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        below: list[Any] = []
        for one in level:
            below += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        level, depth = below, depth + bool(below)
    return depth


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects in a schema, at any level."""
    if isinstance(schema, dict):
        yield schema
    if isinstance(schema, dict | list):
        for below in schema.values() if isinstance(schema, dict) else schema:
            yield from _objects(below)


def _digits(multiple: Any) -> int:
    """The digits of a `multipleOf`: 25 for 0.25; 1 for anything that is no number."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not multiple:
        return 1
    digits = Decimal(str(multiple)).normalize().as_tuple()
    above = digits.exponent if isinstance(digits.exponent, int) else 0
    if above > 9:
        raise BadSchema(f"numbers cannot be held to multiples of {quote(multiple)}")
    return int("".join(map(str, digits.digits))) * 10 ** max(0, above)


def _weight(pattern: str) -> int:
    """Characters of a pattern with its repetitions written out.

    An unbounded repetition counts once, since it needs no copies.
    """
    open_groups, group, last = [], 0, 0  # weights: of outer groups, this group, its last part
    at = 0
    while at < len(pattern):
        char = pattern[at]
        times = _TIMES.match(pattern, at)
        if times:
            often = max((int(number[:9]) for number in times.groups() if number), default=1)
            group += last * (max(often, 1) - 1)
            last *= max(often, 1)
            at = times.end()
            continue
        if char == "(":
            open_groups.append(group)
            group = last = 0
        elif char == ")":
            last, group = group, group + (open_groups.pop() if open_groups else 0)
        elif char == "[":
            at = _end_of_class(pattern, at)
            last, group = 1, group + 1
        else:
            at += char == "\\"
            last, group = 1, group + 1
        at += 1
    return group + sum(open_groups)


def _end_of_class(pattern: str, at: int) -> int:
    """The index of the `]` that ends a character class starting here."""
    end = at + 1 + pattern.startswith("[^", at)
    end += pattern.startswith("]", end)
    while end < len(pattern) and pattern[end] != "]":
        end += 1 + (pattern[end] == "\\")
    return end
