"""Sessions in any order of turns, forks, rewinds, deletions and killed servers, and an oracle.

The oracle has lists of turns in plain Python. Its answers are from a stream that reads the whole
history without a server. A server that is killed leaves its files as they are at that moment, and
the next server opens a copy of them. `WEIR_FUZZ=100` runs 100 such random courses of events.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from servers import POLICY, make_model, make_tokenizer, serving

from weir import Stream
from weir.serve import Engine, EngineClient, Limits
from weir.serve.api import Keys
from weir.serve.sessions.disk_turns import DiskTurns
from weir.serve.sessions.store import SessionStore
from weir.serve.sessions.store_format import StoreFormat

OWNERS = ("wk-alice-0123456789", "wk-bob-0123456789")
KEYS = Keys([hashlib.sha256(key.encode()).hexdigest() for key in OWNERS])
NAMES = ("a", "b", "c")
SAID = ("Hi", "And then?", "Go on, at length, so that some of it has to go: " + "x" * 30)
TOKENS = 3
TOKENIZER = make_tokenizer()
MODEL = make_model(TOKENIZER)

History = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Told:
    """A turn whose end a client has seen. `history` has all messages, the answer last."""

    id: str
    parent: str | None
    history: History


@dataclass
class Owner:
    """The sessions and turns that a client believes the server has."""

    key: str
    sessions: dict[str, list[Told]] = field(default_factory=dict)

    def line(self, session: str, turn: str) -> list[Told]:
        """The turns of a session that lead to one of its turns, oldest first."""
        turns = {told.id: told for told in self.sessions[session]}
        path = []
        at: str | None = turn
        while at in turns:  # a parent in another session, with the same history, is left out
            path.append(turns[at])
            at = turns[at].parent
        return path[::-1]


def as_messages(history: History) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in history]


@cache
def answer_to(history: History) -> str:
    """What the model answers, by a stream that reads the whole history."""
    text = TOKENIZER.apply_chat_template(
        as_messages(history), tokenize=False, add_generation_prompt=True
    )
    ids = TOKENIZER(text, add_special_tokens=False, return_tensors="pt").input_ids
    stream = Stream(MODEL, POLICY, chunk=4)
    stream.feed(ids)
    said: str = TOKENIZER.decode(list(stream.generate(max_new_tokens=TOKENS)))
    return said.strip()


class Machine(RuleBasedStateMachine):
    """One server at a time, and two owners of sessions."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.lives = 0
        self.owners = [Owner(key) for key in OWNERS]
        self.open()
        for said in SAID[:2]:
            self.turn(who=0, name="a", said=said, back=0)
        self.fork(first=0, at=0, back=0, new="d")

    def open(self) -> None:
        self.running = contextlib.ExitStack()
        data = self.folder / str(self.lives)
        disk = DiskTurns(data, StoreFormat.of(MODEL, POLICY, 4))
        store = self.running.enter_context(SessionStore(disk))
        engine = Engine(MODEL, POLICY, 2, store, chunk=4, queue=8)
        engine_client = EngineClient(engine, TOKENIZER, "small", Limits())
        self.server = self.running.enter_context(serving(engine_client, KEYS))

    def ask(self, owner: Owner, method: str, path: str, body: Any = None, **headers: str) -> Any:
        return httpx.request(
            method,
            f"{self.server.url}{path}",
            json=body,
            headers={"authorization": f"Bearer {owner.key}", **headers},
            timeout=60,
        )

    def forward_lock_of(self, owner: Owner, session: str) -> list[dict[str, Any]]:
        answer = self.ask(owner, "GET", f"/v1/sessions/{session}/turns")
        found: list[dict[str, Any]] = answer.json()["data"]
        return found

    def pick(self, first: int, at: int, back: int) -> tuple[Owner, str, str]:
        """An owner who has sessions, one of these sessions, and one of its turns."""
        owner = self.owners[first]
        if not owner.sessions:
            owner = self.owners[1 - first]
        name = sorted(owner.sessions)[at % len(owner.sessions)]
        turns = owner.sessions[name]
        return owner, name, turns[-1 - back % len(turns)].id

    @rule(
        who=st.sampled_from([0, 1]),
        name=st.sampled_from(NAMES),
        said=st.sampled_from(SAID),
        back=st.integers(0, 3),
    )
    def turn(self, who: int, name: str, said: str, back: int) -> None:
        """A turn that continues one of a session's turns, or begins the session."""
        owner = self.owners[who]
        turns = owner.sessions.get(name, [])
        before = turns[-1 - back % len(turns)].history if turns else ()
        history: History = (*before, ("user", said))
        body = {
            "model": "small",
            "messages": as_messages(history),
            "max_tokens": TOKENS,
            "temperature": 0,
        }
        path = "/v1/chat/completions"
        answer = self.ask(owner, "POST", path, body, **{"x-session-id": name}).json()
        content = answer["choices"][0]["message"]["content"]
        assert content.strip() == answer_to(history)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 0) == bool(before)
        newest = self.forward_lock_of(owner, name)[-1]
        # It can continue any turn with the same history, also one of another session.
        known = (told for each in owner.sessions.values() for told in each)
        same = {told.id for told in known if told.history == before}
        assert newest["parent"] in same or (newest["parent"] is None and not before)
        told = Told(newest["id"], newest["parent"], (*history, ("assistant", content)))
        owner.sessions[name] = [*turns, told]

    @precondition(lambda self: any(owner.sessions for owner in self.owners))
    @rule(
        first=st.sampled_from([0, 1]),
        at=st.integers(0, 5),
        back=st.integers(0, 3),
        new=st.sampled_from([*NAMES, "d", None]),
    )
    def fork(self, first: int, at: int, back: int, new: str | None) -> None:
        owner, name, turn = self.pick(first, at, back)
        body = {"turn": turn} if new is None else {"turn": turn, "id": new}
        answer = self.ask(owner, "POST", f"/v1/sessions/{name}/fork", body)
        if new in owner.sessions:
            assert answer.status_code == 409
        else:
            owner.sessions[answer.json()["id"]] = owner.line(name, turn)

    @precondition(lambda self: any(owner.sessions for owner in self.owners))
    @rule(first=st.sampled_from([0, 1]), at=st.integers(0, 5), back=st.integers(0, 3))
    def rewind(self, first: int, at: int, back: int) -> None:
        owner, name, turn = self.pick(first, at, back)
        answer = self.ask(owner, "POST", f"/v1/sessions/{name}/rewind", {"turn": turn})
        assert answer.json()["head"] == turn
        owner.sessions[name] = owner.line(name, turn)

    @precondition(lambda self: any(owner.sessions for owner in self.owners))
    @rule(first=st.sampled_from([0, 1]), at=st.integers(0, 5))
    def delete(self, first: int, at: int) -> None:
        owner, name, _ = self.pick(first, at, 0)
        assert self.ask(owner, "DELETE", f"/v1/sessions/{name}").json()["deleted"]
        del owner.sessions[name]

    @precondition(lambda self: any(owner.sessions for owner in self.owners))
    @rule(
        first=st.sampled_from([0, 1]),
        at=st.integers(0, 5),
        verb=st.sampled_from(["fork", "rewind", "turns", "export", ""]),
    )
    def trespass(self, first: int, at: int, verb: str) -> None:
        """Sessions of another owner cannot be told from sessions that do not exist."""
        owner, name, turn = self.pick(first, at, 0)
        other = next(each for each in self.owners if each is not owner)
        body = {"turn": turn} if verb in ("fork", "rewind") else None
        for named in {name, "never"} - set(other.sessions):
            path = f"/v1/sessions/{named}/{verb}".rstrip("/")
            answer = self.ask(other, "GET" if body is None else "POST", path, body)
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == "there is no such session"

    @rule()
    def restart(self) -> None:
        self.running.close()
        self.open()

    @rule()
    def kill(self) -> None:
        """Copy all files as they are at this moment, and open the copy with another server."""
        here = self.folder / str(self.lives)
        self.lives += 1
        shutil.copytree(here, self.folder / str(self.lives))
        self.running.close()
        self.open()

    @invariant()
    def stands(self) -> None:
        """What the server tells is what the oracle has."""
        for owner in self.owners:
            told = self.ask(owner, "GET", "/v1/sessions").json()["data"]
            found = {each["id"]: (each["turns"], each["head"]) for each in told}
            assert found == {
                name: (len(turns), turns[-1].id) for name, turns in owner.sessions.items()
            }
            for name, turns in owner.sessions.items():
                kept = self.forward_lock_of(owner, name)
                assert [(each["id"], each["parent"]) for each in kept] == [
                    (turn.id, turn.parent) for turn in turns
                ]
                assert kept[-1]["messages"] == as_messages(turns[-1].history[-2:])
                current = {turn.id for turn in owner.line(name, turns[-1].id)}
                assert {each["id"] for each in kept if each["current"]} == current

    def teardown(self) -> None:
        if hasattr(self, "running"):
            self.running.close()
            shutil.rmtree(self.folder)


Machine.TestCase.settings = settings(
    max_examples=int(os.environ.get("WEIR_FUZZ", "2")),
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # shrinking a failure would take minutes
    suppress_health_check=list(HealthCheck),
)
TestSessions = pytest.mark.slow(Machine.TestCase)
