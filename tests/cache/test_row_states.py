"""Rows of a cache that are added, removed and moved, each of which stays as it would be alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference.naive import VOCABULARY, make_llama
from roundings import close_runs
from torch import Tensor

import weir
from weir import StreamingCache, WeirError
from weir.cache import RowState

pytestmark = pytest.mark.thinned(3, least=2)

CHUNK = 4
POLICIES = [
    "sink(2) | recent(6)",
    "recent(5) | heavy(4) | snap(6, 2, 3)",
    "sink(1) | recent(4) | reservoir(5, weighted=true)",
    "sink(1) | recent(4) | balance(8, block=4)",
    "sink(1) | recent(4) | subgen(6, 3, 2)",
    "[[recent(5) | heavy(4), recent(7)], [sink(1) | recent(4) | reservoir(5), recent(9)]]",
    "dense",
]
SEEDS = (0, 0, 7)
MODEL = make_llama()


@dataclass
class Alone:
    """A row in a separate cache, fed in one call. Every row of a batch must equal such a row."""

    policy: str
    seed: int
    tokens: list[int] = field(default_factory=list)

    def cache(self) -> StreamingCache:
        made = StreamingCache(MODEL, self.policy, chunk=CHUNK, seed=self.seed)
        with torch.no_grad():
            MODEL(torch.tensor([self.tokens]), past_key_values=made)
        return made


def check_row(cache: StreamingCache, row: int, alone: StreamingCache) -> None:
    """Check that a row holds the places that it holds alone, with equal numbers, to rounding."""
    for layer in range(len(cache)):
        mine, theirs = cache.slots(layer), alone.slots(layer)
        for head in range(mine.position.shape[1]):
            held, wanted = mine.position[row, head] >= 0, theirs.position[0, head] >= 0
            assert torch.equal(mine.position[row, head, held], theirs.position[0, head, wanted])
            close_runs(mine.a[row, head, held], theirs.a[0, head, wanted], MODEL)
            close_runs(mine.b[row, head, held], theirs.b[0, head, wanted], MODEL)
            close_runs(mine.keys[row, head, held], theirs.keys[0, head, wanted], MODEL)
            close_runs(mine.values[row, head, held], theirs.values[0, head, wanted], MODEL)
            assert mine.pool[row, head, held].tolist() == theirs.pool[0, head, wanted].tolist()


@contextmanager
def broken_model() -> Iterator[None]:
    """Make the model fail after its last layer, when every layer has received the tokens."""

    def fail(*given: object) -> None:
        raise ZeroDivisionError

    hook = MODEL.model.norm.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


class RowsThatComeAndGo(RuleBasedStateMachine):
    """Any sequence of feeding, taking, putting, emptying and reordering rows."""

    @initialize(policy=st.sampled_from(POLICIES), batch=st.integers(1, 3))
    def open(self, policy: str, batch: int) -> None:
        self.policy = policy
        self.cache = StreamingCache(MODEL, policy, chunk=CHUNK, batch=batch)
        self.rows = [Alone(policy, 0) for _ in range(batch)]
        self.kept: list[tuple[RowState, Alone]] = []

    @rule(data=st.data(), length=st.integers(1, 11))
    def feed(self, data: st.DataObject, length: int) -> None:
        batch = len(self.rows)
        counts = [data.draw(st.integers(0, length)) for _ in range(batch)]
        ids = torch.zeros(batch, length, dtype=torch.int64)
        mask = torch.zeros(batch, length, dtype=torch.int64)
        for row, count in enumerate(counts):
            tokens = data.draw(
                st.lists(st.integers(0, VOCABULARY - 1), min_size=count, max_size=count)
            )
            self.rows[row].tokens += tokens
            if count:
                ids[row, length - count :] = torch.tensor(tokens)
                mask[row, length - count :] = 1
        with torch.no_grad():
            MODEL(ids, attention_mask=mask, past_key_values=self.cache)

    @precondition(lambda self: self.policy != "dense")
    @rule(data=st.data(), length=st.integers(1, 11), refused=st.booleans())
    def feed_some(self, data: st.DataObject, length: int, refused: bool) -> None:
        start = data.draw(st.integers(0, len(self.rows) - 1))
        stop = data.draw(st.integers(start + 1, len(self.rows)))
        ids = data.draw(
            st.lists(
                st.lists(st.integers(0, VOCABULARY - 1), min_size=length, max_size=length),
                min_size=stop - start,
                max_size=stop - start,
            )
        )
        with torch.no_grad(), self.cache.only(start, stop):
            if refused:
                with broken_model(), pytest.raises(ZeroDivisionError):
                    MODEL(torch.tensor(ids), past_key_values=self.cache)
                return
            MODEL(torch.tensor(ids), past_key_values=self.cache)
        for row, tokens in zip(range(start, stop), ids, strict=True):
            self.rows[row].tokens += tokens

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.rows) - 1))
        alone = self.rows[row]
        self.kept.append((self.cache.take_row(row), replace(alone, tokens=list(alone.tokens))))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.rows) - 1))
        state, alone = data.draw(st.sampled_from(self.kept))
        self.cache.put_row(row, state)
        self.rows[row] = replace(alone, tokens=list(alone.tokens))

    @rule(data=st.data(), seed=st.sampled_from(SEEDS))
    def reset(self, data: st.DataObject, seed: int) -> None:
        row = data.draw(st.integers(0, len(self.rows) - 1))
        self.cache.reset_row(row, seed=seed)
        self.rows[row] = Alone(self.policy, seed)

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        batch = len(self.rows)
        order = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3))
        self.cache.batch_select_indices(torch.tensor(order))
        self.rows = [replace(self.rows[n], tokens=list(self.rows[n].tokens)) for n in order]

    @rule()
    def copy(self) -> None:
        self.cache = copy.deepcopy(self.cache)

    @invariant()
    def each_row_is_as_it_would_be_alone(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.seen == [len(alone.tokens) for alone in self.rows]
        row = sum(self.cache.seen) % len(self.rows)
        if self.rows[row].tokens:
            check_row(self.cache, row, self.rows[row].cache())


TestRowsThatComeAndGo = RowsThatComeAndGo.TestCase
TestRowsThatComeAndGo.settings = settings(
    settings.get_profile("weir"), max_examples=20, stateful_step_count=8
)


def fed(cache: StreamingCache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return MODEL(ids, attention_mask=mask, past_key_values=cache).logits


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thinned(9)
def test_rows_at_different_folds_answer_as_they_would_alone(ids, policy):
    tokens = ids(4, 40)
    cache = StreamingCache(MODEL, policy, chunk=CHUNK, batch=4)
    alone = [StreamingCache(MODEL, policy, chunk=CHUNK) for _ in range(4)]
    for column in range(40):
        there = torch.tensor([column >= row and (column + row) % 5 > 0 for row in range(4)])
        got = fed(cache, tokens[:, column : column + 1], there[:, None].long())
        for row in range(4):
            if there[row]:
                wanted = fed(alone[row], tokens[row : row + 1, column : column + 1])
                close_runs(got[row], wanted[0], MODEL)
    assert len(set(cache.waiting)) > 1
    for row in range(4):
        check_row(cache, row, alone[row])


def test_a_row_joins_while_the_others_go_on(ids):
    tokens = ids(2, 60)
    cache = StreamingCache(MODEL, "sink(2) | recent(6) | heavy(4)", chunk=CHUNK, batch=2)
    whole = StreamingCache(MODEL, "sink(2) | recent(6) | heavy(4)", chunk=CHUNK)
    fed(cache, tokens[:, :30], torch.tensor([[1] * 30, [0] * 30]))
    fed(whole, tokens[1:, :29])
    cache.put_row(1, whole.take_row(0))
    assert cache.seen == [30, 29]
    close_runs(fed(cache, tokens[:, 30:])[1], fed(whole, tokens[1:, 30:])[0], MODEL)
    check_row(cache, 1, whole)


def test_folding_touches_no_row_that_is_not_due(ids):
    cache = StreamingCache(MODEL, "sink(2) | recent(6) | heavy(4)", chunk=CHUNK, batch=3)
    tokens = ids(3, 30)
    fed(cache, tokens[:, :20], torch.tensor([[1] * 20, [0] * 1 + [1] * 19, [0] * 2 + [1] * 18]))
    assert cache.waiting == [0, 3, 2]
    events = []
    cache.on_fold = events.append
    before = [cache.take_row(row).tensors for row in (0, 2)]
    fed(cache, tokens[:, 20:21], torch.tensor([[0], [1], [0]]))
    assert [event.rows for event in events] == [(1,)]
    assert events[0].seconds > 0
    for row, was in zip((0, 2), before, strict=True):
        now = cache.take_row(row).tensors
        waiting = cache.waiting[row]
        for name, t in was.items():
            # The slot that waits for the row's next token, and its query, may hold anything.
            spare = name.endswith(("keys", "values", "queries"))
            same = (t == now[name]) | (t != t)
            assert bool(same.all()) or (spare and int((~same.flatten(3).all(-1)).sum()) <= 2), (
                name,
                waiting,
            )


def test_narrowed_to_a_row_the_others_are_left_alone_and_the_model_computes_for_it_alone(ids):
    cache = StreamingCache(MODEL, "sink(2) | recent(6) | heavy(4)", chunk=CHUNK, batch=3)
    tokens = ids(3, 30)
    fed(cache, tokens[:, :21])
    before = [cache.take_row(row) for row in (0, 2)]
    alone = StreamingCache(MODEL, "sink(2) | recent(6) | heavy(4)", chunk=CHUNK)
    fed(alone, tokens[1:2, :21])
    with cache.only(1, 2):
        assert (cache.batch, cache.seen) == (1, [21])
        got = fed(cache, tokens[1:2, 21:])
        with pytest.raises(WeirError, match="already restricted"), cache.only(0, 1):
            pass
    assert got.shape[0] == 1
    close_runs(got, fed(alone, tokens[1:2, 21:]), MODEL)
    assert (cache.batch, cache.seen) == (3, [21, 30, 21])
    check_row(cache, 1, alone)
    for was, row in zip(before, (0, 2), strict=True):
        now = cache.take_row(row)
        assert {**now.facts, "columns": 0} == {**was.facts, "columns": 0}
        assert all(torch.equal(t, now.tensors[name]) for name, t in was.tensors.items())


@pytest.mark.parametrize("pool", ["subgen(8, 4, 2)", "balance(8, block=4)", "hive(8)"])
def test_a_row_that_begins_anew_and_is_fed_apart_from_others_reads_as_alone(ids, pool: str):
    """What a pool remembers of a row stays with the row, whatever rows were fed in between."""
    policy, tokens = f"sink(2) | recent(6) | {pool}", ids(2, 90)
    cache = StreamingCache(MODEL, policy, chunk=CHUNK, batch=2)
    fed(cache, tokens[:, :30])
    cache.reset_row(1)
    alone = StreamingCache(MODEL, policy, chunk=CHUNK)
    for begin in range(30, 90, 20):
        piece = slice(begin, begin + 20)
        for row in (1, 0):
            with cache.only(row, row + 1):
                found = fed(cache, tokens[row : row + 1, piece])
            if row == 1:
                close_runs(found, fed(alone, tokens[1:, piece]), MODEL)
    check_row(cache, 1, alone)


def test_what_fails_in_a_narrowed_cache_never_happened(ids):
    cache = StreamingCache(MODEL, "sink(2) | recent(6) | heavy(4)", chunk=CHUNK, batch=2)
    tokens = ids(2, 40)
    fed(cache, tokens[:, :20])
    alone = StreamingCache(MODEL, "sink(2) | recent(6) | heavy(4)", chunk=CHUNK)
    fed(alone, tokens[1:, :20])
    with cache.only(1, 2), broken_model(), pytest.raises(ZeroDivisionError):
        fed(cache, tokens[1:, 20:])  # several chunks; all but the last are folded
    assert cache.seen == [20, 20]
    check_row(cache, 1, alone)
    more = tokens[1:, :9]
    with cache.only(1, 2):
        close_runs(fed(cache, more), fed(alone, more), MODEL)


def test_which_rows_there_are_is_not_changed_in_a_narrowed_cache(ids):
    cache = other(batch=3)
    fed(cache, ids(3, 20))
    changes = [
        cache.reset,
        lambda: cache.put_rows([]),
        lambda: cache.batch_select_indices(torch.tensor([0])),
    ]
    for change in changes:
        with cache.only(1, 2), pytest.raises(WeirError, match="Leave the only"):
            change()
    assert cache.seen == [20] * 3


def test_narrowed_to_all_its_rows_a_cache_is_as_it_always_is(ids):
    cache, alike = other(batch=2), other(batch=2)
    with cache.only(0, 2):
        answer = fed(cache, ids(2, 20))
    assert torch.equal(answer, fed(alike, ids(2, 20)))
    assert cache.seen == [20, 20]


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (2, 3), (1, 1), (1, 0), (-1, 1), (0, None)])
def test_a_cache_is_not_narrowed_to_rows_that_are_not_there(start, stop):
    with pytest.raises(WeirError, match="does not exist"), other(batch=2).only(start, stop):
        pass


def test_without_a_limit_a_cache_is_not_narrowed():
    with pytest.raises(WeirError, match="has no limit"), other(policy="dense", batch=2).only(0, 1):
        pass


def test_a_state_is_a_copy(ids):
    cache = StreamingCache(MODEL, "sink(2) | recent(6)", chunk=CHUNK)
    fed(cache, ids(1, 20))
    state = cache.take_row(0)
    kept = {name: t.clone() for name, t in state.tensors.items()}
    fed(cache, ids(1, 20, seed=1))
    assert all(torch.equal(t, kept[name]) for name, t in state.tensors.items())
    assert state.nbytes == cache.nbytes


def other(**changes):
    given = {"policy": "sink(2) | recent(6)", "chunk": CHUNK, **changes}
    model = given.pop("model", MODEL)
    return StreamingCache(model, given.pop("policy"), **given)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"policy": "sink(2) | recent(7)"}, "with policy"),
        ({"chunk": 5}, "with chunk 4, but this cache has 5"),
        ({"positions": "original"}, "with positions"),
        ({"origin": 3}, "with origin 0, but this cache has 3"),
        ({"model": make_llama(layers=1)}, "another model: layers 2, here 1"),
        ({"model": make_llama(num_key_value_heads=4)}, "another model: heads"),
        ({"model": make_llama().to(torch.bfloat16)}, "another model: heads"),
        ({"model": make_llama(seed=1)}, "another model, with other weights"),
    ],
)
def test_a_row_of_another_kind_is_refused(ids, changes, sentence):
    cache = other()
    fed(cache, ids(1, 20))
    for target in (other(**changes), other(**changes, batch=2)):
        with pytest.raises(WeirError, match=sentence):
            target.put_row(0, cache.take_row(0))
        assert target.seen in ([], [0, 0])


def test_the_same_policy_may_be_written_in_two_ways(ids):
    cache = other()
    fed(cache, ids(1, 20))
    target = other(policy="streaming_llm(budget=8, sinks=2)")
    target.put_row(0, cache.take_row(0))
    assert target.seen == [20]


def test_a_state_that_lies_about_its_tensors_is_refused_and_nothing_is_changed(ids):
    cache = other()
    fed(cache, ids(1, 20))
    state = cache.take_row(0)
    keys = state.tensors["1.keys"]
    lies = {
        "layer 1: keys is missing": None,
        r"layer 1: keys must have the shape .* got \[1, 2, 3, ": keys[:, :, :3],
        "layer 1: keys must be float32, got float64": keys.double(),
    }
    before = {name: t.clone() for name, t in state.tensors.items()}
    for sentence, lie in lies.items():
        tensors = dict(state.tensors)
        tensors.pop("1.keys")
        if lie is not None:
            tensors["1.keys"] = lie
        with pytest.raises(WeirError, match=sentence):
            cache.put_row(0, replace(state, tensors=tensors))
        assert all(torch.equal(t, before[n]) for n, t in cache.take_row(0).tensors.items())
    with pytest.raises(WeirError, match="must come from take_row"):
        cache.put_row(0, {"tensors": {}})


LIES = {
    "position does not rise": ("0.position", (0, 1, 5), 3),
    "position has places": ("0.position", (0, 0, 1), 99),
    "keys has numbers that are not finite": ("1.keys", (0, 0, 2, 0), torch.nan),
    "b gives weight to slots|b has numbers": ("0.b", (0, 0, 0), torch.inf),
    "a is not 0 in the slots for new tokens": ("1.a", (0, 0, 9), 1.0),
    "this layer has no tensor 'moods'": ("0.moods", None, 0),
    "'7.keys' does not belong to a layer": ("7.keys", None, 0),
    "last must be a token id from 0 to 60, got 61": ("last", None, 61),
    "ended must be true or false, got 3": ("ended", None, 3),
    "waiting must be at most 3, got 4": ("waiting", None, 4),
    "unexpected field 'mood'": ("mood", None, 1),
}


@pytest.mark.parametrize("sentence", LIES)
def test_a_state_that_no_row_can_have_is_refused_as_in_a_file(ids, sentence):
    cache, (name, place, lie) = other(), LIES[sentence]
    fed(cache, ids(1, 20))
    state, before = cache.take_row(0), cache.take_row(0)
    if place is not None:
        state.tensors[name][place] = lie
    elif "." in name:
        state.tensors[name] = state.tensors["0.keys"]
    else:
        state.facts[name] = lie
    for call in (lambda: cache.put_row(0, state), lambda: cache.put_rows([before, state])):
        with pytest.raises(
            WeirError, match=f"no row of this cache can have this state: .*({sentence})"
        ):
            call()
        now = cache.take_row(0)
        assert now.facts == before.facts
        assert all(torch.equal(t, before.tensors[n]) for n, t in now.tensors.items())


def test_who_knows_a_state_may_put_it_unchecked_but_for_what_it_is_of(ids):
    cache = other(batch=2)
    fed(cache, ids(2, 20))
    state = cache.take_row(0)
    state.facts["mood"] = 1
    with pytest.raises(WeirError, match="no row of this cache can have"):
        cache.put_row(1, state)
    cache.put_row(1, state, check=False)
    now, wanted = cache.take_row(1), cache.take_row(0)
    assert now.facts == wanted.facts
    assert all(torch.equal(t, wanted.tensors[n]) for n, t in now.tensors.items())
    with pytest.raises(WeirError, match="with other weights"):
        other(model=make_llama(seed=1), batch=2).put_row(0, state, check=False)


@pytest.mark.parametrize("rows", [5, None, "row", [3], {"kind": 1}])
def test_rows_that_are_no_states_are_refused_and_nothing_is_changed(ids, rows):
    cache = other()
    fed(cache, ids(1, 20))
    with pytest.raises(WeirError, match="from take_row, got"):
        cache.put_rows(rows)
    assert cache.seen == [20]
    cache.put_rows(state for state in cache.take_rows())  # any iterable is accepted
    assert cache.seen == [20]


def test_a_row_that_was_read_before_the_weights_were_trained_is_not_put_back(ids):
    model = make_llama(seed=4)
    cache = other(model=model)
    with torch.no_grad():
        model(ids(1, 20), past_key_values=cache)
        state = cache.take_row(0)
        cache.put_row(0, state)
        model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    with pytest.raises(WeirError, match="another model, with other weights"):
        cache.put_row(0, state)


@pytest.mark.parametrize("row", [-1, 2, True, 1.0, "0", None])
def test_a_row_that_is_not_there_is_refused(ids, row):
    cache = other(batch=2)
    state = cache.take_row(0)
    for call in (cache.take_row, cache.reset_row, lambda n: cache.put_row(n, state)):
        with pytest.raises(WeirError, match=r"does not exist\. The rows are 0 to 1"):
            call(row)


def test_a_cache_without_rows_says_how_to_have_some(ids):
    for call in (lambda c: c.take_row(0), lambda c: c.reset_row(0)):
        with pytest.raises(WeirError, match="no rows yet: feed it, or make it with batch=n"):
            call(other())


@pytest.mark.parametrize("batch", [0, -1, True, 1.5])
def test_a_batch_of_no_rows_is_refused(batch):
    with pytest.raises(WeirError, match="batch must be a whole number of at least 1"):
        other(batch=batch)


def test_one_row_of_a_batch_is_saved_as_a_stream_of_its_own(ids, tmp_path):
    tokens = ids(3, 50)
    policy = "sink(1) | recent(4) | reservoir(5, weighted=true)"
    stream = weir.Stream(MODEL, policy, chunk=CHUNK, seed=5)
    stream.feed(tokens[:, :30])
    stream.save(tmp_path / "row", row=2)
    stream.save(tmp_path / "all")
    one, every = (weir.Stream.restore(MODEL, tmp_path / name) for name in ("row", "all"))
    assert (one.cache.batch, one.seen, one.last) == (1, 30, [int(tokens[2, 29])])
    wanted = stream.feed(tokens[:, 30:], all_logits=True)
    close_runs(one.feed(tokens[2:, 30:], all_logits=True)[0], wanted[2], MODEL)
    assert torch.equal(every.feed(tokens[:, 30:], all_logits=True), wanted)
    with pytest.raises(WeirError, match="row 3 does not exist"):
        stream.save(tmp_path / "row", row=3)


@pytest.mark.parametrize("policy", ["sink(2) | recent(6) | heavy(4)", "recompute(20)"])
def test_a_copied_stream_is_a_second_one(ids, policy):
    stream = weir.Stream(MODEL, policy)
    stream.feed(ids(1, 30))
    list(stream.generate(3, temperature=1.0))
    second = copy.deepcopy(stream)
    assert second.model is MODEL
    assert list(second.generate(9, temperature=1.0)) == list(stream.generate(9, temperature=1.0))
    second.feed(ids(1, 5))
    assert (stream.seen, second.seen) == (42, 47)


def test_who_listens_to_folds_sees_the_cache_as_it_is_to_stay(ids):
    cache = StreamingCache(MODEL, "sink(2) | recent(6)", chunk=CHUNK)
    whole = StreamingCache(MODEL, "sink(2) | recent(6)", chunk=CHUNK)
    seen = []

    def listen(folded) -> None:
        seen.append((cache.seen, cache.take_row(0).facts["seen"]))
        raise ValueError("heard")

    cache.on_fold = listen
    with pytest.raises(ValueError, match="heard"):
        fed(cache, ids(1, 20))
    cache.on_fold = None
    assert seen == [([20], 20)]
    wanted = fed(whole, torch.cat([ids(1, 20), ids(1, 9, seed=1)], dim=1))[:, 20:]
    close_runs(fed(cache, ids(1, 9, seed=1)), wanted, MODEL)


@pytest.mark.parametrize("listener", [5, "print", [print]])
def test_what_cannot_be_called_does_not_listen(ids, listener):
    cache, heard = other(), []
    cache.on_fold = heard.append
    with pytest.raises(WeirError, match=r"on_fold must be a function or None, got"):
        cache.on_fold = listener
    fed(cache, ids(1, 20))
    assert heard


def test_a_cache_of_so_many_rows_does_not_say_that_a_reset_would_change_that(ids):
    fixed, free = other(batch=3), other()
    fed(free, ids(3, 20))
    for cache, instead in (
        (fixed, "or make a cache with batch=2"),
        (free, "or call cache.reset() first"),
    ):
        with pytest.raises(WeirError, match=r"holds 3 rows, but a batch of 2 was fed\.") as error:
            fed(cache, ids(2, 5))
        assert instead in str(error.value)
    fixed.reset()
    with pytest.raises(WeirError, match="holds 3 rows"):
        fed(fixed, ids(2, 5))


@pytest.mark.parametrize("policy", ["sink(2) | recent(6) | heavy(4)", "recompute(20)"])
def test_a_stream_is_not_copied_shallowly(ids, policy):
    stream = weir.Stream(MODEL, policy)
    with pytest.raises(WeirError, match=r"both copies would use one cache\. Use copy\.deepcopy"):
        copy.copy(stream)


def test_a_seed_may_be_as_large_as_one_likes(ids, tmp_path):
    stream = weir.Stream(MODEL, "sink(1) | recent(4) | reservoir(5)", seed=2**70)
    stream.feed(ids(1, 30))
    stream.save(tmp_path / "s")
    again = weir.Stream.restore(MODEL, tmp_path / "s")
    assert torch.equal(again.feed(ids(1, 9)), stream.feed(ids(1, 9)))


@pytest.mark.parametrize("rows", [[], [2], [-1]])
def test_rows_that_cannot_be_kept_are_refused(ids, rows):
    cache = other()
    fed(cache, ids(2, 20))
    with pytest.raises(WeirError, match="cannot be kept: the rows are 0 to 1"):
        cache.batch_select_indices(torch.tensor(rows, dtype=torch.int64))
    with pytest.raises(WeirError, match="at least 1"):
        cache.batch_repeat_interleave(0)
    assert cache.seen == [20, 20]


def test_a_detached_cache_is_refused_though_another_lives(ids):
    cache, another = other(), other()
    cache.detach()
    with pytest.raises(WeirError, match="was detached from its model"):
        fed(cache, ids(1, 9))
    assert fed(another, ids(1, 9)).isfinite().all()
