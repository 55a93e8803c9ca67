"""What OpenAI's clients keep at a server: responses by their ids, and conversations of items."""

from weir.serve.book.book import Book, Conversation, Response
from weir.serve.book.items import Item, answer_item, answer_part, input_item, message_of, new_id

__all__ = [
    "Book",
    "Conversation",
    "Item",
    "Response",
    "answer_item",
    "answer_part",
    "input_item",
    "message_of",
    "new_id",
]
