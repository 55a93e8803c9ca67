"""Marked tokens stay in the slots that the beginning leaves free, as long as they are marked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_header import places
from test_sink import FOLD, tokens

import weir
from weir.errors import WeirError
from weir.pools import Beginning, Heavy, Kept, Marks


def fold_with(*ranges: tuple[int, int], beginning: int | None = 2):
    kept = torch.tensor([ranges]) if ranges else None
    return replace(FOLD, kept=kept, beginning=beginning)


def test_marked_tokens_are_kept_when_they_come_and_let_go_when_the_marks_are_gone():
    pool, held = Kept(8), tokens(0, 0)
    held, rest = pool.fold(held, tokens(0, 5), fold_with((3, 7)))
    assert (places(held), places(rest)) == ([3, 4], [0, 1, 2])
    held, rest = pool.fold(held, tokens(5, 9), fold_with((3, 7)))
    assert (places(held), places(rest)) == ([3, 4, 5, 6], [7, 8])
    same, rest = pool.fold(held, tokens(9, 12), fold_with((3, 7), (20, 30)))
    assert same is held
    assert places(rest) == [9, 10, 11]
    held, rest = pool.fold(held, tokens(12, 15), fold_with((5, 6), (13, 14)))
    assert (places(held), places(rest)) == ([5, 13], [3, 4, 6, 12, 14])
    held, rest = pool.fold(held, tokens(15, 17), fold_with())
    assert (places(held), places(rest)) == ([], [5, 13, 15, 16])


@pytest.mark.parametrize(("beginning", "room"), [(2, 3), (0, 5), (9, 0), (None, 0)])
def test_there_is_as_much_room_as_the_beginning_leaves(beginning, room):
    held, rest = Kept(5).fold(
        tokens(0, 0), tokens(10, 20), fold_with((10, 20), beginning=beginning)
    )
    assert len(held) == room
    assert len(rest) == 10 - room


def test_nothing_changes_where_nothing_is_marked():
    held, new = tokens(0, 0), tokens(0, 9)
    found = Kept(5).fold(held, new, fold_with())
    assert found[0] is held
    assert found[1] is new


def test_it_is_as_large_in_every_layer_of_a_pyramid():
    assert Kept(5).fixed((Beginning(5), Heavy(3))) == 5


@pytest.mark.parametrize(
    "policy",
    [
        "recent(4) | kept(4)",
        "beginning(4) | recent(4) | kept(5)",
        "recent(4) | kept(4) | heavy(4)",
        "beginning(4):int8 | recent(4) | kept(4)",
        "beginning(4) | recent(4) | kept(4):int8",
    ],
)
def test_a_pipe_without_such_a_beginning_is_refused(policy):
    with pytest.raises(WeirError, match=r"beginning"):
        weir.policy(policy)


def test_its_slots_are_not_counted_twice():
    assert weir.policy("beginning(4) | recent(6) | kept(4)").slots == 10
    coded = weir.policy("beginning(4):int8 | recent(6) | kept(4):int8")
    assert (coded.slots, coded.quantized_slots) == (10, 4)


@pytest.mark.parametrize(
    "kept", [((5, 5),), ((5, 9), (8, 12)), ((9, 12), (5, 8)), ((-1, 4),), ((1, 2, 3),), (7,), "ab"]
)
def test_wrong_marks_are_refused(kept):
    with pytest.raises(WeirError, match="kept must be"):
        Marks(3, kept=kept)
