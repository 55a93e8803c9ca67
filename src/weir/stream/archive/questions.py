"""Questions in a turn: the sentences that ask for something, as words to search for.

A turn can have several questions, next to a pasted novel. Only sentences that ask something are
searched for, each by its own words, because a word of one question says nothing about another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from weir.stream.archive.passages import cut_sentences
from weir.stream.archive.words import FUNCTION_WORDS, has_number, split_words

MOST_QUESTIONS = 6
"""Largest number of questions of one turn that are searched for. If there are more, the last ones
are searched for.
"""
MOST_NAMES = 3
"""A question with at most this many names can also be searched for once for each name."""
MOST_TERMS = 24
"""Largest number of words of one question that are searched for."""
EDGE = 400
"""In a turn of more than `LONGEST` characters, only the first and the last sentence can be
questions, if they are not longer than this number of characters. The text in between was probably
pasted.
"""
SHORT = 12
"""In a turn of at most this many words, every sentence that does not begin with a quotation mark
counts as a question, because it may consist of keywords.
"""
LONGEST = 600
"""Largest number of characters of a sentence that can be a question. A longer sentence is data."""
_MARK = re.compile(r"[?？؟;]\s*[\"'”’»」』)]*\s*$")
_ASKS = re.compile(
    r"""^\W*(?:(?:please|and|but|so|now|ok(?:ay)?|also|then|hey|hi|hello|well)\b\W*)*
    (?:tell\ (?:me|us)|remind|recall|repeat|recite|look\ up|search\ for|quote)\b""",
    re.VERBOSE | re.IGNORECASE,
)
_QUOTES = "\"'“‘«„»「『>"
"""A sentence that begins with one of these characters quotes somebody else."""
_NUMBER = 3
"""A word with a digit counts as a name if it has at least this many characters. A shorter word is
probably a count.
"""


@dataclass(frozen=True)
class Term:
    """A word to search for, or a name of several words.

    Attributes:
        strong: whether it is written like a name or a number, and is not a part of a longer name.
        part: whether it is part of a longer name that is also a term.
    """

    word: str
    strong: bool = False
    part: bool = False


@dataclass(frozen=True)
class Inquiry:
    """A sentence that asks something, and its words that are searched for.

    Attributes:
        parts: the same question about each of its names, if it has two or three. They are searched
            for if no passage answers the whole question: two statements may have one name each.
    """

    text: str
    terms: tuple[Term, ...]
    parts: tuple[Inquiry, ...] = ()


def find_inquiries(text: str) -> list[Inquiry]:
    """Find the last questions of a turn, the last one first; none if it asks nothing.

    In a turn that is not long, a question without a name is also searched for together with the
    names in the sentence before it.
    """
    if len(text) > LONGEST:
        # People ask before or after a pasted text. A sentence that is cut at `EDGE` is left out.
        sentences = [*cut_sentences(text[:EDGE])[:-1][:1], *cut_sentences(text[-EDGE:])[1:][-1:]]
    else:
        sentences = cut_sentences(text)
    sentences = [one.strip() for one in sentences]
    sentences = [one for one in sentences if 0 < len(one) <= LONGEST]
    short = len(text) <= LONGEST and len(split_words(text)) <= SHORT
    found: dict[tuple[Term, ...], Inquiry] = {}
    for at in reversed(range(len(sentences))):
        sentence = sentences[at]
        if sentence[0] in _QUOTES or not (_MARK.search(sentence) or _ASKS.match(sentence) or short):
            continue
        terms = find_terms(sentence)
        if not any(term.strong for term in terms) and at and len(text) <= LONGEST:
            # "I am about to call Alice. What was her number?"
            before = [term for term in find_terms(sentences[at - 1]) if term.strong]
            if before and terms:
                joined = (*terms, *(term for term in before if term not in terms))[:MOST_TERMS]
                found.setdefault(joined, Inquiry(f"{sentences[at - 1]} {sentence}", joined))
        # Short numbers alone say nothing: "What about |x + 10| < 5?"
        if any(term.strong or not has_number(term.word) for term in terms):
            found.setdefault(terms, Inquiry(sentence, terms, _part(sentence, terms)))
        if len(found) >= MOST_QUESTIONS:
            break
    return list(found.values())[:MOST_QUESTIONS]


def _part(sentence: str, terms: Sequence[Term]) -> tuple[Inquiry, ...]:
    """Split a question with several names into one for each name.

    Returns nothing if it has fewer than two names, or more than `MOST_NAMES`.
    """
    names = [term for term in terms if term.strong]
    if not 1 < len(names) <= MOST_NAMES:
        return ()
    shared = [term for term in terms if not term.strong and not term.part]
    parts = []
    for name in names:
        words = name.word.split()
        own = [term for term in terms if term.part and term.word in words]
        parts.append(Inquiry(sentence, (name, *own, *shared)))
    return tuple(parts)


def find_terms(sentence: str) -> tuple[Term, ...]:
    """Return the words that say what a sentence is about, each once; names and numbers are strong.

    Adjacent names and numbers are one name: "Alice Moreau" is not another person called Alice. The
    first word of a sentence always begins with a capital letter, so it counts as a name only if all
    its letters are capitals.
    """
    found: dict[str, Term] = {}
    name: list[str] = []

    def close_name() -> None:
        if len(name) > 1:
            whole = " ".join(name)
            found[whole] = Term(whole, strong=True)
            found.update({word: Term(word, part=True) for word in name})
        name.clear()

    before = ""  # a word such as "Will", with which a name can begin
    for place, word in enumerate(split_words(sentence)):
        plain = word.casefold()
        if plain in FUNCTION_WORDS or (len(plain) == 1 and plain.isascii()):
            close_name()
            before = plain if place and word[0].isupper() and len(word) > 1 else ""
            continue
        named = word[0].isupper() and (place > 0 or (len(word) > 1 and word.isupper()))
        strong = named or (has_number(word) and len(word) >= _NUMBER)
        if strong:
            name += [before, plain] if before else [plain]
        else:
            close_name()
        before = ""
        if plain not in found or (strong and not found[plain].part):
            found[plain] = Term(plain, strong)
    close_name()
    # If there are too many words, keep names and numbers.
    terms = sorted(found.values(), key=lambda term: not term.strong)
    return tuple(terms[:MOST_TERMS])
