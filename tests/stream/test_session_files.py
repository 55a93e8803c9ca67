"""Forged session files: a stream continues from them, or an error says why not.

The checksum of each file is correct, so only the checks of its contents can refuse it.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import weir
from weir.cache import row_state
from weir.cache.tensor_bytes import TensorBytes, write_tensors
from weir.errors import NotFiniteError, WeirError
from weir.stream import session
from weir.stream.session import replace_atomically

Facts = dict[str, Any]
Tensors = dict[str, Tensor]

CHUNK = 8
SEEN = 203
POLICIES = [
    "streaming_llm(24)",
    "dense",
    "sink(2) | recent(12) | reservoir(12, weighted=true)",
    "sink(2) | recent(10) | hive(16)",
    "sink(2) | recent(8) | heavy(8) | snap(8, window=4)",
    "sink(2) | recent(8) | outliers(8) | kcenter(6)",
    "sink(2) | recent(8) | subgen(samples=8, clusters=3, per_cluster=2)",
    "sink(2) | recent(8) | balance(16)",
    "sink(2) | recent(8) | balance(24, sets=separate)",
]


def read(path: Path) -> tuple[Facts, Tensors]:
    """Return the facts and tensors of a file.

    The facts of each row are in the list "rows", and its tensors are named "ROW.LAYER.NAME".
    """
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()[session.KEY])
        held = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    facts["rows"], tensors = [], {}
    for name, t in held.items():
        row = name.removeprefix(session.ROW)
        if row == name:
            tensors[name] = t
            continue
        found = TensorBytes.read(t)
        facts["rows"].append(json.loads(found.metadata[row_state.KEY]))
        tensors |= {f"{row}.{own}": found.tensor(own).clone() for own in found.sizes}
    return facts, tensors


def write(path: Path, facts: Any, tensors: Tensors) -> None:
    """Write a file with a correct checksum."""
    rows, tensors = facts["rows"], dict(tensors)
    for index, said in enumerate(rows):
        own = [name for name in tensors if name.startswith(f"{index}.")]
        held = {name.removeprefix(f"{index}."): tensors.pop(name) for name in own}
        data = write_tensors(
            {n: t.clone() for n, t in held.items()}, row_state.KEY, json.dumps(said)
        )
        tensors[f"{session.ROW}{index}"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    written = json.dumps({name: fact for name, fact in facts.items() if name != "rows"})
    tensors = {name: t.contiguous().clone() for name, t in tensors.items()}
    checksum = session._checksum(written, tensors)
    save_file(tensors, path, metadata={session.KEY: written, session.CHECKSUM: checksum})


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Callable[..., tuple[Facts, Tensors]]:
    """Return a function that makes what a session file holds, for a policy and a batch size."""
    folder, known = tmp_path_factory.mktemp("files"), {}

    def make(model: Any, policy: str, batch: int = 1, **made: Any) -> tuple[Facts, Tensors]:
        key = (policy, batch, *made.items())
        if key not in known:
            stream = weir.Stream(model, policy, chunk=CHUNK, seed=3, **made)
            generator = torch.Generator().manual_seed(0)
            stream.feed(torch.randint(61, (batch, SEEN), generator=generator))
            stream.save(folder / "file")
            known[key] = read(folder / "file")
        facts, tensors = known[key]
        return copy.deepcopy(facts), {name: t.clone() for name, t in tensors.items()}

    return make


def refused(model: Any, path: Path, sentence: str) -> None:
    with pytest.raises(WeirError, match=sentence) as error:
        weir.Stream.restore(model, path)
    said = str(error.value)
    assert said.startswith(str(path)) and "\n" not in said and len(said) < 500


LARGE = [
    ("sink(4) | recent(4000)", "sink(4) | recent(400)"),
    ("weir(4096)", "weir(512)"),
    ("sink(2) | recent(500) | kcenter(2000):int8", "sink(2) | recent(500) | kcenter(200):int8"),
]


@pytest.mark.parametrize(("large", "small"), LARGE)
def test_what_is_held_is_written_and_not_what_could_be(llama, tmp_path, large, small):
    sizes = []
    for policy in (large, small):
        stream = weir.Stream(llama, policy, chunk=CHUNK)
        stream.feed(torch.arange(45)[None])
        stream.save(tmp_path / "file")
        sizes.append((tmp_path / "file").stat().st_size)
        again = weir.Stream.restore(llama, tmp_path / "file")
        for ids in (torch.arange(3)[None], torch.arange(40)[None]):
            assert torch.equal(again.feed(ids), stream.feed(ids))
    assert sizes[0] - sizes[1] < 500  # the texts of the policies


# --- what somebody could write into a file, one change at a time


def fact(*path: Any, to: Any) -> Callable[[Facts, Tensors], None]:
    """Change a fact."""

    def change(facts: Facts, tensors: Tensors) -> None:
        for step in path[:-1]:
            facts = facts[step]
        facts[path[-1]] = to

    return change


def number(name: str, *place: Any, to: Any) -> Callable[[Facts, Tensors], None]:
    """Change numbers of a tensor."""

    def change(facts: Facts, tensors: Tensors) -> None:
        tensors[name][place] = to

    return change


def tensor(name: str, to: Callable[[Tensor], Tensor]) -> Callable[[Facts, Tensors], None]:
    """Replace a tensor."""

    def change(facts: Facts, tensors: Tensors) -> None:
        tensors[name] = to(tensors[name])

    return change


def without(of: int, *path: Any) -> Callable[[Facts, Tensors], None]:
    """Remove a fact (0) or a tensor (1)."""

    def change(*both: Any) -> None:
        it = both[of]
        for step in path[:-1]:
            it = it[step]
        del it[path[-1]]

    return change


ROW = ("rows", 0, "row")
WRONG: dict[str, tuple[Callable[[Facts, Tensors], None], str]] = {
    "no policy": (without(0, "policy"), "policy is missing"),
    "a policy that is a number": (fact("policy", to=7), "policy must be a text, got 7"),
    "another policy": (
        fact("pools", to="sink(4) | recent(12)"),
        "this row is of a cache with policy",
    ),
    "a policy of another row": (
        fact("rows", 0, "kind", "pools", to="dense"),
        "row 0: this row is of",
    ),
    "weights of another row": (
        fact("rows", 0, "kind", "weights", to=""),
        "row 0: this row is of another model",
    ),
    "a row of another format": (fact("rows", 0, "format", to=2), "row 0: it has the format 2"),
    "notes that are none": (
        fact("rows", 0, "notes", to=2),
        "row 0: notes must be an object, got 2",
    ),
    "a fact too many": (fact("mood", to="good"), "unexpected field 'mood'"),
    "a model that is a list": (fact("model", to=[]), "model must be an object, got a list"),
    "an argument of nobody's": (fact("made_with", to={"x": 1}), "made_with.chunk is missing"),
    "a chunk of 2^40": (fact("made_with", "chunk", to=2**40), "take [0-9,]* bytes for 1 row"),
    "half a chunk": (fact("made_with", "chunk", to=8.5), "chunk must be a whole number, got 8.5"),
    "no chunk": (fact("made_with", "chunk", to=0), "chunk must be at least 1, got 0"),
    "another chunk": (
        fact("made_with", "chunk", to=4),
        "of a cache with chunk 8, but this cache has 4",
    ),
    "a chunk that is true": (fact("made_with", "chunk", to=True), "chunk must be a whole number"),
    "other positions": (fact("made_with", "positions", to="round"), "'rolling' or 'original'"),
    "an endless origin": (fact("made_with", "origin", to=math.inf), "origin must be a whole num"),
    "a seed below zero": (fact("seed", to=-1), "seed must be at least 0, got -1"),
    "a token that is none": (fact("last", to=[math.nan]), r"last\[0\] must be a whole number"),
    "a token nobody knows": (
        fact("last", to=[61]),
        r"last\[0\] must be a token id from 0 to 60, got 61",
    ),
    "two last tokens": (fact("last", to=[1, 2]), "last must have 1 entries, got 2"),
    "no row": (fact("rows", to=[]), "last must have 0 entries, got 1"),
    "a row that is none": (fact(*ROW, to=None), "row must be an object, got none"),
    "one row more": (fact("rows", to=[{}, {}]), "last must have 2 entries, got 1"),
    "endless columns": (fact(*ROW, "columns", to=math.inf), "columns must be a whole number"),
    "tokens below zero": (fact(*ROW, "seen", to=-5), "seen must be at least 0, got -5"),
    "tokens seen as a list": (fact(*ROW, "seen", to=[-5]), "seen must be .* got a list of 1"),
    "more tokens than columns": (fact(*ROW, "seen", to=SEEN + 8), "seen must be at most columns"),
    "a tail that is full": (fact(*ROW, "waiting", to=8), "waiting must be at most 7, got 8"),
    "a tail of another size": (fact(*ROW, "waiting", to=4), "waiting is 4, which is impossible"),
    "a longer stream": (fact(*ROW, to={"seen": 2**62}), "columns is missing"),
    "lengths of one layer": (fact(*ROW, "lengths", to=[[4, 20]]), "lengths must have 2 entries"),
    "a pool too full": (fact(*ROW, "lengths", 1, 1, to=21), "must be at most 20, got 21"),
    "another length": (fact(*ROW, "lengths", 1, 1, to=19), "row 0: layer 1: keys must have"),
    "half an end": (fact(*ROW, "ended", to=0.5), "ended must be true or false, got 0.5"),
    "no keys": (without(1, "0.1.keys"), "row 0: layer 1: keys is missing"),
    "no generator": (without(1, "generator"), "generator is missing"),
    "no logits": (without(1, "logits"), "logits is missing"),
    "logits that are none": (number("logits", 0, 7, to=math.nan), "logits has numbers from which"),
    "endless logits": (
        number("logits", 0, 7, to=math.inf),
        "logits has numbers from which no token",
    ),
    "logits of nothing": (
        number("logits", 0, to=-math.inf),
        "logits has numbers from which no token",
    ),
    "logits of others": (tensor("logits", lambda t: t[:, :-1]), r"logits must be .* got \[1, 60\]"),
    "logits in words": (tensor("logits", lambda t: t.long()), "logits must .* of torch.int64"),
    "half a generator": (tensor("generator", lambda t: t[:99]), r"generator must be .* got \[99\]"),
    "no generator's state": (
        number("generator", slice(None), to=255),
        ("generator is not the state"),
    ),
    "keys that are values": (
        tensor("0.0.keys", lambda t: t.transpose(2, 3)),
        r"row 0: layer 0: keys must have the shape \[1, 2, 32, 16\], got \[1, 2, 16, 32\]",
    ),
    "keys in halves": (tensor("0.0.keys", lambda t: t.half()), "keys must be float32, got float"),
    "a head less": (
        tensor("0.0.a", lambda t: t[:, :1]),
        r"a must have the shape .* got \[1, 1, 32\]",
    ),
    "a slot more": (
        tensor("0.0.b", lambda t: torch.cat([t, t[:, :, :1]], 2)),
        "b must have the shape",
    ),
    "a place below -1": (number("0.0.position", 0, 0, 2, to=-2), "position has places"),
    "a place of the future": (number("0.0.position", 0, 1, 3, to=2**62), "position has places"),
    "a place twice": (number("0.0.position", 0, 0, 9, to=190), "position does not rise"),
    "a tail elsewhere": (number("0.0.position", 0, 0, 25, to=0), "position does not rise"),
    "an endless weight": (number("0.0.a", 0, 0, 0, to=math.inf), "a has numbers that cannot"),
    "a weight that is none": (number("0.1.b", 0, 1, 5, to=math.nan), "b has numbers that cannot"),
    "weight in the tail": (number("0.0.a", 0, 0, 26, to=1.0), "a is not 0 in the slots for new"),
    "a key that is none": (number("0.0.keys", 0, 0, 0, 0, to=math.nan), "keys has numbers that"),
    "an endless value": (number("0.1.values", 0, 0, 9, 0, to=math.inf), "values has numbers that"),
    "a master that is none": (number("0.0.masters", 0, 0, 0, 0, to=math.nan), "masters has numb"),
    "a layer too many": (
        lambda facts, tensors: tensors.update({"0.2.keys": torch.zeros(3)}),
        "'2.keys' does not belong to a layer",
    ),
    "a tensor of nobody's": (
        lambda facts, tensors: tensors.update(weights=torch.zeros(3)),
        "a session has no tensor 'weights'",
    ),
    "a tensor by another name": (
        lambda facts, tensors: tensors.update({"0.00.keys": tensors.pop("0.0.keys")}),
        "'00.keys' does not belong to a layer",
    ),
    "mass that nobody asked for": (
        lambda facts, tensors: tensors.update({"0.0.mass": tensors["0.0.a"]}),
        "this layer has no tensor 'mass'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_stream_can_have_is_refused_by_its_name(llama, files, tmp_path, name):
    change, sentence = WRONG[name]
    facts, tensors = files(llama, POLICIES[0])
    change(facts, tensors)
    write(tmp_path / "file", facts, tensors)
    refused(llama, tmp_path / "file", sentence)


REMEMBERED = [
    (3, "settled", 10**6),
    (2, "came", -1),
    (2, "came", 2**40),
    (2, "a", math.nan),
    (2, "b", math.inf),
    (5, "sum", math.nan),
    (5, "away", math.inf),
    (6, "pairs", 999),
    (6, "pairs", -2),
    (6, "mu", -1.0),
    (6, "delta", math.nan),
    (6, "count", math.inf),
    (6, "centre", math.nan),
    (6, "born", -1),
    (6, "samples", 999),
    (7, "level", 63),
    (7, "level", -2),
    (8, "bucket", 2**40),
    (8, "came", -1),
    (8, "longest", math.nan),
]


@pytest.mark.parametrize(("policy", "name", "to"), REMEMBERED)
def test_what_a_pool_cannot_remember_is_refused_by_its_name(
    llama, files, tmp_path, policy, name, to
):
    facts, tensors = files(llama, POLICIES[policy])
    (key,) = (k for k in tensors if k.startswith("0.1.state.") and k.endswith(f".{name}"))
    tensors[key].flatten()[0] = to
    write(tmp_path / "file", facts, tensors)
    refused(llama, tmp_path / "file", f"row 0: layer 1: in the state of the pool .*, .*{name}")


@pytest.mark.parametrize("name", ["mass", "queries"])
def test_sums_and_queries_that_are_no_numbers_are_refused(llama, files, tmp_path, name):
    facts, tensors = files(llama, POLICIES[4])
    tensors[f"0.0.{name}"].flatten()[0] = math.nan
    write(tmp_path / "file", facts, tensors)
    refused(llama, tmp_path / "file", f"row 0: layer 0: {name} has numbers that")


@pytest.mark.parametrize("name", ["mask", "numerator", "denominator"])
@pytest.mark.parametrize("to", [math.nan, 0.25])
def test_weights_that_attention_would_read_otherwise_are_refused(llama, files, tmp_path, name, to):
    facts, tensors = files(llama, POLICIES[8])
    tensors[f"0.1.{name}"][0, 1, 4] = to
    write(tmp_path / "file", facts, tensors)
    refused(llama, tmp_path / "file", f"row 0: layer 1: {name} does not match a and b")


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        ({"chunk": 2**40}, "a chunk of 1,099,511,627,776 before the first token"),
        ({"origin": 2**60}, "origin must be at most 9007199254740992"),
    ],
)
def test_a_stream_without_a_token_makes_no_slots_of_any_size(llama, tmp_path, made, sentence):
    weir.Stream(llama, "dense").save(tmp_path / "file")
    facts, tensors = read(tmp_path / "file")
    facts["made_with"] |= made
    write(tmp_path / "file", facts, tensors)
    refused(llama, tmp_path / "file", sentence)


def test_no_tensor_is_copied_out_of_a_file_that_is_refused(llama, files, tmp_path):
    """The file has slots of 80 MB, and is for a cache of a few kilobytes."""
    facts, tensors = files(llama, POLICIES[0])
    for name in ("keys", "values"):
        tensors[f"0.1.{name}"] = torch.zeros(1, 2, 32 * 10_000, 16)
    write(tmp_path / "file", facts, tensors)
    del tensors

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["RssAnon"].split()[0]) * 1024

    before = resident()
    refused(
        llama,
        tmp_path / "file",
        r"row 0: layer 1: keys must have the shape .* got \[1, 2, 320000, 16\]",
    )
    assert resident() - before < 20e6


# --- random changes anywhere


JUNK = st.one_of(
    st.sampled_from([None, True, -1, 0, 1, 7, 8, 9, 2**31, 2**62, 2**64, 10**400, 0.5, -0.0]),
    st.sampled_from([math.inf, -math.inf, math.nan, "", "x", "1", [], {}, [0], [[0]], {"x": 1}]),
    st.sampled_from(["dense", "sink(4)", "reservoir(99999999999)", "\ud800", "full", "original"]),
    st.integers(-300, 300),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return each container in the facts with each of its keys."""
    if isinstance(value, dict):
        keys: Any = list(value)
    elif isinstance(value, list):
        keys = range(len(value))
    else:
        return []
    return [(value, key) for key in keys] + [it for key in keys for it in places(value[key])]


def change_a_fact(draw: Any, facts: Facts) -> None:
    holder, key = draw(st.sampled_from(places(facts)))
    what = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
    if what == "replace":
        holder[key] = draw(JUNK)
    elif what == "remove":
        del holder[key]
    elif isinstance(holder, dict):
        holder[draw(st.sampled_from(["x", "seen", "keys"]))] = draw(JUNK)
    else:
        holder.append(draw(JUNK))


def change_a_tensor(draw: Any, tensors: Tensors) -> None:
    name = draw(st.sampled_from(sorted(tensors)))
    other = draw(st.sampled_from(sorted(tensors)))
    t = tensors[name]
    what = draw(st.sampled_from([*["number"] * 8, "swap", "remove", "rename", "shape", "dtype"]))
    if what == "number" and t.numel():
        # A value from another place of the file is often the hardest to recognize as wrong.
        values = [-1, 0, 1, 2, 7, 24, 202, 203, 2**30, 2**62, -(2**62), math.nan, math.inf, -0.5]
        to = draw(st.sampled_from([*values, -math.inf, 1e30, 1e-30, float(t.flatten()[-1])]))
        if not t.is_floating_point():
            to = int(max(-(2.0**62), min(2.0**62, to))) if math.isfinite(to) else -7
            to = to % 256 if t.dtype == torch.uint8 else to % 2 if t.dtype == torch.bool else to
        elif t.dtype != torch.float64 and math.isfinite(to):
            to = max(-3e38, min(3e38, to))
        index = draw(st.integers(0, t.numel() - 1))
        count = draw(st.sampled_from([1, 1, 1, 5, t.numel()]))
        t.view(-1)[index : index + count] = to
    elif what == "swap":
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif what == "remove":
        del tensors[name]
    elif what == "rename":
        tensors[draw(st.sampled_from(["0.0.x", "1.0.keys", "0.9.a", "x", "-1.0.a"]))] = t
    elif what == "shape":
        shapes = [t[None], t.flatten(), t[..., :-1], torch.cat([t, t], dim=-1), t.transpose(0, -1)]
        tensors[name] = draw(st.sampled_from(shapes)).contiguous()
    else:
        tensors[name] = t.to(draw(st.sampled_from([torch.float64, torch.int64, torch.uint8])))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25)
@given(data=st.data())
def test_whatever_a_file_says_a_stream_goes_on_or_a_sentence_says_why_not(
    llama, files, tmp_path, policy, data
):
    batch = data.draw(st.sampled_from([1, 1, 2]))
    facts, tensors = files(llama, policy, batch)
    for _ in range(data.draw(st.integers(1, 2))):
        if data.draw(st.booleans()):
            change_a_fact(data.draw, facts)
        else:
            change_a_tensor(data.draw, tensors)
    path = tmp_path / "file"
    try:
        write(path, facts, tensors)
    except UnicodeEncodeError:
        return
    try:
        stream = weir.Stream.restore(llama, path)
    except WeirError as error:
        said = str(error)
        assert said.startswith(str(path)) and "\n" not in said and len(said) < 500
        return
    more = torch.arange(30)[None].expand(stream.cache.batch or 1, -1)
    try:
        stream.feed(more)
        stream.score(more)
    except NotFiniteError:
        return  # the numbers are finite, but so large that the model's are not
    if more.shape[0] == 1:
        list(stream.generate(5))
    for layer in (0, 1):
        stream.slots(layer)
    stream.save(path)
    assert weir.Stream.restore(llama, path).seen == stream.seen


def test_a_file_being_written_is_not_cleared_by_the_next_write(tmp_path):
    path = tmp_path / "session.weir"
    with replace_atomically(path) as slow:
        slow.write_text("slow")
        with replace_atomically(path) as quick:
            quick.write_text("quick")
        assert slow.read_text() == "slow"
    assert path.read_text() == "slow"
    assert [each.name for each in tmp_path.iterdir()] == ["session.weir"]
