"""Clients of a server under load: the replies they record, and the figures computed from these."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from serve.servers import make_client, serving

from weir.errors import WeirError
from weir_bench.serving.attackers import START, START_REFUSED, Attacker, refused_bodies
from weir_bench.serving.load import Heard, Manner, closed, percentiles, together
from weir_bench.serving.models import words
from weir_bench.serving.part import chosen
from weir_bench.serving.parts.compaction import ASK, Compacting
from weir_bench.serving.parts.peer import Forgetting
from weir_bench.serving.run import PARTS
from weir_bench.serving.server import weir_serves
from weir_bench.serving.talk import ById, Reply, Talk
from weir_bench.serving.wire import Wire

MANNER = Manner(words=1, tokens=5)


@dataclass
class Stand:
    """A stand-in for a server, with the attributes that a run reads."""

    port: int
    memory: int = 1_000_000
    worked: float = 3.0
    running: bool = True


@pytest.fixture(scope="module")
def port():
    with serving(make_client()) as server:
        yield server.port


def reply(asked: float, *arrived: float, tokens: int | None = None) -> Reply:
    return Reply(asked, arrived, len(arrived) if tokens is None else tokens, 3, 9, "text")


def test_a_conversation_goes_on_from_its_answer_and_reads_only_what_is_new(port):
    async def talk() -> list[Reply]:
        one = Talk(port, "small")
        replies = [await one.turn("Hello there", 5), await one.turn("And", 5)]
        one.close()
        return replies

    first, second = asyncio.run(talk())
    assert (first.tokens, second.tokens) == (5, 5)
    assert first.read == first.prompt
    assert second.prompt > first.prompt + 5
    # It reads only what came after the first turn, and the last token of the first answer, which
    # was sampled but never read.
    assert second.read == second.prompt - (first.prompt + 5 - 1)
    assert first.asked < first.arrived[0] <= first.arrived[-1] < second.asked


def test_all_clients_of_a_closed_loop_talk_and_are_counted(port):
    talks = [Talk(port, "small") for _ in range(3)]
    heard = asyncio.run(closed(Stand(port), talks, MANNER, what="three", seconds=0.3))
    assert not heard.errors
    assert len(heard.replies) >= 3
    assert all(len(talk.messages) >= 2 for talk in talks)
    assert heard.seconds == pytest.approx(0.3)
    assert heard.pace > 0
    assert {size for _, size in heard.memory} == {1_000_000}
    facts = json.loads(json.dumps(heard.as_json()))
    assert facts["clients"] == 3
    assert facts["errors"] == 0


def test_what_a_server_refuses_is_an_error_of_the_run_and_not_its_end(port):
    talks = [Talk(port, "another")]
    heard = asyncio.run(closed(Stand(port), talks, MANNER, what="", seconds=0.2))
    assert heard.errors
    assert not heard.replies
    assert heard.pace == 0
    assert "/v1/chat/completions answers 404" in heard.errors[0]


def test_a_server_that_is_not_there_is_an_error_in_one_sentence():
    with pytest.raises(WeirError, match="does not answer"):
        asyncio.run(Talk(9, "model").turn("Hello", 1))


def test_only_what_comes_within_a_run_is_counted_in_it():
    heard = Heard("", 1, [(10.0, 20.0)], [reply(9, 9.5, 11, 12, 21, tokens=8), reply(19, 25)])
    # Two of the first reply's four pieces came within the run, so half of its eight tokens count.
    assert heard.pace == pytest.approx(4 / 10)
    assert heard.between == [1]
    assert heard.first == [6]
    assert heard.third(0).pace == pytest.approx(4 / (10 / 3))
    assert heard.third(2).first == [6]
    assert heard.third(2).pace == 0
    both = together("two", [heard, Heard("", 1, [(30.0, 40.0)], [reply(30, 31, 32)], ["no"])])
    assert both.seconds == 20
    assert both.pace == pytest.approx((4 + 2) / 20)
    assert both.errors == ["no"]
    assert replace(both, worked=24.0).worked_a_token == pytest.approx(24 / (8 + 1 + 2))


def test_processor_time_a_token_is_of_the_looks_within_a_run():
    looks = [(9.0, 1.0), (11.0, 2.0), (15.0, 4.0), (19.0, 8.0), (21.0, 90.0)]
    replies = [reply(9, *(10.5 + n for n in range(9)), tokens=9)]
    heard = Heard("", 1, [(10.0, 20.0)], replies, processor=looks)
    # Between the looks at 11 and 19, eight of the tokens came, for six seconds of processor time.
    assert heard.worked_within == pytest.approx(6 / 8)
    assert heard.third(0).worked_within is None
    assert replace(heard, replies=[]).worked_within is None
    still = replace(heard, processor=[(when, 0.0) for when, _ in looks])
    assert still.worked_within is None


def test_percentiles_are_milliseconds_and_of_nothing_there_are_none():
    assert percentiles([]) == {}
    assert percentiles([0.5]) == {"p50": 500, "p95": 500, "p99": 500}
    many = percentiles([n / 1000 for n in range(1, 101)])
    assert many["p50"] == pytest.approx(50, abs=1)
    assert many["p99"] == pytest.approx(99, abs=1)


def test_who_compacts_asks_for_a_summary_at_four_fifths_and_goes_on_with_it_alone(port):
    async def talk() -> tuple[list[int], Compacting, Reply]:
        one = Compacting(port, "small", window=80)
        lengths = []
        for _ in range(3):
            answer = await one.turn("abcdefgh", 5)
            lengths.append(len(one.messages))
        one.close()
        return lengths, one, answer

    lengths, one, answer = asyncio.run(talk())
    assert one.compactions >= 1
    assert max(lengths) <= 6
    assert ASK not in [message["content"] for message in one.messages]
    assert one.messages[0]["content"].startswith("What was said so far: ")
    assert answer.tokens == 5


def test_who_forgets_begins_again_where_there_is_no_room(port):
    async def talk() -> list[int]:
        one = Forgetting(port, "small", window=70)
        found = []
        for _ in range(3):
            await one.turn("abcdefgh", 5)
            found.append(len(one.messages))
        one.close()
        return found

    assert max(asyncio.run(talk())) < 6


def test_who_talks_by_id_names_what_it_goes_on_from_and_reads_as_little(port):
    async def talk() -> list[Reply]:
        one = ById(port, "small")
        replies = [await one.turn("Hello there", 5), await one.turn("And", 5)]
        one.close()
        return replies

    first, second = asyncio.run(talk())
    assert second.prompt > first.prompt + 5
    assert second.read == second.prompt - (first.prompt + 5 - 1)


def test_a_response_is_heard_as_a_chat_is_and_names_itself(monkeypatch):
    usage = {"input_tokens": 9, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 7}}
    events = [
        (1.0, {"type": "response.created", "response": {"id": "resp_1"}}),
        (2.0, {"type": "response.output_text.delta", "delta": "so"}),
        (3.0, {"type": "response.incomplete", "response": {"id": "resp_1", "usage": usage}}),
    ]

    async def told(wire, path, body):
        for event in events:
            yield event

    monkeypatch.setattr(Wire, "events", told)
    talk = ById(1, "small")
    reply = asyncio.run(talk.turn("And", 5))
    assert replace(reply, asked=0.5) == Reply(0.5, (2.0,), 1, 2, 9, "so")
    assert talk.last == "resp_1"
    events[1:] = []
    with pytest.raises(WeirError, match="has no text"):
        asyncio.run(talk.turn("And", 5))
    events[:] = [(4.0, {"type": "response.failed"})]
    with pytest.raises(WeirError, match="the answer failed"):
        asyncio.run(talk.turn("And", 5))


def test_every_token_of_the_random_models_is_text_of_its_own():
    tokenizer = words(2000)
    assert len(tokenizer) == 2000
    texts = [tokenizer.decode([token]) for token in range(256, 2000)]
    assert len(set(texts)) == len(texts)
    assert all(text.startswith(" ") and text.strip() for text in texts)
    assert tokenizer.decode(tokenizer("Hello, träumer")["input_ids"]) == "Hello, träumer"


def test_without_names_all_parts_are_meant_but_the_soak():
    assert set(PARTS) - set(chosen([])) == {"soak", "attack", "refused"}
    assert chosen(["soak", "disk"]) == ["soak", "disk"]


@pytest.mark.slow
@pytest.mark.parametrize("start", [START, START_REFUSED])
def test_the_attackers_process_finds_its_code(tmp_path: Path, start: str):
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", start, "1", "nano", "0"]
    said = subprocess.check_output(command, text=True, env=bare, cwd=tmp_path)
    assert json.loads(said)["sent"] == 0


def test_all_bodies_of_the_attackers_are_refused(port):
    notes: list[tuple[str, float]] = []
    attacker = Attacker(port, "small", 0, {}, b"", notes)
    slow = refused_bodies("small")
    for way in slow[:-1]:  # the last one sends a byte at a time
        way(attacker)
    assert len(notes) == len(slow) - 1
    assert all(what.endswith((" 400", " 413", " 429")) for what, _ in notes), notes


def test_a_server_that_does_not_start_says_why(tmp_path: Path):
    with (
        pytest.raises(WeirError, match=r"the server did not start: .*o such option"),
        weir_serves(tmp_path, "--wrong"),
    ):
        pass


OUTER = f"""
import sys
sys.path.append({str(Path(__file__).parents[2] / "bench")!r})
from weir.cli.runtime import terminable
from weir_bench.serving.server import _running
command = [sys.executable, "-c", "import time; time.sleep(60)"]
with terminable(), _running(command) as (process, said):
    print(process.pid, flush=True)
    process.wait()
"""


@pytest.mark.slow
def test_who_is_told_to_end_ends_its_server_too():
    outer = subprocess.Popen([sys.executable, "-c", OUTER], stdout=subprocess.PIPE, text=True)
    assert outer.stdout is not None
    with outer.stdout:
        inner = int(outer.stdout.readline())
        outer.send_signal(signal.SIGTERM)
        assert outer.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(inner, 0)
