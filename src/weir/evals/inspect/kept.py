"""Shows which tokens of a text a policy keeps at several moments, by pool, as picture and as HTML.

A token is *held* by a KV head of a layer while its own key and value are in a slot there. In pools
with weights (`balance`, `subgen`, `uniform`, ...), a slot also represents evicted tokens. Evicted
tokens are shown as gone, and the label of the token in the slot gives the slot's weight. A mean of
several tokens (`residue`) is shown at the newest of them.

The HTML needs no scripts, and color is never the only sign: each pool has a style for the line
under a token, and the line is thicker the more heads hold the token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from itertools import groupby, product
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.cache import Held, Holding
from weir.errors import WeirError
from weir.evals.inspect.section import Inspection, Picture, Section, drawing
from weir.evals.report import TextTable, render
from weir.models import describe
from weir.policies import KVzip, Recompute, parse_policy
from weir.stream import Stream, describe_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#2c6e9b", "#d1410c", "#7a9a01", "#8e5aa8", "#c99a00", "#0a8f8f")
"""Colors of the pools, in the order of the pipe; they also differ in lightness."""
WAITING = "#77828c"
"""Color of tokens that wait for a fold."""
LINES = ("solid", "dotted", "dashed", "double")
STRONGEST = 0.45
"""Largest opacity of a shade; on a stronger one, text would be hard to read."""

STYLE = "\n" + (resources.files("weir.evals.inspect") / "kept.css").read_text("utf-8")


class Run(NamedTuple):
    """Adjacent tokens, special or not, and where each of them is held; None for nowhere."""

    first: int
    last: int
    text: str
    special: bool
    held: Held | None

    @property
    def pool(self) -> str | None:
        """The pool in which most heads hold the tokens."""
        pools = {} if self.held is None else self.held.pools
        return max(pools, key=pools.__getitem__, default=None)


def color_of(pools: Sequence[str], pool: str) -> str:
    """The color of a policy's pool; the last of `pools` stands for tokens that wait for a fold."""
    return WAITING if pool == pools[-1] else COLORS[pools.index(pool) % len(COLORS)]


def fragment_of(tokenizer: PreTrainedTokenizerBase, ids: Tensor, found: Sequence[Holding]) -> str:
    """HTML of a text [tokens] at each moment, with only the last moment expanded. The text of each
    token is escaped.
    """
    said, pools = describe_tokens(tokenizer, ids.tolist()), found[-1].pools
    moments = [(holding, runs_of(said, holding)) for holding in found]
    values = {"pools": pools, "moments": moments, "label_of": label_of}
    return render("inspect/kept.html", style_of=partial(_style_of, pools), **values)


def runs_of(said: Sequence[tuple[str, bool]], holding: Holding) -> Iterator[Run]:
    """Group the tokens read so far into runs of neighbors with the same label."""
    of = {held.token: held for held in holding.tokens()}

    def alike(token: int) -> tuple[bool, Held | None]:
        held = of.get(token)
        return said[token][1], None if held is None else replace(held, token=0)

    for (special, held), tokens in groupby(range(holding.seen), alike):
        run = list(tokens)
        yield Run(run[0], run[-1], "".join(said[n][0] for n in run), special, held)


def label_of(run: Run, holding: Holding) -> str:
    """The label of a run of tokens, as plain text."""
    which, prefix = f"token {run.first:,}", ""
    if run.first < run.last:
        which, prefix = f"tokens {run.first:,} to {run.last:,}", "each "
    if (held := run.held) is None:
        return f"{which}: gone"
    by = ", ".join(f"{pool} {count:,}" for pool, count in held.pools.items())
    label = f"{which}: {prefix}held by {held.pairs:,} of {holding.pairs:,} (layer, head)\n{by}"
    if held.above == held.below == 1:
        return label
    stands = f"{held.above:.3g} tokens in the numerator, {held.below:.3g} in the denominator"
    return f"{label}\na slot stands for {stands}"


def _style_of(pools: Sequence[str], pool: str, share: float) -> str:
    """CSS of a token: shade and underline by the share of layers and heads that hold it."""
    color = color_of(pools, pool)
    red, green, blue = (int(color[n : n + 2], 16) for n in (1, 3, 5))
    line = LINES[list(pools).index(pool) % len(LINES)]
    thick = 1 + round(3 * share)
    return (
        f"background:rgb({red} {green} {blue} / {STRONGEST * share:.2f});"
        f"border-bottom:{max(3, thick) if line == 'double' else thick}px {line} {color}"
    )


POLICY = "sink(4) | recent(60) | heavy(64)"
"""The default policy: first tokens, newest tokens, and a pool that each head fills differently."""
USUAL = 1024
"""Number of tokens that are read by default."""
MOST = 4096
"""Largest number of tokens that are shown."""
FEWEST = 8
"""Smallest number of tokens."""
QUARTERS = 4
"""Number of moments at which the text is shown by default: after each quarter of it."""
MOST_MOMENTS = 12
COLUMNS = 640
"""Largest number of columns of a strip; if there are more tokens, several share a column."""
GONE, UNREAD = (0.93, 0.94, 0.95), (1.0, 1.0, 1.0)


def section(asked: Inspection) -> Section:
    """Show what the policy holds of the text, as strips over layers and heads, and as text."""
    name = POLICY if asked.policy is None else asked.policy
    if isinstance(parse_policy(name), KVzip):
        raise WeirError(
            "kvzip chooses once, after it has read the whole text, but here the text is read part "
            "by part. Use another policy."
        )
    if isinstance(parse_policy(name), Recompute):
        raise WeirError(
            "recompute caches nothing, so there is nothing to show. Use another policy."
        )
    if asked.tokens is not None and asked.tokens > MOST:
        raise WeirError(
            f"the slots of {asked.tokens:,} tokens are too many for one picture. Use at most "
            f"{MOST:,} tokens."
        )
    ids = asked.ids(asked.tokens or USUAL)
    if len(ids) < FEWEST:
        raise WeirError(
            f"{len(ids)} tokens are too few. Use a text of at least {FEWEST} tokens, and a "
            "--tokens of at least as many."
        )
    found = follow(asked, name, ids, moments_of(asked, len(ids)))
    strips = draw(found, len(ids), *chosen(asked))
    picture = Picture("kept", strips, f"Which tokens {name} holds in every layer and head.")
    facts = {
        "policy": str(parse_policy(name)),
        "tokens": len(ids),
        "moments": [holding.as_json() for holding in found],
    }
    fragment = fragment_of(asked.tokenizer, ids, found)
    title, text = "What the policy keeps", _explain(name, found)
    return Section("kept", title, text, (picture,), _table(found), facts, fragment, STYLE)


def moments_of(asked: Inspection, tokens: int) -> list[int]:
    """Token counts at which to look: as asked for, or after each quarter of the text."""
    if asked.moments is None:
        return [tokens * (n + 1) // QUARTERS for n in range(QUARTERS)]
    moments = sorted(set(asked.moments))
    for moment in moments:
        if not 1 <= moment <= tokens:
            raise WeirError(
                f"there is no moment after {moment:,} tokens, because only {tokens:,} tokens of "
                "the text are read. Use --tokens to read more."
            )
    if len(moments) > MOST_MOMENTS:
        raise WeirError(f"{len(moments)} moments are too many. Use at most {MOST_MOMENTS}.")
    return moments


def chosen(asked: Inspection) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers and KV heads to show; all if none were chosen."""
    known = describe(asked.model).layers
    layers = tuple(range(len(known))) if asked.layers is None else asked.layers
    of = known[layers[0]].heads
    heads = asked.kv_heads(of.group)
    return layers, tuple(range(of.kv_heads)) if heads is None else heads


def follow(asked: Inspection, policy: str, ids: Tensor, moments: Sequence[int]) -> list[Holding]:
    """Stream a text [tokens], and return what the chosen layers and heads hold at each moment."""
    layers, heads = chosen(asked)
    stream = Stream(asked.model, policy, seed=asked.seed)
    found: list[Holding] = []
    try:
        for moment in moments:
            stream.feed(ids[stream.seen : moment])
            found.append(only(stream.holding(), layers, heads))
            asked.on_step(len(found), len(moments))
    finally:
        if stream.cache is not None:
            stream.cache.detach()
    return found


def only(holding: Holding, layers: Sequence[int], heads: Sequence[int]) -> Holding:
    """Restrict a holding to some layers and KV heads."""
    mine = torch.isin(holding.layer, torch.tensor(layers))
    mine &= torch.isin(holding.head, torch.tensor(heads))
    names = ("layer", "head", "token", "pool", "a", "b")
    parts = {name: getattr(holding, name)[mine] for name in names}
    return replace(holding, pairs=len(layers) * len(heads), **parts)


def strip(holding: Holding, tokens: int, layers: Sequence[int], heads: Sequence[int]) -> Tensor:
    """Return the pool that holds each token of a text, by KV head [layers * heads, tokens], int64.

    Entries are indexes of `holding.pools`; -1 for gone, -2 for tokens not read yet.
    """
    found = torch.full((len(layers) * len(heads), tokens), -2)
    found[:, : holding.seen] = -1
    for line, (layer, head) in enumerate(product(layers, heads)):
        mine = (holding.layer == layer) & (holding.head == head)
        found[line, holding.token[mine]] = holding.pool[mine]
    return found


def draw(
    found: Sequence[Holding], tokens: int, layers: Sequence[int], heads: Sequence[int]
) -> Figure:
    """Draw a strip per moment, with a line per layer and KV head and a column per token."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    pools = found[-1].pools
    colors = [to_rgb(color_of(pools, pool)) for pool in pools]
    palette = torch.tensor([*colors, UNREAD, GONE])  # -2 and -1 from the end
    lines = len(layers) * len(heads)
    height = min(1.6, max(0.55, 0.07 * lines))
    with drawing(0.9 + (height + 0.38) * len(found)) as figure:
        panels = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
        for axes, holding in zip(panels, found, strict=True):
            image = narrow_image(palette[strip(holding, tokens, layers, heads)]).numpy()
            axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, tokens, lines, 0))
            axes.axvline(holding.seen, color="#1b2733", lw=1)
            axes.set_title(f"after {holding.seen:,} tokens", loc="left", fontsize=9, pad=3)
            every = max(1, -(-len(layers) // 8))
            middles = [(n + 0.5) * len(heads) for n in range(0, len(layers), every)]
            axes.set_yticks(middles, [str(layer) for layer in layers[::every]])
            axes.tick_params(axis="y", length=0)
            for n in range(1, len(layers) if len(layers) <= 12 else 0):
                axes.axhline(n * len(heads), color="white", lw=0.8)
            axes.spines[:].set_color("#c8d0d6")
        panels[-1].set_xlabel("place in the text, tokens")
        figure.supylabel(f"layer ({len(heads)} KV head{'s'[: len(heads) > 1]} each)", size=9)
        patches = [Patch(color=c, label=pool) for pool, c in zip(pools, colors, strict=True)]
        patches.append(Patch(facecolor=GONE, edgecolor="#c8d0d6", label="gone"))
        across = min(6, len(patches))
        figure.legend(handles=patches, loc="outside upper center", ncols=across, frameon=False)
    return figure


def narrow_image(image: Tensor) -> Tensor:
    """Mix neighbors of an image [lines, tokens, 3] into the columns of a picture."""
    return F.avg_pool1d(image.mT, -(-image.shape[1] // COLUMNS), ceil_mode=True).mT


def _explain(policy: str, found: Sequence[Holding]) -> str:
    times, last = ", ".join(f"{holding.seen:,}" for holding in found), found[-1]
    weighs = any(held.above != 1 or held.below != 1 for held in last.tokens())
    others = (
        " Slots of this policy also represent other tokens: evicted tokens still count in an "
        "estimate, and a token's label says how many tokens its slots represent."
    )
    return (
        f"A stream under {policy}, shown after {times} tokens. A token is held by a KV head of a "
        "layer while its key and value are in a slot there. Its color shows the pool, or that it "
        f'waits for the next fold ("{last.pools[-1]}").{others if weighs else ""} '
        "Below is the text. The more layers and heads hold a token, the stronger its shade and "
        "its line. Tokens without a line are in no layer. Point at a token, or tap it, to see "
        "which pools hold it."
    )


def _table(found: Sequence[Holding]) -> TextTable:
    pools = found[-1].pools
    rows = []
    for holding in found:
        held = holding.tokens()
        everywhere = sum(token.pairs == holding.pairs for token in held)
        slots = torch.bincount(holding.pool, minlength=len(pools)) / holding.pairs
        cells = (holding.seen, len(held), everywhere)
        rows.append((*(f"{n:,}" for n in cells), *(f"{n:.1f}" for n in slots.tolist())))
    heads = ("tokens read", "held by some", "held by all", *(f"{pool}, slots" for pool in pools))
    return TextTable(heads, tuple(rows))
