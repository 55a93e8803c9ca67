"""Saved streams continue bit-identically, and a damaged file is never restored."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from roundings import close_runs
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

import weir
from weir.errors import WeirError
from weir.policies.registry import NAMED
from weir.stream import session

pytestmark = pytest.mark.thinned(3, least=2)

POLICY = "streaming_llm(24)"
PARTLY_FULL = 203
"""The number of tokens after which a tail of 8 slots holds 3."""


@pytest.fixture
def saved(llama, ids, tmp_path) -> Path:
    """Save a session in a separate folder."""
    stream = weir.Stream(llama, POLICY, chunk=8)
    stream.feed(ids(1, PARTLY_FULL))
    folder = tmp_path / "sessions"
    folder.mkdir()
    stream.save(folder / "one.safetensors")
    return folder / "one.safetensors"


def same(one: weir.Stream, other: weir.Stream, more: Tensor) -> bool:
    """Whether two streams continue bit-identically, beginning with the next token."""
    last = one.last == other.last
    drawn = True
    if more.shape[0] == 1:
        drawn = list(one.generate(30, temperature=2.0)) == list(other.generate(30, temperature=2.0))
    scores = [stream.score(more[:, :40]) for stream in (one, other)]
    logits = [stream.feed(more[:, 40:], all_logits=True) for stream in (one, other)]
    held = [stream.slots(0) for stream in (one, other)]
    slots = all(
        torch.equal(*(getattr(it, name) for it in held))
        for name in ("position", "keys", "values", "a", "b", "pool")
    )
    return last and drawn and torch.equal(*scores) and torch.equal(*logits) and slots


# --- continuing


@pytest.mark.parametrize("length", [1, 8, 31, PARTLY_FULL, 208])
@pytest.mark.parametrize("policy", [POLICY, "window(20)", "dense"])
def test_a_restored_stream_goes_on_bit_for_bit(llama, ids, tmp_path, policy, length):
    stream = weir.Stream(llama, policy, chunk=8, seed=3)
    stream.feed(ids(1, length))
    list(stream.generate(5, temperature=2.0))  # so that the state of the generator has changed
    stream.save(tmp_path / "session")
    restored = weir.Stream.restore(llama, tmp_path / "session")
    assert (restored.seen, restored.seed, str(restored.policy)) == (length + 5, 3, policy)
    assert same(stream, restored, ids(1, 80, seed=1))


ALIKE = {"attention_matching", "dense", "h2o", "kcenter", "keydiff", "pyramidkv", "snapkv", "tova"}
"""Policies whose pools have no state beyond their slots, or the same kind of state as others."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE))
        for name in sorted(set(NAMED) - {"recompute", "kvzip"})
    ],
)
@pytest.mark.thinned(9)
def test_every_named_policy_can_be_saved_and_goes_on_bit_for_bit(llama, ids, tmp_path, name):
    stream = weir.Stream(llama, name, chunk=8)
    stream.feed(ids(1, 2 * PARTLY_FULL))
    stream.save(tmp_path / "session")
    assert same(stream, weir.Stream.restore(llama, tmp_path / "session"), ids(1, 80, seed=1))


def test_a_batch_in_bfloat16_goes_on_bit_for_bit(fresh_llama, ids, tmp_path):
    model = fresh_llama().to(torch.bfloat16)
    stream = weir.Stream(model, POLICY, chunk=8)
    stream.feed(ids(3, PARTLY_FULL))
    stream.save(tmp_path / "session")
    restored = weir.Stream.restore(model, tmp_path / "session")
    assert restored.slots(0).keys.dtype == torch.bfloat16
    assert same(stream, restored, ids(3, 80, seed=1))


@pytest.mark.parametrize(
    "made",
    [{"positions": "original"}, {"prefill": "full"}, {"origin": 4_000_000}, {"chunk": 64}],
)
def test_a_restored_stream_is_made_as_the_saved_one_was(llama, ids, tmp_path, made):
    stream = weir.Stream(llama, POLICY, **made)
    stream.feed(ids(1, PARTLY_FULL))
    stream.save(tmp_path / "session")
    assert same(stream, weir.Stream.restore(llama, tmp_path / "session"), ids(1, 80, seed=1))


def test_a_stream_that_was_fed_nothing_can_be_saved(llama, ids, tmp_path):
    weir.Stream(llama, POLICY, seed=4).save(tmp_path / "session")
    restored = weir.Stream.restore(llama, tmp_path / "session")
    assert restored.score(ids(1, 9))[0, 0].isnan()


def test_saving_changes_nothing(llama, ids, tmp_path):
    stream, other = (weir.Stream(llama, POLICY, chunk=8) for _ in range(2))
    for it in (stream, other):
        it.feed(ids(1, PARTLY_FULL))
    stream.save(tmp_path / "session")
    assert same(stream, other, ids(1, 80, seed=1))


def test_what_becomes_of_the_file_is_nothing_to_the_restored_stream(llama, ids, saved):
    undisturbed = weir.Stream.restore(llama, saved)
    stream = weir.Stream.restore(llama, saved)
    with saved.open("rb+") as file:
        file.write(b"\xff" * saved.stat().st_size)
    assert same(stream, undisturbed, ids(1, 80, seed=1))


KILLED = """
import sys, torch, weir
from transformers import LlamaForCausalLM
folder, path = sys.argv[1:]
model = LlamaForCausalLM.from_pretrained(folder).eval()
text = torch.load(folder + "/text.pt")
stream = weir.Stream(model, "streaming_llm(24)", chunk=8, seed=3)
stream.feed(text[:, :203])
for token in stream.generate(10_000_000, temperature=2.0):
    stream.save(path)
    print(stream.seen, flush=True)
"""


@pytest.mark.slow
def test_a_stream_that_was_killed_goes_on_bit_for_bit_in_a_new_process(fresh_llama, ids, tmp_path):
    fresh_llama().save_pretrained(tmp_path)
    torch.save(ids(1, PARTLY_FULL), tmp_path / "text.pt")
    path = tmp_path / "session.safetensors"
    source = str(Path(weir.__file__).parents[1])
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), str(path)],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    # It saves without pause, so there is one whole file whenever it is killed.
    said = [int(child.stdout.readline()) for _ in range(30)]
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()

    model = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    restored = weir.Stream.restore(model, path)
    assert restored.seen >= said[-1] > PARTLY_FULL
    uninterrupted = weir.Stream(model, POLICY, chunk=8, seed=3)
    uninterrupted.feed(ids(1, PARTLY_FULL))
    list(uninterrupted.generate(restored.seen - PARTLY_FULL, temperature=2.0))
    assert same(restored, uninterrupted, ids(1, 80, seed=1))


def test_one_row_of_a_batch_can_be_saved_and_goes_on_as_in_the_batch(llama, ids, tmp_path):
    batch = weir.Stream(llama, POLICY, chunk=8)
    batch.feed(ids(3, PARTLY_FULL))
    batch.save(tmp_path / "row", row=1)
    alone = weir.Stream.restore(llama, tmp_path / "row")
    assert (alone.seen, alone.last) == (PARTLY_FULL, batch.last[1:2])
    for name in ("position", "keys", "values", "a", "b", "pool"):
        one, all_rows = (getattr(it.slots(0), name) for it in (alone, batch))
        assert torch.equal(one, all_rows[1:2] if all_rows.shape[0] == 3 else all_rows)
    more = ids(3, 40, seed=1)
    together = batch.feed(more, all_logits=True)[1:2]
    close_runs(alone.feed(more[1:2], all_logits=True), together, llama)
    with pytest.raises(WeirError, match="row 3 does not exist"):
        batch.save(tmp_path / "other", row=3)


@pytest.mark.parametrize("policy", [POLICY, "dense", "recompute(24, sinks=2)"])
def test_a_copied_stream_goes_on_by_itself(llama, ids, policy):
    stream, undisturbed = (weir.Stream(llama, policy, chunk=8, seed=3) for _ in range(2))
    for it in (stream, undisturbed):
        it.feed(ids(1, PARTLY_FULL))
        list(it.generate(5, temperature=2.0))
    copied = copy.deepcopy(stream)
    assert copied.model is llama
    copied.feed(ids(1, 50, seed=2))
    copies = [copy.deepcopy(stream), undisturbed]
    drawn = [list(it.generate(30, temperature=2.0)) for it in (stream, *copies)]
    assert drawn[0] == drawn[1] == drawn[2]
    logits = [it.feed(ids(1, 30, seed=1), all_logits=True) for it in (stream, *copies)]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_a_stream_copied_with_its_model_is_a_stream_of_the_copy(fresh_llama, ids):
    model = fresh_llama()
    stream = weir.Stream(model, POLICY, chunk=8)
    stream.feed(ids(1, PARTLY_FULL))
    other, copied = copy.deepcopy((model, stream))
    assert copied.model is other is not model
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    more = ids(1, 30, seed=1)
    assert torch.equal(copied.feed(more), 2 * stream.feed(more))


# --- damaged and foreign files


@pytest.mark.parametrize("path", [None, 5, b"session"])
def test_what_is_no_name_of_a_file_is_refused(llama, ids, path):
    stream = weir.Stream(llama, POLICY)
    stream.feed(ids(1, 5))
    for call in (stream.save, lambda path: weir.Stream.restore(llama, path)):
        with pytest.raises(WeirError, match="a session must be the path of a file, got "):
            call(path)


def test_a_session_is_restored_into_a_model_only(saved):
    with pytest.raises(WeirError, match="works with transformers models, got a str"):
        weir.Stream.restore("nano", saved)


def refused(model, path: Path, sentence: str | None = None, **more: str) -> str:
    with pytest.raises(WeirError, match=sentence) as error:
        weir.Stream.restore(model, path, **more)
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_file_cut_short_anywhere_is_refused(llama, saved):
    whole = saved.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    lengths = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1}
    for length in sorted(lengths | set(range(0, len(whole), len(whole) // 40))):
        saved.write_bytes(whole[:length])
        refused(llama, saved)
    saved.write_bytes(whole + b"\0")
    refused(llama, saved)
    saved.write_bytes(whole)
    assert weir.Stream.restore(llama, saved).seen == PARTLY_FULL


def test_a_single_bit_that_has_changed_is_noticed_wherever_it_is(llama, saved):
    whole = bytearray(saved.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(0)
    places = [draw.randrange(header) for _ in range(150)]
    places += [draw.randrange(header, len(whole)) for _ in range(150)]
    for place in places:
        bit = 1 << draw.randrange(8)
        whole[place] ^= bit
        saved.write_bytes(whole)
        refused(llama, saved)
        whole[place] ^= bit
    saved.write_bytes(whole)
    assert weir.Stream.restore(llama, saved).seen == PARTLY_FULL


@pytest.mark.parametrize("holds", [b"", b"hello", b"\0" * 100, b"\xff" * 100, b"{}" * 50])
def test_a_file_of_something_else_is_refused(llama, tmp_path, holds):
    (tmp_path / "other").write_bytes(holds)
    refused(llama, tmp_path / "other", "damaged or not a session of weir")


def test_safetensors_of_others_are_refused(llama, tmp_path):
    save_file({"weight": torch.zeros(3)}, tmp_path / "other", metadata={"format": "pt"})
    refused(llama, tmp_path / "other", "not a session of weir")
    save_file({"weight": torch.zeros(3)}, tmp_path / "bare")
    refused(llama, tmp_path / "bare", "not a session of weir")


def test_what_is_no_file_is_refused(llama, tmp_path):
    refused(llama, tmp_path / "nowhere", "the session file")
    (tmp_path / "folder").mkdir()
    refused(llama, tmp_path / "folder", "is a folder, not a session")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    refused(llama, tmp_path / "pipe", "is a pipe, not a session")


@pytest.mark.parametrize("facts", ["[]", "7", "null", '{"format": 1}', "{", "[" * 100_000])
@pytest.mark.thinned(1)
def test_facts_that_are_no_facts_are_refused(llama, tmp_path, facts):
    save_file({"weight": torch.zeros(3)}, tmp_path / "odd", metadata={session.KEY: facts})
    refused(llama, tmp_path / "odd")


def rewrite(path: Path, **changed: Any) -> None:
    """Write the same session again with changed facts."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()[session.KEY])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    session.write_file(path, {**facts, **changed}, tensors)


@pytest.mark.parametrize("number", [4, 6])
def test_a_session_of_another_format_is_refused_by_its_number(llama, saved, number):
    rewrite(saved, format=number)
    refused(llama, saved, f"session format {number}, but this version of weir reads 5")


def test_a_session_of_another_model_is_refused_and_says_what_differs(fresh_llama, llama, saved):
    assert "layers 2, here 1" in refused(fresh_llama(layers=1), saved, "another model")
    assert "vocabulary 61, here 62" in refused(fresh_llama(vocab_size=62), saved)
    assert "dtype float32, here bfloat16" in refused(fresh_llama().to(torch.bfloat16), saved)
    assert refused(fresh_llama(seed=1), saved).count("here") == 1  # the weights, nothing else
    # The same model as the saved one.
    assert weir.Stream.restore(fresh_llama(), saved).seen == PARTLY_FULL


def test_models_are_told_apart_by_any_of_their_weights(fresh_llama, llama, saved):
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"):
        model = fresh_llama()
        with torch.no_grad():
            model.get_parameter(name).flatten()[0] += 0.5
        refused(model, saved, "weights")


def test_a_session_of_another_policy_is_refused_where_one_is_expected(llama, saved):
    refused(
        llama, saved, r"has the policy streaming_llm\(24\), not window\(24\)", policy="window(24)"
    )
    for written in ("streaming_llm(24)", "streaming_llm(budget=24)", "sink(4) | recent(20)"):
        assert weir.Stream.restore(llama, saved, policy=written).seen == PARTLY_FULL


def test_a_policy_that_is_not_known_is_named(llama, saved):
    rewrite(saved, policy="streaming_alm(24)")
    refused(llama, saved, "a policy that this version of weir does not know.*'streaming_alm'")


def test_a_name_that_stands_for_others_by_now_goes_on_under_those_it_stood_for(
    llama, ids, tmp_path
):
    path = tmp_path / "session"
    meant = weir.policy("weir(budget=24, sinks=5)")
    stream = weir.Stream(llama, meant, chunk=8)
    stream.feed(ids(1, PARTLY_FULL))
    stream.save(path)
    rewrite(path, policy="weir(budget=24)")  # as if the name had meant five sinks when it was saved
    restored = weir.Stream.restore(llama, path)
    refused(llama, path, "which weir.budget=24. stood for.*, not weir", policy="weir(budget=24)")
    assert restored.policy == weir.policy(meant.stands_for)
    assert same(restored, stream, ids(1, 80))
    rewrite(path, policy="weir(budget=24, sinks=5)")
    assert str(weir.Stream.restore(llama, path).policy) == "weir(budget=24, sinks=5)"
    rewrite(path, pools="sink(4) | recent(20)")
    refused(llama, path, "row 0: this row is of a cache with policy")


# --- saving


def test_a_session_says_what_it_is(saved):
    facts = session.SessionFile(saved).facts
    assert (facts["policy"], facts["format"]) == (POLICY, 5)
    assert facts["made_with"]["chunk"] == 8 and len(facts["last"]) == 1
    assert facts["model"]["kind"] == "llama"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("nowhere/session", "No such file"),
        ("file/session", "Not a directory"),
        (".", "Is a direct"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(llama, ids, tmp_path, place, reason):
    (tmp_path / "file").write_text("here")
    stream = weir.Stream(llama, POLICY)
    stream.feed(ids(1, 9))
    with pytest.raises(WeirError, match=f"cannot write the session .*{reason}"):
        stream.save(tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_without_permission_is_named(llama, ids, tmp_path):
    stream = weir.Stream(llama, POLICY)
    stream.feed(ids(1, 9))
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root would have every permission
    try:
        with pytest.raises(WeirError, match="Permission denied"):
            stream.save(tmp_path / "session")
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


def broken(error: BaseException) -> Callable[..., None]:
    def fail(*args: object, **more: object) -> None:
        if len(args) > 1 and isinstance(args[1], str):
            Path(args[1]).write_bytes(b"half of a ses")
        raise error

    return fail


@pytest.mark.parametrize("where", ["save_file", "os.fsync", "os.replace"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("disk"), KeyboardInterrupt()]
)
def test_an_interrupted_save_leaves_the_old_file_whole_and_nothing_beside_it(
    llama, ids, saved, monkeypatch, where, error
):
    before = saved.read_bytes()
    stream = weir.Stream.restore(llama, saved)
    stream.feed(ids(1, 30))
    if where == "save_file":
        monkeypatch.setattr(session, "save_file", broken(error))
    else:
        monkeypatch.setattr(session.os, where.partition(".")[2], broken(error))
    with pytest.raises((WeirError, KeyboardInterrupt)) as raised:
        stream.save(saved)
    monkeypatch.undo()
    if not isinstance(error, KeyboardInterrupt):
        assert "cannot write the session" in str(raised.value)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
    stream.save(saved)
    assert weir.Stream.restore(llama, saved).seen == PARTLY_FULL + 30
    assert list(saved.parent.iterdir()) == [saved]


class Writer:
    """Another process that is saving to a path, and waits after half of the file."""

    def __init__(self, path: Path) -> None:
        writing, told = os.pipe()
        waiting, self._go = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            save = session.save_file

            def half(tensors: Any, path: Any, metadata: Any) -> None:
                Path(path).write_bytes(b"half of a ses")
                os.write(told, b"!")
                os.read(waiting, 1)
                save(tensors, path, metadata=metadata)

            try:
                session.save_file = half
                session.write_file(path, {"of": "another process"}, {"a": torch.zeros(3)})
                os._exit(0)
            finally:
                os._exit(1)
        os.close(told)
        os.close(waiting)
        assert os.read(writing, 1) == b"!"
        os.close(writing)

    def end(self, killed: bool = False) -> int:
        """Kill the process, or let it continue. Return its exit code, or minus the signal."""
        if killed:
            os.kill(self.pid, signal.SIGKILL)
        else:
            os.write(self._go, b"!")
        os.close(self._go)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


# The child does nothing with threads, which newer versions of Python warn about.
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@forks
def test_the_next_save_clears_what_a_killed_one_left(llama, saved):
    assert Writer(saved).end(killed=True) == -signal.SIGKILL
    others = [saved.parent / name for name in ("one.safetensors.part", "two.abcdefgh.part")]
    for other in others:
        other.mkdir()
    assert len(list(saved.parent.iterdir())) == 4
    stream = weir.Stream.restore(llama, saved)
    stream.save(saved)
    assert set(saved.parent.iterdir()) == {saved, *others}


@forks
def test_a_save_leaves_alone_what_another_process_is_writing(llama, saved):
    stream = weir.Stream.restore(llama, saved)
    other = Writer(saved)
    stream.save(saved)
    assert len(list(saved.parent.iterdir())) == 2
    assert weir.Stream.restore(llama, saved).seen == PARTLY_FULL
    assert other.end() == 0
    assert list(saved.parent.iterdir()) == [saved]
    with safe_open(saved, framework="pt") as file:
        assert json.loads(file.metadata()[session.KEY])["of"] == "another process"


def test_only_files_are_replaced(llama, tmp_path):
    stream = weir.Stream(llama)
    stream.feed([1, 2, 3])
    with pytest.raises(weir.WeirError, match="it exists and is not a regular file"):
        stream.save("/dev/null")
    assert not Path("/dev/null").is_file()


def test_a_model_that_places_tokens_elsewhere_is_another_model(llama, tmp_path):
    stream = weir.Stream(llama, seed=2**70)
    stream.feed([1, 2, 3])
    stream.save(tmp_path / "s.safetensors")
    before = llama.config.rope_parameters
    llama.config.rope_parameters = {**before, "rope_theta": 5e5}
    try:
        with pytest.raises(weir.WeirError, match="another model"):
            weir.Stream.restore(llama, tmp_path / "s.safetensors")
    finally:
        llama.config.rope_parameters = before
