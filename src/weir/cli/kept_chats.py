"""Conversations that `weir chat` saves as they go: a transcript, an archive and a saved stream.

The transcript has a line of JSON for each turn. It is written as the turn is said, so that nothing
is lost if the process ends. The saved stream lets `--continue` go on without recomputing the
conversation. It is written at the end, and before that so seldom that saving takes at most about a
twentieth of the time. The archive is searched by `--recall`. A missing archive is rebuilt from the
transcript.
"""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weir.cli.common import say
from weir.errors import WeirError

if TYPE_CHECKING:
    from weir.stream import Archive, Conversation, Transcript

SAVED = 8
"""Number of the newest conversations that keep a saved stream. Older ones are recomputed from
their transcripts. A conversation whose transcript lacks the beginning of the stream keeps its saved
stream, too.
"""
SELDOM = 20
"""Shortest wait between two saves of a stream, in multiples of the time that the first of them
took.
"""


def folder() -> Path:
    """Return the folder of saved conversations, in `XDG_STATE_HOME` or `~/.local/state`."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path("~/.local/state").expanduser()) / "weir" / "chats"


def session_of(transcript: Path) -> Path:
    """Return the path of the saved stream that belongs to a transcript."""
    return transcript.with_suffix(".safetensors")


def archive_of(transcript: Path) -> Path:
    """Return the path of the archive that belongs to a transcript."""
    return transcript.with_suffix(".archive")


def open_archive(transcript: Transcript | None) -> Archive | None:
    """Open the archive of a conversation.

    An empty archive is filled from the transcript. If the conversation is not saved, the archive is
    in memory. Returns None and reports why if it cannot be used.
    """
    from weir.stream import Archive, ArchiveProblem

    path = None if transcript is None else transcript.path
    try:
        archive = Archive(None if path is None else archive_of(path))
        if transcript is not None and transcript.turns and not archive.turns:
            for turn in transcript.whole_turns():
                role = "user" if turn.by_user else "assistant"
                archive.add(role, turn.text, start=turn.start, stop=turn.end)
        return archive
    except ArchiveProblem as error:
        say(f"weir: {error} The conversation goes on, but nothing is recalled.")
        return None


def begin(facts: dict[str, Any]) -> Transcript:
    """Begin a transcript. If it cannot be written, report that and keep it in memory."""
    from weir.stream import Transcript

    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{datetime.now():%Y-%m-%d-%H%M%S-%f}-{os.getpid()}.jsonl"
        return Transcript(folder() / name, facts)
    except (WeirError, OSError, RuntimeError) as error:
        say(f"this conversation is not saved: {error}")
    return Transcript(None, facts)


def name_anywhere(model: str) -> str:
    """Return a model's name so that it means the same model in any folder."""
    if model in ("nano", "smollm2"):
        return model
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def find_newest(model: str | None) -> Transcript:
    """Open the newest conversation that no other process has open.

    If a model is named, only conversations with it count. Raises WeirError if there is none.
    """
    from weir.stream import Transcript

    refused, asked = "", None if model is None else name_anywhere(model)
    for path in sorted(folder().glob("*.jsonl"), key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            found = Transcript.read(path)
        except WeirError as error:
            refused = refused or str(error)
            continue
        if found.turns and (asked is None or asked == name_anywhere(str(found.facts.get("model")))):
            if refused:
                say(f"{refused.removesuffix('.')}. Continuing an older conversation instead.")
            return found
        found.close()
    of = "" if model is None else f" with {model}"
    why = f" ({refused})" if refused else ""
    raise WeirError(
        f"no conversation{of} to continue in {folder()}{why}. Start one with weir chat."
    )


class Keeper:
    """Saves the stream of a conversation.

    `saved` is the number of tokens of the stream that was last saved, or -1 if none was.
    """

    def __init__(self, conversation: Conversation, saved: int = -1) -> None:
        self.conversation = conversation
        self._saved_at = saved
        self._pause, self._last = 0.0, time.monotonic()

    def save(self, *, last: bool = False) -> None:
        """Save the stream if it has changed: always at the end, otherwise from time to time."""
        stream, transcript = self.conversation.stream, self.conversation.transcript
        path = None if transcript is None else transcript.path
        began = time.monotonic()
        if path is None or stream.cache is None or stream.seen == self._saved_at:
            return
        if not last and began - self._last < self._pause:
            return
        try:
            stream.save(session_of(path))
            _clear(path.parent)
        except (WeirError, OSError, KeyboardInterrupt) as error:
            why = str(error) or "interrupted"
            say(f"weir: {why}. --continue must recompute from {path} what was not saved")
        self._saved_at, self._last = stream.seen, time.monotonic()
        self._pause = SELDOM * (self._last - began)


def _clear(chats: Path) -> None:
    """Remove the saved streams of older conversations that can be recomputed from their
    transcripts.
    """
    from weir.stream import Transcript

    saved = sorted(chats.glob("*.safetensors"), key=lambda p: p.stat().st_mtime, reverse=True)
    for path in saved[SAVED:]:
        try:
            transcript = Transcript.read(path.with_suffix(".jsonl"))
        except (WeirError, OSError):
            continue
        if transcript.turns and transcript.turns[0].start == 0:
            path.unlink(missing_ok=True)
        transcript.close()
