"""Report the tokens of a session's stream that the cache still holds, and the pools that hold them.

The row knows which tokens it holds, and the records of turns contain the ids of all tokens of these
turns. Either may have tokens that the other lacks: a row can hold the beginning of a stream whose
first turns are no longer kept, and most of the tokens in the records are no longer in any slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from weir.cache import Holding, StreamingCache
from weir.serve.engine.engine import RowInspection
from weir.serve.engine.sequence import TokenSequence
from weir.serve.sessions.records import TurnTokens, pack_ids, unpack_ids
from weir.serve.sessions.store import SessionStore
from weir.stream import describe_tokens

BLOCK = 32
"""Number of tokens that are decoded together and cached. In a growing stream, few blocks change."""
NAMED = 64
"""Number of newest turns with lost tokens whose messages are shown."""
CONTEXT = 4
"""Number of tokens before a block that are decoded with it.

Spaces, and characters that consist of several tokens, depend on the tokens before.
"""


def running_turns(
    store: SessionStore, owner: str, sequence: TokenSequence, inspection: RowInspection
) -> list[TurnTokens]:
    """Return the tokens of a running sequence and of earlier turns, as far back as they are
    kept.

    Empty if the turn that the sequence continues is not kept, because the places of the sequence's
    tokens are then unknown.
    """
    turns = [] if sequence.parent is None else store.ancestry(owner, sequence.parent)
    if sequence.parent is None or turns:
        ids = [*sequence.prompt_ids, *inspection.output_ids]
        before = turns[-1].end if turns else 0
        turns.append(TurnTokens(sequence.id, before + len(ids), pack_ids(ids)))
    return turns


def without_tokens(holding: Holding, places: Sequence[tuple[int, int]]) -> Holding:
    """Return what a row holds, without the tokens at some places, which the next answer drops."""
    stay = torch.ones_like(holding.token, dtype=torch.bool)
    for start, stop in places:
        stay &= (holding.token < start) | (holding.token >= stop)
    names = ("layer", "head", "token", "pool", "a", "b")
    return replace(holding, **{name: getattr(holding, name)[stay] for name in names})


def _forgotten(
    seen: int, held: list[int], turns: list[TurnTokens], names: Callable[[str], list[Any] | None]
) -> dict[str, Any]:
    """Count the tokens that no slot holds, by turn.

    Args:
        seen: number of tokens that the row has read.
        held: the tokens that it still holds, in ascending order.
        names: describes the messages of a turn; None if they are not known.
    """
    found: list[dict[str, Any]] = []
    for turn in turns:
        end = min(turn.end, seen)
        read = max(0, end - turn.start)
        still = bisect_left(held, end) - bisect_left(held, turn.start)
        if read > still:
            found.append({"id": f"resp_{turn.node}", "tokens": read, "forgotten": read - still})
    for lost in found[-NAMED:]:
        if (messages := names(lost["id"].removeprefix("resp_"))) is not None:
            lost["messages"] = messages
    return {"tokens": seen - len(held), "turns": found}


class MemoryReporter:
    """Lists what rows of one cache remember."""

    def __init__(self, cache: StreamingCache, tokenizer: PreTrainedTokenizerBase) -> None:
        self._policy, self._chunk = str(cache.policy), cache.chunk
        self._bytes = cache.nbytes // (cache.batch or 1)
        layers = [plan.heads for plan in cache.plans]
        self._token_bytes = sum(
            heads.kv_heads * (heads.key_dim + heads.value_dim) * heads.dtype.itemsize
            for heads in layers
        )
        self._tokenizer = tokenizer
        self._decode_cached = lru_cache(maxsize=2048)(self._decode)

    def report(
        self,
        holding: Holding,
        turns: list[TurnTokens],
        most: int,
        latest: int,
        doing: str | None = None,
        names: Callable[[str], list[Any] | None] = lambda node: None,
    ) -> dict[str, Any]:
        """List what a row remembers, in the format of `GET /v1/sessions/ID/memory`.

        The last pool in the list is "new", for tokens that wait for the next fold.

        Args:
            turns: the tokens of the row's stream, by turns, as far back as they are kept.
            most: number of held tokens to list: those that the most layers and heads hold.
            latest: number of tokens at the end of the stream to list, held or not.
            doing: "reading" or "answering" for a running turn; None between turns.
            names: describes the messages of a turn, given its id; None if they are not known.
        """
        seen = holding.seen  # for a prompt that is being read, only the part that was read
        if doing != "reading" and turns:
            seen = max(seen, turns[-1].end)
        held = holding.tokens()
        pools: list[dict[str, Any]] = [
            {
                "name": name,
                # The mean over layers and KV heads.
                "slots": int((holding.pool == number).sum()) / max(1, holding.pairs),
                "tokens": sum(name in token.pools for token in held),
            }
            for number, name in enumerate(holding.pools)
        ]
        last = range(max(0, seen - latest), seen)
        listed = sorted(held, key=lambda token: (token.pairs, token.token))
        listed = listed[max(0, len(held) - most) :]
        by_place = {token.token: token.pools for token in held if token.token in last}
        by_place |= {token.token: token.pools for token in listed}
        places = sorted(by_place.keys() | set(last))
        known = dict(self._texts(turns, places))
        tokens = []
        for place in places:
            text, is_special = known.get(place, (None, False))
            in_pools = [by_place.get(place, {}).get(name, 0) for name in holding.pools]
            token = {"at": place, "text": text, "pools": in_pools}
            tokens.append({**token, "special": True} if is_special else token)
        return {
            "doing": doing,
            "policy": self._policy,
            "chunk": self._chunk,
            "seen": seen,
            "read": holding.seen,
            "folds": (holding.seen - pools[-1]["tokens"]) // self._chunk,
            "bytes": self._bytes,
            "bytes_of_all": self._token_bytes * holding.seen,
            "pairs": holding.pairs,
            "held": len(held),
            "forgotten": _forgotten(holding.seen, [token.token for token in held], turns, names),
            "pools": pools,
            "tokens": tokens,
        }

    def _texts(
        self, turns: list[TurnTokens], places: list[int]
    ) -> Iterator[tuple[int, tuple[str, bool]]]:
        """Yield the texts of tokens at ascending places, and whether they are special, if known."""
        near = sorted({place - back for place in places for back in range(CONTEXT + 1)})
        ids: dict[int, int] = {}
        for turn in turns:
            inside = near[bisect_left(near, turn.start) : bisect_left(near, turn.end)]
            own = unpack_ids(turn.ids) if inside else ()
            ids |= {place: own[place - turn.start] for place in inside}
        known = (place for place in places if place in ids)
        for _, block in groupby(known, key=lambda place: place // BLOCK):
            inside = list(block)
            first = inside[0] - CONTEXT
            texts = self._decode_cached(
                tuple(ids.get(place) for place in range(first, inside[-1] + 1))
            )
            yield from ((place, texts[place - first]) for place in inside)

    def _decode(self, ids: tuple[int | None, ...]) -> list[tuple[str, bool]]:
        """Decode neighboring tokens. None stands for a token that is unknown, or whose text is not
        needed.
        """
        found: list[tuple[str, bool]] = []
        for gap, run in groupby(ids, key=lambda token: token is None):
            some = [token or 0 for token in run]
            found += [("", False)] * len(some) if gap else describe_tokens(self._tokenizer, some)
        return found
