"""No part of a prompt is read twice, after a client hangs up or in a second conversation."""

from __future__ import annotations

from array import array

import pytest
import torch
from test_engine import CHUNK, MODEL, engine, turn, words, work

from weir import StreamingCache
from weir.serve.engine.prefixes import PrefixKey, PrefixState, PrefixStates
from weir.serve.messages import ResultPlace

PIECE = 5  # tokens of a prompt that are read in one call (see `engine`)
POLICY = "pinned(sink(2) | recent(6) | heavy(4), n=12, header=3)"


def read(served, sequence, steps: int) -> None:
    served.submit(sequence)
    for _ in range(steps):
        served.step()


def cancelled(served, ids, steps: int, **given) -> None:
    """Run a turn whose client hangs up while its prompt is read."""
    one = turn("gone", ids, **given)
    read(served, one, steps)
    served.cancel(one)
    served.step()
    assert one.listener.error is not None
    assert not one.output_ids


def answered(served, name: str, ids, **given):
    one = turn(name, ids, **given)
    work(served, one)
    return one


@pytest.mark.parametrize("policy", [POLICY, "sink(2) | recent(6) | heavy(4)"])
def test_an_interrupted_prompt_goes_on_where_it_was_and_answers_the_same(policy):
    ids, given = words(1, 60), {"owner": "me", "beginning": 3, "header": 3}
    served = engine(policy=policy)
    cancelled(served, ids, 4, **given)
    assert len(served.prefixes) == 1
    again = answered(served, "again", ids, **given)
    assert again.reused == 4 * PIECE
    fresh = answered(engine(policy=policy), "fresh", ids, **given)
    assert fresh.reused == 0
    assert again.listener.tokens == fresh.listener.tokens
    # The tokens that were read can also begin a longer prompt.
    longer = answered(served, "longer", [*ids[:-3], *words(2, 9)], **given)
    assert longer.reused == 4 * PIECE


def test_a_turn_that_continues_another_is_kept_apart_from_one_that_does_not():
    served = engine()
    answered(served, "first", words(1, 9), owner="me")
    ids = words(2, 40)
    cancelled(served, ids, 3, owner="me", start="first")
    assert answered(served, "new", ids, owner="me").reused == 0
    second = answered(served, "second", ids, owner="me", start="first")
    assert second.reused == 3 * PIECE
    other = engine()
    answered(other, "first", words(1, 9), owner="me")
    expected = answered(other, "second", ids, owner="me", start="first")
    assert second.listener.tokens == expected.listener.tokens


@pytest.mark.parametrize(
    "how", [{"owner": "you"}, {"owner": None}, {"owner": "me", "beginning": 4}, {"seed": 1}]
)
def test_nobody_else_goes_on_from_it(how):
    served, ids = engine(), words(1, 40)
    cancelled(served, ids, 3, owner="me")
    assert answered(served, "again", ids, **{"owner": "me", **how}).reused == 0


def test_nothing_is_kept_of_who_has_no_owner():
    served = engine()
    cancelled(served, words(1, 40), 3)
    assert len(served.prefixes) == 0


def test_the_header_of_the_answer_is_always_read():
    served, ids = engine(), words(1, 22)
    cancelled(served, ids, 3, owner="me", header=3)
    known = answered(served, "short", ids[:17], owner="me", header=3)
    assert known.reused == 0  # 15 tokens are known, but the last 3 of the 17 are the header
    assert answered(served, "enough", ids[:18], owner="me", header=3).reused == 15


def test_a_long_beginning_is_shared_by_conversations():
    served, start = engine(policy=POLICY), words(1, 13)
    given = {"owner": "me", "beginning": 13, "header": 2}
    first = answered(served, "a", [*start, *words(2, 20)], **given)
    second = answered(served, "b", [*start, *words(3, 20)], **given)
    assert (first.reused, second.reused) == (0, 13)
    alone = answered(engine(policy=POLICY), "b", [*start, *words(3, 20)], **given)
    assert second.listener.tokens == alone.listener.tokens
    assert answered(served, "c", [*start, *words(3, 20)], **{**given, "owner": "you"}).reused == 0
    # A longer state, of a prompt that was interrupted, does not replace it.
    cancelled(served, [*start, *words(4, 40)], 6, **given)
    assert answered(served, "d", [*start, *words(5, 20)], **given).reused == 13


def test_a_prompt_with_a_result_to_keep_does_not_go_on_from_where_that_was_let_go():
    ids, given = words(1, 60), {"owner": "me", "beginning": 3, "header": 3}
    kept = {"kept": (ResultPlace(10, 16, "x"),)}
    fresh = answered(engine(policy=POLICY), "fresh", ids, **given, **kept)
    served = engine(policy=POLICY)
    cancelled(served, ids, 8, **given)
    again = answered(served, "again", ids, **given, **kept)
    assert again.reused == 0  # 40 tokens are known, but the ones to keep have left the window
    assert again.listener.tokens == fresh.listener.tokens
    # It goes on from a state with the same tokens kept, or from one that has not reached them yet.
    served = engine(policy=POLICY)
    cancelled(served, ids, 8, **given, **kept)
    assert answered(served, "again", ids, **given, **kept).reused == 8 * PIECE
    served = engine(policy=POLICY)
    cancelled(served, ids, 2, **given)
    assert answered(served, "again", ids, **given, **kept).reused == 2 * PIECE
    served = engine(policy=POLICY)
    cancelled(served, ids, 2, **given, **kept)
    assert answered(served, "again", ids, **given).reused == 2 * PIECE


@pytest.mark.parametrize(
    ("place", "is_kept"), [((1, 4), False), ((28, 33), True), ((35, 60), False), ((50, 53), True)]
)
def test_a_running_answer_keeps_what_is_in_its_window_or_not_read_yet(place, is_kept):
    served = engine(policy=POLICY)
    one = turn("one", words(1, 60), beginning=3, header=3)
    read(served, one, 7)  # 35 tokens
    found = served.keep(one, ResultPlace(*place, "x"))
    assert not found.done()
    served.step()
    assert found.result() is is_kept  # nothing is kept of a place that is too long
    assert served.cache.marks[one.row].kept == ((place,) if is_kept else ())
    while not one.listener.over:
        served.step()
    gone = served.keep(one, ResultPlace(*place, "x"))
    served.step()
    assert gone.result() is False  # it no longer has a row


def test_a_short_beginning_costs_no_call_of_its_own():
    served = engine()
    answered(served, "a", words(1, 9), owner="me", beginning=4)
    assert len(served.prefixes) == 0


def test_what_follows_a_deleted_turn_is_dropped():
    served = engine()
    answered(served, "first", words(1, 9), owner="me")
    cancelled(served, words(2, 40), 3, owner="me", start="first")
    served.forget("first")
    answered(served, "other", words(1, 9), owner="me")
    assert len(served.prefixes) == 0


def state_of(owner: str, ids: list[int], beginning: int = 0) -> PrefixState:
    cache = StreamingCache(MODEL, "recent(8)", chunk=CHUNK, batch=1)
    with torch.no_grad():
        MODEL(torch.tensor([[1]]), past_key_values=cache, use_cache=True)
    key = PrefixKey(owner, None, beginning, 0)
    return PrefixState(key, array("I", ids), cache.take_row(0))


def test_one_owner_cannot_drop_what_others_have():
    kept = PrefixStates(3)
    kept.add(state_of("you", [7]))
    for n in range(5):
        kept.add(state_of("me", [n, n]))
    assert len(kept) == 3
    assert kept.find(PrefixKey("you", None, 0, 0), [7, 8], 9) is not None
    assert kept.find(PrefixKey("me", None, 0, 0), [0, 0, 0], 9) is None
    assert kept.find(PrefixKey("me", None, 0, 0), [4, 4, 4], 9) is not None


def test_the_one_used_longest_ago_goes_first():
    kept = PrefixStates(2)
    kept.add(state_of("me", [1]))
    kept.add(state_of("me", [2]))
    assert kept.find(PrefixKey("me", None, 0, 0), [1, 5], 9) is not None
    kept.add(state_of("me", [3]))
    assert kept.find(PrefixKey("me", None, 0, 0), [2, 5], 9) is None
    assert kept.find(PrefixKey("me", None, 0, 0), [1, 5], 9) is not None


def test_a_state_that_has_read_further_replaces_an_earlier_one():
    kept = PrefixStates(5)
    for ids in ([1], [1, 2], [1, 2, 3]):
        kept.add(state_of("me", ids))
    assert len(kept) == 1
    assert list(kept.find(PrefixKey("me", None, 0, 0), [1, 2, 3, 4], 9).ids) == [1, 2, 3]
    assert PrefixStates(0).find(PrefixKey("me", None, 0, 0), [1], 9) is None
