"""How large a JSON schema may be that a stranger sends.

The compiler of grammars bounds most of its work by itself, but not all: repetitions of repetitions
in a pattern, and automata that count multiples, take it as long as their numbers say. Those are
bounded here, before it sees them. Knows nothing about tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from weir.errors import WeirError, quote

BYTES = 65_536
"""Of a schema, written as JSON."""
DEPTH = 48
"""Lists and objects in each other."""
PATTERNS = 2000
"""Characters of all patterns together, each counted as often as its repetitions say."""
MULTIPLES = 2000
"""The least common multiple of the digits of all `multipleOf`."""

_TIMES = re.compile(r"\{(\d*),?(\d*)\}")


class BadSchema(WeirError):
    """A JSON schema, or another rule of an answer, that cannot be held to."""


def check_schema(schema: Any) -> None:
    """Refuse what would take long to make a grammar of.

    Raises:
        BadSchema: it is too large, too deep, repeats too much, or is no JSON.
    """
    if _depth(schema) > DEPTH:
        raise BadSchema(f"it is nested deeper than {DEPTH} levels")
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except (ValueError, TypeError):
        raise BadSchema("it has numbers that JSON does not have") from None
    if size > BYTES:
        raise BadSchema(f"it has {size:,} bytes, and may have {BYTES:,}")
    weight, multiple = 0, 1
    for node in _objects(schema):
        patterns = [node.get("pattern")]
        by_name = node.get("patternProperties")
        patterns += list(by_name) if isinstance(by_name, dict) else []
        weight += sum(_weight(pattern) for pattern in patterns if isinstance(pattern, str))
        multiple = math.lcm(multiple, _digits(node.get("multipleOf")))
        if weight > PATTERNS:
            raise BadSchema(f"its patterns repeat more than {PATTERNS:,} characters")
        if multiple > MULTIPLES:
            raise BadSchema(f"numbers cannot be held to multiples of {multiple:,}")


def _depth(value: Any) -> int:
    """How deep lists and objects are in each other; walks no deeper than is asked for."""
    level, depth = [value], 0
    while level and depth <= DEPTH:
        below: list[Any] = []
        for one in level:
            below += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        level, depth = below, depth + bool(below)
    return depth


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects in a schema, wherever they stand."""
    if isinstance(schema, dict):
        yield schema
    if isinstance(schema, dict | list):
        for below in schema.values() if isinstance(schema, dict) else schema:
            yield from _objects(below)


def _digits(multiple: Any) -> int:
    """The digits of what a number is to be a multiple of: 25 of 0.25; 1 for anything else."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not multiple:
        return 1
    digits = Decimal(str(multiple)).normalize().as_tuple()
    above = digits.exponent if isinstance(digits.exponent, int) else 0
    if above > 9:
        raise BadSchema(f"numbers cannot be held to multiples of {quote(multiple)}")
    return int("".join(map(str, digits.digits))) * 10 ** max(0, above)


def _weight(pattern: str) -> int:
    """Characters of a pattern, those in a repetition as often as it says.

    A repetition without an end counts once, for it needs no copies.
    """
    open_groups, group, last = [], 0, 0  # weights of groups around, of this one, of its last part
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
    """Where a class of characters ends that begins here."""
    end = at + 1 + pattern.startswith("[^", at)
    end += pattern.startswith("]", end)
    while end < len(pattern) and pattern[end] != "]":
        end += 1 + (pattern[end] == "\\")
    return end
