"""A history as a client sends it to a chat, looked through."""

from __future__ import annotations

from collections.abc import Sequence

from weir.serve.api.errors import Refused
from weir.serve.messages import Message, NoCall, placed


def history_of(messages: Sequence[Message]) -> list[Message]:
    """Messages whose results know which call they are of.

    Raises:
        Refused: a result is of no call that was made before it and has none, or the last message is
            no message to answer.
    """
    try:
        known = placed(messages)
    except NoCall as error:
        param = f"messages[{error.number}].tool_call_id"
        raise Refused(400, str(error), param=param, code="invalid_value") from None
    if known[-1].role == "assistant":
        raise Refused(
            400, "the last message must be one to answer, not an assistant's", param="messages"
        )
    return known
