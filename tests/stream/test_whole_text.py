"""`kvzip` reads a text whole, repeats it, and holds its best tokens, as in a naive loop."""

from __future__ import annotations

import copy

import pytest
import torch
from model_runs import restored_goes_on
from reference.kvzip import fold_of, highest, scores_of
from reference.models import make
from reference.seeing import THREE_AXES, seeing
from roundings import close_runs, run_off

import weir
from weir.errors import NotFiniteError, WeirError
from weir.policies import KVzip, parse_policy
from weir.stream import whole_text

TEXT, KEPT, NEWEST, CHUNK = 30, 10, 6, 4
POLICY = f"kvzip({KEPT + NEWEST}, newest={NEWEST}, asks=false)"


class Words:
    """A tokenizer that knows only the two requests."""

    FIRST, LATER = [7, 8, 9], [11, 12]

    def __call__(self, text, add_special_tokens=True):
        assert not add_special_tokens
        ids = {whole_text.REQUEST: self.FIRST, whole_text.NEXT_REQUEST: self.LATER}
        return {"input_ids": ids[text]}


def request_of(text, asks: bool):
    """Return a function for what the model is asked before the part that begins at a token."""

    def request(start: int):
        if not asks:
            return text[max(0, start - whole_text.LEAD) : start]
        words = Words.LATER if start else Words.FIRST
        return [*words, *text[max(0, start - whole_text.LEAD) : start]]

    return request


@pytest.mark.parametrize("positions", ["original", "rolling"])
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("part", [TEXT, 12])
def test_a_text_is_held_and_read_on_as_in_a_naive_loop(llama, ids, naive, positions, asks, part):
    text, later = ids(1, TEXT)[0].tolist(), ids(1, 40, seed=3)[0].tolist()
    policy = KVzip(KEPT + NEWEST, NEWEST, part, asks)
    stream = weir.Stream(
        llama, policy, chunk=CHUNK, positions=positions, tokenizer=Words() if asks else None
    )
    scores = scores_of(llama, text, part, request_of(text, asks))
    loop = naive(
        llama, fold_of(scores, KEPT, NEWEST), pools=2, chunk=CHUNK, rolling=positions == "rolling"
    )
    close_runs(stream.feed(text, all_logits=True)[0], loop.feed(text, at_once=True), llama)
    for layer, of_layer in enumerate(scores):
        for head, of_head in enumerate(of_layer):
            held = stream.slots(layer).position[0, head]
            assert held[held >= 0].tolist() == highest(of_head, KEPT)
    close_runs(stream.feed(later, all_logits=True)[0], loop.feed(later), llama)


@pytest.mark.parametrize("kind", ["bloom", "gemma3", "gpt-oss", "mpt"])
def test_scores_are_those_of_plain_attention_in_other_families(kind):
    model = make(kind)
    text = torch.randint(3, 90, (TEXT,), generator=torch.Generator().manual_seed(1)).tolist()
    stream = weir.Stream(model, POLICY, chunk=CHUNK)
    stream.feed(text)
    for layer, of_layer in enumerate(scores_of(model, text, TEXT, request_of(text, False))):
        held = stream.slots(layer)
        if (
            model.config.get_text_config()
            .to_dict()
            .get("layer_types", ["full_attention"] * 99)[layer]
            != "full_attention"
        ):
            newest = held.position[0, 0][held.position[0, 0] >= 0].tolist()
            assert newest == list(range(TEXT - len(newest), TEXT))
            continue
        for head, of_head in enumerate(of_layer):
            assert held.position[0, head, :KEPT].tolist() == highest(of_head, KEPT)


def test_rows_are_judged_alone_and_pieces_are_one_text(llama, ids):
    text, later = ids(2, TEXT), ids(2, 13, seed=5)
    both = weir.Stream(llama, POLICY, chunk=CHUNK)
    got = [both.feed(text), both.feed(later, all_logits=True)]
    for row in range(2):
        alone = weir.Stream(llama, POLICY, chunk=CHUNK)
        close_runs(alone.feed(iter(text[row].tolist()))[0], got[0][row], llama)
        close_runs(alone.feed(later[row], all_logits=True)[0], got[1][row], llama)
        assert torch.equal(both.slots(1).position[row], alone.slots(1).position[0])


def test_scoring_a_text_chooses_too(llama, ids):
    text = ids(1, TEXT)
    scored, fed = weir.Stream(llama, POLICY), weir.Stream(llama, POLICY)
    scored.score(text)
    fed.feed(text)
    assert torch.equal(scored.slots(0).position, fed.slots(0).position)


@pytest.mark.parametrize("length", [1, KEPT - 1, KEPT, KEPT + 3])
def test_a_text_that_fits_is_all_held_and_read_on_as_by_plain_attention(llama, ids, length):
    text = ids(1, KEPT + NEWEST)
    kept, plain = weir.Stream(llama, POLICY, chunk=CHUNK), weir.Stream(llama, "dense")
    for part in text.split([length, KEPT + NEWEST - length], dim=1):
        got, wanted = (stream.feed(part, all_logits=True) for stream in (kept, plain))
        if length <= KEPT:
            close_runs(got, wanted, llama)
    held = kept.slots(0).position[0, 0]
    assert (held >= 0).sum() == min(length, KEPT) + KEPT + NEWEST - length


def test_words_on_three_axes_are_read_on_as_by_plain_attention():
    model = seeing(THREE_AXES[0])
    text = torch.randint(3, 60, (1, KEPT + NEWEST), generator=torch.Generator().manual_seed(2))
    kept, plain = weir.Stream(model, POLICY, chunk=CHUNK), weir.Stream(model, "dense")
    for part in text.split([KEPT - 2, NEWEST + 2], dim=1):
        got, wanted = (stream.feed(part, all_logits=True) for stream in (kept, plain))
        close_runs(got, wanted, model)
    kept.feed(text)  # the window moves, and the positions of the kept tokens move with it


def test_its_memory_is_fixed_once_the_text_has_been_read(llama, ids):
    stream = weir.Stream(llama, POLICY, chunk=CHUNK)
    assert stream.cache is None
    stream.feed(ids(1, TEXT))
    plain = weir.Stream(llama, f"sink({KEPT}) | recent({NEWEST})", chunk=CHUNK)
    plain.feed(ids(1, 1))
    assert stream.nbytes == plain.nbytes
    stream.feed(ids(1, 50))
    assert stream.nbytes == plain.nbytes and stream.seen == TEXT + 50


def test_a_restored_stream_and_a_copy_go_on(llama, ids, tmp_path):
    restored_goes_on(llama, POLICY, ids(1, 60), 33, tmp_path, 5)
    unread = copy.deepcopy(weir.Stream(llama, POLICY, chunk=CHUNK))
    unread.feed(ids(1, TEXT))
    read, more = copy.deepcopy(unread), ids(1, 20, seed=2)
    assert torch.equal(read.feed(more), unread.feed(more))


def test_a_restored_stream_needs_no_tokenizer(llama, ids, tmp_path):
    policy = "kvzip(16, newest=6)"
    stream = weir.Stream(llama, policy, tokenizer=Words())
    stream.feed(ids(1, TEXT))
    stream.save(tmp_path / "s.safetensors")
    again = weir.Stream.restore(llama, tmp_path / "s.safetensors", policy)
    assert torch.equal(again.feed(ids(1, 9)), stream.feed(ids(1, 9)))


def test_a_text_that_breaks_off_goes_on_where_it_stands(fresh_llama, ids):
    model, text = fresh_llama(), ids(1, TEXT)[0]
    run_off(model)  # measured while the weights are still correct
    text[text == 60] = 59
    with torch.no_grad():
        model.get_input_embeddings().weight[60] = torch.nan
    whole, broken = (weir.Stream(model, POLICY, chunk=CHUNK) for _ in range(2))
    wanted = whole.feed(text)
    with pytest.raises(NotFiniteError):
        broken.feed([*text[:20].tolist(), 60, 1])
    assert broken.cache is None and broken.seen == 20
    close_runs(broken.feed(text[20:]), wanted, model)
    assert torch.equal(broken.slots(0).position, whole.slots(0).position)


@pytest.mark.parametrize(
    ("make_it", "said"),
    [
        (lambda m: weir.StreamingCache(m, POLICY), "only weir.Stream can run it"),
        (lambda m: weir.Stream(m, f"pinned({POLICY})"), "cannot be part of another policy"),
        (lambda m: weir.Stream(m, POLICY, slots="int8"), "cannot be part of another policy"),
        (lambda m: weir.Stream(m, "kvzip(16)").feed([1, 2]), "asks=false"),
        (lambda m: weir.Stream(m, POLICY).slots(), "has not read a text yet"),
        (lambda m: weir.Stream(m, "kvzip(4, newest=4)"), "no slots for kept tokens"),
        (lambda m: weir.Stream(m, "kvzip(8, newest=0)"), "no slots for newest tokens"),
        (lambda m: weir.Stream(m, "kvzip(8, part=0)"), "part"),
        (
            lambda m: weir.Stream(m, POLICY).feed(
                embeddings=m.get_input_embeddings()(torch.tensor([1, 2])).detach()
            ),
            "repeat token ids",
        ),
        (
            lambda _: weir.Stream(make("mistral-sliding"), POLICY),
            "every layer of this model sees",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(llama, make_it, said):
    with pytest.raises(WeirError, match=said):
        make_it(llama)


def test_it_is_written_as_it_is_read():
    for text in ("kvzip(budget=64, newest=16)", "kvzip(budget=9, newest=2, part=7, asks=false)"):
        assert parse_policy(text).stands_for == text
        assert parse_policy(text).after.stands_for == text
