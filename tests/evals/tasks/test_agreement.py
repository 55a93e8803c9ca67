"""`agreement`: the share of the tokens kept by KVzip that a policy holds, on small texts."""

from __future__ import annotations

import pytest

import weir
from weir.errors import WeirError
from weir.evals.task import Subject
from weir.evals.tasks.agreement import Agreement
from weir.policies import parse_policy
from weir.stream import read_stream

TASK = Agreement(tokens=64, passages=2, asks=False)


@pytest.fixture(scope="module")
def nano():
    return weir.load("nano")


def subject(nano, policy: str) -> Subject:
    return Subject("nano", *nano, parse_policy(policy), chunk=8)


def quiet(share: float) -> None:
    assert 0 < share <= 1


def places(model, policy: str, passage) -> dict[tuple[int, int], set[int]]:
    """The tokens that each head of each layer holds."""
    stream = weir.Stream(model, policy, chunk=8)
    stream.feed(passage)
    return {
        (layer, head): {place for place in held.tolist() if place >= 0}
        for layer in range(len(stream.cache))
        for head, held in enumerate(stream.slots(layer).position[0])
    }


def test_it_counts_tokens_that_both_hold(nano):
    model, tokenizer = nano
    policy = "sink(4) | recent(12) | keydiff(8)"
    found = TASK.run(subject(nano, policy), quiet)
    both = wanted = 0
    for passage in read_stream(tokenizer, None, 128).ids.split(64):
        mine = places(model, policy, passage)
        theirs = places(model, "kvzip(25, newest=1, asks=false)", passage)
        both += sum(len(mine[at] & theirs[at]) for at in theirs)
        wanted += sum(len(of_head) for of_head in theirs.values())
    assert found["agreement"] == pytest.approx(both / wanted)
    assert found["slots"] == 24 and found["chance"] == pytest.approx(24 / 64)


def test_kvzip_agrees_with_itself_and_a_window_does_not(nano):
    itself = TASK.run(subject(nano, "kvzip(25, newest=1, asks=false)"), quiet)
    # The reference gets one more slot than the policy, for the token after the text. So it keeps 25
    # tokens, of which the policy holds 24.
    assert itself["agreement"] == pytest.approx(24 / 25)
    assert TASK.run(subject(nano, "window(24)"), quiet)["agreement"] < 0.7


@pytest.mark.parametrize(
    ("task", "policy", "said"),
    [
        (TASK, "dense", "room for all 64 tokens"),
        (TASK, "window(64)", "room for all 64 tokens"),
        (TASK, "recompute(16)", "recompute caches nothing"),
    ],
)
def test_what_cannot_be_compared_is_refused(nano, task, policy, said):
    with pytest.raises(WeirError, match=said):
        task.run(subject(nano, policy), quiet)


def test_a_text_that_is_too_short_is_refused(nano, tmp_path):
    (tmp_path / "short.txt").write_text("One sentence.")
    task = Agreement(tokens=64, passages=2, text=str(tmp_path / "short.txt"))
    with pytest.raises(WeirError, match="passages of 64 tokens take 128"):
        task.run(subject(nano, "window(24)"), quiet)
