"""What OpenAI's clients keep at a server: responses by their ids, and conversations of items."""

from weir.serve.book.book import Book, Conversation, Response
from weir.serve.book.items import (
    Item,
    answer_item,
    answer_part,
    call_item,
    input_item,
    messages_of,
    new_id,
    result_item,
)

__all__ = [
    "Book",
    "Conversation",
    "Item",
    "Response",
    "answer_item",
    "answer_part",
    "call_item",
    "input_item",
    "messages_of",
    "new_id",
    "result_item",
]
