"""Endless streams: tokens in, logits out, on disk, as a conversation."""

from weir.stream.answer import AnswerText, begun, tokens_as_text, until_stop
from weir.stream.conversation import Conversation, beginning_of
from weir.stream.repetition import Repetition, check_penalty
from weir.stream.sampling import Sampling
from weir.stream.stream import MOST_LOGITS, PIECE, Stream
from weir.stream.text import BOOK, STANDARD_INPUT, Books, encode, read_books, read_stream, read_text
from weir.stream.tokens import Tokens, is_count, read_ids, read_stops
from weir.stream.turns import Turns, render_chat
from weir.stream.whole_files import replacing

__all__ = [
    "BOOK",
    "MOST_LOGITS",
    "PIECE",
    "STANDARD_INPUT",
    "AnswerText",
    "Books",
    "Conversation",
    "Repetition",
    "Sampling",
    "Stream",
    "Tokens",
    "Turns",
    "beginning_of",
    "begun",
    "check_penalty",
    "encode",
    "is_count",
    "read_books",
    "read_ids",
    "read_stops",
    "read_stream",
    "read_text",
    "render_chat",
    "replacing",
    "tokens_as_text",
    "until_stop",
]
