"""A sliding window with recomputation, against a plain loop with one forward for each token."""

from __future__ import annotations

import pytest
import torch
from roundings import close_runs, nll_off, within
from torch import Tensor

import weir
from weir.errors import NotFiniteError, PolicyError, WeirError
from weir.policies.grammar import policy
from weir.policies.library import Recompute, recompute
from weir.stream import recomputation as module
from weir.stream.held import HeldPlaces

BUDGET = 16
LENGTH = 50


@torch.no_grad()
def looped(model, text: Tensor, budget: int, sinks: int = 0) -> Tensor:
    """Return the logits after each token of `text`, each from a forward of its own window."""
    logits = []
    for end in range(1, text.shape[1] + 1):
        window = text[:, :end]
        if end > budget:
            window = torch.cat([text[:, :sinks], text[:, end - (budget - sinks) : end]], dim=1)
        logits.append(model(window, use_cache=False).logits[:, -1])
    return torch.stack(logits, dim=1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sinks", [0, 1, 4, BUDGET - 1])
@pytest.mark.parametrize("cuts", [[LENGTH], [1] * LENGTH, [16, 1, 33], [17, 33]])
@pytest.mark.thinned(5)
def test_every_token_is_predicted_from_its_own_window_read_anew(llama, ids, batch, sinks, cuts):
    text = ids(batch, LENGTH)
    stream = weir.Stream(llama, recompute(BUDGET, sinks))
    parts = [stream.feed(part, all_logits=True) for part in text.split(cuts, dim=1)]
    close_runs(torch.cat(parts, dim=1), looped(llama, text, BUDGET, sinks), llama)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("length", [1, BUDGET - 1, BUDGET, BUDGET + 1, LENGTH])
def test_the_logits_after_the_last_token_are_the_last_of_all(llama, ids, sinks, length):
    text = ids(2, length)
    last = weir.Stream(llama, recompute(BUDGET, sinks)).feed(text)
    close_runs(last, looped(llama, text, BUDGET, sinks)[:, -1], llama)


def test_how_many_windows_are_read_at_once_changes_nothing(llama, ids, monkeypatch):
    text = ids(2, LENGTH)
    for at_once in (1, 3 * 2 * BUDGET, 10**6):
        monkeypatch.setattr(module, "AT_ONCE", at_once)
        found = weir.Stream(llama, recompute(BUDGET, 4)).feed(text, all_logits=True)
        close_runs(found, looped(llama, text, BUDGET, 4), llama)


@pytest.mark.slow
def test_it_scores_and_continues_like_every_stream(llama, ids):
    text = ids(1, LENGTH)
    stream = weir.Stream(llama, recompute(BUDGET, 4))
    logits = looped(llama, text, BUDGET, 4)
    nll = -logits[:, :-1].log_softmax(-1).gather(-1, text[:, 1:, None])[..., 0]
    within(stream.score(text)[:, 1:], nll, nll_off(llama, 1))
    for _ in range(20):
        best = looped(llama, text, BUDGET, 4)[:, -1].argmax(-1, keepdim=True)
        text = torch.cat([text, best], dim=1)
    assert list(stream.generate(20)) == text[0, LENGTH:].tolist()


def test_only_token_ids_are_kept_between_tokens(llama, ids):
    stream = weir.Stream(llama, recompute(BUDGET, 4))
    assert stream.nbytes == 0
    for count in (5, 20, 300):
        stream.feed(ids(2, count))
        assert stream.nbytes == 2 * 8 * min(stream.seen, BUDGET)


def test_a_window_longer_than_the_models_own_is_refused(llama, ids):
    with pytest.raises(
        WeirError, match="reads 513 tokens at once, but the model can read only 512"
    ):
        weir.Stream(llama, recompute(513))
    assert weir.Stream(llama, recompute(512)).feed(ids(1, 20)).shape == (1, 61)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((0,), "at least 1, got 0"),
        ((-3,), "at least 1, got -3"),
        ((16, 16), "from 0 to 15 with a budget of 16, got 16"),
        ((16, 17), "from 0 to 15 with a budget of 16, got 17"),
        ((16, -1), "from 0 to 15 with a budget of 16, got -1"),
        ((1, 1), "from 0 to 0 with a budget of 1, got 1"),
    ],
)
def test_a_window_without_room_for_the_newest_token_is_refused(given, sentence):
    for make in (recompute, Recompute):
        with pytest.raises(WeirError, match=sentence):
            make(*given)
    with pytest.raises(PolicyError, match=sentence):
        policy(f"recompute{given}".replace(",)", ")"))


def test_logits_that_are_no_numbers_are_refused_and_the_window_stays(fresh_llama):
    model = fresh_llama()
    model.get_input_embeddings().weight.data[7] = torch.nan
    stream = weir.Stream(model, recompute(16))
    with pytest.raises(NotFiniteError, match=r"token 3 of this call \(id 7\).*logits that are no"):
        stream.feed([1, 2, 7, 3])
    assert stream.seen == 2
    plain = weir.Stream(model, recompute(16))
    plain.feed([1, 2])
    assert torch.equal(stream.feed([4]), plain.feed([4]))


@pytest.mark.parametrize("made", [recompute(16), recompute(16, 4), recompute(300, sinks=1)])
def test_its_text_reads_back_as_the_same_policy(made):
    assert policy(str(made)) == made
    assert policy("recompute(16)") != policy("recompute(16, sinks=4)")


@pytest.mark.parametrize("sinks", [0, 4])
def test_what_it_holds_are_the_first_tokens_and_the_newest(llama, ids, sinks):
    stream = weir.Stream(llama, recompute(BUDGET, sinks))
    length = 3 * BUDGET
    stream.feed(ids(1, length)[0])
    is_held = HeldPlaces(stream)
    newest = {*range(length - BUDGET + sinks, length)}
    for place in range(length + 2):
        assert is_held(place, place + 1) == (place < sinks or place in newest)
