"""`weir bench peers`: processes that answer line by line, a file that a run resumes, and tables."""

from __future__ import annotations

import asyncio
import json

import pytest

from weir.errors import WeirError
from weir_bench.peers import chat, process
from weir_bench.peers.chat import Shifting, endless_chats, is_sane
from weir_bench.peers.engines import COMPILED, ENGINES, EngineSetup, chosen
from weir_bench.peers.measure import QUICK, PeerPlan, measured
from weir_bench.peers.process import PeerProcess
from weir_bench.peers.report import markdown
from weir_bench.peers.results import Results, read_results
from weir_bench.serving.talk import Reply, Talk

SIDE = """
import os, signal, sys
sys.path.insert(0, {sides!r})
from protocol import serve

class Side:
    def __init__(self, wanted):
        if wanted.get("builds") is False:
            raise ValueError("no such file")
        print("what libraries print is no answer")
    def facts(self):
        return {{"version": "side 1", "built": "AVX2"}}
    def read(self, tokens):
        return tokens / 1000
    def steps(self, behind, count):
        return [0.01] * count
    def compile(self):
        pass
    def rows(self, rows, behind, count):
        return [0.02] * count
    def first(self):
        pass
    def sizes(self):
        return {{"weights": 100, "cache": 10}}
    def die(self, number):
        sys.stderr.write("the last words\\n")
        sys.stderr.flush()
        os.kill(os.getpid(), number) if number else os._exit(3)

serve(Side)
"""


@pytest.fixture
def side(tmp_path, monkeypatch):
    """A peer that runs in this environment, with its script and models in a temporary folder."""
    sides = str(process.SIDES)
    (tmp_path / "side.py").write_text(SIDE.format(sides=sides), "utf-8")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2-Q4_1.gguf").write_bytes(b"")
    monkeypatch.setattr(process, "SIDES", tmp_path)
    for module in ("process", "engines"):
        monkeypatch.setattr(f"weir_bench.peers.{module}.HOME", tmp_path)
    return EngineSetup("side", "", "side.py", 32, "Q4_1", main=True, compiles=True)


def test_a_peer_answers_in_lines_and_its_errors_are_answers(side):
    with side.start(1, 64) as peer:
        assert peer.ask("read", tokens=500) == 0.5
        with pytest.raises(WeirError, match=r"TypeError: .*tokens"):
            peer.ask("read")
        assert peer.ask("steps", behind=4, count=2) == [0.01, 0.01]
        assert peer.peak >= peer.memory > 0


@pytest.mark.parametrize(
    ("number", "told"),
    [(0, "the last words"), (4, "instructions that this processor does not have"), (9, "SIGKILL")],
)
def test_a_process_that_ends_says_why(side, number, told):
    with side.start(1, 64) as peer, pytest.raises(WeirError, match=told):
        peer.ask("die", number=number)


def test_who_is_not_there_is_told_with_what_to_do(side, tmp_path):
    with pytest.raises(WeirError, match="no such file"):
        side.start(1, 64, builds=False)
    with pytest.raises(WeirError, match="nowhere is not installed; `make peers`"):
        PeerProcess("nowhere", "side.py", {"threads": 1})
    (tmp_path / "models" / "smollm2-Q4_1.gguf").unlink()
    with pytest.raises(WeirError, match=r"smollm2-Q4_1.gguf does not exist .*`make peers`"):
        side.start(1, 64)


def test_a_run_writes_every_figure_and_goes_on_from_them(side, tmp_path, monkeypatch):
    gone = EngineSetup("gone", "nowhere", "side.py", 32, "Q4_1", main=True)
    plan = PeerPlan([side, gone], [1], list(range(64)), **QUICK)
    path = tmp_path / "found.json"
    facts = {"date": "today", "command": "weir", "machine": {"processor": "P", "cores": 2}}
    parts = ("steps", "prompts", "rows", "start")
    assert list(measured(plan, Results.at(path, facts), parts)) == list(parts)
    found = read_results(path)
    assert found.missing.keys() == {"gone", "gone: start"}
    compiled = found.find("step", who=f"side{COMPILED}", threads=1, behind=128)
    assert compiled is not None and compiled["seconds"] == 0.01
    assert found.find("rows", who=f"side{COMPILED}", rows=2)["tokens_per_second"] == 100  # type: ignore[index]
    assert len([each for each in found.figures if each["part"] == "start"]) == 4
    assert json.loads(path.read_text("utf-8"))["date"] == "today"

    def never(*given, **more):
        raise AssertionError("what was measured is not measured again")

    monkeypatch.setattr(EngineSetup, "start", never)
    again = Results.at(path, {**facts, "date": "tomorrow"})
    list(measured(PeerPlan([side], [1], list(range(64)), **QUICK), again, parts))
    assert again.figures == found.figures and not again.missing
    with pytest.raises(WeirError, match=r"unknown part 'speed'\. Use one of steps"):
        list(measured(plan, again, ["speed"]))


def test_tables_have_ratios_times_and_what_was_not_measured():
    facts = {"date": "today", "command": "weir bench peers", "versions": {}}
    found = Results(None, {**facts, "machine": {"processor": "P", "cores": 2}})
    for threads in (1, 2):
        for who, seconds in ((f"weir q8_0{COMPILED}", 0.03 / threads), ("llama.cpp Q8_0", 0.04)):
            named = {"who": who, "threads": threads, "behind": 1024, "compiled": True}
            found.add("step", named, {"seconds": seconds})
    found.miss("OpenVINO", "it is not installed")
    text = markdown(found)
    assert "| step of weir q8_0, compiled ÷ llama.cpp Q8_0 | **0.75** | 0.375 |" in text
    assert "| llama.cpp Q8_0 | 40 | 40 |" in text
    assert "- Not measured: OpenVINO: it is not installed." in text


def test_a_client_that_is_refused_leaves_out_its_oldest_turns(monkeypatch):
    async def turn(self, words, tokens):
        if len(self.messages) > 3:
            raise WeirError("400: request (1074 tokens) excee…")  # error texts are cut off
        return Reply(1e9, (1e9 + 1,), 3, 2, 9, "yes")

    monkeypatch.setattr(Talk, "turn", turn)
    talk = Shifting(1, "model", messages=[{"role": "system", "content": str(n)} for n in range(6)])
    reply = asyncio.run(talk.turn("hello", 4))
    assert [each["content"] for each in talk.messages] == ["0", "5"]
    assert talk.left_out == 2
    assert reply.asked < 1e9  # the time of the refused requests counts


def test_a_chat_goes_past_its_window_and_is_judged(monkeypatch):
    said = []

    async def turn(self, words, tokens):
        said.append(words)
        text = "I am Max." if len(said) < 20 else "Who knows what I am?"
        return Reply(0.0, (0.5, 1.5), 11, 7, 20 * len(said), text)

    monkeypatch.setattr(Talk, "turn", turn)
    found = asyncio.run(chat._talked(Talk(1, "model"), lambda: 5, 200, 12))
    assert found["turns"] == len(said) == 22
    assert [at for at, words in enumerate(said) if words == chat.NAME] == [0, 5, 10, 15, 20, 21]
    assert found["obeyed_before"] == 1
    assert found["obeyed"] == 0.5
    assert not found["obeyed_last"]
    assert found["tokens_per_second"] == 10
    assert found["first_seconds"] == 0.5
    assert found["sane"] == 1


def test_answers_that_go_round_in_circles_are_not_sane():
    assert is_sane("The ocean is large, and many animals live in it.")
    assert is_sane("Yes.")
    assert not is_sane("the moon the moon the moon the moon the moon")
    assert not is_sane("")
    assert not is_sane("1 2 3 4 ... %% a b c d")


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K_M"])
def test_the_large_model_is_read_by_weir_and_by_two_builds_of_llamacpp(kind):
    engines = chosen([], "tinyllama")
    (bits,) = {each.bits for each in engines if each.kind == kind}
    together = [each for each in engines if each.bits == bits]  # engines that take turns
    assert [each.name for each in together] == [
        f"weir {kind} tinyllama",
        f"llama.cpp {kind} tinyllama",
        f"llama.cpp native {kind} tinyllama",
    ]
    assert [each.home for each in together] == ["", "llamacpp", "llamacpp_native"]
    assert all(each.main for each in together)


def test_every_engine_and_server_is_among_the_engines():
    names = [each.name for each in ENGINES]
    assert len(set(names)) == len(names)
    assert [each.name for each in chosen(["weir", "Llama.cpp F"])][-1] == "weir int4"
    assert {name.split(",")[0] for name, _ in endless_chats(ENGINES, 1, 64)} == {
        "weir serve",
        "llama.cpp Q4_1",
    }
    with pytest.raises(WeirError, match="unknown peer 'lama'"):
        chosen(["lama"])
