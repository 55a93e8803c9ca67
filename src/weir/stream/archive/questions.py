"""Questions in a turn: the sentences that ask for something, as words to search for.

A turn may hold several questions, and a pasted novel beside them. Only sentences that ask are
searched for, each by its own words, since a word of one says nothing about another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from weir.stream.archive.passages import cut_sentences
from weir.stream.archive.words import FUNCTION_WORDS, has_number, split_words

MOST_QUESTIONS = 6
"""Questions of one turn that are searched for: its last ones."""
MOST_TERMS = 24
"""Words of one question that are searched for."""
EDGE = 400
"""Characters at either end of a long turn in which questions are looked for: what lies between was
pasted."""
SHORT = 12
"""Words of a turn that asks whatever its form, as keywords do."""
LONGEST = 600
"""Characters of a sentence that can ask; a longer one is data."""
_MARK = re.compile(r"[?？؟;]\s*[\"'”’»」』)]*\s*$")
_ASKS = re.compile(
    r"""^\W*(?:(?:please|and|but|so|now|ok(?:ay)?|also|then|hey|hi|hello|well)\b\W*)*
    (?:tell\ (?:me|us)|remind|recall|repeat|recite|look\ up|search\ for|quote)\b""",
    re.VERBOSE | re.IGNORECASE,
)
_QUOTES = "\"'“‘«„»「『>"
"""First characters of what somebody else asks."""
_NUMBER = 3
"""Characters from which on a word with a digit names something; shorter ones count things."""


@dataclass(frozen=True)
class Term:
    """A word to search for, or a name of several words.

    Attributes:
        strong: whether it is written as a name or a number.
        part: whether it is a part of a name that is a term, too.
    """

    word: str
    strong: bool = False
    part: bool = False


@dataclass(frozen=True)
class Inquiry:
    """A sentence that asks, and the words of it that are searched for."""

    text: str
    terms: tuple[Term, ...]


def find_inquiries(text: str) -> list[Inquiry]:
    """Find what a turn asks: its last questions, the last one first; none if nothing is asked."""
    if len(text) > LONGEST:
        # Before or after a pasted text is where one asks. Sentences that are cut are left out.
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
        if terms:
            found.setdefault(terms, Inquiry(sentence, terms))
        if len(found) >= MOST_QUESTIONS:
            break
    return list(found.values())[:MOST_QUESTIONS]


def find_terms(sentence: str) -> tuple[Term, ...]:
    """The words of a sentence that say what it is about, each once; names and numbers are strong.

    Words with capital letters that follow each other are one name: "Alice Moreau" is nobody else
    who is called Alice. The first word of the sentence has a capital letter whatever it is, so it
    is not taken for a name.
    """
    found: dict[str, Term] = {}
    name: list[str] = []

    def close_name() -> None:
        if len(name) > 1:
            whole = " ".join(name)
            found[whole] = Term(whole, strong=True)
            found.update({word: Term(word, part=True) for word in name})
        name.clear()

    before = ""  # a word such as "Will", which a name may begin with
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
    # Of too many words, names and numbers are the ones to keep.
    terms = sorted(found.values(), key=lambda term: not term.strong)
    return tuple(terms[:MOST_TERMS])
