"""Responses and conversations are kept within a bound, and each is its owner's alone."""

from __future__ import annotations

import pytest

from weir.errors import WeirError
from weir.serve.book import Book, Response, input_item


def response(name: str, size: int = 0, **given) -> Response:
    body = {"id": name, "output": [input_item("assistant", ["x" * size])]}
    said = {"session": "s", "previous": None, "instructions": None, "input": [], "body": body}
    return Response(name, **{**said, **given})


def test_what_was_kept_is_there_when_the_book_is_opened_again(tmp_path):
    item = input_item("user", ["hé"])
    made = response("resp_1", previous="resp_0", instructions="i", input=[item])
    book = Book(tmp_path / "book.db")
    started = book.begin("me", {"a": "b"}, [])
    book.keep("me", made, started.id, [item, *made.body["output"]])
    book.close()
    book = Book(tmp_path / "book.db")
    assert book.response("me", "resp_1") == made
    assert book.of("me", "s") == ["resp_1"]
    found = book.conversation("me", started.id)
    assert found is not None and (found.head, found.whole) == ("resp_1", True)
    assert book.items("me", started.id) == [item, *made.body["output"]]
    assert book.items("me", started.id, found.read) == []
    book.close()
    (tmp_path / "other.db").write_bytes(b"SQLite format 3\x00" + b"x" * 4000)
    with pytest.raises(WeirError, match="damaged"):
        Book(tmp_path / "other.db")


def test_what_is_anothers_is_as_what_never_was():
    book = Book()
    book.keep("me", response("resp_1"))
    started = book.begin("me", {}, [input_item("user", ["x"])])
    (item,) = book.items("me", started.id)
    book.drop("you", ["resp_1"])
    book.remove("you", started.id, item["id"])
    book.describe("you", started.id, {"a": "b"})
    book.end("you", started.id)
    assert book.response("you", "resp_1") is book.conversation("you", started.id) is None
    assert book.item("you", started.id, item["id"]) is None
    assert book.items("you", started.id) == book.of("you", "s") == []
    assert book.page("you", started.id, item["id"], 5, newest=True) is None
    assert book.response("me", "resp_1") is not None
    assert book.conversation("me", started.id) == started
    assert book.item("me", started.id, item["id"]) == item
    with pytest.raises(WeirError, match="cannot be kept"):
        book.keep("you", response("resp_1"))  # the id is taken
    assert book.response("you", "resp_1") is None


def test_the_oldest_go_where_an_owner_has_too_much_and_nobody_elses():
    book = Book(most=20_000)
    book.keep("you", response("resp_you", 15_000))
    for n in range(10):
        book.keep("me", response(f"resp_{n}", 4000))
    kept = [n for n in range(10) if book.response("me", f"resp_{n}")]
    assert kept and kept == list(range(kept[0], 10)) and kept[0] >= 5
    assert book.response("you", "resp_you") is not None
    first, second = book.begin("me", {}, []), book.begin("me", {}, [])
    for n in range(3):
        for each in (first, second):
            book.add("me", each.id, [input_item("user", [str(n) * 4000])])
    wholes = [book.conversation("me", each.id) for each in (first, second)]
    assert [one is not None and one.whole for one in wholes] == [False, False]
    assert len(book.items("me", first.id)) + len(book.items("me", second.id)) in (3, 4)
    assert book.items("me", second.id)[-1]["content"][0]["text"].startswith("2")


def test_conversations_themselves_are_bounded_and_those_used_longest_ago_go():
    book = Book(most=6000)
    names = [book.begin("me", {}, []).id for _ in range(8)]
    book.add("me", names[0], [input_item("user", ["x"])])
    names += [book.begin("me", {}, []).id for _ in range(8)]
    left = [name for name in names if book.conversation("me", name)]
    assert names[-1] in left and names[0] in left and names[1] not in left and len(left) < 13


def test_an_item_that_was_read_lets_the_head_go_when_it_goes():
    book = Book()
    started = book.begin("me", {}, [])
    read = [input_item("user", [text]) for text in "ab"]
    book.keep("me", response("resp_1"), started.id, read)
    unread = input_item("user", ["c"])
    book.add("me", started.id, [unread])
    book.remove("me", started.id, unread["id"])
    found = book.conversation("me", started.id)
    assert found is not None and found.head == "resp_1"
    book.remove("me", started.id, read[0]["id"])
    found = book.conversation("me", started.id)
    assert found is not None and (found.head, found.read) == (None, 0)
    assert book.items("me", started.id) == [read[1]]
