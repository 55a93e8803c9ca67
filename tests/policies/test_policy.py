"""The grammar of policies: which texts it reads, and that errors show where a mistake is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import weir
from weir.errors import PolicyError, WeirError, format_value
from weir.policies.grammar import policy, saved_policy
from weir.policies.library import (
    Recompute,
    buzz,
    dense,
    h2o,
    recompute,
    streaming_llm,
    uniform,
    window,
)
from weir.policies.pipe import Pipe, Policy
from weir.policies.registry import NAMED
from weir.policies.wrappers import pyramid, pyramidkv
from weir.pools import POOLS, Fold, Heavy, KNorm, Pool, Recent, Sink, SubGen, Tova, pool
from weir.pools.parameters import argument_hints
from weir.slab.slots import Slots


@dataclass(frozen=True)
class Every(Pool):
    """A toy pool with a parameter of each kind."""

    n: int
    rate: float = 0.5
    fair: bool = True
    kind: str = "plain"
    cap: int | None = None

    def slots(self) -> int:
        return abs(self.n)

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        return held, new


@pytest.fixture(autouse=True, scope="module")
def toy() -> Iterator[None]:
    """Register the pool `every` while the tests of this file run."""
    pool("every")(Every)
    yield
    del POOLS["every"]


@pytest.mark.parametrize(
    ("text", "pools"),
    [
        ("sink(4) | recent(252)", (Sink(4), Recent(252))),
        ("sink | recent(252)", (Sink(4), Recent(252))),
        ("sink() | recent(252)", (Sink(4), Recent(252))),
        ("sink(n=4)|recent(n=252)", (Sink(4), Recent(252))),
        ("  sink ( 4 )\n|\trecent( n = 252 )  ", (Sink(4), Recent(252))),
        ("recent(1_000_000)", (Recent(1_000_000),)),
        ("recent(+7)", (Recent(7),)),
        ("recent(none)", (Recent(None),)),
        ("recent(None)", (Recent(None),)),
        ("recent(2) | recent(3)", (Recent(2), Recent(3))),
        ("every(3)", (Every(3),)),
        ("every(3, 1)", (Every(3, 1.0),)),
        ("every(3, .25, false, odd, 9)", (Every(3, 0.25, False, "odd", 9),)),
        ("every(kind=odd, n=3, fair=FALSE, rate=-1.5e-3)", (Every(3, -0.0015, False, "odd"),)),
        ("every(3, cap=none)", (Every(3),)),
    ],
)
def test_a_pipe_is_read_as_it_is_written(text, pools):
    assert policy(text).pools == pools


@pytest.mark.parametrize(
    ("text", "pools"),
    [
        ("dense", (Recent(None),)),
        ("dense()", (Recent(None),)),
        ("window(budget=8)", (Recent(8),)),
        ("window", (Recent(256),)),
        ("streaming_llm", (Sink(4), Recent(252))),
        ("streaming_llm(256)", (Sink(4), Recent(252))),
        ("streaming_llm(64, sinks=8)", (Sink(8), Recent(56))),
        ("streaming_llm(64, sinks=0)", (Recent(64),)),
    ],
)
def test_a_name_stands_for_a_pipe(text, pools):
    assert policy(text).pools == pools


def test_recompute_is_a_policy_that_no_cache_can_follow(llama):
    made = policy("recompute(budget=32)")
    assert made == Recompute(32) == recompute(32)
    with pytest.raises(WeirError, match=r"weir\.Stream"):
        weir.StreamingCache(llama, made)


def test_a_policy_is_written_as_the_user_wrote_it():
    assert str(policy("  streaming_llm( budget = 64 ) ")) == "streaming_llm( budget = 64 )"
    assert str(policy("sink(4)|recent(60)")) == "sink(4)|recent(60)"


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_policy_made_in_python_can_be_written_and_read_again(name):
    made = NAMED[name].make()
    assert policy(str(made)) == made
    assert policy(name) == made


pools_of_any_kind = st.one_of(
    st.builds(Recent, st.integers(1, 10**9)),
    st.builds(
        Every,
        st.integers(-(10**6), 10**6),
        st.floats(-(2.0**50), 2.0**50, allow_nan=False),
        st.booleans(),
        st.sampled_from(["plain", "odd", "a_b2"]),
        st.none() | st.integers(-5, 5),
    ),
)


@given(st.lists(pools_of_any_kind, min_size=1, max_size=4), st.none() | st.integers(1, 99))
def test_every_pipe_survives_being_written_and_read(pools, sinks):
    pipe = Pipe((*([] if sinks is None else [Sink(sinks)]), *pools))
    assert policy(str(pipe)) == pipe
    assert str(policy(str(pipe))) == str(pipe)


OF_KIND = {
    int: st.integers(0, 400),
    bool: st.booleans(),
    float: st.floats(0, 9, allow_nan=False),
    str: st.sampled_from(["auto", "pairs", "authors", "paper", "shared", "flat", "separate"]),
    type(None): st.none(),
    Pool: st.sampled_from([Heavy(30), KNorm(12), Tova(9)]),
    Policy: st.sampled_from([window(300), h2o(300), uniform(300), Pipe((SubGen(9, 9),))]),
}


def of_kind(hint: Any) -> st.SearchStrategy:
    """Return a strategy for values of an annotated type. Some may be out of its bounds."""
    hint = getattr(hint, "__origin__", hint) if hasattr(hint, "__metadata__") else hint
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    return (
        st.one_of([of_kind(part) for part in get_args(hint)]) if get_args(hint) else OF_KIND[hint]
    )


@st.composite
def calls(draw: st.DrawFn) -> Policy:
    """Draw a named policy, or a pipe of one pool, with values for some of its parameters."""
    name, make = draw(st.sampled_from([*POOLS.items(), *((n, it.make) for n, it in NAMED.items())]))
    wanted = {key: hint for key, hint in argument_hints(make).items() if key != "return"}
    given = {}
    for key in draw(st.sets(st.sampled_from(sorted(wanted)))) if wanted else ():
        given[key] = draw(of_kind(wanted[key]))
    try:
        made = make(**given)
        return Pipe((made,)) if isinstance(made, Pool) else made
    except (WeirError, TypeError):  # parameters that contradict each other, or lack one
        assume(False)
        raise


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(calls())
def test_whatever_policy_is_printed_is_read_as_the_same(made):
    again = policy(str(made))
    assert again == made
    assert str(again) == str(made)
    assert not re.search("True|False|None", str(made))


def test_a_policy_is_passed_through():
    made = dense()
    assert policy(made) is made


@pytest.mark.parametrize("thing", [None, 5, b"sink(4)", ["sink(4)"]])
def test_what_is_neither_text_nor_policy_is_refused(thing):
    with pytest.raises(WeirError, match="a policy must be a text"):
        policy(thing)


# Where the error lies is marked with » in the text; the marks are taken out before it is read.
MISTAKES = {
    "nothing": ("»", "expected a pool or a policy"),
    "only space": ("  »", "expected a pool or a policy"),
    "a trailing pipe": ("sink(4) | recent(9) |»", "expected a pool or a policy"),
    "a leading pipe": ("»| recent(9)", "expected a pool or a policy"),
    "two pipes": ("sink(4) |»| recent(9)", "expected a pool or a policy"),
    "no pipe between": ("sink(4) »recent(9)", "expected '|' or the end"),
    "one bracket too many": ("sink(4)») | recent(9)", "expected '|' or the end"),
    "a bracket never closed": ("recent(9»", "expected ',' or ')'"),
    "an argument never given": ("recent(»", "expected a value"),
    "a trailing comma": ("sink(4,»)", "expected a value"),
    "a leading comma": ("sink(»,4)", "expected a value"),
    "no comma between": ("every(3 »0.5)", "expected ',' or ')'"),
    "a name without its value": ("recent(n=»)", "expected a value"),
    "an underscore at the end": ("recent(1»_)", "expected ',' or ')'"),
    "a hexadecimal": ("recent(0»x10)", "expected ',' or ')'"),
    "a strange sign": ("recent(»%9)", "expected a value"),
    "a quoted word": ("every(3, kind=»'odd')", "expected a value"),
    "a number beyond use": ("recent(»" + "9" * 5000 + ")", "too large"),
    "an infinite number": ("every(3, »1e999)", "too large"),
    "an unknown pool": ("sink(4) | »riddle(9)", "unknown pool or policy 'riddle'"),
    "a name with accents": ("sink(4) | »résumé(9)", "unknown pool or policy 'résumé'"),
    "a reservoir of none": ("»reservoir(256, samples=0)", "leaves no slots for samples"),
    "an unknown parameter": ("sink(»m=4)", "sink has no parameter 'm'"),
    "a parameter too many": ("sink(4, »5)", "got too many arguments. It takes n"),
    "a parameter of what takes none": ("dense(»3)", "got too many arguments. It takes none"),
    "a parameter twice": ("sink(4, »n=5)", "got 'n' twice"),
    "a parameter by name twice": ("sink(n=4, »n=5)", "got 'n' twice"),
    "a place after a name": ("every(n=3, »0.5)", "cannot follow a value with a name"),
    "a parameter missing": ("sink(4) | »recent", "recent needs a value for 'n'"),
    "a number with a point for a whole one": (
        "recent(»8.)",
        "a whole number of at least 1 or none, got 8.0",
    ),
    "true for a whole number": ("sink(»true)", "n of sink must be a whole number, got true"),
    "true for a number": ("every(3, »true)", "rate of every must be a number, got true"),
    "none where a number must be": ("sink(»none)", "n of sink must be a whole number, got none"),
    "a word for a number": (
        "recent(n=»many)",
        "n of recent must be a whole number of at least 1 or none, got 'many'",
    ),
    "a number for a word by place": (
        "every(3, 1, true, »7)",
        "kind of every must be a word, got 7",
    ),
    "a number for a word": ("every(3, kind=»7)", "kind of every must be a word, got 7"),
    "one for true": ("every(3, fair=»1)", "fair of every must be true or false, got 1"),
    "a policy inside a pipe": ("sink(4) | »window(8)", "window is a whole policy"),
    "a policy before a pipe": ("»window(8) | recent(4)", "window is a whole policy"),
    "no room": ("recent(»0)", "a whole number of at least 1 or none, got 0"),
    "less than no room": ("sink(4) | recent(»-3)", "of at least 1 or none, got -3"),
    "no sinks": ("»sink(0) | recent(4)", "at least 1 token, got 0"),
    "a budget that its sinks use up": (
        "»streaming_llm(budget=4, sinks=4)",
        "a budget of 4 leaves no slots for recent tokens after 4 sinks",
    ),
    "sinks below nothing": ("»streaming_llm(sinks=-1)", "at least 1 token, got -1"),
    "a window of nothing": (
        "window(»0)",
        "budget of window must be a whole number of at least 1, got 0",
    ),
    "a re-computation of nothing": ("»recompute(0)", "at least 1, got 0"),
    "a sink after others": ("recent(4) | »sink(4)", "must be the first pool of a pipe"),
    "two sinks": ("sink(4) | »sink(4)", "must be the first pool of a pipe"),
    "no limit after a choice": ("every(3) | »recent(none)", "recent(none) can only follow"),
    "a pool after one that keeps all": ("recent(none) | »recent(5)", "recent would get no tokens"),
    "a pool after a share of one": ("uniform(rate=1) | »heavy(5)", "heavy would get no tokens"),
    "a pool's parameter of what reads as a policy": (
        "kcenter(256, »quiet=2)",
        "or kcenter(k=256, quiet=2) for only the pool",
    ),
    "the same within another": (
        "quantized(kcenter(256, »quiet=2))",
        "Write recent(64) | kcenter(192, quiet=2) for the newest tokens followed by the pool",
    ),
    "the same with two numbers": (
        "kcenter(256, 4, »quiet=2)",
        "kcenter on its own is the policy, and quiet is a parameter of the pool (",
    ),
    "the same with what is the policy's alone": (
        "kcenter(256, budget=3, »quiet=2)",
        "quiet is a parameter of the pool (",
    ),
    "a line break in what is wrong": ("sink(4)\n| »riddle(9)", "unknown pool or policy"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_pointed_at_in_one_line(mistake):
    marked, reason = MISTAKES[mistake]
    text, at = marked.replace("»", ""), marked.index("»")
    with pytest.raises(PolicyError) as caught:
        policy(text)
    message = str(caught.value)
    assert reason in message
    assert (caught.value.at, caught.value.text) == (at, text)
    assert f"character {at + 1}" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("snk(4) | recent(9)", "sink"),
        ("Sink(4) | recent(9)", "sink"),
        ("sink(4) | RECENT(9)", "recent"),
        ("STREAMING_LM(9)", "streaming_llm"),
        ("window(BUDGET=9)", "budget"),
        ("sink(4) | recnet(9)", "recent"),
        ("streaming_lm(9)", "streaming_llm"),
        ("streaming_llm(bugdet=9)", "budget"),
        ("window(buget=9)", "budget"),
        ("every(3, rat=1)", "rate"),
    ],
)
def test_the_nearest_name_is_suggested(text, near):
    with pytest.raises(PolicyError, match=f"did you mean '{near}'"):
        policy(text)


def test_nothing_is_suggested_where_nothing_is_near():
    with pytest.raises(PolicyError) as caught:
        policy("xyzzy(4)")
    assert "did you mean" not in str(caught.value)


def test_a_text_of_any_length_gets_an_error_of_one_line_that_shows_where():
    with pytest.raises(PolicyError) as caught:
        policy("recent(5) | " * 2000 + "nonsense" + " | recent(5)" * 2000)
    assert caught.value.at == 24000
    assert "character 24001: …" in str(caught.value)
    assert "recent(5) | »nonsense | recent(5)" in str(caught.value)
    with pytest.raises(PolicyError) as long_name:
        policy("x" * 9000 + "(" + "y" * 9000)
    assert all(len(str(error.value)) < 300 for error in (caught, long_name))


# --- what a policy or a pool is given in Python

NO_SUCH_THINGS = [
    (
        streaming_llm,
        {"budget": "many"},
        "budget of streaming_llm must be a whole number, got 'many'",
    ),
    (streaming_llm, {"sinks": 4.0}, "sinks of streaming_llm must be a whole number, got 4.0"),
    (window, {"budget": True}, "budget of window must be a whole number of at least 1, got true"),
    (h2o, {"budget": None}, "budget of h2o must be a whole number, got none"),
    (pyramidkv, {"beta": "steep"}, "beta of pyramidkv must be a number, got 'steep'"),
    (buzz, {"local_max": 1}, "local_max of buzz must be true or false, got 1"),
    (uniform, {"rate": "half"}, "rate of uniform must be a number or none, got 'half'"),
    (pyramid, {"pipe": 5}, "pipe of pyramid must be a policy or none, got 5"),
    (Sink, {"n": 2.5}, "n of sink must be a whole number, got 2.5"),
    (Recent, {"n": "many"}, "n of recent must be a whole number of at least 1 or none, got 'many'"),
    (Every, {"n": 3, "kind": 7}, "kind of every must be a word, got 7"),
]


@pytest.mark.parametrize(("make", "given", "sentence"), NO_SUCH_THINGS)
def test_python_and_text_refuse_what_is_no_such_thing_with_the_same_sentence(make, given, sentence):
    with pytest.raises(WeirError) as python:
        make(**given)
    assert str(python.value) == sentence
    name = make.name if isinstance(make, type) else make.__name__
    values = ", ".join(f"{key}={format_value(value)}" for key, value in given.items())
    with pytest.raises(PolicyError) as text:
        policy(f"{name}({values})")
    assert str(text.value).startswith(f"{sentence} (character ")


def test_what_cannot_be_written_in_a_policy_is_refused_in_python_in_one_short_line():
    with pytest.raises(
        WeirError, match="budget of window must be a whole number of at least 1, got '256'"
    ):
        window("256")
    with pytest.raises(WeirError) as caught:
        Sink([[7] * 50] * 50)
    assert len(str(caught.value)) < 150 and len(str(caught.value).splitlines()) == 1


def test_numbers_of_other_libraries_become_numbers_of_python():
    sink = Sink(np.int64(4))
    assert sink == Sink(4) and type(sink.n) is int
    assert type(pyramidkv(beta=np.float32(2)).beta) is float
    assert type(uniform(rate=1).pools[-1].rate) is float


def test_a_pipe_of_nothing_or_of_other_things_is_refused():
    for pools in ((), ("sink(4)",), (Sink(4), None)):
        with pytest.raises(WeirError, match="a pipe must have at least one pool"):
            Pipe(pools)


WORDS = [*"(),|=+-._ \n\t»", "sink", "recent", "every", "dense", "window", "streaming_llm", "n"]
WORDS += ["none", "true", "4", "1_0", "1__0", "1e5", "0.5", "-3", "budget", "kind", "٣", "²", "\0"]


@given(st.text(max_size=30) | st.lists(st.sampled_from(WORDS), max_size=14).map("".join))
def test_any_text_is_either_read_or_refused_in_one_line(text):
    try:
        made = policy(text)
    except PolicyError as error:
        assert 0 <= error.at <= len(text)
        assert len(str(error).splitlines()) == 1
    else:
        assert isinstance(made, Policy)
        assert policy(str(made)) == made


# --- what a pipe knows about its pools


@pytest.mark.parametrize(
    ("text", "run", "front", "slots"),
    [
        ("sink(4) | recent(252)", (1,), (0,), 256),
        ("recent(5)", (0,), (), 5),
        ("recent(5) | every(6)", (0,), (1,), 11),
        ("every(6) | recent(5)", (), (0, 1), 11),
        ("sink(2) | recent(3) | recent(4)", (2, 1), (0,), 9),
        ("sink(2) | recent(3) | every(4) | recent(5)", (1,), (0, 2, 3), 14),
        ("dense", (0,), (), None),
        ("sink(2) | recent(none)", (1,), (0,), None),
    ],
)
def test_the_newest_tokens_form_a_run_and_the_others_the_front(text, run, front, slots):
    pipe = policy(text)
    assert (pipe.run, pipe.front, pipe.slots) == (run, front, slots)
    assert pipe.for_layer(3, 8) is pipe


def test_every_named_policy_says_where_it_comes_from():
    assert {"dense", "window", "streaming_llm", "recompute"} <= set(NAMED)
    assert all(entry.paper and entry.make.__doc__ for entry in NAMED.values())


def test_advice_about_a_name_of_both_can_be_followed():
    with pytest.raises(PolicyError, match="on its own is the policy") as caught:
        weir.policy("kcenter(96, quiet=2)")
    first, second = re.findall(r"Write (.*?) for .*, or (.*?) for", str(caught.value))[0]
    assert weir.policy(first).pipes[0].slots == weir.policy(second).pipes[0].slots == 96


def test_what_weir_wrote_is_read_as_it_was_meant():
    assert saved_policy("kcenter(96, quiet=2)") == weir.policy("kcenter(k=96, quiet=2)")
    around = "pinned(kcenter(96, quiet=2), n=8)"
    assert saved_policy(around) == weir.policy(around.replace("(96", "(k=96"))
