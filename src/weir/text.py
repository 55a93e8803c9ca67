"""Reading text files: plain or xz-compressed UTF-8, one or many books to a file.

A byte order mark is dropped and lines end with a line feed, whatever editor wrote the file: what a
model reads, and what it costs, are the text's and not the editor's.
Knows nothing about tokens or models.
"""

from __future__ import annotations

import lzma
from pathlib import Path

from weir.errors import WeirError

BOOK_SEPARATOR = "\n\0\n"


def read_text(path: str | Path) -> str:
    """The whole text of a file, plain or `.xz`, as UTF-8; without a mark, lines ending with LF.

    Raises:
        WeirError: the file is missing, is not UTF-8 (the byte is named), is damaged or is empty.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
        text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8")
    except UnicodeDecodeError as error:
        raise WeirError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}"
        ) from None
    except (lzma.LZMAError, EOFError) as error:
        raise WeirError(f"{path} is not a whole .xz file: {error}") from None
    except OSError as error:
        raise WeirError(f"cannot read {path}: {error.strerror}") from None
    if not text.strip("\0 \t\r\n\ufeff"):
        raise WeirError(f"{path} holds no text")
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def read_books(path: str | Path) -> list[str]:
    """The books of a file: one, or several parted by a line that holds a NUL byte.

    Raises:
        WeirError: as `read_text`.
    """
    books = (book.strip("\n") for book in read_text(path).split(BOOK_SEPARATOR))
    return [book for book in books if book]
