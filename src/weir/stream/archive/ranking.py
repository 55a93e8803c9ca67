"""Search: finds the archived passages that answer a question, the best first.

The weight of a word depends on how rare the word is in the conversation, and is larger for names
and numbers. A passage is found if it has enough of the question's words, and if these words are
unlikely to occur together by chance. `weir eval --tasks found` measures both thresholds.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weir.stream.archive.passages import PASSAGE, cut_sentences
from weir.stream.archive.questions import Inquiry, Term
from weir.stream.archive.tables import INDEXES, LINE, ArchiveEnd, RunQuery
from weir.stream.archive.words import FUNCTION_WORDS, index_form, split_words

COMMON = 256
"""A word that is in more than this many passages is common, and finds nothing on its own. Only its
newest passages are read, so that a search takes as long in a large archive as in a small one.
"""
WINDOW = 50_000
"""Number of newest passages that are searched for several words at once if one of these words is
common.
"""
CANDIDATES = 24
"""Number of passages that are read at once for one question. If fewer than half as many can be
answers, more are read.
"""
BACKGROUND = 1000
"""Number of imaginary passages without any of a question's words that are added to the number of
passages, so that in a short conversation a word that was said twice is still rare.
"""
NAME_BOOST = 3.0
"""Factor on the weight of names and numbers."""
PART = 0.5
"""Factor on the weight of a word that is part of a longer name in the question."""
UNSEEN = 0.6
"""Factor on the weight of a word that is not in the archive and is not a name, because the question
may use other words than the passage.
"""
COVERAGE = 0.55
"""Share of the weight of a question's words that a passage must have."""
SURPRISE = 2.0
"""How unlikely it must be that a passage has the question's words by chance: the logarithm of one
over the expected number of such passages.
"""
NEAR = 0.12
"""Scores that differ by at most this count as equal. Passages with equal scores are sorted by who
said them and when (`_in_order`).
"""
SAME = 0.6
"""Share of the words of the shorter of two statements that the other must also have, so that the
later one can replace the earlier one.
"""
_ADDS = re.compile(r"\b(?:also|too|another|as well|in addition|one of|besides)\b", re.IGNORECASE)
"""Words that mark a statement as an addition to an earlier one."""
ASKED = 0.5
"""Factor on the score of a passage if the sentence in it that fits best is a question. If the user
asked it, the factor is 0.
"""
ANSWERED = 0.85
"""Factor on the score of what the model has said. If the model and the user contradict each other,
the user is probably right.
"""


@dataclass(frozen=True)
class Excerpt:
    """A piece of archived text that a search has found.

    Attributes:
        text: the text.
        role: who said it: "user", "assistant", "tool", "system", or "text" for a stream's text.
        name: the name of the author or of the tool; empty for most.
        time: when it was said, in seconds since 1970.
        start, stop: its first position in the stream, and the one after its last; -1 if it is not
            in a stream.
        score: how well it answers the question, at most 1.
        turn: number of its turn in the archive; later turns have larger numbers.
    """

    text: str
    role: str
    name: str
    time: float
    start: int
    stop: int
    score: float
    turn: int


@dataclass(frozen=True)
class _Hits:
    """Passages with a word: all of them, or the newest if the word is common.

    Attributes:
        passages: the numbers of these passages.
        count: the number of all passages with the word, which is estimated if the word is common.
        common: whether the word is in more than `COMMON` passages of an index.
    """

    passages: frozenset[int]
    count: float
    common: bool


@dataclass
class _Candidate:
    """A passage that may be an answer, and its sentences."""

    row: sqlite3.Row
    sentences: list[str]
    held: bool
    sentence: str = ""
    score: float = 0.0


IsHeld = Callable[[int, int], bool]
"""Tells whether a cache still holds the text from `start` to `stop` of the stream."""


class ArchiveSearch:
    """Searches the text that is visible from the end of one turn or session (see `tables.py`). The
    archive must not change during the search.
    """

    def __init__(self, query: RunQuery, owner: str, end: ArchiveEnd) -> None:
        self._query, self._owner, self._end = query, owner, end
        self._line = self._find_line()
        rows = query(
            "SELECT english, plain FROM archived_branches WHERE number = ? AND owner = ?",
            end.tree,
            owner,
        )
        english, plain = rows[0] if rows else (0, 0)
        self._total = english + plain
        self._used = [INDEXES[True]] * bool(english) + [INDEXES[False]] * bool(plain)
        self._known: dict[str, _Hits] = {}
        # If there is no other tree, as in the file of one chat, passages need not be filtered by
        # tree and owner.
        ((others,),) = query(
            "SELECT EXISTS (SELECT 1 FROM archived_branches WHERE tree != ? OR owner != ?)",
            end.tree,
            owner,
        )
        ((self._branches,),) = query(
            "SELECT count(*) FROM archived_branches WHERE tree = ? AND owner = ?", end.tree, owner
        )
        self._alone = not others
        self._last = query("SELECT max(number) FROM archived_passages")[0][0] or 0

    def _find_line(self) -> dict[int, int]:
        """Find the branches that are visible from the end, and the last visible turn of each."""
        rows = self._query(
            f"{LINE} SELECT branch, turn FROM line",
            self._end.branch,
            self._end.turn,
            self._owner,
        )
        return {row[0]: row[1] for row in rows}

    def search(self, questions: Sequence[Inquiry], is_held: IsHeld, most: int) -> list[Excerpt]:
        """Find at most `most` excerpts, the best first; held passages are left out.

        Each question is answered separately, and the best passages of all questions come before the
        second-best passages.
        """
        if not self._total:
            return []
        found = [answer for one in questions for answer in self._answers(one, is_held)]
        excerpts: list[Excerpt] = []
        seen: set[tuple[str, ...]] = set()
        for rank in range(max(map(len, found), default=0)):
            for several in found:
                if rank >= len(several) or len(excerpts) >= most:
                    continue
                one = several[rank]
                # If the best sentences of two passages differ only in function words, only the
                # passage that comes first here stays.
                said = tuple(sorted(set(_content(one.sentence))))
                if said not in seen:
                    seen.add(said)
                    excerpts.append(self._excerpt(one))
        return excerpts

    def count_turns(self) -> int:
        """Count the turns that are visible from the end."""
        counts = (
            self._query(
                "SELECT count(*) FROM archived_turns WHERE branch = ? AND number <= ? "
                "AND owner = ?",
                branch,
                turn,
                self._owner,
            )[0][0]
            for branch, turn in self._line.items()
        )
        return sum(counts)

    # --- one question

    def _answers(self, question: Inquiry, is_held: IsHeld) -> list[list[_Candidate]]:
        """Find the passages that answer a question, or else those that answer its parts."""
        whole = self._answer(question, is_held)
        if whole or not question.parts:
            return [_without_held(whole)]
        return [_without_held(self._answer(one, is_held)) for one in question.parts]

    def _answer(self, question: Inquiry, is_held: IsHeld) -> list[_Candidate]:
        """Find the passages that answer a question, the best first, held ones included."""
        hits = {term: self._hits(term.word) for term in question.terms}
        weights = {term: self._weigh(term, hits[term]) for term in question.terms}
        whole = sum(weights.values())
        if not whole:
            return []
        partial: dict[int, float] = defaultdict(float)
        rare = [term for term in question.terms if not hits[term].common]
        for term in rare:
            for passage in hits[term].passages:
                partial[passage] += weights[term]
        common = [term for term in question.terms if hits[term].common]
        if len(partial) > CANDIDATES:
            # Rare words alone select too many passages, so those that also have common words are
            # read first.
            either = " OR ".join(f'"{term.word}"' for term in rare)
            for term in common:
                for passage in self._find_all(f'({either}) AND "{term.word}"'):
                    partial[passage] += weights[term]
        elif len(common) > 1:
            # Passages that have only the common words get weight 0, so they come after all others.
            # Passages with a rare word keep the weight that they have.
            for passage in self._find_all(" AND ".join(f'"{term.word}"' for term in common)):
                partial.setdefault(passage, 0)
        order = sorted(partial, key=lambda passage: (partial[passage], passage), reverse=True)
        candidates: list[_Candidate] = []
        for at in range(0, min(len(order), COMMON), CANDIDATES):
            # A question that was asked every day must not hide the statement that answers it.
            loaded = self._load(order[at : at + CANDIDATES], is_held)
            candidates += [one for one in loaded if not _only_asks(one)]
            if len(candidates) >= CANDIDATES // 2:
                break
        self._score(candidates, question, weights)
        return _without_superseded(_in_order([one for one in candidates if one.score > 0]))

    def _weigh(self, term: Term, hits: _Hits) -> float:
        """Compute the weight of a word from its rarity; names weigh more."""
        rarity = math.log((self._total + BACKGROUND) / (hits.count + 0.5))
        if term.strong:
            rarity *= NAME_BOOST
        elif term.part:
            rarity *= PART
        elif not hits.count:
            rarity *= UNSEEN
        return max(0.0, rarity)

    def _hits(self, word: str) -> _Hits:
        if word not in self._known:
            self._known[word] = self._find(word)
        return self._known[word]

    def _find(self, word: str) -> _Hits:
        """Find the newest passages with a word."""
        found: list[int] = []
        count, common = 0.0, False
        for index in self._used:
            numbers = self._match(index, f'"{word}"', COMMON + 1)
            if len(numbers) > COMMON:
                common = True
                # Assume that the word is as frequent in the newest passages as in all.
                span = numbers[0] - numbers[-1] + 1
                count += max(len(numbers), self._total * len(numbers) / max(span, self._total / 50))
            else:
                numbers = self._seen_of(numbers)
                count += len(numbers)
            found += numbers
        return _Hits(frozenset(found), min(count, self._total), common)

    def _find_all(self, words: str) -> list[int]:
        """Find the newest passages that match several words."""
        return [n for index in self._used for n in self._match(index, words, COMMON, WINDOW)]

    def _match(self, index: str, words: str, most: int, window: int = 0) -> list[int]:
        """Find the newest passages of the tree with some words, in one index and on any branch."""
        if not self._alone:
            words = f'tree : "t{self._end.tree}" AND words : ({words})'
        else:
            words = f"words : ({words})"
        rows = self._query(
            f"SELECT rowid FROM {index} WHERE {index} MATCH ? AND rowid > ? "
            "ORDER BY rowid DESC LIMIT ?",
            words,
            self._last - window if window else 0,
            most,
        )
        return [row[0] for row in rows]

    def _seen_of(self, numbers: Sequence[int]) -> list[int]:
        """Return the passages that belong to the owner and are visible from the end."""
        if self._alone and len(self._line) == self._branches == 1:
            return list(numbers)
        marks = ", ".join("?" * len(numbers))
        rows = self._query(
            "SELECT number, branch, turn FROM archived_passages "
            f"WHERE number IN ({marks}) AND owner = ? AND tree = ?",
            *numbers,
            self._owner,
            self._end.tree,
        )
        return [row["number"] for row in rows if self._sees(row)]

    def _sees(self, row: sqlite3.Row) -> bool:
        """Return whether a passage is visible from the end: whether its branch is visible, and the
        passage is not after the last visible turn of this branch.
        """
        return bool(row["turn"] <= self._line.get(row["branch"], -1))

    def _load(self, numbers: Sequence[int], is_held: IsHeld) -> list[_Candidate]:
        """Read passages, and note which are held."""
        marks = ", ".join("?" * len(numbers))
        rows = self._query(
            "SELECT p.number, p.branch, p.turn, p.start, p.stop, p.text, p.english, t.role, "
            "t.name, t.time FROM archived_passages AS p JOIN archived_turns AS t "
            f"ON t.number = p.turn WHERE p.number IN ({marks}) AND p.owner = ? AND p.tree = ?",
            *numbers,
            self._owner,
            self._end.tree,
        )
        rows = [row for row in rows if self._sees(row)]
        return [
            _Candidate(
                row,
                cut_sentences(row["text"]),
                row["start"] >= 0 and is_held(row["start"], row["stop"]),
            )
            for row in rows
        ]

    def _score(
        self, candidates: Sequence[_Candidate], question: Inquiry, weights: dict[Term, float]
    ) -> None:
        """Score passages by the question's words in them, and in their best sentence."""
        sentences = [(one, text) for one in candidates for text in one.sentences]
        matched = _match_sentences(
            [text for _, text in sentences],
            [bool(one.row["english"]) for one, _ in sentences],
            question.terms,
        )
        whole = sum(weights.values())
        in_passage: dict[int, set[Term]] = {}
        best: dict[int, float] = {}
        for (one, text), terms in zip(sentences, matched, strict=True):
            share = sum(weights[term] for term in terms) / whole
            place = one.row["number"]
            in_passage.setdefault(place, set()).update(terms)
            # If a statement and a question are equally good, prefer the statement.
            share -= 1e-6 * _asks(text)
            if share > best.get(place, -1.0):
                best[place], one.sentence = share, text
        for one in candidates:
            place = one.row["number"]
            terms = in_passage.get(place, set())
            weight = sum(weights[term] for term in terms)
            if weight < COVERAGE * whole or weight < math.log(self._total + 1) + SURPRISE:
                continue
            one.score = (weight / whole + best[place]) / 2
            if _asks(one.sentence):
                # An earlier question of the user does not contain the answer.
                one.score *= 0.0 if one.row["role"] == "user" else ASKED
            if one.row["role"] == "assistant":
                one.score *= ANSWERED

    # --- excerpts

    def _excerpt(self, one: _Candidate) -> Excerpt:
        """Make an excerpt of a passage. If the passage is short, its neighbors in the turn are
        included as far as there is room.
        """
        row = one.row
        text, start, stop = row["text"], row["start"], row["stop"]
        if len(text) < PASSAGE // 2:
            for neighbor in self._query(
                "SELECT number, text, start, stop FROM archived_passages "
                "WHERE turn = ? AND owner = ? AND number BETWEEN ? - 1 AND ? + 1",
                row["turn"],
                self._owner,
                row["number"],
                row["number"],
            ):
                more = neighbor["text"]
                if neighbor["number"] == row["number"] or len(text) + len(more) > PASSAGE:
                    continue
                if neighbor["number"] < row["number"]:
                    text, start = more + text, neighbor["start"]
                else:
                    text, stop = text + more, neighbor["stop"]
        return Excerpt(
            text.strip(),
            row["role"],
            row["name"],
            row["time"],
            start,
            stop,
            round(one.score, 3),
            row["turn"],
        )


def _without_superseded(found: list[_Candidate]) -> list[_Candidate]:
    """Leave out statements that a statement of the user replaces (`_supersedes`).

    A small model that reads both statements repeats the replaced one about half of the time.
    """
    left: list[_Candidate] = []
    for one in found:
        if not any(_supersedes(later, one) for later in left):
            left.append(one)
    return left


def _without_held(found: list[_Candidate]) -> list[_Candidate]:
    """Leave out passages that the cache holds. Passages that answer clearly worse than the best of
    these are left out too, because they would only distract.
    """
    best = max((one.score for one in found if one.held), default=0.0)
    return [
        one for one in found if not one.held and (one.score >= best or is_as_good(one.score, best))
    ]


def _supersedes(later: _Candidate, earlier: _Candidate) -> bool:
    """Return whether a statement replaces another one with mostly the same words.

    Only a statement of the user that is not an addition replaces others. It replaces statements of
    the model even if they come later. It replaces a statement of the user only if that one comes
    earlier and the two are about equally good as answers.
    """
    if later.row["role"] != "user" or earlier.row["role"] not in ("user", "assistant"):
        return False
    if earlier.row["role"] == "user" and (
        later.row["turn"] <= earlier.row["turn"] or not is_as_good(later.score, earlier.score)
    ):
        return False
    if _ADDS.search(later.sentence):
        return False
    one, other = set(_content(later.sentence)), set(_content(earlier.sentence))
    return len(one & other) >= SAME * min(len(one), len(other))


def is_as_good(score: float, other: float) -> bool:
    """Return whether two scores are nearly equal."""
    return abs(score - other) <= NEAR


def _in_order(found: list[_Candidate]) -> list[_Candidate]:
    """Sort by score, the best first. Among nearly equal scores, what others said comes before what
    the model said, and later comes before earlier.
    """
    left = sorted(found, key=lambda one: -one.score)
    order: list[_Candidate] = []
    while left:
        near = [one for one in left if is_as_good(one.score, left[0].score)]
        left = left[len(near) :]
        order += sorted(near, key=lambda one: (one.row["role"] == "assistant", -one.row["number"]))
    return order


def _only_asks(one: _Candidate) -> bool:
    """Return whether a passage contains only what the user has asked before."""
    return one.row["role"] == "user" and all(map(_asks, one.sentences))


def _asks(sentence: str) -> bool:
    """Return whether a sentence is a question."""
    return sentence.rstrip().rstrip("\"'”’»」』)").endswith(("?", "？", "؟"))


def _content(sentence: str) -> list[str]:
    """Return the words that say what a sentence is about."""
    words = [word.casefold() for word in split_words(sentence)]
    return [word for word in words if word not in FUNCTION_WORDS]


def _match_sentences(
    sentences: Sequence[str], english: Sequence[bool], terms: Sequence[Term]
) -> list[set[Term]]:
    """Find the terms in each of some sentences, with the tokenizer of the passage's index."""
    found: list[set[Term]] = [set() for _ in sentences]
    scratch = sqlite3.connect(":memory:")
    try:
        tokenizer = "unicode61 remove_diacritics 2 categories 'L* N* Co M*'"
        for stems in set(english):
            kind = f"porter {tokenizer}" if stems else tokenizer
            table = f"words{int(stems)}"
            scratch.execute(f'CREATE VIRTUAL TABLE {table} USING fts5(words, tokenize = "{kind}")')
            scratch.executemany(
                f"INSERT INTO {table} (rowid, words) VALUES (?, ?)",
                [
                    (at, index_form(text))
                    for at, text in enumerate(sentences)
                    if english[at] == stems
                ],
            )
            for term in terms:
                for (at,) in scratch.execute(
                    f"SELECT rowid FROM {table} WHERE {table} MATCH ?", (f'"{term.word}"',)
                ):
                    found[at].add(term)
    finally:
        scratch.close()
    return found
