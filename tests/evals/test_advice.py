"""Advice: policies with the largest budgets that fit the memory, tried on the text, best first."""

from __future__ import annotations

import copy

import pytest
import torch
from roundings import nll_off

import weir
from weir.cache import DEFAULT, size_of
from weir.errors import WeirError
from weir.evals import advice
from weir.evals.advice import advise
from weir.evals.notation import with_budget
from weir.evals.perplexity import read
from weir.models import fingerprint
from weir.policies import format_policy_file
from weir.stream.text import BOOK, encode, read_text

few_slots = pytest.mark.filterwarnings("ignore:weir. .* only .* slots, too few to judge it by")
"""Ignore a warning about something that the test is not about."""


@pytest.fixture(scope="module")
def nano():
    return weir.load("nano")


@pytest.mark.slow
def test_the_policies_are_tried_on_the_text_and_the_best_is_named(nano, monkeypatch):
    model, tokenizer = nano
    monkeypatch.setattr(advice, "CANDIDATES", ("window", "streaming_llm", "subgen"))
    told: list[tuple[str, float]] = []
    found = advise(
        model, tokenizer, str(BOOK), 1_000_000, tokens=900,
        on_step=lambda policy, share: told.append((policy, share)),
    )  # fmt: skip
    assert found.best.policy.startswith("streaming_llm(")
    assert [one.ppl for one in found.tries] == sorted(one.ppl for one in found.tries)
    assert all(one.kv_bytes <= 1_000_000 for one in found.tries)
    ids = encode(tokenizer, read_text(BOOK), 900)
    wanted = read(weir.Stream(model, found.best.policy), ids).ppl
    assert found.best.ppl == pytest.approx(wanted, rel=nll_off(model, 899))
    assert (found.tokens, found.window, found.everything) == (900, 512, False)
    assert told[-1][1] == 1.0
    assert [share for _, share in told] == sorted(share for _, share in told)


def test_a_model_without_a_perplexity_gets_no_advice(nano):
    model, tokenizer = copy.deepcopy(nano[0]), nano[1]
    model.lm_head.weight = torch.nn.Parameter(torch.full_like(model.lm_head.weight, torch.nan))
    with pytest.raises(WeirError, match="perplexity cannot be computed"):
        advise(model, tokenizer, str(BOOK), budget=100, policies="window", tokens=300)


def test_what_is_taken_where_nobody_says_is_among_the_candidates():
    assert DEFAULT.partition("(")[0] in advice.CANDIDATES
    for name in advice.CANDIDATES:
        assert weir.policy(with_budget(name, advice.SMALLEST)).pipes


@pytest.mark.slow
def test_policies_that_are_named_get_what_fits_or_are_taken_as_they_are(nano, tmp_path):
    path = tmp_path / "mine.toml"
    layer = {"policy": "sink(4) | recent(60)"}
    wide = {"policy": "sink(4) | recent(70)"}
    path.write_text(format_policy_file({}, fingerprint(nano[0]), [layer] * 3 + [wide]))
    listed = f"window(40), {path}, weir(sinks=8), window(40)"
    found = advise(*nano, str(BOOK), 600_000, policies=listed, tokens=600)
    slots = {one.policy: one.budget for one in found.tries}
    (sized,) = (it for it in slots if it.startswith("weir(sinks=8"))
    assert slots == {"window(40)": 40, str(path): 74, sized: slots[sized]}
    assert size_of(nano[0], with_budget("weir(sinks=8)", slots[sized])).stream <= 600_000
    assert size_of(nano[0], with_budget("weir(sinks=8)", slots[sized] + 3)).stream > 600_000
    assert all(one.evicted for one in found.tries)


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ("window(400)", r"window\(400\) takes [\d,]+ bytes, more than 400,000"),
        ("pyramidkv(800), dense", r"pyramidkv\(800\) takes .*, more than 400,000"),
        ("dense", "dense has no limit"),
        ("", "expected a pool or a policy"),
    ],
)
def test_where_no_named_policy_fits_it_is_refused(nano, policies, said):
    with pytest.raises(WeirError, match=said):
        advise(*nano, str(BOOK), 400_000, policies=policies, tokens=600)


def test_a_named_policy_that_does_not_fit_is_left_out_and_the_others_are_tried(nano):
    named = "pyramidkv(800), window(40), dense"
    found = advise(*nano, str(BOOK), 700_000, policies=named, tokens=300)
    assert [one.policy for one in found.tries] == ["window(40)"]
    large, endless = found.left_out.items()
    assert large[0] == "pyramidkv(800)" and large[1].endswith("more than 700,000")
    assert endless[0] == "dense" and "no limit" in endless[1]


def test_a_named_policy_that_cannot_be_made_so_small_says_what_it_takes(nano):
    with pytest.raises(
        WeirError, match=r"5,000 bytes are too few for weir: weir\(budget=5\) takes"
    ):
        advise(*nano, str(BOOK), 5_000, policies="weir", tokens=600)


def test_a_policy_file_of_another_model_is_refused(nano, tmp_path):
    path = tmp_path / "theirs.toml"
    other = {**fingerprint(nano[0]), "layers": 3}
    path.write_text(format_policy_file({}, other, [{"policy": "recent(60)"}] * 3))
    with pytest.raises(WeirError, match="was calibrated for another model"):
        advise(*nano, str(BOOK), 400_000, policies=f"weir, {path}", tokens=600)


def test_more_memory_than_the_window_needs_is_left(nano, monkeypatch):
    monkeypatch.setattr(advice, "CANDIDATES", ("streaming_llm",))
    found = advise(*nano, str(BOOK), 10**9, tokens=600)
    assert found.best.budget == 512 - 64


@pytest.mark.slow
@few_slots
def test_a_text_that_fits_needs_no_policy(nano, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("It was a bright morning, and they walked on. " * 20)
    found = advise(*nano, str(path), 10**7)
    assert found.everything
    assert found.best.policy == "dense"
    assert not advise(*nano, str(path), 700_000).everything


@pytest.mark.parametrize("memory", [10_000, 400_000])  # 400,000 is enough for smaller budgets
@few_slots
@pytest.mark.slow
def test_too_little_memory_is_refused_with_what_it_takes(nano, memory):
    with pytest.raises(WeirError, match=r"bytes are too few\. .* takes 675,840 bytes\. Use more"):
        advise(*nano, str(BOOK), memory)


def test_a_budget_takes_the_place_of_memory(nano):
    found = advise(*nano, str(BOOK), budget=100, policies="weir, h2o, window(40)", tokens=300)
    assert {one.policy: one.budget for one in found.tries} == {
        "weir(budget=100)": 100, "h2o(budget=100)": 100, "window(40)": 40,
    }  # fmt: skip
    assert not found.everything
    small = advise(*nano, str(BOOK), budget=2, policies="window, weir", tokens=100)
    assert [one.policy for one in small.tries] == ["window(budget=2)"]
    assert "leaves no slots for recent tokens" in small.left_out["weir"]


def test_either_memory_or_a_budget_is_given(nano):
    for given, which in (({}, "neither"), ({"memory": 10**6, "budget": 100}, "both")):
        with pytest.raises(WeirError, match=f"given by either memory or budget, got {which}"):
            advise(*nano, str(BOOK), **given)


def test_a_chunk_that_leaves_no_room_in_the_window_is_named(nano):
    with pytest.raises(WeirError, match=r"a chunk of 600 .* exceed the model's window of 512"):
        advise(*nano, str(BOOK), 10**9, chunk=600)


def test_a_text_that_is_shorter_than_the_sample_is_refused(nano, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("It was a bright morning, and they walked on. " * 60)
    count = len(encode(nano[1], read_text(path)))
    with pytest.raises(WeirError, match=f"the text has only {count} tokens, but 5,000 are needed"):
        advise(*nano, str(path), 10**6, tokens=5000)


@pytest.mark.slow
def test_it_is_said_whether_anything_was_evicted(nano, monkeypatch):
    monkeypatch.setattr(advice, "CANDIDATES", ("window", "pyramidkv"))
    few = advise(*nano, str(BOOK), 10**9, tokens=448 + 64 - 1)
    # Some layers of a pyramid have fewer slots than the budget.
    assert {one.policy.partition("(")[0]: one.evicted for one in few.tries} == {
        "window": False,
        "pyramidkv": True,
    }
    more = advise(*nano, str(BOOK), 10**9, tokens=448 + 64)
    assert all(one.evicted for one in more.tries)
