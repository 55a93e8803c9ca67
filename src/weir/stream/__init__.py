"""Endless streams: tokens in, logits out, on disk, as a conversation."""

from weir.stream.answer import AnswerText
from weir.stream.conversation import Conversation
from weir.stream.sampling import Sampling
from weir.stream.stream import MOST_LOGITS, PIECE, Stream
from weir.stream.text import PACKAGED, Books, encode, read_books, read_stream, read_text
from weir.stream.tokens import Tokens, is_count, read_ids, read_stops

__all__ = [
    "MOST_LOGITS",
    "PACKAGED",
    "PIECE",
    "AnswerText",
    "Books",
    "Conversation",
    "Sampling",
    "Stream",
    "Tokens",
    "encode",
    "is_count",
    "read_books",
    "read_ids",
    "read_stops",
    "read_stream",
    "read_text",
]
