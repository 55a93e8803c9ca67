"""The engine answers each session as if it were alone, whatever the other sessions do."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from bare_record import bare_record
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference.naive import VOCABULARY, make_llama

import weir
from weir.errors import WeirError
from weir.serve import Engine, SampledToken, Sampler, SamplingParams, SessionStore, TokenSequence
from weir.serve.engine.engine import Cancelled
from weir.serve.engine.scheduler import Busy
from weir.stream import Sampling

MODEL = make_llama()
POLICY = "sink(2) | recent(6) | heavy(4)"
CHUNK = 4


@dataclass
class Heard:
    """A listener that records what it is told."""

    choices: list[SampledToken] = field(default_factory=list)
    reason: str | None = None
    error: Exception | None = None
    stop_after: int | None = None

    def on_token(self, token: SampledToken) -> str | None:
        assert self.reason is None
        assert self.error is None
        self.choices.append(token)
        return "stop" if len(self.choices) == self.stop_after else None

    def on_finish(self, reason: str) -> None:
        assert self.reason is None
        assert self.error is None
        self.reason = reason

    def on_failure(self, error: Exception) -> None:
        assert self.reason is None
        assert self.error is None
        self.error = error

    @property
    def tokens(self) -> list[int]:
        return [choice.id for choice in self.choices]

    @property
    def over(self) -> bool:
        return self.reason is not None or self.error is not None


def engine(rows: int = 3, **given) -> Engine:
    given = {"policy": POLICY, "chunk": CHUNK, "prefill_chunk": 5, **given}
    return Engine(MODEL, given.pop("policy"), rows, given.pop("store", SessionStore()), **given)


def turn(node: str, ids, start: str | None = None, limit: int = 6, **given) -> TokenSequence:
    chooser = Sampler(given.pop("choosing", SamplingParams()))
    given = {"record": bare_record, **given}
    listener = given.pop("listener", Heard())
    stops = frozenset(given.pop("stops", ()))
    return TokenSequence(node, start, list(ids), limit, stops, chooser, listener, **given)


def work(engine: Engine, *turns: TokenSequence) -> None:
    """Submit turns together, and run the engine until all are answered."""
    for each in turns:
        engine.submit(each)
    for _ in range(2000):
        if all(each.listener.over for each in turns):
            return
        engine.step()
    raise AssertionError("the engine does not finish the turns")


def alone(turns: list[tuple[list[int], int]], policy: str = POLICY) -> list[list[int]]:
    """Answer each prompt greedily with the given number of tokens, in a single stream."""
    stream = weir.Stream(MODEL, policy, chunk=CHUNK)
    answers = []
    for ids, limit in turns:
        stream.feed(ids)
        answers.append(list(stream.generate(limit, stop=[])))
    return answers


def words(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


def test_sessions_are_answered_as_they_would_be_alone():
    served = engine(rows=3)
    prompts = [words(n, 3 + 7 * n) for n in range(7)]
    turns = [turn(f"a{n}", ids, limit=5 + n) for n, ids in enumerate(prompts)]
    work(served, *turns)
    again = [turn(f"b{n}", ids[::-1], start=f"a{n}", limit=4) for n, ids in enumerate(prompts)]
    work(served, *again)
    for n, ids in enumerate(prompts):
        first, second = alone([(ids, 5 + n), (ids[::-1], 4)])
        assert turns[n].listener.tokens == first
        assert again[n].listener.tokens == second
        assert turns[n].listener.reason == again[n].listener.reason == "length"
    assert served.load().busy == served.load().waiting == 0


def feeds(served: Engine) -> list[dict[int, int]]:
    """Record, for each call of the engine from now on, how many tokens each row is fed."""
    calls: list[dict[int, int]] = []
    feed = served.runner.run

    def noting(tokens):
        calls.append({row: len(part) for row, part in tokens.items()})
        return feed(tokens)

    served.runner.run = noting
    return calls


def test_short_prompts_are_read_in_one_call_and_answered_as_they_would_be_alone():
    prompts = [words(n, 11 - n) for n in range(4)]
    served = engine(rows=4, prefill_chunk=64)
    work(served, *(turn(f"a{n}", ids) for n, ids in enumerate(prompts)))
    calls = feeds(served)
    # The rows are at different positions, and a row between them is idle.
    again = [turn(f"b{n}", words(n + 9, 3 + n), start=f"a{n}") for n in (3, 0, 1)]
    work(served, *again)
    assert calls[0] == {3: 3 + 4, 1: 5, 0: 4}
    assert served.load().seen == sum(map(len, prompts)) + 4 * 5 + 7 + 4 + 5 + 3 * 5
    for each in again:
        n = int(each.parent[1])
        assert each.listener.tokens == alone([(prompts[n], 6), (words(n + 9, 3 + n), 6)])[1]


def test_with_deterministic_every_prompt_is_read_by_itself():
    served = engine(rows=3, prefill_chunk=64, deterministic=True)
    calls = feeds(served)
    work(served, *(turn(f"a{n}", words(n, 9)) for n in range(3)))
    assert all(len(call) == 1 for call in calls)


def test_what_one_of_several_prompts_breaks_it_breaks_for_itself_alone():
    served = engine(rows=3, prefill_chunk=64)
    turns = [turn(f"a{n}", words(n, 9)) for n in range(3)]
    bad, feed = words(1, 9), served.runner.run

    def feed_or_fail(tokens):
        if bad in tokens.values():
            raise ValueError("the second prompt")
        return feed(tokens)

    served.runner.run = feed_or_fail
    work(served, *turns)
    assert str(turns[1].listener.error) == "the second prompt"
    for n in (0, 2):
        assert turns[n].listener.tokens == alone([(words(n, 9), 6)])[0]


def test_a_long_prompt_waits_for_no_more_than_a_call_of_short_ones():
    served = engine(rows=3, prefill_chunk=8)
    long, *short = (
        turn("long", words(0, 40), limit=1),
        *(turn(f"a{n}", words(n, 4)) for n in (1, 2)),
    )
    for each in (long, *short):
        served.submit(each)
    calls = feeds(served)
    for _ in range(4):
        served.step()
    read = [call for call in calls if max(call.values()) > 1]
    assert read == [{0: 8}, {1: 4, 2: 4}, {0: 8}, {0: 8}]


def test_a_turn_may_be_gone_on_from_again_and_after_its_row_went_on():
    served = engine(rows=1)
    first = turn("a", words(0, 20))
    work(served, first)
    answers = []
    for node in "bcd":
        each = turn(node, words(1, 9), start="a")
        work(served, each)
        answers.append(each.listener.tokens)
    assert answers[0] == answers[1] == answers[2] == alone([(words(0, 20), 6), (words(1, 9), 6)])[1]


def test_a_row_that_stands_where_a_turn_starts_is_not_filled_anew():
    served = engine(rows=2)
    work(served, turn("a", words(0, 20)))
    puts = []
    put_row, served.cache.put_row = served.cache.put_row, lambda *given, **more: puts.append(given)
    work(served, turn("b", words(1, 3), start="a"))
    assert not puts
    served.cache.put_row = put_row
    other = turn("c", words(1, 3), start="a")
    work(served, other)
    assert other.listener.reason == "length"


def test_end_tokens_end_an_answer_and_are_read_before_the_next_prompt():
    prompt = words(3, 12)
    (answer,) = alone([(prompt, 8)])
    stop = answer[4]
    served = engine()
    first = turn("a", prompt, limit=50, stops=[stop])
    work(served, first)
    cut = answer[: answer.index(stop) + 1]
    assert (first.listener.tokens, first.listener.reason) == (cut, "stop")
    second = turn("b", words(4, 2), start="a")
    work(served, second)
    stream = weir.Stream(MODEL, POLICY, chunk=CHUNK)
    stream.feed(prompt + cut + words(4, 2))
    assert second.listener.tokens == list(stream.generate(6, stop=[]))


def test_a_listener_ends_an_answer():
    served = engine()
    each = turn("a", words(3, 12), limit=50, listener=Heard(stop_after=3))
    work(served, each)
    assert (len(each.listener.tokens), each.listener.reason) == (3, "stop")


def test_several_answers_to_one_prompt():
    served = engine(rows=2)
    choosing = [SamplingParams(Sampling(temperature=2.0), seed=n) for n in range(3)]
    turns = [turn(f"a{n}", words(0, 20), choosing=c, limit=9) for n, c in enumerate(choosing)]
    turns[0].forks = turns[1:]
    served.submit(turns[0])
    while not all(each.listener.over for each in turns):
        served.step()
    assert served.load().seen == 20 + 3 * 8
    for each, how in zip(turns, choosing, strict=True):
        apart = turn("x", words(0, 20), choosing=how, limit=9)
        work(engine(), apart)
        assert each.listener.tokens == apart.listener.tokens
    assert len({tuple(each.listener.tokens) for each in turns}) == 3


@pytest.mark.parametrize("more", [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02}])
def test_draws_depend_on_nobody_else(more):
    how = SamplingParams(Sampling(temperature=1.5, **more), seed=5)
    apart = turn("a", words(0, 20), choosing=how, limit=12)
    work(engine(), apart)
    served = engine()
    among = turn("a", words(0, 20), choosing=how, limit=12)
    work(served, turn("b", words(1, 30), choosing=how), among, turn("c", words(2, 3)))
    assert among.listener.tokens == apart.listener.tokens


def test_a_cancelled_turn_never_happened():
    served = engine(rows=1)
    work(served, turn("a", words(0, 20)))
    gone, waiting = turn("b", words(1, 9), start="a", limit=50), turn("c", words(1, 9))
    served.submit(gone)
    served.submit(waiting)
    for _ in range(6):
        served.step()
    assert 0 < len(gone.listener.tokens) < 50
    served.cancel(gone)
    served.cancel(waiting)
    served.step()
    assert isinstance(gone.listener.error, Cancelled)
    assert isinstance(waiting.listener.error, Cancelled)
    assert served.load().busy == served.load().waiting == 0
    again = turn("b", words(1, 9), start="a")
    work(served, again)
    assert again.listener.tokens == alone([(words(0, 20), 6), (words(1, 9), 6)])[1]


def test_a_failing_row_is_that_turns_own(monkeypatch):
    served = engine(rows=2)
    good, bad = turn("a", words(0, 9), limit=20), turn("b", words(1, 9), limit=20)
    served.submit(good)
    served.submit(bad)
    while len(bad.listener.tokens) < 3:
        served.step()
    bad.output_ids[-1] = VOCABULARY  # an invalid token id
    work(served)
    while not good.listener.over:
        served.step()
    assert isinstance(bad.listener.error, WeirError)
    assert good.listener.tokens == alone([(words(0, 9), 20)])[0]


def test_a_call_that_fails_is_the_end_of_its_turns_and_of_nothing_else(monkeypatch):
    served = engine(rows=2)
    work(served, turn("a", words(0, 20)))
    turns = [turn("b", words(1, 9), start="a"), turn("c", words(2, 9))]
    for each in turns:
        served.submit(each)
    while not turns[0].listener.tokens:
        served.step()

    def fail(*given):
        raise MemoryError("no memory")

    hook = MODEL.model.norm.register_forward_pre_hook(fail)
    served.step()
    hook.remove()
    assert isinstance(turns[0].listener.error, MemoryError)
    again = turn("d", words(1, 9), start="a")
    work(served, again)
    assert again.listener.tokens == alone([(words(0, 20), 6), (words(1, 9), 6)])[1]


class Full(SessionStore):
    """A store in which every save fails."""

    def save(self, checkpoint, record, done):
        raise OSError("no room")


@pytest.mark.parametrize("answers", [1, 3])
def test_a_turn_whose_row_cannot_be_copied_fails_and_leaves_its_row(monkeypatch, answers):
    served = engine(rows=1)
    lost = [turn(f"a{n}", words(0, 9)) for n in range(answers)]
    lost[0].forks = lost[1:]

    def fail(*given):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(served.cache, "take_row", fail)
        served.submit(lost[0])
        for _ in range(20):
            served.step()
    assert all(isinstance(each.listener.error, MemoryError) for each in lost)
    after = turn("b", words(1, 9))
    work(served, after)
    assert after.listener.reason == "length"
    load = served.load()
    assert (load.busy, load.waiting, load.resting) == (0, 0, 1)


def test_a_store_that_refuses_a_turn_fails_it():
    served = engine(rows=1, store=Full())
    lost = turn("a", words(0, 9))
    work(served, lost)
    assert isinstance(lost.listener.error, OSError)
    assert served.load().resting == 0  # no row is kept for a next turn


def test_a_fold_that_is_interrupted_empties_the_rows_and_what_is_saved_goes_on(monkeypatch):
    served = engine(rows=2)
    work(served, turn("a", words(0, 20)))
    broken = turn("b", words(1, 30), start="a")
    served.submit(broken)
    layer = served.cache.stack[1]
    monkeypatch.setattr(layer, "commit", lambda: 1 / 0)
    while not broken.listener.over:
        served.step()
    monkeypatch.undo()
    assert isinstance(broken.listener.error, ZeroDivisionError)
    again = turn("c", words(1, 9), start="a")
    work(served, again)
    assert again.listener.tokens == alone([(words(0, 20), 6), (words(1, 9), 6)])[1]


def test_nobodys_prompt_stops_the_answers_of_others():
    served = engine(rows=2)
    quick, slow = turn("a", words(0, 2), limit=30), turn("b", words(1, 100))
    served.submit(quick)
    served.step()
    served.submit(slow)
    for _ in range(15):
        before = len(quick.listener.tokens)
        served.step()
        assert len(quick.listener.tokens) == before + 1
    assert slow.num_read == 75


def test_clients_take_turns():
    served = engine(rows=1)
    greedy = [turn(f"a{n}", words(n, 3), limit=2, holder="a") for n in range(4)]
    modest = turn("b", words(9, 3), limit=2, holder="b")
    for each in (*greedy, modest):
        served.submit(each)
    order = []
    while not all(each.listener.over for each in (*greedy, modest)):
        served.step()
        order += [e.id for e in (*greedy, modest) if e.listener.over and e.id not in order]
    assert order.index("b") == 1


def test_a_warm_engine_has_run_all_kinds_of_calls_and_holds_nothing(monkeypatch):
    warm, sizes = engine(), []
    run = warm.runner.run
    monkeypatch.setattr(
        warm.runner, "run", lambda given: sizes.append([*map(len, given.values())]) or run(given)
    )
    warm.warm_up()
    assert sizes == [[5], [1], [1, 1, 1]]
    assert list(warm.cache.seen) == [0, 0, 0]
    assert warm.load() == engine().load()
    told = []
    for each in (warm, engine()):
        asked = turn("a", words(1, 12))
        work(each, asked)
        told.append(asked.output_ids)
    assert told[0] == told[1]


def test_the_queue_is_bounded_and_a_stopped_engine_takes_no_more():
    served = engine(rows=1, queue=2)
    for node in "abc":  # the first one does not count as waiting, because a row is free
        served.submit(turn(node, words(0, 3)))
    with pytest.raises(Busy, match="2 turns are already waiting"):
        served.submit(turn("d", words(0, 3)))
    served.step()  # the first one gets its row, and two are waiting
    with pytest.raises(Busy, match="2 turns are already waiting"):
        served.submit(turn("d", words(0, 3)))
    served.stop()
    with pytest.raises(WeirError, match="takes no more turns"):
        served.submit(turn("d", words(0, 3)))
    served.run()
    assert served.load().waiting == 0


def test_turns_that_make_no_sense_are_refused():
    served = engine()
    lost = turn("a", [1], start="nowhere")
    work(served, lost)
    assert "no longer kept" in str(lost.listener.error)
    foreign = turn("a", [VOCABULARY])
    work(served, foreign)
    assert isinstance(foreign.listener.error, WeirError)


def test_a_node_that_is_not_kept_leaves_its_row_free():
    served = engine(rows=1)
    each = turn("a", words(0, 9), record=None)
    work(served, each)
    assert each.listener.reason == "length"
    assert served.load().resting == 0
    lost = turn("b", [1], start="a")
    work(served, lost)
    assert isinstance(lost.listener.error, WeirError)


def test_a_forgotten_checkpoint_leaves_its_row_free():
    served = engine(rows=2)
    work(served, turn("a", words(0, 9)))
    served.forget("a")
    assert served.load().resting == 0
    lost = turn("b", [1], start="a")
    work(served, lost)
    assert isinstance(lost.listener.error, WeirError)


class Sessions(RuleBasedStateMachine):
    """Run random sequences of turns, forks, cancellations and deletions on few rows."""

    @initialize(rows=st.integers(1, 3))
    def open(self, rows: int) -> None:
        self.engine = engine(rows=rows)
        self.nodes: dict[str, list[tuple[list[int], int]]] = {}
        self.under_way: list[tuple[TokenSequence, list[tuple[list[int], int]]]] = []
        self.count = 0

    @rule(
        data=st.data(), length=st.integers(1, 12), limit=st.integers(1, 6), seed=st.integers(0, 9)
    )
    def ask(self, data: st.DataObject, length: int, limit: int, seed: int) -> None:
        start = data.draw(st.sampled_from([None, *self.nodes]))
        self.count += 1
        ids = words(seed, length)
        history = [*(self.nodes[start] if start else []), (ids, limit)]
        each = turn(f"n{self.count}", ids, start=start, limit=limit, holder=str(seed % 2))
        self.engine.submit(each)
        self.under_way.append((each, history))

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
        self.settle()

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        each, _ = data.draw(st.sampled_from(self.under_way))
        self.engine.cancel(each)
        self.engine.step()
        self.settle()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.nodes)))
        self.engine.forget(node)
        del self.nodes[node]

    def settle(self) -> None:
        for each, history in list(self.under_way):
            if each.listener.over:
                self.under_way.remove((each, history))
            if each.listener.reason is not None:
                assert each.listener.tokens == alone(history)[-1]
                self.nodes[each.id] = history

    @invariant()
    def rows_have_one_owner(self) -> None:
        if hasattr(self, "engine"):
            load = self.engine.load()
            assert load.busy + load.resting <= load.rows


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    settings.get_profile("weir"), max_examples=15, stateful_step_count=12
)
