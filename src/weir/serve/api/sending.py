"""An answer on its way to the client: as one object, or as events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import JSONResponse, Response

from weir.serve.api.generation import Answers, while_there
from weir.serve.api.middleware import note
from weir.serve.api.sse import EventStream


class Form(Protocol):
    """The forms that an answer has on the wire."""

    async def whole(self, answers: Answers) -> dict[str, Any]:
        """All of it as one object."""

    def frames(self, answers: Answers) -> AsyncIterator[bytes]:
        """All of it as events."""


async def sent(
    request: Request, form: Form, answers: Answers, headers: dict[str, str], *, stream: bool
) -> Response:
    """What is sent to a client.

    Args:
        request: the client's, who may leave meanwhile.
        form: of the answers.
        answers: that have begun.
        headers: beside the usual ones.
        stream: as events.

    Raises:
        Refused: an answer failed before anything was sent.
        Gone: nobody waits for it.
    """
    if stream:
        mailbox, stall = answers.asked.mailbox, answers.desk.limits.stall
        return EventStream(form.frames(answers), mailbox.overrun, stall, answers.close, headers)
    try:
        whole = await while_there(request, form.whole(answers))
    finally:
        answers.close()
    note(request.scope, answered=answers.answered)
    return JSONResponse(whole, headers=headers)
