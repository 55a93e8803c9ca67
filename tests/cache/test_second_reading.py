"""A second reading: scores as plain transformers have them, and no other trace."""

from __future__ import annotations

import pytest
import torch
from model_runs import restored_goes_on
from reference.models import make
from reference.repeat import scores_of
from roundings import close_runs, run_off, within

import weir
from weir.errors import WeirError
from weir.pools import CounterRNG, Fold, Reconstruct
from weir.slab import AttentionParams, Slots

POLICY = "sink(2) | recent(6) | reconstruct(8)"


def test_scores_are_those_of_plain_attention(llama, ids):
    tokens = ids(1, 20)
    stream = weir.Stream(llama, "recent(40) | reconstruct(4)", chunk=5, positions="original")
    stream.feed(tokens)
    for layer, wanted in enumerate(scores_of(llama, tokens, 5)):
        slab = stream.cache.stack[layer].state.slab
        place = slab.position[0, 0].tolist().index(15)
        within(slab.mass[0, :, place : place + 5], wanted, run_off(llama))


@pytest.mark.parametrize("kind", ["bloom", "gemma3", "gpt-oss"])
def test_nothing_else_is_left_of_it(kind):
    model = make(kind)
    tokens = torch.randint(3, 90, (1, 30), generator=torch.Generator().manual_seed(1))
    got = weir.Stream(model, "recent(20) | reconstruct(30)", chunk=4)
    wanted = weir.Stream(model, "recent(20) | knorm(30)", chunk=4)
    close_runs(got.feed(tokens, all_logits=True), wanted.feed(tokens, all_logits=True), model)
    assert got.seen == 30
    assert got.cache.stack[1].state.slab.mass.any()


def test_streams_are_cut_anyhow_and_rows_read_alone(llama, ids):
    tokens = ids(1, 47).repeat(2, 1)
    tokens[1] = tokens[1].flip(0)
    both = weir.Stream(llama, POLICY, chunk=5)
    got = both.feed(tokens, all_logits=True)
    for row in range(2):
        alone = weir.Stream(llama, POLICY, chunk=5)
        parts = [alone.feed(part, all_logits=True) for part in tokens[row].split(3)]
        close_runs(got[row], torch.cat(parts, dim=1)[0], llama)
        assert torch.equal(both.slots(1).position[row], alone.slots(1).position[0])


def test_a_restored_stream_goes_on(llama, ids, tmp_path):
    restored_goes_on(llama, POLICY, ids(1, 60), 33, tmp_path, 5)


def test_the_tokens_of_the_highest_scores_stay():
    mass = torch.tensor([[[0.1, 0.9, 0.2, 0.3, 0.4]]])
    zeros, position = torch.zeros(1, 1, 5), torch.arange(5)[None, None]
    slots = Slots(zeros[..., None], zeros[..., None], zeros, zeros, position, mass)
    fold = Fold(CounterRNG(0), torch.tensor([5]), AttentionParams(scale=1.0))
    for kernel, wanted in ((1, [1, 4]), (3, [1, 2])):
        kept, gone = Reconstruct(2, kernel).fold(slots.part(0, 0), slots, fold)
        assert kept.position.tolist() == [[wanted]]
        assert len(gone) == 3


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (POLICY, {}, "cannot have 12 tokens. Feed them through weir.Stream"),
        ("recent(4) | reconstruct(8)", {}, "Write recent\\(5\\) | reconstruct"),
        (POLICY, {"prefill": "full"}, "reads each chunk twice"),
        ("recent(6) | heavy(4) | reconstruct(8)", {}, "Leave out one of them"),
    ],
)
def test_what_cannot_be_read_twice_is_refused(llama, ids, policy, options, message):
    def read():
        cache = weir.StreamingCache(llama, policy, chunk=5, **options)
        return llama(ids(1, 12), past_key_values=cache)

    with pytest.raises(WeirError, match=message):
        read()


def test_embeddings_cannot_be_repeated(llama, ids):
    stream = weir.Stream(llama, POLICY, chunk=5)
    with pytest.raises(WeirError, match="repeats token ids"):
        stream.feed(embeddings=llama.get_input_embeddings()(ids(1, 3)[0]))
