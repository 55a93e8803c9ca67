"""The archive: stores the text of conversations and streams in SQLite, and finds it again by
words.
"""

from weir.stream.archive.keeping import Archive
from weir.stream.archive.passages import PASSAGE, cut_passages, cut_sentences
from weir.stream.archive.places import Encode, find_texts
from weir.stream.archive.questions import Inquiry, find_inquiries
from weir.stream.archive.quoting import find_quotes, quote_excerpt, write_quotes
from weir.stream.archive.ranking import ArchiveSearch, Excerpt, IsHeld
from weir.stream.archive.tables import (
    ARCHIVE_TABLES,
    ARCHIVE_VERSION,
    ArchivedTurn,
    ArchiveProblem,
    ArchiveTables,
)

__all__ = ["Archive", "Excerpt"]
