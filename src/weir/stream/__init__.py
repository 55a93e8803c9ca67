"""Endless streams: feed tokens, get logits or text, save to disk, and hold conversations."""

from weir.stream.archive import Archive, ArchiveProblem
from weir.stream.chat_template import (
    BrokenTemplate,
    ChatTemplate,
    PromptEncoder,
    PromptTooLong,
    TextPlace,
    check_template,
    mark_text,
    render_chat,
)
from weir.stream.conversation import RECALL, RECALL_SHARE, Conversation, count_beginning
from weir.stream.detokenizer import Detokenizer, count_stop_prefix, cut_at_stop, describe_tokens
from weir.stream.held import HeldPlaces, HeldRanges, held_ranges
from weir.stream.inputs import Tokens
from weir.stream.sampling import RepetitionPenalty, Sampling, check_penalty
from weir.stream.session import replace_atomically
from weir.stream.stream import MOST_LOGITS, PIECE, Stream
from weir.stream.template_bounds import make_way
from weir.stream.text import BOOK, STANDARD_INPUT, Books, encode, read_books, read_stream, read_text
from weir.stream.transcript import Passage, Transcript, Turn, held_shares, repeats

__all__ = ["Archive", "Conversation", "Stream"]
