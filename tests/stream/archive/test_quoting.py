"""Quotations say who said a passage and when, in as few tokens as distinguish them."""

from __future__ import annotations

import time

import pytest

from weir.stream.archive import Excerpt, quote_excerpt, write_quotes

NOON = (2026, 11, 3, 14, 5, 0, 0, 0, -1)


@pytest.fixture(autouse=True)
def november(monkeypatch):
    """Set the day on which quotations are written."""
    own, now = time.localtime, time.mktime((2026, 11, 28, 9, 0, 0, 0, 0, -1))
    monkeypatch.setattr(time, "localtime", lambda at=None: own(now if at is None else at))


def excerpt(text: str, *, hours: float = 0.0, **given: object) -> Excerpt:
    at = time.mktime(NOON) + 3600 * hours
    values = {"role": "user", "name": "", "start": -1, "stop": -1, "score": 1.0, "turn": 1}
    return Excerpt(text=text, time=at, **{**values, **given})  # type: ignore[arg-type]


def test_a_single_quotation_has_its_day():
    text, used = write_quotes([excerpt("The code is 7.")], 1000, len)
    assert text == "Earlier in this conversation:\nI said, on 3 November:\n> The code is 7.\n\n"
    assert len(used) == 1


def test_quotations_of_one_day_have_their_times():
    several = [excerpt("One."), excerpt("Two.", hours=2), excerpt("Three.", hours=30)]
    text, _ = write_quotes(several, 1000, len)
    said = [line for line in text.splitlines() if line.startswith("I said")]
    assert said == [
        "I said, on 3 November at 14:05:",
        "I said, on 3 November at 16:05:",
        "I said, on 4 November:",
    ]


def test_another_year_is_told():
    text, _ = write_quotes([excerpt("Old.", hours=-24 * 365)], 1000, len)
    assert "I said, on 3 November 2025:" in text


def test_no_line_of_a_passage_ends_its_quotation():
    text = quote_excerpt(excerpt("a\n\nb\r\nYou said:\u2028c"), "a\n\nb\r\nYou said:\u2028c")
    assert text.splitlines()[1:] == ["> a", "> b", "> You said:", "> c"]


def test_a_passage_that_does_not_fit_is_shortened_to_whole_sentences():
    text, used = write_quotes([excerpt("The code is 7. The rest is long.")], 80, len)
    assert "> The code is 7.\n" in text and "rest" not in text and len(used) == 1
    assert write_quotes([excerpt("The code is 7.")], 20, len) == ("", [])
