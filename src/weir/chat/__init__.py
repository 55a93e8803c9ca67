"""Conversations without end: text in, text out, over one stream."""

from weir.chat.conversation import Conversation

__all__ = ["Conversation"]
