"""Words of a text as SQLite's tokenizers cut them, and the choice of the tokenizer.

English is indexed with `porter`, which treats "codes" as "code", and everything else with
`unicode61`. Scripts without spaces between words (Chinese, Japanese, Thai and others) are indexed
as overlapping pairs of characters: most Chinese words have two characters, and
SQLite's tokenizer `trigram` cannot find words of fewer than three.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache

SPACELESS = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Tibetan, Burmese, Khmer
    "\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Scripts without spaces between words, as a character class of a regular expression."""
_RUN = re.compile(f"[{SPACELESS}]+")

FUNCTION_WORDS = frozenset(
    """a about above after again against ago all also am an and another any anyone anything are as
    ask asked at back be because been before being below between both but by came can come could
    did do does doing done down during each earlier either else ever every few for from further
    get gets getting give given go goes going gone got had has have having he hello her here hers
    herself hey hi him himself his how however i if in into is it its itself just know let like
    ll look m made make many may maybe me mean might mine more most much must my myself need no nor
    not now of off ok okay on once one only or other our ours ourselves out over own please re
    really recall remember remind s said same say see shall she should since so some someone
    something still such t take tell than thank thanks that the their theirs them themselves then
    there these they thing things think this those though through to too told under until up upon
    us use used ve very want was way we well were what whatever when where whether which while who
    whom whose why will with within without would yes yet you your yours yourself yourselves d
    don doesn didn isn aren wasn weren won wouldn couldn shouldn can cannot ain hasn haven hadn
    answer question called call name named""".split()
)
"""English words that do not tell what a sentence is about."""
_ENGLISH = frozenset(
    """the and of to is in that it you for was with are this have on be what my not as at from your
    will they he she we i do did how who where when which""".split()
)
"""Words that are frequent in English text."""
_SHARE = 0.12
"""A text counts as English if at least this share of its words is in `_ENGLISH`."""


@cache
def _word_pattern() -> re.Pattern[str]:
    """Make a pattern that matches words: letters, digits, and the marks that belong to the letter
    before them.
    """
    marks = (c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c)[0] == "M")
    return re.compile(rf"[^\W_](?:[^\W_]|[{re.escape(''.join(marks))}])*")


def index_form(text: str) -> str:
    """Convert a text to the form that is indexed: normalized to NFKC, with runs of scripts without
    spaces cut into overlapping pairs of characters.
    """
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKC", text)
    return _RUN.sub(lambda run: f" {' '.join(_pairs(run.group()))} ", text)


def _pairs(run: str) -> list[str]:
    return [run[at : at + 2] for at in range(len(run) - 1)] or [run]


def split_words(text: str) -> list[str]:
    """Split a text into words as they are written; in scripts without spaces, into pairs of
    characters.
    """
    return [found.group() for found in _word_pattern().finditer(index_form(text))]


def is_english(text: str) -> bool:
    """Return whether a text is English, judged by the frequent English words at its beginning."""
    words = [word.lower() for word in split_words(text[:2000])]
    return bool(words) and sum(word in _ENGLISH for word in words) >= _SHARE * len(words)


def has_number(word: str) -> bool:
    """Return whether a word has a digit."""
    return any(char.isdigit() for char in word)
