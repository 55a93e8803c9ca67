"""`weir chat`: answers on standard output, everything else on standard error."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sqlite3
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from terminal import CHATML, Ended, Process, make_model, run

import weir
from weir.cache import size_of
from weir.cli import common
from weir.native import UNFINISHED
from weir.stream import Transcript, session

FEW = ("--policy", "sink(4) | recent(20)", "--chunk", 8, "--max-tokens", 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A small random model with a chat template."""
    return make_model(tmp_path_factory.mktemp("model"), CHATML)


@pytest.fixture
def chat(capsys, monkeypatch, model):
    """A function that types lines into a chat, and returns what the command has printed."""

    def talk(*lines: str | bytes, words: tuple[object, ...] = (), of: str = model) -> Ended:
        typed = b"".join(
            line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines
        )
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
        return run(capsys, "chat", "--model", of, *FEW, *words)

    return talk


def test_each_line_gets_an_answer_and_a_line_of_figures(chat):
    ended = chat("Hello", "And you?")
    assert ended.code == 0
    assert ended.out.strip()
    figures = re.findall(r"(\d+) tokens seen, (\d+) slots, ([\d.]+) kB, [\d,]+ tokens/s", ended.err)
    assert len(figures) == 2
    seen = [int(each[0]) for each in figures]
    hello = len("<") + len("user\nHello<\n<assistant\n")
    assert seen[0] == hello + 12
    assert seen[1] == seen[0] + len("<\n<user\nAnd you?<\n<assistant\n") + 12
    assert all(24 <= int(each[1]) < 24 + 8 for each in figures)
    assert figures[0][2] == figures[1][2]


def test_it_says_why_steps_are_not_native(chat, monkeypatch):
    assert "native" not in chat().err
    monkeypatch.setenv("WEIR_KERNELS", "reference")
    said = chat().err.splitlines()[1]
    assert said == (
        "decode steps run in PyTorch, not natively, which is slower: numba is not installed or "
        "does not work here, or WEIR_KERNELS chooses other kernels"
    )


@pytest.mark.slow
def test_while_the_kernel_is_compiled_one_line_says_so(capfd, monkeypatch):
    """The first step prints this line, so `say_steps` must not print it too."""
    common.say_steps({"run": "eager", "reason": UNFINISHED})
    assert capfd.readouterr().err == ""
    common.say_steps({"run": "eager", "reason": "it has other norms"})
    assert "not natively, which is slower: it has other norms" in capfd.readouterr().err


def test_a_broken_template_is_refused_before_the_first_message(chat, tmp_path):
    ended = chat(of=make_model(tmp_path, "{{ 1 "))
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert "cannot be read: unexpected end of template" in ended.err


def test_the_same_seed_says_the_same_and_another_says_something_else(chat):
    said = [chat("Hello", words=("--seed", seed)).out for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


def test_without_a_template_it_says_that_it_continues_the_text(chat, tmp_path):
    ended = chat("Hello", of=make_model(tmp_path))
    assert "the model has no chat template, so it continues your text\n" in ended.err
    assert "no chat template" not in chat().err


def test_a_policy_without_a_budget_gets_what_the_window_and_the_memory_allow(
    chat, model, monkeypatch
):
    ended = chat("Hello", words=("--policy", "streaming_llm"))
    said = (
        "the first 4 and the newest 500 tokens. It has 504 slots, as many as fit in the window and "
        "a quarter of the free memory, up to 8,192"
    )
    assert ended.err.startswith(f"{model} keeps {said}. /help")  # 504 is the window less the chunk
    free = 4 * 60_000
    monkeypatch.setattr("weir.models.free_memory", lambda device: free)
    budget = int(re.search(r"(\d+) slots,", chat(words=("--policy", "streaming_llm")).err)[1])
    loaded = weir.load(model)[0]
    taken = [size_of(loaded, f"streaming_llm({n})", chunk=8).stream for n in (budget, budget + 1)]
    assert taken[0] <= free / 4 < taken[1]
    free = 4_000
    ended = chat(words=("--policy", "streaming_llm"))
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "streaming_llm does not fit in 1.0 kB (a quarter of the free memory)" in ended.err


def test_a_policy_for_each_layer_is_told_by_its_slots(chat, tmp_path):
    model = make_model(tmp_path, CHATML, layers=2)
    policy = "[sink(4) | recent(20) | reservoir(8), sink(4) | recent(30) | reservoir(8)]"
    told = chat("/report", of=model, words=("--policy", policy)).err.splitlines()
    brief = "a policy for each of 2 layers, 32 to 42 slots"
    assert told[0] == f"{model} keeps {brief}. /help for help."
    assert told[1].startswith(f"{brief}: 0 tokens seen")


SYSTEM = "You are Anna, and you know the number 482."


def test_what_the_model_is_told_first_is_never_evicted(chat, model, tmp_path):
    path = tmp_path / "talk.safetensors"
    words = ("--system", SYSTEM, "--temperature", 0)
    said = [f"Tell me of number {n}." for n in range(4)]
    ended = chat(*said, f"/save {path}", words=words)
    first = len("<") + len(f"system\n{SYSTEM}<\n<user\n")
    assert f"keeps the first {first + 4} and the newest 20 tokens" in ended.err
    stream = weir.Stream.restore(weir.load(model)[0], path)
    assert stream.policy == weir.policy(f"pinned(sink(4) | recent(20), n={first}, header=16)")
    held = {it.token for it in stream.holding().tokens()}
    assert held >= set(range(first)) and stream.seen - 50 not in held
    assert ended.out != chat(*said, words=("--temperature", 0)).out


def test_a_system_turn_that_fills_the_window_is_named_as_what_leaves_no_room(chat):
    ended = chat("Hello", words=("--policy", "streaming_llm", "--system", SYSTEM * 12))
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    said = r"the 1 available slot after the \d{3} tokens of --system. To fix this, shorten "
    assert re.search(said + "--system, or give the policy a smaller budget", ended.err)


def test_an_empty_system_turn_is_none(chat):
    assert "keeps the first 4 and" in chat("Hello", words=("--system", "")).err


def test_a_template_without_a_system_turn_is_told_with_what_to_do(chat, tmp_path):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    model = make_model(tmp_path, refusing + CHATML)
    ended = chat("Hello", of=model, words=("--system", SYSTEM))
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert ended.err.endswith(
        "no system. Leave out --system, and put the text in your first message instead.\n"
    )


def test_a_system_turn_is_for_a_conversation_that_has_not_begun(chat, tmp_path):
    ended = chat(words=("--system", SYSTEM, "--session", tmp_path / "talk"))
    assert (ended.code, ended.out) == (1, "")
    assert "--system is only for a new conversation" in ended.err


@pytest.mark.slow
def test_words_of_several_lines_are_one_turn(chat):
    several = chat('"""Hello', "/quit", "", 'and you?"""', "And you?")
    assert several.code == 0
    figures = re.findall(r"(\d+) tokens seen, ", several.err)
    assert int(figures[0]) == len("<user\nHello\n/quit\n\nand you?<\n<assistant\n") + 12
    assert len(figures) == 2
    # Lines in quotes are a message, even if they begin like a command.
    assert "unknown command" not in chat('"""/usr/bin is', 'full"""').err
    assert chat("/save ~nobody-has-this-name/x").err.count("names a user that does not exist") == 1
    assert chat('"""Hello"""').out == chat("Hello").out
    assert chat('"""Hello').out == chat("Hello").out  # the input ends before the closing quotes


@pytest.mark.slow
def test_how_tokens_are_drawn_is_said_to_the_stream(chat):
    hot = ("--temperature", 5, "--top-p", 1)
    assert (
        chat("Hello", words=(*hot, "--top-k", 1)).out
        == chat("Hello", words=("--temperature", 0)).out
    )
    said = chat("Hello", words=("--temperature", 0, "--repetition-penalty", 9)).out.strip()
    assert said != chat("Hello", words=("--temperature", 0)).out.strip()


def test_input_that_ends_ends_it(chat):
    assert chat().code == 0
    assert chat("").out == ""
    assert chat(b"Hello").err.count("tokens seen") == 1  # without a line break at the end


@pytest.mark.parametrize("word", ["/quit", "/exit"])
def test_it_can_be_left(chat, word):
    ended = chat("Hello", word, "Are you there?")
    assert (ended.code, ended.err.count("tokens seen")) == (0, 1)


def test_help_names_every_command(chat):
    ended = chat("/help")
    for word in ("/save FILE", "/load FILE", "/report", "/help", "/quit", "Ctrl-C"):
        assert word in ended.err
    assert ended.out == ""


def test_a_report_says_what_every_layer_holds(chat):
    ended = chat("Hello", "/report")
    assert re.search(r"sink\(4\) \| recent\(20\): \d+ tokens seen, [\d.]+ kB", ended.err)
    assert re.search(r"layer 0: sink 4, recent 20, new \d; [\d.]+ kB", ended.err)


def test_before_its_first_fold_a_layer_is_told_by_what_waits(chat):
    ended = chat("/report", "H", "/report", words=("--policy", "dense", "--chunk", 64))
    seen = len("<") + len("user\nH<\n<assistant\n") + 12
    waits = re.findall(r"layer \d: (\d+) new, waiting for the first fold; ", ended.err)
    assert set(waits) == {str(seen)}
    first, last = (line for line in ended.err.splitlines() if line.startswith("layer 0"))
    assert first.startswith("layer 0: nothing yet; ") and " 0" not in last.partition(":")[2]


@pytest.mark.slow
def test_what_is_given_beside_a_session_and_changes_nothing_is_said(chat, tmp_path):
    path = tmp_path / "talk"
    chat("Hello", f"/save {path}", words=("--seed", 3))
    assert "new conversation" not in chat(words=("--session", path, "--seed", 3)).err
    given = ("--session", path, "--policy", "window(9)", "--slots", "exact", "--chunk", 64)
    said = chat(words=given).err.splitlines()[1]
    assert said == (
        "--chunk and --policy and --slots apply only to a new conversation; this one keeps its "
        "policy, its chunk of 8 and its seed 3"
    )
    assert "--seed applies only to a new" in chat(words=("--session", path, "--seed", 0)).err


def test_a_saved_conversation_goes_on_elsewhere(chat, tmp_path):
    path = tmp_path / "a talk.safetensors"
    whole = chat("Hello", "And you?", "/report")
    first = chat("Hello", f"/save {path}")
    assert f"saved to {path}" in first.err
    for ended in (
        chat(f"/load {path}", "And you?", "/report"),
        chat("And you?", "/report", words=("--session", path, "--policy", "window(9)")),
    ):
        assert "the conversation continues after " in ended.err
        assert first.out + ended.out == whole.out
        assert ended.err.splitlines()[-1] == whole.err.splitlines()[-1]


COMPLAINTS = {
    "/sav x": "unknown command /sav. Type /help for the list.",
    "/": "unknown command /. Type /help for the list.",
    "/save": "/save needs a file, as in /save FILE",
    "/load  ": "/load needs a file, as in /load FILE",
    "/load nowhere.safetensors": "the session file nowhere.safetensors does not exist",
    "/load .": ". is a folder, not a session. Use the path of a file.",
    "/save /nowhere/talk": "cannot write the session /nowhere/talk: No such file or directory",
}


def test_a_command_that_fails_is_one_line_and_the_conversation_goes_on(chat):
    lines = [*COMPLAINTS, b"M\xe1rya\n"]
    ended = chat("Hello", *lines, "And you?")
    assert ended.code == 0
    complaints = [said for said in ended.err.splitlines() if said.startswith("weir: ")]
    told = [*COMPLAINTS.values(), "that line is not UTF-8 and was ignored"]
    assert complaints == [f"weir: {said}" for said in told]
    assert ended.err.count("tokens seen,") == 2
    assert ended.out == chat("Hello", "And you?").out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--session", "nowhere"), "the session file nowhere does not exist"),
        (("--policy", "window(0)"), "a whole number of at least 1"),
        (("--model", "./nowhere"), "the model folder './nowhere' does not exist"),
    ],
)
def test_what_is_wrong_from_the_start_ends_it(chat, words, says):
    ended = chat("Hello", words=words)
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert ended.err.startswith("weir: ")
    assert says in ended.err


def test_the_model_may_stand_alone_or_after_its_option_but_not_both(capsys):
    ended = run(capsys, "chat", "./nowhere")
    assert (ended.code, "the model folder './nowhere' does not exist" in ended.err) == (1, True)
    ended = run(capsys, "chat", "nano", "--model", "smollm2")
    assert (ended.code, "two models are named: nano and --model smollm2" in ended.err) == (2, True)


@pytest.mark.slow
def test_an_interrupted_command_changes_nothing_and_the_conversation_goes_on(
    chat, monkeypatch, tmp_path
):
    path = tmp_path / "talk"
    chat("Hello", f"/save {path}")
    before = path.read_bytes()

    def pressed(*words: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "save_file", pressed)
    ended = chat("Another", f"/save {path}", "And you?")
    assert ended.code == 0
    assert "interrupted. Nothing has changed." in ended.err
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    assert ended.out == chat("Another", "And you?").out


def test_a_conversation_without_a_cache_can_be_held_but_not_saved(chat, tmp_path):
    words = ("--policy", "recompute(24)")
    ended = chat("Hello", "/report", f"/save {tmp_path / 'talk'}", words=words)
    assert re.search(r"\d+ tokens seen, 192 B, [\d,]+ tokens/s", ended.err)
    assert "weir: recompute caches nothing" in ended.err


@pytest.fixture
def chats(tmp_path, monkeypatch):
    """The folder of kept conversations, empty at first."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "weir" / "chats"


def test_a_conversation_without_a_cache_is_continued(chat, chats):
    words = ("--policy", "recompute(24)", "--temperature", 0)
    whole = chat("Hello", "And you?", words=(*words, "--no-keep"))
    first = chat("Hello", words=words)
    ended = chat("And you?", words=("--continue", "--temperature", 0, "--seed", 5))
    assert first.out + ended.out == whole.out
    assert "--policy and --seed apply only to a new conversation" in ended.err
    assert "this one keeps its policy and its seed 0" in ended.err


def test_a_relative_path_names_the_model_of_a_conversation(chat, chats, model, monkeypatch):
    monkeypatch.chdir(Path(model).parent)
    chat("Hello", of=Path(model).name)
    monkeypatch.chdir(model)
    for name in (".", model, f"../{Path(model).name}"):
        assert "continues after" in chat("/report", words=("--continue",), of=name).err


def test_a_conversation_is_kept_and_continued(chat, chats, model):
    whole = chat("Hello", "And you?", "/report", words=("--temperature", 0, "--no-keep"))
    assert not chats.exists()
    first = chat("Hello", words=("--temperature", 0))
    assert len(list(chats.iterdir())) == 3 and chats.stat().st_mode & 0o077 == 0
    ended = chat("And you?", "/report", words=("--continue", "--temperature", 0))
    assert first.out + ended.out == whole.out
    assert ended.err.splitlines()[-1] == whole.err.splitlines()[-1]
    # If the saved stream is missing or damaged, the transcript is read again. Damage is reported.
    for write in (Path.unlink, lambda path: path.write_bytes(b"x")):
        write(next(chats.glob("*.safetensors")))
        again = chat("/remembers and YOU?", words=("--continue",))
        seen = int(re.search(r"continues after (\d+) tokens", again.err)[1])
        assert seen == len("<user\nHello<\n<assistant\n<\n<user\nAnd you?<\n<assistant\n") + 24
        assert "turn 2, you: gone" in again.err
    assert "recomputing the conversation from its transcript" in again.err
    assert len(list(chats.glob("*.jsonl"))) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--continue",),
            "no conversation with .* to continue in .*. Start one with weir chat",
        ),
        (("--continue", "--session", "x"), "Give only one"),
        (
            ("--continue", "--system", "x"),
            "--system is only for a new conversation, and --continue",
        ),
    ],
)
def test_what_cannot_be_continued_is_said(chat, chats, words, says):
    ended = chat("Hello", words=words)
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert re.search(says, ended.err)


def test_an_older_conversation_is_not_taken_for_the_newest(chat, chats):
    chat("Hello")
    chat("Again")
    newest = Transcript.read(max(chats.glob("*.jsonl")))
    ended = chat("/remembers hello", words=("--continue",))
    newest.close()
    assert "Continuing an older conversation instead." in ended.err
    assert "turn 1, you" in ended.err


def test_of_older_conversations_the_transcript_stays_alone(chat, chats, monkeypatch):
    monkeypatch.setattr("weir.cli.kept_chats.SAVED", 1)
    for word in ("Hello", "Again"):
        chat(word)
    assert [len(list(chats.glob(f"*.{kind}"))) for kind in ("jsonl", "safetensors")] == [2, 1]


def test_what_is_forgotten_is_told_once_and_listed(chat):
    ended = chat("Remember 482.", "H", "/forgotten", "/remembers 482", "/remembers 483")
    told = "parts of this conversation are forgotten"
    assert ended.err.count(told) == 1 and "/forgotten shows which ones" in ended.err
    unkept = chat("Remember 482.", "H", words=("--no-keep",)).err
    assert told in unkept and "/forgotten shows" not in unkept  # /forgotten needs a kept chat
    listed = re.findall(r"turns? (\d.*), (\d+) tokens, (.*): ", ended.err)
    assert listed[0][2] != "whole" and listed[-1][2] != "gone"
    assert (
        "turn 1, you: gone" in ended.err
        and "'483' does not occur in this conversation" in ended.err
    )
    fresh = chat("/forgotten", "H", "/forgotten", words=("--policy", "window(200)"))
    assert (
        "nothing has been said since" in fresh.err and "nothing has been forgotten yet" in fresh.err
    )


def test_the_tokens_of_a_loaded_state_are_listed_without_text(chat, tmp_path):
    """All tokens that were seen are in some line."""
    path = tmp_path / "talk"
    loaded = chat("Remember 482.", f"/save {path}").err
    before = int(re.findall(r"([\d,]+) tokens seen", loaded)[-1])
    for policy in ("window(200)", "window(12)"):
        chat("Remember 482.", f"/save {path}", words=("--policy", policy))
        for ended in (
            chat(f"/load {path}", "H", "/forgotten"),
            chat("H", "/forgotten", words=("--session", path)),
        ):
            listed = re.findall(r"(\d+) tokens?, (whole|gone|\d+% held): ", ended.err)
            said = r"(\d+) loaded tokens, (.*): a saved state has no text\n"
            (first,) = re.findall(said, ended.err)
            counts = [int(count) for count, _ in (first, *listed)]
            seen = int(re.findall(r"([\d,]+) tokens seen", ended.err)[-1])
            assert counts[0] == before and sum(counts) == seen
            is_whole = policy == "window(200)"
            assert (first[1] == "whole") is is_whole
            assert ("nothing has been forgotten yet" in ended.err) is is_whole
    assert "loaded" not in chat("Hello", "/forgotten").err


def test_a_wait_for_kernels_is_not_said_to_be_the_only_one(chat, monkeypatch):
    """Other commands need other kernels, and even without any to compile, the line can appear."""
    told = []
    monkeypatch.setattr("weir.cli.chat.waiting", lambda what: told.append(what) or nullcontext())
    chat("Hello", "And you?")
    kernels = "preparing kernels (each is compiled when first used, and kept for later runs)"
    assert told == [f"{kernels}, then reading", "reading", "saving the conversation"]


def test_a_model_that_repeats_itself_is_told_apart_with_a_remedy(chat, monkeypatch):
    assert "repeats itself" not in chat("Hello").err
    monkeypatch.setattr("weir.stream.conversation.repeats", lambda ids: len(ids) == 12)
    said = "the model repeats itself\\. .* weir chat --continue --repetition-penalty 1\\.2"
    assert re.search(said, chat("Hello").err)


def test_equal_layers_are_one_line_of_a_report(chat, tmp_path):
    ended = chat("Hello", "/report", of=make_model(tmp_path, CHATML, layers=4))
    assert re.search(r"layers 0 to 3: sink 4, recent 20, new \d; [\d.]+ kB each", ended.err)
    assert ended.err.count("layers ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_process_loses_nothing(model, tmp_path, number):
    env = {"XDG_STATE_HOME": str(tmp_path)}
    words = ("chat", "--model", model, "--max-tokens", 10_000_000, "--temperature", 1)
    process = Process(*words, **env)
    process.wait_for("/help for help")
    process.tell("Hello")
    assert process.process.stdout is not None and process.process.stdout.read(20)
    process.process.send_signal(number)
    ended = process.end()
    assert ended.code == 143 and "Traceback" not in ended.err
    (transcript,) = (tmp_path / "weir" / "chats").glob("*.jsonl")
    turns = [json.loads(line) for line in transcript.read_text("utf-8").splitlines()[1:]]
    stream = weir.Stream.restore(weir.load(model)[0], transcript.with_suffix(".safetensors"))
    assert [turn["text"] for turn in turns[:1]] == ["Hello"]
    assert stream.seen == turns[1]["at"] + len(turns[1]["ids"]) > 30


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(model, tmp_path):
    """Answers of this model never end by themselves."""
    path = tmp_path / "talk.safetensors"
    process = Process("chat", "--model", model, "--max-tokens", 10_000_000, "--temperature", 1)
    process.wait_for("/help for help")
    process.tell("Hello")
    assert process.process.stdout is not None
    assert process.process.stdout.read(20)
    process.interrupt()
    process.wait_for("tokens seen, ")
    # The rest of the first answer must not be taken for the second one.
    os.set_blocking(process.process.stdout.fileno(), False)
    while process.process.stdout.read(4096):
        pass
    os.set_blocking(process.process.stdout.fileno(), True)
    process.tell("And you?")
    assert process.process.stdout.read(20)
    process.interrupt()
    process.wait_for("tokens seen, ", times=2)
    process.wait_for("tokens/s\x1b[0m\r\n", times=2)
    for _ in range(10):
        process.interrupt_until_a_line()  # if no answer is running, Ctrl-C starts a new line
    process.tell(f"/save {path}")
    process.wait_for("saved to")
    ended = process.end()
    assert ended.code == 0
    assert "Traceback" not in ended.err
    seen = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) tokens seen, ", ended.err)]
    assert seen[1] > seen[0] > 20
    assert weir.Stream.restore(weir.load(model)[0], path).seen == seen[1]


def test_steps_are_native_and_compiled_if_that_is_asked_for(chat, monkeypatch):
    asked: list[object] = []
    monkeypatch.setattr(weir.native, "compile_steps", lambda model, **given: asked.append(given))
    chat("Hello")
    assert chat("Hello", words=("--compile",)).code == 0
    assert asked == [{"torch_compile": compiled, "strict": False} for compiled in (False, True)]


# --- recall

ROOMY = ("--policy", "sink(4) | recent(1200)", "--chunk", 8)
CODE = "The secret access code of Alice Moreau is 48213."
ASK = "What is the secret access code of Alice Moreau?"
FILLER = "Filler without any meaning. " * 50


def test_what_was_said_is_recalled_and_told(chat, chats):
    ended = chat(CODE, FILLER, ASK, words=ROOMY)
    (line,) = [one for one in ended.err.splitlines() if one.startswith("recalled")]
    assert re.fullmatch(rf"recalled from you, \d+ \w+ \d{{4}} \d\d:\d\d: {re.escape(CODE)}", line)
    assert "weir finds it and shows it to the model" in ended.err
    assert len(list(chats.glob("*.archive"))) == 1


def test_without_recall_nothing_is_brought_back(chat):
    ended = chat(CODE, FILLER, ASK, words=(*ROOMY, "--recall", 0))
    assert "recalled" not in ended.err and "weir finds it" not in ended.err
    assert chat(words=("--recall", -1)).code == 2


def test_a_conversation_that_is_continued_recalls_what_was_said_before(chat, chats):
    chat(CODE, FILLER, words=ROOMY)
    assert f": {CODE}" in chat(ASK, words=("--continue",)).err
    # The archive is made again from the transcript.
    for path in chats.glob("*.archive*"):
        path.unlink()
    assert f": {CODE}" in chat(ASK, words=("--continue",)).err


def test_a_conversation_that_is_not_kept_recalls_from_memory(chat, chats):
    assert f": {CODE}" in chat(CODE, FILLER, ASK, words=(*ROOMY, "--no-keep")).err
    assert not list(chats.rglob("*.archive"))


def damage(path: Path) -> None:
    path.write_bytes(b"nothing like a database" * 1000)


def change_version(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()


@pytest.mark.parametrize(
    ("spoil", "why"), [(damage, "is damaged"), (change_version, "this file has version 99")]
)
def test_an_archive_that_cannot_be_read_is_told_once_and_the_chat_goes_on(chat, chats, spoil, why):
    chat(CODE, words=ROOMY)
    (path,) = chats.glob("*.archive")
    spoil(path)
    ended = chat("Hello", ASK, words=("--continue",))
    assert ended.code == 0 and len(re.findall(r"\d+ tokens seen, ", ended.err)) == 2
    assert ended.err.count(why) == 1 and "nothing is recalled" in ended.err


def test_an_archive_that_another_process_has_locked_is_told_once(chat, chats, monkeypatch):
    monkeypatch.setattr("weir.stream.archive.keeping.PATIENCE", 0.05)
    chat(CODE, words=ROOMY)
    (path,) = chats.glob("*.archive")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    ended = chat("Hello", ASK, words=("--continue",))
    other.close()
    assert ended.code == 0 and len(re.findall(r"\d+ tokens seen, ", ended.err)) == 2
    assert ended.err.count("is locked by another process") == 1
