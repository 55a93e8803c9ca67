"""Gates: scores equal those of plain attention, and least squares are solved as in PyTorch."""

from __future__ import annotations

import pytest
import torch
from model_runs import reads_exactly, restored_goes_on
from reference.kvzip import scores_of
from reference.models import make
from roundings import run_off, within

import weir
from weir.errors import WeirError
from weir.evals.capture import capture_each, unrotated_keys
from weir.evals.gates import RIDGE, _Sums, repeat_scores, train_gates
from weir.models import Gate, describe, save_gates
from weir.pools import Gated
from weir.stream import BOOK

POLICY = "sink(2) | recent(6) | gated(8)"


@pytest.fixture
def gated(fresh_llama, tmp_path, monkeypatch):
    """A model with gates of random numbers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = fresh_llama(seed=3)
    facts = describe(model)
    heads = [layer.heads for layer in facts.layers]
    weights = [
        torch.randn(
            one.kv_heads * (one.key_dim + one.value_dim) + 1,
            one.kv_heads,
            generator=torch.Generator().manual_seed(layer),
        )
        for layer, one in enumerate(heads)
    ]
    gates = {layer: Gate(weight - 1) for layer, weight in enumerate(weights)}
    save_gates(facts.decoder, facts.config, gates)
    return model, gates


def test_scores_are_those_of_plain_attention(llama, ids):
    tokens = ids(1, 24)
    twice = torch.cat([tokens, tokens], dim=1)[0]
    found = capture_each(llama, twice, lambda inputs: repeat_scores(inputs, 24))
    for layer, wanted in enumerate(scores_of(llama, tokens[0].tolist(), 24, lambda start: [])):
        within(found[layer].T, torch.tensor(wanted), run_off(llama))


def test_the_map_is_that_of_penalized_least_squares():
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(200, 5, generator=generator), torch.ones(200, 1)], dim=1)
    y = (x @ torch.randn(6, 2, generator=generator) / 4).clamp_max(0)
    sums = _Sums()
    for part in (slice(0, 70), slice(70, 200)):
        sums.add(x[part], y[part].exp())
    penalty = RIDGE * x.double().square().sum(0).mean()
    more = torch.diag(penalty.sqrt().expand(6)).clone()
    more[-1] = 0
    rows = torch.cat([x.double(), more])
    wanted = torch.linalg.lstsq(rows, torch.cat([y.double(), y.new_zeros(6, 2).double()])).solution
    torch.testing.assert_close(sums.solve().double(), wanted, rtol=1e-5, atol=1e-5)
    off = (x.double() @ wanted - y).square().sum(0)
    around = (y - y.mean(0)).double().square().sum(0)
    assert sums.explained(wanted) == pytest.approx(float((1 - off / around).mean()), abs=1e-5)


def test_the_tokens_that_the_gate_names_stay(gated, ids):
    model, gates = gated
    tokens = ids(1, 30)
    stream = weir.Stream(model, "recent(6) | gated(8, kernel=1)", chunk=5)
    stream.feed(tokens)
    taken = capture_each(model, tokens[0], lambda inputs: inputs)
    # Keys of the first layer do not depend on what was evicted.
    score = gates[0](unrotated_keys(taken[0]), taken[0].values)[0, :, :24]
    held = stream.slots(0)
    for head in range(score.shape[0]):
        place = held.position[0, head].tolist()
        wanted = score[head].topk(8).indices.sort().values.tolist()
        assert sorted(p for p in place if 0 <= p < 24) == wanted


def test_a_gated_stream_goes_on_and_is_exact_within_its_budget(gated, ids, tmp_path):
    model, _ = gated
    restored_goes_on(model, POLICY, ids(1, 60), 33, tmp_path, 5)
    reads_exactly(model, "recent(6) | gated(40)", ids(1, 40))
    out = model.generate(
        ids(1, 40),
        past_key_values=weir.StreamingCache(model, POLICY, chunk=5),
        max_new_tokens=3,
        do_sample=False,
    )
    stream = weir.Stream(model, POLICY, chunk=5)
    stream.feed(ids(1, 40))
    assert out[0, 40:].tolist() == list(stream.generate(3, stop=[]))


def test_what_cannot_be_gated_is_refused(fresh_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = fresh_llama(seed=4)
    with pytest.raises(WeirError, match="calibrate --gates"):
        weir.StreamingCache(model, POLICY)
    facts = describe(model)
    file = save_gates(facts.decoder, facts.config, {0: Gate(torch.zeros(3, 2))})
    with pytest.raises(WeirError, match="trained for this model"):
        weir.StreamingCache(model, POLICY)
    file.with_suffix(".part").mkdir()
    with pytest.raises(WeirError, match="cannot write the gates"):
        save_gates(facts.decoder, facts.config, {0: Gate(torch.zeros(3, 2))})
    file.write_bytes(b"not a file of tensors")
    with pytest.raises(WeirError, match="Delete the file"):
        weir.StreamingCache(model, POLICY)
    with pytest.raises(WeirError, match="Put gated first"):
        weir.policy("recent(4) | heavy(4) | gated(8)")
    with pytest.raises(WeirError, match="must be a whole number of at least 1 and odd, got 2"):
        Gated(4, kernel=2)


def test_a_model_whose_layers_all_slide_gets_no_gates():
    tokenizer = weir.load("nano")[1]
    model = make("mistral-sliding", vocab_size=len(tokenizer), sliding_window=40)
    with pytest.raises(WeirError, match="all layers of this model have a sliding window"):
        train_gates(model, tokenizer, str(BOOK), tokens=600)
