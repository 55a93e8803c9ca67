"""What a session's cache still remembers: the text of its stream, each token with who holds it.

The row says which tokens are held, records say what they were. Either may know more than the other:
a cache holds the beginning of a stream whose first turns are not kept any more, and most of what
records know no slot holds. Knows nothing about HTTP.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from weir.cache import Holding, LayerPlan, StreamingCache, holding_in
from weir.serve.engine import RowInspection, Sequence, Stage
from weir.serve.sessions import SessionStore, TurnTokens, pack_ids, unpack_ids
from weir.stream import tokens_as_text

BLOCK = 32
"""Tokens that are made text together: of a stream that grows, few are made again."""
BEFORE = 4
"""Tokens in front of them that are read too, for spaces and for characters of several tokens."""


@dataclass(frozen=True)
class Recalled:
    """A token of a stream.

    Attributes:
        at: its place, from 0 on.
        text: what it says; None where nobody knows any more which token it was.
        special: whether it is a special token.
        pools: in how many pairs of a layer and a KV head each of `Memory.pools` holds it.
    """

    at: int
    text: str | None
    special: bool
    pools: tuple[int, ...]


@dataclass(frozen=True)
class Pool:
    """A pool of the policy, in a row.

    Attributes:
        name: its name; the last is "new", of tokens that wait for the next fold.
        slots: in use of a layer and a KV head, the mean over them.
        tokens: that it holds anywhere.
    """

    name: str
    slots: float
    tokens: int


@dataclass(frozen=True)
class Memory:
    """What a row holds, and of which text.

    Attributes:
        doing: of the turn under way: "reading" or "answering"; None between turns.
        seen: tokens of the stream so far.
        read: of them those that the row has read: all but the last of an answer.
        folds: of the row so far.
        bytes: of the row; they never change.
        whole: bytes that keys and values of all tokens that were read would take.
        pairs: of a layer and a KV head, how many there are.
        pools: in the order of the pipe.
        held: tokens that are held anywhere.
        tokens: those of them that are told, and the latest of the stream, in its order.
    """

    doing: str | None
    seen: int
    read: int
    folds: int
    bytes: int
    whole: int
    pairs: int
    pools: tuple[Pool, ...]
    held: int
    tokens: tuple[Recalled, ...]


@dataclass(frozen=True)
class Row:
    """A row, and what is known of what was fed to it.

    Attributes:
        holding: what it holds.
        line: the tokens of its stream, as far back as they are kept.
        doing: as in `Memory`.
    """

    holding: Holding
    line: list[TurnTokens]
    doing: str | None = None

    @property
    def seen(self) -> int:
        """How many tokens the stream has; of a prompt that is being read those that were."""
        if self.doing == "reading":
            return self.holding.seen
        return max(self.holding.seen, self.line[-1].end if self.line else 0)


def row_of_turn(store: SessionStore, owner: str, turn: Sequence, glance: RowInspection) -> Row:
    """The row of a turn under way.

    Args:
        store: where the turns before it are.
        owner: whose they are.
        turn: the turn.
        glance: what was seen of its row.
    """
    line = [] if turn.start is None else store.ancestry(owner, turn.start)
    if turn.start is None or line:
        ids = [*turn.ids, *glance.chosen]
        before = line[-1].end if line else 0
        line.append(TurnTokens(turn.node, before + len(ids), pack_ids(ids)))
    answering = turn.stage is not Stage.READING
    return Row(glance.holding, line, "answering" if answering else "reading")


def row_at(store: SessionStore, owner: str, node: str, plans: list[LayerPlan]) -> Row:
    """The row at the end of a saved turn.

    Raises:
        WeirError: it is not kept any more.
    """
    return Row(holding_in(plans, store.get(node).state), store.ancestry(owner, node))


class Recaller:
    """Tells what rows of one cache remember.

    Args:
        cache: that the rows go into; only what it was made with is looked at.
        tokenizer: of its model.
    """

    def __init__(self, cache: StreamingCache, tokenizer: PreTrainedTokenizerBase) -> None:
        self._chunk = cache.chunk
        self._bytes = cache.nbytes // (cache.batch or 1)
        heads = [plan.heads for plan in cache.plans]
        self._each = sum(
            it.kv_heads * (it.key_dim + it.value_dim) * it.dtype.itemsize for it in heads
        )
        self._tokenizer = tokenizer
        self._said = lru_cache(maxsize=2048)(self._say)

    def recall(self, row: Row, most: int, latest: int) -> Memory:
        """What a row remembers.

        Args:
            row: the row.
            most: so many tokens that are held are told: those that most layers and heads hold.
            latest: so many of the end of the stream are told, held or not.
        """
        holding = row.holding
        held = holding.tokens()
        pools = tuple(
            Pool(
                name,
                int((holding.pool == number).sum()) / max(1, holding.pairs),
                sum(name in token.pools for token in held),
            )
            for number, name in enumerate(holding.pools)
        )
        late = range(max(0, row.seen - latest), row.seen)
        told = sorted(held, key=lambda token: (token.pairs, token.token))[len(held) - most :]
        by_place = {token.token: token.pools for token in held if token.token in late}
        by_place |= {token.token: token.pools for token in told}
        places = sorted(by_place.keys() | set(late))
        known = dict(self._texts(row.line, places))
        texts = ((place, known.get(place, (None, False))) for place in places)
        return Memory(
            doing=row.doing,
            seen=row.seen,
            read=holding.seen,
            folds=(holding.seen - pools[-1].tokens) // self._chunk,
            bytes=self._bytes,
            whole=self._each * holding.seen,
            pairs=holding.pairs,
            pools=pools,
            held=len(held),
            tokens=tuple(
                Recalled(
                    place,
                    text,
                    is_special,
                    tuple(by_place.get(place, {}).get(pool.name, 0) for pool in pools),
                )
                for place, (text, is_special) in texts
            ),
        )

    def _texts(
        self, line: list[TurnTokens], places: list[int]
    ) -> Iterator[tuple[int, tuple[str, bool]]]:
        """What tokens at rising places say, and whether they are special, where it is known."""
        near = {place - back for place in places for back in range(BEFORE + 1)}
        ids = dict(_ids(line, sorted(near)))
        known = (place for place in places if place in ids)
        for _, block in groupby(known, key=lambda place: place // BLOCK):
            mine = list(block)
            first = mine[0] - BEFORE
            said = self._said(tuple(ids.get(place) for place in range(first, mine[-1] + 1)))
            yield from ((place, said[place - first]) for place in mine)

    def _say(self, ids: tuple[int | None, ...]) -> list[tuple[str, bool]]:
        """What neighboring tokens say; None stands for some that nobody asks for."""
        found: list[tuple[str, bool]] = []
        for gap, run in groupby(ids, key=lambda token: token is None):
            some = [token or 0 for token in run]
            found += [("", False)] * len(some) if gap else tokens_as_text(self._tokenizer, some)
        return found


def _ids(line: list[TurnTokens], places: list[int]) -> Iterator[tuple[int, int]]:
    """The tokens at rising places of a stream, where they are known."""
    starts = [stretch.start for stretch in line]
    for number, group in groupby(places, key=lambda place: bisect_right(starts, place) - 1):
        if number < 0:
            continue
        stretch = line[number]
        ids = unpack_ids(stretch.ids)
        for place in group:
            if place < stretch.end:
                yield place, ids[place - stretch.start]
