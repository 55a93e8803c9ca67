"""An error about a file's values names only the first wrong one, however many there are."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from weir.errors import WeirError
from weir.policies.file_facts import FileFacts, ListOf, Whole, read_facts


class Inner(FileFacts):
    at: Whole


class Facts(FileFacts):
    count: Annotated[Whole, Field(ge=1)]
    name: str
    said: str
    hash: Annotated[str, Field(pattern=r"^[0-9a-f]*$")]
    how: Literal["one", "two"]
    ended: bool
    ids: ListOf[Whole]
    inner: Inner
    pair: Annotated[ListOf[Whole], Field(min_length=2, max_length=2)]
    since: Annotated[float, Field(ge=0, allow_inf_nan=False)]


RIGHT = {
    "count": 1,
    "name": "a",
    "said": "\ud800",
    "hash": "0a",
    "how": "one",
    "ended": False,
    "ids": [0, 2**53],
    "inner": {"at": 0},
    "pair": [1, 2],
    "since": 3,
}

WRONG = [
    ({"count": True}, "count must be a whole number, got true"),
    ({"count": 1.0}, "count must be a whole number, got 1.0"),
    ({"count": 0}, "count must be at least 1, got 0"),
    (
        {"count": 10**400},
        "count must be at most 9007199254740992, got a number of more than 30 digits",
    ),
    ({"count": -(10**400)}, "count must be at least 1, got a number of more than 30 digits"),
    ({"name": None}, "name must be a text, got none"),
    ({"said": 7}, "said must be a text, got 7"),
    ({"hash": "0x"}, "hash must be a text that fits ^[0-9a-f]*$, got '0x'"),
    ({"hash": "\ud800"}, r"hash must be a text of whole characters, got '\ud800'"),
    ({"how": "three"}, "how must be 'one' or 'two', got 'three'"),
    ({"ended": 1}, "ended must be true or false, got 1"),
    ({"ids": {}}, "ids must be a list, got an object of 0 fields"),
    ({"ids": [3, -1, -2]}, "ids[1] must be at least 0, got -1"),
    ({"inner": [1, 2]}, "inner must be an object, got a list of 2"),
    ({"inner": {"at": 0, "to": 1}}, "unexpected field 'to' in inner"),
    ({"inner": {}}, "inner.at is missing"),
    ({"pair": [1]}, "pair must have 2 entries, got 1"),
    ({"pair": [1, 2, 3]}, "pair must have 2 entries, got 3"),
    ({"since": math.nan}, "since must be a finite number, got nan"),
    ({"since": math.inf}, "since must be a finite number, got inf"),
    ({"since": -0.5}, "since must be at least 0.0, got -0.5"),
    ({"more": 1}, "unexpected field 'more'"),
]


def test_right_facts_are_taken_as_they_are():
    found = read_facts(Facts, RIGHT)
    assert found.said == "\ud800" and found.inner.at == 0 and found.ids == [0, 2**53]


@pytest.mark.parametrize(("change", "sentence"), WRONG)
def test_the_first_wrong_fact_is_named(change, sentence):
    with pytest.raises(WeirError) as error:
        read_facts(Facts, {**RIGHT, **change})
    assert str(error.value) == sentence


def test_facts_that_are_none_are_named_as_a_whole():
    with pytest.raises(WeirError, match="the content must be an object, got a list of 0"):
        read_facts(Facts, [])
    with pytest.raises(WeirError, match="the row must be an object, got 7"):
        read_facts(Facts, 7, "the row")


@pytest.mark.parametrize(
    "change", [{"ids": ["x"] * 1000}, {f"n{n}": n for n in range(1000)}, {"pair": ["x"] * 1000}]
)
def test_many_wrong_facts_are_one_error(change):
    """An error for each would take seconds and gigabytes for a file of a few megabytes."""
    with pytest.raises(ValidationError) as error:
        Facts.model_validate({**RIGHT, **change})
    assert error.value.error_count() <= 2


def test_a_long_wrong_fact_is_quoted_in_part():
    with pytest.raises(WeirError) as error:
        read_facts(Facts, {**RIGHT, "inner": {"at": "x" * 10**7}})
    assert len(str(error.value)) < 200
