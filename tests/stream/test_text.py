"""Text files: plain or xz, one book or many, and a one-sentence error for what cannot be read."""

from __future__ import annotations

import lzma

import pytest

from weir.errors import WeirError
from weir.stream.text import read_books, read_stream, read_text

BOOK = "Eh bien, mon prince.\nGênes et Lucques…\n"


@pytest.mark.parametrize("name", ["book.txt", "book", "book.txt.xz"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_plain_and_compressed_text_read_alike(tmp_path, name, mark):
    raw = (mark + BOOK).encode()
    (tmp_path / name).write_bytes(lzma.compress(raw) if name.endswith(".xz") else raw)
    assert read_text(tmp_path / name) == read_text(str(tmp_path / name)) == BOOK


def test_a_text_written_on_windows_is_the_same_text(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbf" + BOOK.replace("\n", "\r\n").encode())
    assert read_text(path) == BOOK
    path.write_bytes(b"one\r\n\0\r\ntwo\r\n")
    assert read_books(path) == ["one", "two"]


@pytest.mark.parametrize("most", [-1, 0, 1])
def test_a_stream_of_fewer_than_two_tokens_is_refused(most):
    with pytest.raises(WeirError, match=f"most must be at least 2 tokens, got {most}"):
        read_stream(None, most=most)


def test_marks_inside_a_text_and_lone_carriage_returns_stay(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes("a\ufeffb\rc\n".encode())
    assert read_text(path) == "a\ufeffb\rc\n"


def test_books_are_parted_by_lines_that_hold_a_nul_byte(tmp_path):
    path = tmp_path / "books.txt"
    path.write_text("zero\0\none\n\ntwo\n\0\nthree\n\0\n\n\0\nfour\n", "utf-8")
    assert read_books(path) == ["zero\0\none\n\ntwo", "three", "four"]
    path.write_text(BOOK, "utf-8")
    assert read_books(path) == [BOOK.strip("\n")]


WHOLE = lzma.compress(BOOK.encode() * 50)
DAMAGED = {
    "missing.txt": (None, "cannot read .*: No such file or directory"),
    "missing.txt.xz": (None, "cannot read .*: No such file or directory"),
    "latin1.txt": (BOOK.encode("latin-1", "replace"), "is not UTF-8 text: byte 22 is 0xea"),
    "latin1.txt.xz": (
        lzma.compress(BOOK.encode("latin-1", "replace")),
        "is not UTF-8 text: byte 22 is 0xea",
    ),
    "cut off.txt": (BOOK.encode()[:23], "is not UTF-8 text: byte 22 is 0xc3"),
    "empty.txt": (b"", "contains no text"),
    "blank.txt": (b"\xef\xbb\xbf \r\n\t\n\0\n", "contains no text"),
    "empty.xz": (b"", "is not a whole .xz file"),
    "nothing in it.xz": (lzma.compress(b""), "contains no text"),
    "cut off.xz": (WHOLE[:-20], "is not a whole .xz file"),
    "changed.xz": (WHOLE[:60] + b"\0\0\0\0" + WHOLE[64:], "is not a whole .xz file"),
    "plain.xz": (BOOK.encode(), "is not a whole .xz file"),
}


@pytest.mark.parametrize("read", [read_text, read_books])
@pytest.mark.parametrize("name", DAMAGED)
def test_what_cannot_be_read_is_one_sentence(tmp_path, name, read):
    content, sentence = DAMAGED[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(WeirError, match=sentence) as caught:
        read(tmp_path / name)
    told = str(caught.value)
    assert name in told
    assert "\n" not in told
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_folder_is_not_a_text(tmp_path):
    with pytest.raises(WeirError, match=r"cannot read .*: Is a directory"):
        read_text(tmp_path)
