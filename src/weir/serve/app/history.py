"""A history as a client sends it, looked through: whose result is what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weir.serve.app.errors import Refused
from weir.serve.messages import Call, Message


def history_of(
    messages: Sequence[Message], before: Sequence[Message] = (), param: str = "messages"
) -> list[Message]:
    """Messages whose results know which call they are of.

    Args:
        messages: as they came.
        before: what came before them.
        param: what they are called in the request.

    Raises:
        Refused: a result is of no call that was made before it, or the last message is no message
            to answer.
    """
    known: list[Message] = []
    calls: tuple[Call, ...] = next((one.calls for one in reversed(before) if one.calls), ())
    for number, message in enumerate(messages):
        calls = message.calls or calls
        if message.result is not None:
            ids = [call.id for call in calls]
            if message.result not in ids:
                raise Refused(
                    400,
                    "a result is of a call that the assistant made last before it, and has its id",
                    param=f"{param}[{number}].tool_call_id",
                )
            place = ids.index(message.result)
            message = replace(message, name=calls[place].name, place=place)
        known.append(message)
    if known[-1].role == "assistant":
        raise Refused(
            400, "the last message must be one to answer, not an assistant's", param=param
        )
    return known
