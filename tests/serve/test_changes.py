"""If the server allows it, a conversation whose system message changed continues with a note."""

from __future__ import annotations

import logging

import pytest
from servers import logged, make_client, serving
from test_reread import MORE, USER, ask, cached, reread, said

from weir.serve.changes import MOST_NOTED, ChangedPrefixes, Outline, describe_change
from weir.serve.messages import Message

RULES = "\n".join(f"Rule {n}: say what it is." for n in range(6))


def system(time: str, rules: str = RULES) -> dict:
    return {"role": "system", "content": f"You are a clerk.\nIt is {time}.\n{rules}"}


@pytest.fixture(scope="module")
def server():
    with serving(make_client(notes_changes=True)) as server:
        yield server


def noted(answer) -> str | None:
    return answer["usage"]["weir"].get("noted")


def test_a_clock_is_noted_and_nothing_is_read_again(server, caplog):
    first = ask(server, system("10:40"), USER)
    history = [USER, said(first), MORE]
    caplog.set_level(logging.INFO, "weir.serve")
    second = ask(server, system("10:41"), *history)
    assert cached(second) == first["usage"]["total_tokens"] - 1
    assert noted(second) == (
        "The system message at the beginning has changed.\n"
        "This no longer applies:\nIt is 10:40.\nThis applies now:\nIt is 10:41."
    )
    assert reread(second) is None
    assert logged(caplog, "noted")[-1]["noted"] == len(noted(second))
    # The same time again is an ordinary turn, without a note.
    history += [said(second), USER]
    third = ask(server, system("10:41"), *history)
    assert cached(third) == second["usage"]["total_tokens"] - 1
    assert noted(third) is None
    # The time changes again. The note compares it with the newest time that the model was told.
    history += [said(third), MORE]
    fourth = ask(server, system("10:42"), *history)
    assert cached(fourth) == third["usage"]["total_tokens"] - 1
    assert "no longer applies:\nIt is 10:41." in noted(fourth)
    # The time of the first turn does not lead back to that turn, because a later turn matches.
    fifth = ask(server, system("10:40"), *history)
    assert cached(fifth) == third["usage"]["total_tokens"] - 1


def test_the_model_reads_the_note(server):
    first = ask(server, system("noon"), USER)
    second = ask(server, system("night"), USER, said(first), MORE)
    plain = ask(server, system("noon"), USER, said(first), MORE)
    new = [one["usage"]["prompt_tokens"] - cached(one) for one in (second, plain)]
    assert new[0] - new[1] >= len(noted(second))  # a byte is a token


def test_what_is_not_a_small_change_is_read_again(server):
    first = ask(server, system("dawn"), USER)
    longer = system("dusk", "x\n" * (MOST_NOTED // 2))
    second = ask(server, longer, USER, said(first), MORE)
    assert (cached(second), noted(second), reread(second)["why"]) == (0, None, "changed")
    # If another message changes, or the number of system messages, it is another conversation.
    for messages in (
        [system("dusk"), {**USER, "content": "Hello here"}, said(first), MORE],
        [USER, said(first), MORE],
        [system("dusk"), system("later"), USER, said(first), MORE],
    ):
        assert noted(ask(server, *messages)) is None


def test_without_the_option_it_is_read_again():
    with serving(make_client()) as server:
        first = ask(server, system("10:40"), USER)
        second = ask(server, system("10:41"), USER, said(first), MORE)
    assert (cached(second), noted(second), reread(second)["why"]) == (0, None, "changed")


def test_keys_do_not_share_turns_and_the_oldest_are_dropped():
    changes = ChangedPrefixes(most=2)
    for n, owner in enumerate("aab"):
        changes.add(owner, f"outline {n}", f"turn {n}", ("x",))
    assert changes.find("a", "outline 0") is None
    assert changes.find("a", "outline 1") == ("turn 1", ("x",))
    assert changes.find("b", "outline 1") is None


def test_an_outline_leaves_out_the_system_messages_before_the_first_answer():
    def outline(*roles: str, text: str = "x") -> Outline:
        return Outline.of("r", [Message(r, text if r == "system" else r) for r in roles])

    plain = outline("system", "user", "assistant", "system")
    assert plain.systems == ("x",)
    assert len(plain.hashes) == 5
    other = Outline.of("r", [Message("system", "y"), Message("user", "user")])
    assert other.hashes[2] == plain.hashes[2]
    assert other.hashes[1] == other.hashes[0]
    # A later system message is part of the hashes, and so is the place of the first ones.
    assert outline("system", "user", "assistant", "system", text="z").hashes[4] != plain.hashes[4]
    assert outline("user", "system").hashes[2] != other.hashes[2]


@pytest.mark.parametrize(
    ("old", "new", "was", "now"),
    [
        ("a\nb\nc", "a\nB\nc", "b", "B"),
        ("a\nb", "a", "b", None),
        ("a", "a\nb", None, "b"),
        (
            "w " * 50 + "the time is 10:40 now " + "v " * 50,
            "w " * 50 + "the time is 10:41 now " + "v " * 50,
            "10:40",
            "10:41",
        ),
    ],
)
def test_a_note_says_what_has_changed(old, new, was, now):
    note = describe_change([old], [new])
    assert note is not None
    assert len(note) < 400
    for header, text in (("no longer applies", was), ("applies now", now)):
        _, found, after = note.partition(f"This {header}:\n")
        assert bool(found) == (text is not None)
        if text is not None:
            assert text in after.split("\nThis")[0]
