"""Which sequence gets a row next, and which prompts are read next."""

from __future__ import annotations

import pytest

from weir.serve import Sampler, SamplingParams, TokenSequence
from weir.serve.engine.scheduler import Busy, Scheduler, fits_one_call, group_prefills


def turn(length: int, row: int | None = None, holder: str = "", read: int = 0) -> TokenSequence:
    made = TokenSequence(
        "", None, [1] * length, 1, frozenset(), Sampler(SamplingParams()), None, holder=holder
    )
    made.row, made.unread, made.num_read = row, [1] * length, read
    return made


def scheduler(queue: int) -> Scheduler:
    return Scheduler(1, queue, 100, deterministic=False)


def test_clients_take_turns_and_one_clients_turns_come_in_order():
    its = scheduler(5)
    turns = [turn(1, holder=name) for name in "aaabbc"]
    for each in turns:
        its.add(each)
    with pytest.raises(Busy, match="5 turns are already waiting"):
        its.add(turn(1))
    order = []
    while (admitted := its.admit()) is not None:
        assert its.admit() is None  # its only row is busy
        order.append(turns.index(admitted[0]))
        its.finish(admitted[0], at_checkpoint=False)
    assert order == [0, 3, 5, 1, 4, 2]


def test_where_keys_share_a_server_one_of_them_leaves_a_row_and_a_place_to_others():
    its = Scheduler(4, 20, 100, deterministic=False, shared=True)
    for _ in range(3 + 18):
        its.add(turn(1, holder="a"))
    with pytest.raises(Busy, match="18 turns are already waiting"):
        its.add(turn(1, holder="a"))
    for _ in range(3):
        assert its.admit()
    assert its.admit() is None
    other = turn(1, holder="b")
    its.add(other)
    assert its.admit() == (other, False)
    its.add(turn(1, holder="b"))
    its.finish(other, at_checkpoint=False)
    admitted = its.admit()
    assert admitted and admitted[0].holder == "b"


def test_what_is_read_already_goes_first_however_many_wait():
    its = scheduler(0)
    its.add(turn(1, holder="a"))
    read = turn(1, holder="a")
    its.add_first(read)
    assert its.admit() == (read, False)
    its.finish(read, at_checkpoint=False)
    its.finish(read, at_checkpoint=False)
    assert len(its.waiting) == 1


def test_short_prompts_are_group_prefills_and_a_long_one_by_itself():
    short = [turn(9, row) for row in (0, 1, 2)]
    long, half = turn(21, 3), turn(9, 4, read=20)
    assert group_prefills([short[0], long, *short[1:], half], 40) == short
    assert group_prefills([long, *short], 20) == [long]
    assert group_prefills([half, *short], 40) == [half]
    assert group_prefills([], 40) == []


def test_no_call_takes_longer_than_a_piece():
    turns = [turn(9, row) for row in range(6)]
    assert group_prefills(turns, 36) == turns[:4]
    assert group_prefills(turns, 35) == turns[:3]
    whole = turn(36, 0)
    assert group_prefills([whole, *turns[1:]], 36) == [whole]


def test_rows_far_from_each_other_are_not_worth_a_call():
    near, far = turn(9, 1), turn(9, 6)
    assert group_prefills([turn(9, 0), far, near], 1000)[1:] == [near]
    # Rows between two that are read cost computation, unless they are read, too.
    between = [turn(9, row) for row in (5, 2, 1)]
    assert group_prefills([turn(9, 0), *between], 1000)[1:] == between[::-1]
    assert fits_one_call({0: 9, 3: 9}, 1000)
    assert not fits_one_call({0: 9, 4: 9}, 1000)
    assert fits_one_call({0: 30, 1: 30, 2: 1}, 1000)
    assert not fits_one_call({0: 30, 1: 4, 2: 4, 3: 4}, 1000)


def test_who_is_to_be_read_apart_is():
    first, second, third = (turn(9, row) for row in range(3))
    second.alone = True
    assert group_prefills([first, second, third], 100) == [first, third]
    assert group_prefills([second, first, third], 100) == [second]
