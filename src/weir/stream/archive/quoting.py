"""Writes recalled passages into a turn as quotations that say who said each and when.

Every line of a passage begins with "> ", so that a passage cannot end the quotation and pretend to
be somebody else. Control tokens in it are treated as text when the turn is rendered.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from weir.stream.archive.passages import cut_sentences
from weir.stream.archive.ranking import Excerpt

OPENING = "Earlier in this conversation:"
SPEAKERS = {"user": "I said", "assistant": "You said", "tool": "A tool returned", "text": "I read"}
"""Names of speakers, from the point of view of the user whose turn has the quotation."""


def write_quotes(
    excerpts: Sequence[Excerpt], most: int, count: Callable[[str], int]
) -> tuple[str, list[Excerpt]]:
    """Write as many excerpts as fit into `most` tokens, the best first. Returns the text, which is
    empty if none fits, and the excerpts in it.

    `count` returns the number of tokens of a text. An excerpt that does not fit is shortened to its
    first sentences, or left out.
    """
    parts: list[str] = []
    used: list[Excerpt] = []
    days = Counter(_day(one) for one in excerpts)
    for one in excerpts:
        sentences = cut_sentences(one.text)
        while sentences:
            part = quote_excerpt(one, "".join(sentences).strip(), with_time=days[_day(one)] > 1)
            if count(_whole([*parts, part])) <= most:
                parts.append(part)
                used.append(one)
                break
            sentences.pop()
    return (_whole(parts), used) if parts else ("", [])


def find_quotes(text: str) -> str | None:
    """Find the quotations that `write_quotes` wrote into a text; None if there are none.

    Returns the quotations with the lines that say who said each, without the line `OPENING`.
    """
    _, opening, rest = text.partition(f"{OPENING}\n")
    # No quoted line is empty, so the first empty line ends the quotations.
    return rest.partition("\n\n")[0] if opening else None


def quote_excerpt(
    excerpt: Excerpt,
    text: str,
    speakers: Mapping[str, str] = SPEAKERS,
    *,
    with_time: bool = True,
) -> str:
    """Write one excerpt: a line that says who said it and when, followed by its quoted lines.

    The model must read every token of a date before it can answer. So the year is left out if it is
    the present one, and the time of day without `with_time`.
    """
    said, now = time.localtime(excerpt.time), time.localtime()
    when = time.strftime("%d %B", said).lstrip("0")
    if said.tm_year != now.tm_year:
        when += time.strftime(" %Y", said)
    if with_time:
        when += time.strftime(" at %H:%M", said)
    speaker = speakers.get(excerpt.role, excerpt.role)
    if excerpt.role == "tool" and excerpt.name:
        speaker = f"The tool {' '.join(excerpt.name.split())[:64]} returned"
    lines = [f"> {line}" for line in text.splitlines() if line.strip()]
    return "\n".join([f"{speaker}, on {when}:", *lines])


def _day(excerpt: Excerpt) -> tuple[int, ...]:
    return time.localtime(excerpt.time)[:3]


def _whole(parts: Sequence[str]) -> str:
    return "\n".join([OPENING, *parts, "", ""])
