"""Maps, shares and the effect of sinks, compared with direct computations."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from reference.models import make, tokens
from roundings import close_runs, nll_off, within
from torch import Tensor
from transformers import PreTrainedModel

import weir
from weir.errors import WeirError
from weir.evals.inspect import Inspection, Section, layers, look, maps
from weir.evals.inspect.section import around, fixed_tokens, pieces, sentences
from weir.models import ModelSink, set_sink
from weir.slab import Slab
from weir.stream import BOOK, Stream, encode, read_text

pytestmark = pytest.mark.thinned(3, least=2)

TEXT = read_text(BOOK)[:40_000]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return weir.load("nano", device="cpu")[1]


@pytest.fixture(scope="module")
def nano() -> PreTrainedModel:
    return weir.load("nano", device="cpu")[0]


def asked(
    model: PreTrainedModel, tokenizer: Any = None, text: str = TEXT, **more: Any
) -> Inspection:
    return Inspection(model, tokenizer, "a model", text, **more)


def direct(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """The weights of every layer [batch, heads, length, length], as transformers returns them."""
    with torch.no_grad():
        found = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    return [weights.double() for weights in found]


# --- maps


def test_maps_are_means_over_all_sequences():
    model = make("llama")
    model.set_attn_implementation("eager")
    ids = tokens(70, 16)  # three batches, the last of them short
    means = maps.mean_logits(asked(model), ids)
    seen = torch.ones(16, 16).tril().bool()
    for layer, weights in enumerate(direct(model, ids)):
        assert means[layer].isfinite().equal(seen.expand(4, 16, 16))
        # A logit is the logarithm of its weight plus a number that is the same for the whole query.
        wanted = weights.log().where(seen, 0.0).mean(dim=0)
        got = means[layer].where(seen, 0.0)
        centerd = [
            (m - (m.sum(-1) / seen.sum(-1))[..., None]).where(seen, 0) for m in (got, wanted)
        ]
        close_runs(centerd[0].float(), centerd[1].float(), model, 16)


def test_progress_of_maps_ends_with_all_sequences():
    done: list[tuple[int, int]] = []
    to = asked(make("llama"), on_step=lambda n, of: done.append((n, of)))
    maps.mean_logits(to, tokens(70, 16))
    assert done == [(32, 70), (64, 70), (70, 70)]


@pytest.mark.parametrize(
    ("count", "most", "wanted"),
    [(4, 8, (0, 1, 2, 3)), (32, 7, (0, 1, 2, 9, 16, 24, 31)), (5, 1, (4,)), (80, 4, (0, 1, 2, 79))],
)
def test_layers_are_spread_as_in_the_paper(count, most, wanted):
    assert maps.spread(count, most) == wanted


def test_a_section_of_maps_shows_what_was_chosen(nano, tokenizer):
    some = maps.section(asked(nano, tokenizer, sequences=8, layers=(3, 1), heads=(2,)))
    assert [(it["layer"], it["head"]) for it in some.facts["maps"]] == [(3, 2), (1, 2)]
    assert some.facts["sequences"] == 8
    assert "place 0 is <|start|> in all of them" in some.text
    titles = [axes.get_title().split("\n")[0] for axes in some.pictures[0].figure.axes]
    assert titles[:2] == ["layer 3, head 2", "layer 1, head 2"]


def test_nanos_maps_show_its_sink(nano, tokenizer):
    found = maps.section(asked(nano, tokenizer, sequences=32)).facts["maps"]
    assert len(found) == 16
    assert all(it["first"] > it["others"] + 1 for it in found)


# --- shares


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "bloom", "gemma3"])
def test_shares_are_those_of_output_attentions(name):
    model = make(name)
    if name != "bloom":
        model.set_attn_implementation("eager")
    ids = tokens(3, 60)
    found = maps.first_shares(asked(model), ids)
    wanted = direct(model, ids)
    assert [share["layer"] for share in found] == list(range(len(wanted)))
    for share, weights in zip(found, wanted, strict=True):
        last = weights[:, :, -1].mean(dim=0)
        first, early = (torch.tensor(share[f"{name}_by_head"]) for name in ("first", "first_4"))
        close_runs(first, last[:, 0].float(), model, 60)
        close_runs(early, last[:, :4].sum(dim=1).float(), model, 60)
        assert share["deviation"] == pytest.approx(float(first.std(correction=0)), rel=1e-4)


def test_a_layer_that_has_slid_on_gives_the_first_token_nothing():
    sliding, full = maps.first_shares(asked(make("gemma3")), tokens(1, 60))
    assert sum(sliding["first_by_head"]) == 0
    assert min(full["first_by_head"]) > 0


def test_shares_are_taken_as_far_out_as_the_window_and_the_text_go(nano, tokenizer):
    facts = maps.shares_section(asked(nano, tokenizer, sequences=2)).facts
    assert (facts["position"], facts["sequences"]) == (512, 2)
    short = maps.shares_section(asked(nano, tokenizer, TEXT[:400])).facts
    assert (short["position"], short["sequences"]) == (len(encode(tokenizer, TEXT[:400])), 1)
    some = maps.shares_section(
        asked(nano, tokenizer, tokens=100, layers=(2,), heads=(1, 3), sequences=1)
    )
    assert some.facts["position"] == 100
    assert [it["layer"] for it in some.facts["layers"]] == [2]
    assert len(some.facts["layers"][0]["first_by_head"]) == 2


# --- where sinks matter


def setup_of(model: PreTrainedModel) -> layers.StreamSetup:
    return layers.StreamSetup({0: 2, 1: 2}, recent=20, chunk=8)


def losses(model: PreTrainedModel, ids: Tensor, hidden: dict[int, tuple[int, ...]]) -> Tensor:
    return layers.losses_of(asked(model), ids, setup_of(model), hidden)


def test_with_all_sinks_and_with_none_it_is_streaming_llm_and_a_window(llama, ids):
    text = ids(1, 120)[0]
    setup = setup_of(llama)
    for hidden, policy in (({}, "sink(4) | recent(20)"), (setup.all_of((0, 1)), "recent(20)")):
        wanted = Stream(llama, policy, chunk=8).score(text[None])[0].double()[setup.start :]
        got = losses(llama, text, hidden)
        assert len(got) == 120 - 32
        # A window evicts the first tokens later than sinks are hidden. Its second layer is affected
        # by this until all tokens that saw them are evicted too, so only the last 30 are compared.
        within(got[-30:], wanted[-30:], nll_off(llama, 1))
    assert (losses(llama, text, {}) - losses(llama, text, setup.all_of((0, 1)))).abs().max() > 0.01


@pytest.mark.parametrize("hidden", [{0: (0, 1)}, {1: (1,)}, {0: (0,), 1: (0, 1)}])
def test_hidden_sinks_are_gone_in_those_heads_only(llama, ids, naive, twins, hidden):
    text = ids(1, 60)[0]
    sink, recent = twins.sink(4), twins.recent(20)

    def fold(held, new, at):
        if at.head in hidden.get(at.layer, ()):
            kept, _ = recent(held[1], [t for t in new if t.position >= 4], at)
            return [[], kept]
        return twins.pipe(sink, recent)(held, new, at)

    twin = naive(llama, fold, pools=2, chunk=8)
    logits = twin.feed(text)
    nll = -logits[:-1].double().log_softmax(-1).gather(1, text[1:, None])[:, 0]
    within(losses(llama, text, hidden), nll[32 - 1 :], nll_off(llama, 1))


@pytest.mark.slow
def test_a_section_of_layers_says_all_figures(nano, tokenizer):
    seen: list[tuple[int, int]] = []
    to = asked(nano, tokenizer, tokens=450, on_step=lambda n, of: seen.append((n, of)))
    section = layers.section(to)
    assert seen[-1] == (18, 18)
    facts = section.facts
    assert facts["ppl"] < facts["ppl_without"]
    assert [it["layer"] for it in facts["hidden_in"]] == [0, 1, 2, 3]
    assert [(it["layer"], it["head"]) for it in facts["hidden_in_head"]] == [
        (layer, head) for layer in range(4) for head in range(2)
    ]
    assert {picture.name for picture in section.pictures} == {
        "layers-without",
        "layers-alone",
        "layers-heads",
    }
    mean = math.log(facts["hidden_in"][0]["ppl"] / facts["ppl"])
    assert facts["hidden_in"][0]["rise"] == pytest.approx(mean)


def test_query_heads_choose_the_kv_heads_they_read(nano, tokenizer):
    section = layers.section(asked(nano, tokenizer, tokens=450, layers=(2,), heads=(2, 3)))
    assert [(it["layer"], it["head"]) for it in section.facts["hidden_in_head"]] == [(2, 1)]


def test_layers_that_slide_are_left_alone():
    model = make("gemma3")
    facts = weir.models.describe(model)
    setup = layers.set_up(asked(model), facts)
    assert setup.kv_heads == {1: 2}


def test_a_model_whose_layers_all_slide_gets_fewer_slots_than_they_see():
    model = make("mistral-sliding")
    setup = layers.set_up(asked(model), weir.models.describe(model))
    assert list(setup.kv_heads) == [0, 1]
    assert len(layers.losses_of(asked(model), tokens(1, 200)[0], setup, {})) == 200 - setup.start


# --- texts


def test_sentences_are_cut_and_short_ones_left_out(nano, tokenizer):
    short, long = (
        "Yes.",
        "The prince was silent, but she looked at him, awaiting a reply, and so on.",
    )
    ids = sentences(asked(nano, tokenizer, f"{short} {long} {short}\n\n{long}"), 2, 12)
    assert ids.shape == (2, 12)
    assert ids[0].tolist() == tokenizer(long)["input_ids"][:12]
    assert fixed_tokens(ids[:1], tokenizer) == {0: "<|start|>"}


def test_a_text_without_sentences_is_cut_into_pieces(nano, tokenizer):
    words = "word " * 100
    ids = sentences(asked(nano, tokenizer, words.strip()), 3, 20)
    whole = tokenizer(words.strip(), add_special_tokens=False)["input_ids"]
    assert ids.shape[1] == 20
    again = pieces(asked(nano, tokenizer, words), 3, 20)
    assert again[:, 0].tolist() == [tokenizer.bos_token_id] * 3
    assert again[:, 1:].flatten().tolist() == whole[:57]


def test_long_sequences_are_pieces_where_sentences_are_too_short(nano, tokenizer):
    long = "The prince was silent, but she looked at him, awaiting a reply, and went on. " * 20
    count = len(tokenizer(long, add_special_tokens=False)["input_ids"]) // 99
    text = f"{long.replace('.', ';')}. {long}"
    assert len(sentences(asked(nano, tokenizer, text), 50, 100)) > count > 2


def test_what_stands_around_a_text_is_found(tokenizer):
    assert around(tokenizer) == ([tokenizer.bos_token_id], [])


def test_the_tokens_of_a_learned_sink_stand_in_front(tokenizer):
    start, model = tokenizer.bos_token_id, make("llama", vocab_size=4096)
    for sink in ([7, 8], [start, 8]):
        set_sink(model.config, "learnable", sink)
        wanted = ModelSink("learnable", tuple(sink)).first([start])
        for cut in (sentences, pieces):
            ids = cut(asked(model, tokenizer), 3, 20)
            assert ids.shape == (3, 20)
            assert ids[:, : len(wanted)].tolist() == [wanted] * 3
            with pytest.raises(WeirError, match=rf"have no room .* at least {len(wanted) + 1}\."):
                cut(asked(model, tokenizer), 3, len(wanted))
            assert cut(asked(model, tokenizer), 3, len(wanted) + 1).shape[1] == len(wanted) + 1
        assert asked(model, tokenizer).ids(10)[: len(wanted)].tolist() == wanted


@pytest.mark.parametrize("name", ["maps", "shares", "layers"])
def test_a_text_that_is_too_short_is_refused(nano, tokenizer, name):
    (found,) = look(asked(nano, tokenizer, "A word."), [name])
    assert isinstance(found, tuple)
    assert found[0] == name
    assert "too short" in str(found[1]) or "too few" in str(found[1])


def test_sections_come_in_the_pages_order_and_unknown_ones_are_refused(nano, tokenizer):
    to = asked(nano, tokenizer, tokens=40, sequences=4)
    found = list(look(to, ["shares", "maps"]))
    assert [it.name for it in found if isinstance(it, Section)] == ["maps", "shares"]
    with pytest.raises(WeirError, match=r"unknown section 'map'. Use one of maps, shares"):
        list(look(to, ["map"]))


def test_slots_of_one_sequence_are_freed_before_the_next_is_read():
    """Even without garbage collection, though caches are in reference cycles."""
    model, most = make("llama"), 0

    def count(done: int, of: int) -> None:
        nonlocal most
        most = max(most, sum(type(found) is Slab for found in gc.get_objects()))

    gc.collect()
    gc.disable()
    try:
        before = sum(type(found) is Slab for found in gc.get_objects())
        maps.first_shares(asked(model, on_step=count), tokens(5, 600))
        maps.mean_logits(asked(model, on_step=count), tokens(70, 16))
    finally:
        gc.enable()
    assert most <= before


def test_maps_keep_what_is_drawn_and_batches_are_bounded(monkeypatch):
    model, ids = make("llama"), tokens(6, 16)
    whole = maps.mean_logits(asked(model), ids)
    monkeypatch.setattr(maps, "MOST_TOKENS", 32)  # three batches
    some = maps.mean_logits(asked(model), ids, [1], [2, 0])
    assert list(some) == [1]
    got, wanted = (mean.nan_to_num().float() for mean in (some[1], whole[1][[2, 0]]))
    close_runs(got, wanted, model, 16)
    assert maps.count_heads(asked(model), ids) == {n: len(mean) for n, mean in whole.items()}
