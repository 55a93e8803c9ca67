"""A text as HTML, each token shaded by how many layers and heads still hold it.

Without scripts: what is known of a token is said in a bar at the lower edge of the window while
one points at it, taps it or reaches it by the keyboard. A shade is never the only sign: the line
under a token has a style for every pool and is the thicker the more hold it, and what is gone has
none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.cache import Held, Holding
from weir.stream import describe_tokens

COLORS = ("#2c6e9b", "#d1410c", "#7a9a01", "#8e5aa8", "#c99a00", "#0a8f8f")
"""Of the pools, in the order of the pipe; they differ in lightness too."""
WAITING = "#77828c"
"""Of tokens that wait for a fold."""
LINES = ("solid", "dotted", "dashed", "double")
STRONGEST = 0.45
"""Of a shade: more of it would be hard to read on."""

STYLE = """
.kept details { margin: 0.6em 0; }
.kept summary { cursor: pointer; font-weight: 600; }
.kept .said { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.9; margin: 0.6em 0; }
.kept .said span { border-bottom: 0 solid transparent; border-radius: 2px; }
.kept .said span.gone { color: var(--gray); }
.kept .said i { font-style: normal; font-size: 0.8em; opacity: 0.75; }
.kept .key { display: flex; flex-wrap: wrap; gap: 0.3em 1em; padding: 0; list-style: none; }
.kept .key span { padding: 0 0.3em; }
.kept [data-held]:hover, .kept [data-held]:focus { outline: 2px solid var(--ink); }
.kept [data-held]:hover::after, .kept [data-held]:focus::after {
  content: attr(data-held); position: fixed; z-index: 9; left: 0; right: 0; bottom: 0;
  padding: 0.6em 1em; background: var(--paper); color: var(--ink);
  border-top: 2px solid var(--ink); font-size: 1rem; line-height: 1.4; white-space: pre-line;
  text-align: center; pointer-events: none;
}
.kept [data-held]:hover::after { z-index: 10; }
"""


@dataclass(frozen=True)
class Run:
    """Neighboring tokens of which the same is to be said.

    Attributes:
        first, last: tokens, from 0 on.
        text: what they say; special tokens in angle brackets of their own.
        special: whether they are special tokens.
        held: where each of them is held; None for nowhere.
    """

    first: int
    last: int
    text: str
    special: bool
    held: Held | None


def color_of(pools: Sequence[str], pool: str) -> str:
    """The color of one of a policy's pools; the last is what waits for a fold."""
    if pool == pools[-1]:
        return WAITING
    return COLORS[pools.index(pool) % len(COLORS)]


def fragment_of(tokenizer: PreTrainedTokenizerBase, ids: Tensor, found: Sequence[Holding]) -> str:
    """The text at each moment, the last one open; every token's text escaped.

    Args:
        tokenizer: of the model that read it.
        ids: the text [tokens], int64.
        found: what was held at each moment, in the order of time.
    """
    said = describe_tokens(tokenizer, ids.tolist())
    parts = [_key(found[-1].pools)]
    for number, holding in enumerate(found):
        opened = " open" if number == len(found) - 1 else ""
        spans = "".join(_span(run, holding) for run in runs_of(said, holding))
        parts.append(
            f"<details{opened}><summary>after {holding.seen:,} tokens</summary>"
            f'<p class="said" dir="auto">{spans}</p></details>'
        )
    return f'<div class="kept">{"".join(parts)}</div>'


def runs_of(said: Sequence[tuple[str, bool]], holding: Holding) -> Iterator[Run]:
    """The tokens read so far, neighbors together where the same is to be said of them."""
    of = {held.token: held for held in holding.tokens()}

    def alike(token: int) -> tuple[bool, Held | None]:
        held = of.get(token)
        return said[token][1], None if held is None else replace(held, token=0)

    for (special, held), tokens in groupby(range(holding.seen), alike):
        run = list(tokens)
        yield Run(run[0], run[-1], "".join(said[n][0] for n in run), special, held)


def label_of(run: Run, holding: Holding) -> str:
    """What is said of a run of tokens, as plain text."""
    one = run.first == run.last
    which = f"token {run.first:,}" if one else f"tokens {run.first:,} to {run.last:,}"
    if run.held is None:
        return f"{which}: gone"
    by = ", ".join(f"{pool} {count:,}" for pool, count in run.held.pools.items())
    each = "" if one else "each "
    label = f"{which}: {each}held by {run.held.pairs:,} of {holding.pairs:,} (layer, head)\n{by}"
    if run.held.above != 1 or run.held.below != 1:
        label += (
            f"\na slot stands for {run.held.above:.3g} tokens in the numerator, "
            f"{run.held.below:.3g} in the denominator"
        )
    return label


def _span(run: Run, holding: Holding) -> str:
    if not run.text:
        return ""
    text = escape(run.text)
    if run.special:
        text = f"<i>{text}</i>"
    label = escape(label_of(run, holding), quote=True)
    if run.held is None:
        return f'<span class="gone" tabindex="0" data-held="{label}">{text}</span>'
    pool = max(run.held.pools, key=lambda name: run.held.pools[name])  # type: ignore[union-attr]
    style = _look(holding.pools, pool, run.held.pairs / holding.pairs)
    return f'<span tabindex="0" style="{style}" data-held="{label}">{text}</span>'


def _look(pools: Sequence[str], pool: str, share: float) -> str:
    """The shade and the line of a token that a share of all layers and heads holds."""
    color = color_of(pools, pool)
    red, green, blue = (int(color[n : n + 2], 16) for n in (1, 3, 5))
    line = LINES[list(pools).index(pool) % len(LINES)]
    thick = 1 + round(3 * share)
    return (
        f"background:rgb({red} {green} {blue} / {STRONGEST * share:.2f});"
        f"border-bottom:{max(3, thick) if line == 'double' else thick}px {line} {color}"
    )


def _key(pools: Sequence[str]) -> str:
    items = "".join(
        f'<li><span style="{_look(pools, pool, 1.0)}">{escape(pool)}</span></li>' for pool in pools
    )
    return f'<ul class="key">{items}<li><span class="gone">gone: no line</span></li></ul>'
