"""The header of the running turn stays until another turn begins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_sink import FOLD, tokens

from weir.pools import Header, Heavy


def fold_at(turn: int | None, header: int = 3):
    place = None if turn is None else torch.tensor([turn])
    return replace(FOLD, turn=place, header=header)


def places(slots) -> list[int]:
    return slots.position[0, 0].tolist()


def test_the_header_is_kept_when_it_comes_and_let_go_when_another_turn_begins():
    pool, held = Header(4), tokens(0, 0)
    held, rest = pool.fold(held, tokens(0, 5), fold_at(4))
    assert (places(held), places(rest)) == ([4], [0, 1, 2, 3])
    held, rest = pool.fold(held, tokens(5, 9), fold_at(4))
    assert (places(held), places(rest)) == ([4, 5, 6], [7, 8])
    same, rest = pool.fold(held, tokens(9, 12), fold_at(4))
    assert same is held
    assert places(rest) == [9, 10, 11]
    held, rest = pool.fold(held, tokens(12, 16), fold_at(13, header=2))
    assert (places(held), places(rest)) == ([13, 14], [4, 5, 6, 12, 15])
    assert held.values[0, 1, :, 0].tolist() == [13, 14]


def test_of_a_long_header_the_first_tokens_stay():
    held, rest = Header(2).fold(tokens(0, 0), tokens(0, 9), fold_at(3, header=5))
    assert (places(held), places(rest)) == ([3, 4], [0, 1, 2, 5, 6, 7, 8])


@pytest.mark.parametrize("fold", [fold_at(None), fold_at(3, header=0)])
def test_nothing_stays_where_nobody_said_where_a_turn_begins(fold):
    new = tokens(0, 9)
    held, rest = Header(2).fold(tokens(0, 0), new, fold)
    assert len(held) == 0
    assert rest is new


def test_it_is_as_large_in_every_layer_of_a_pyramid():
    assert Header(5).fixed((Heavy(3),)) == 5
