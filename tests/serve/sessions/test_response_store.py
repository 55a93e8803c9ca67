"""Responses and conversations are stored up to a limit, and each is visible to its owner only."""

from __future__ import annotations

import pytest

from weir.errors import WeirError
from weir.serve.sessions.items import input_item
from weir.serve.sessions.responses import ResponseStore, StoredResponse


def response(name: str, size: int = 0, **given) -> StoredResponse:
    body = {"id": name, "output": [input_item("assistant", ["x" * size])]}
    said = {"session": "s", "previous": None, "instructions": None, "input": [], "body": body}
    return StoredResponse(name, **{**said, **given})


def test_what_was_kept_is_there_when_the_book_is_opened_again(tmp_path):
    item = input_item("user", ["hé"])
    made = response("resp_1", previous="resp_0", instructions="i", input=[item])
    book = ResponseStore(tmp_path / "book.db")
    started = book.create_conversation("me", {"a": "b"}, [])
    book.save_response("me", made, started.id, [item, *made.body["output"]])
    book.close()
    book = ResponseStore(tmp_path / "book.db")
    assert book.get_response("me", "resp_1") == made
    assert book.list_responses("me", "s") == ["resp_1"]
    found = book.get_conversation("me", started.id)
    assert found is not None and (found.head, found.whole) == ("resp_1", True)
    assert book.list_items("me", started.id) == [item, *made.body["output"]]
    assert book.list_items("me", started.id, found.read) == []
    book.close()
    (tmp_path / "other.db").write_bytes(b"SQLite format 3\x00" + b"x" * 4000)
    with pytest.raises(WeirError, match="damaged"):
        ResponseStore(tmp_path / "other.db")


def test_what_is_anothers_is_as_what_never_was():
    book = ResponseStore()
    book.save_response("me", response("resp_1"))
    started = book.create_conversation("me", {}, [input_item("user", ["x"])])
    (item,) = book.list_items("me", started.id)
    book.delete_responses("you", ["resp_1"])
    book.remove_item("you", started.id, item["id"])
    book.set_metadata("you", started.id, {"a": "b"})
    book.delete_conversation("you", started.id)
    assert book.get_response("you", "resp_1") is book.get_conversation("you", started.id) is None
    assert book.get_item("you", started.id, item["id"]) is None
    assert book.list_items("you", started.id) == book.list_responses("you", "s") == []
    assert book.page_items("you", started.id, item["id"], 5, newest=True) is None
    assert book.get_response("me", "resp_1") is not None
    assert book.get_conversation("me", started.id) == started
    assert book.get_item("me", started.id, item["id"]) == item
    with pytest.raises(WeirError, match="cannot save the turn"):
        book.save_response("you", response("resp_1"))  # the id is taken
    assert book.get_response("you", "resp_1") is None


def test_the_oldest_go_where_an_owner_has_too_much_and_nobody_elses():
    book = ResponseStore(most=20_000)
    book.save_response("you", response("resp_you", 15_000))
    for n in range(10):
        book.save_response("me", response(f"resp_{n}", 4000))
    kept = [n for n in range(10) if book.get_response("me", f"resp_{n}")]
    assert kept and kept == list(range(kept[0], 10)) and kept[0] >= 5
    assert book.get_response("you", "resp_you") is not None
    first, second = book.create_conversation("me", {}, []), book.create_conversation("me", {}, [])
    for n in range(3):
        for each in (first, second):
            book.add_items("me", each.id, [input_item("user", [str(n) * 4000])])
    wholes = [book.get_conversation("me", each.id) for each in (first, second)]
    assert [one is not None and one.whole for one in wholes] == [False, False]
    assert len(book.list_items("me", first.id)) + len(book.list_items("me", second.id)) in (3, 4)
    assert book.list_items("me", second.id)[-1]["content"][0]["text"].startswith("2")


def test_conversations_themselves_are_bounded_and_those_used_longest_ago_go():
    book = ResponseStore(most=6000)
    names = [book.create_conversation("me", {}, []).id for _ in range(8)]
    book.add_items("me", names[0], [input_item("user", ["x"])])
    names += [book.create_conversation("me", {}, []).id for _ in range(8)]
    left = [name for name in names if book.get_conversation("me", name)]
    assert names[-1] in left and names[0] in left and names[1] not in left and len(left) < 13


def test_all_text_counts_towards_the_limits():
    book = ResponseStore(most=6000)
    names = [book.create_conversation("me", {}, []).id for _ in range(8)]
    other = book.create_conversation("you", {}, []).id
    book.set_metadata("me", names[0], {"a": "x" * 3000})
    left = [name for name in names if book.get_conversation("me", name)]
    assert left == [names[0], *names[-len(left) + 1 :]] and len(left) == 4
    assert book.get_conversation("you", other) is not None
    book.set_metadata("me", names[0], {})  # makes room
    more = [book.create_conversation("me", {}, []).id for _ in range(7)]
    assert all(book.get_conversation("me", name) for name in [*left, *more])
    for n in range(4):
        book.save_response("me", response(f"resp_{n}", instructions="é" * 1000))
    assert [n for n in range(4) if book.get_response("me", f"resp_{n}")] == [2, 3]


def test_an_item_that_was_read_lets_the_head_go_when_it_goes():
    book = ResponseStore()
    started = book.create_conversation("me", {}, [])
    read = [input_item("user", [text]) for text in "ab"]
    book.save_response("me", response("resp_1"), started.id, read)
    unread = input_item("user", ["c"])
    book.add_items("me", started.id, [unread])
    book.remove_item("me", started.id, unread["id"])
    found = book.get_conversation("me", started.id)
    assert found is not None and found.head == "resp_1"
    book.remove_item("me", started.id, read[0]["id"])
    found = book.get_conversation("me", started.id)
    assert found is not None and (found.head, found.read) == (None, 0)
    assert book.list_items("me", started.id) == [read[1]]
