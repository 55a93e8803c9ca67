"""Average attention logits by layer and head, and the share of attention on the first tokens.

StreamingLLM (Xiao et al. 2024), Figures 2, 7, 11, 13 and 14: in most layers above the second, all
queries attend to the first token, whatever it is. Section F and Figure 12: the first token gets
more than half of the 4096th token's attention in most layers of Llama-2-7B. A first pass over a few
tokens finds the existing layers and heads. The second keeps sums only for those that are drawn, and
never holds more than a block of queries.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.evals.inspect.attention import Attention, looks_ahead, watch
from weir.evals.inspect.section import (
    MOST_TOKENS,
    SHORTEST,
    Inspection,
    Picture,
    Section,
    drawing,
    fixed_tokens,
    passages,
    sentences,
    style_panel,
)
from weir.evals.report import TextTable
from weir.models import window_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH = 32
"""Largest number of sequences that are read together; they have at most `MOST_TOKENS` tokens in
total.
"""
ACROSS = 4
"""Number of panels side by side that fit on a phone."""
MOST_PANELS = 16
"""Largest number of panels if no layers or heads are chosen."""


def section(asked: Inspection) -> Section:
    """Draw the maps of the chosen layers and heads; by default, all of a small model."""
    if asked.length < SHORTEST:
        raise WeirError(f"a map of {asked.length} tokens shows nothing. Use at least {SHORTEST}.")
    ids = sentences(asked, asked.sequences, asked.length)
    sizes = count_heads(asked, ids)
    layers, heads = _panels(sizes, asked.layers, asked.heads)
    means = mean_logits(asked, ids, layers, heads)
    maps = {(layer, head): means[layer][n] for layer in layers for n, head in enumerate(heads)}
    fixed = fixed_tokens(ids, asked.tokenizer)
    with drawing(1.45 * math.ceil(len(maps) / ACROSS) + 0.9) as figure:
        _draw(figure, maps)
    named = "; ".join(f"place {place} is {token} in all of them" for place, token in fixed.items())
    named = f" ({named})" if named else ""
    text = (
        f"The mean over {len(ids)} sequences of {asked.length} tokens{named}: each row is a query, "
        "each column a key, as in StreamingLLM's Figures 2, 7, 11, 13 and 14. A bright column is a "
        "token that all queries attend to: a sink. Logits are those that go into the "
        "softmax: scaled, and capped where the model caps them. "
    )
    if looks_ahead(asked.model):
        text += "Every token sees every other."
    else:
        text += "Keys that come after a query are left white."
    shown = f"{len(layers)} of {len(sizes)} layers" if len(layers) < len(sizes) else "all layers"
    which = ", ".join(map(str, heads))
    alt = f"Maps of average attention logits, query by key, for {shown} and heads {which}."
    facts = {
        "sequences": len(ids),
        "length": asked.length,
        "fixed_tokens": {str(place): token for place, token in fixed.items()},
        "maps": [
            {
                "layer": layer,
                "head": head,
                # Over the logits of all queries except the first token's own.
                "first": float(mean[1:, 0].nanmean()),
                "others": float(mean[1:, 1:].nanmean()),
                "logits": [[round(x, 4) for x in row] for row in mean.tolist()],
            }
            for (layer, head), mean in maps.items()
        ],
    }
    picture = Picture("maps", figure, alt)
    return Section("maps", "Average attention logits", text, (picture,), facts=facts)


def count_heads(asked: Inspection, ids: Tensor) -> dict[int, int]:
    """Return the layers whose attention weights are visible, and the number of heads of each."""
    found: dict[int, int] = {}

    def add(attention: Attention) -> None:
        found[attention.layer] = attention.heads

    watch(asked.model, ids[:1, :SHORTEST], add)
    return dict(sorted(found.items()))


def mean_logits(
    asked: Inspection,
    ids: Tensor,
    layers: Collection[int] | None = None,
    heads: Sequence[int] | None = None,
) -> dict[int, Tensor]:
    """Mean logits over sequences [count, length] of the layers and heads to keep; None for all.

    Returns:
        By layer [heads, length, length], float64; NaN where no query attends.
    """
    sums: dict[int, Tensor] = {}
    length = ids.shape[1]

    def add(attention: Attention) -> None:
        if layers is not None and attention.layer not in layers:
            return
        kept = list(range(attention.heads) if heads is None else heads)
        if attention.layer not in sums:
            size = len(kept), length, length
            sums[attention.layer] = torch.full(size, math.nan, dtype=torch.float64)
        total = sums[attention.layer]
        for start, stop in attention.blocks():
            rows = slice(attention.first + start, attention.first + stop)
            new = attention.logits(start, stop)[:, kept].double().sum(dim=0).cpu()
            # Masked logits are -inf; queries of one position attend to the same positions in all
            # sequences.
            new = new.masked_fill(new.isneginf(), math.nan)
            at = attention.places.cpu()
            before = total[:, rows, at]
            total[:, rows, at] = torch.where(before.isnan(), new, before + new)

    size = max(1, min(BATCH, MOST_TOKENS // length))
    for start, batch in enumerate(ids.split(size)):
        watch(asked.model, batch, add)
        asked.on_step(start * size + len(batch), len(ids))
    return {layer: total / len(ids) for layer, total in sorted(sums.items())}


def spread(count: int, most: int) -> tuple[int, ...]:
    """Pick `most` of `count` indices: the first three, and the others evenly up to the last.

    StreamingLLM shows layers 0, 1, 2, 9, 16, 23 and 31.
    """
    if count <= most:
        return tuple(range(count))
    first = min(3, most - 1)
    rest = most - first
    step = (count - first) / rest
    return (*range(first), *(first - 1 + round(step * (n + 1)) for n in range(rest)))


def _panels(
    sizes: dict[int, int], layers: tuple[int, ...] | None, heads: tuple[int, ...] | None
) -> tuple[Sequence[int], Sequence[int]]:
    """Choose the layers and heads to draw."""
    known, every = list(sizes), min(sizes.values())
    for layer in layers or ():
        if layer not in sizes:
            raise WeirError(f"layer {layer} has no attention weights to show")
    if heads is None:
        heads = tuple(range(every)) if len(layers or known) * every <= MOST_PANELS else (0,)
    if layers is None:
        layers = tuple(known[n] for n in spread(len(known), max(4, MOST_PANELS // len(heads))))
    return layers, heads


def _draw(figure: Figure, maps: dict[tuple[int, int], Tensor]) -> None:
    from matplotlib.cm import ScalarMappable

    across = min(ACROSS, len(maps))
    down = -(-len(maps) // across)
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, ((layer, head), mean) in zip(panels, maps.items(), strict=False):
        low, high = map(float, mean[~mean.isnan()].aminmax())
        axes.imshow(mean.numpy(), vmin=low, vmax=high, cmap="viridis", interpolation="nearest")
        axes.set_title(f"layer {layer}, head {head}\n{low:.2g} to {high:.2g}", fontsize=8, pad=2)
        ends = [0, len(mean) - 1]
        axes.set(xticks=ends, yticks=ends)
        axes.tick_params(labelsize=7, length=2)
        axes.spines[:].set_visible(False)  # spines would hide the first of many columns
    for axes in panels[len(maps) :]:
        axes.set_axis_off()
    figure.supxlabel("place of the key", fontsize=9)
    figure.supylabel("place of the query", fontsize=9)
    # Each map has its own scale: heads differ far more than the positions within one.
    bar = figure.colorbar(
        ScalarMappable(cmap="viridis"), ax=panels.tolist(), location="top", aspect=40, shrink=0.7
    )
    bar.set_ticks([0, 1], labels=["lowest", "highest"])
    bar.set_label("mean logit, each map from its lowest to its highest", fontsize=8)
    bar.ax.tick_params(labelsize=8, length=0)


SEQUENCES = 16
"""Number of long sequences in the average; the paper has 256."""
FIRST = 4
"""The number of tokens that StreamingLLM keeps for sinks."""


def shares_section(asked: Inspection) -> Section:
    """Draw the share of attention on the first tokens in all or the chosen layers, averaged over
    the chosen heads.
    """
    if looks_ahead(asked.model):
        raise WeirError(
            f"{asked.model.config.model_type} sees its whole text at once, so this section does "
            "not apply to it. Use the section maps."
        )
    most = min(asked.tokens or MOST_TOKENS, window_of(asked.model.config) or MOST_TOKENS)
    ids = passages(asked, most, min(SEQUENCES, asked.sequences), SHORTEST)
    long = ids.shape[1]
    found = first_shares(asked, ids)
    if not found:
        raise WeirError("the chosen layers have no attention weights to show")
    with drawing(2.9) as figure:
        _draw_shares(figure, found, long)
    fixed = fixed_tokens(ids, asked.tokenizer)
    start = f" The first token is {fixed[0]} in all of them." if 0 in fixed else ""
    several = "the first sequence" if len(ids) == 1 else f"the first {len(ids)} sequences"
    text = (
        f"Share of the attention of token {long:,}, after the softmax, that the first token gets, "
        f"and that the first {FIRST} tokens get, as in StreamingLLM's Figure 12. Means over "
        f"{several} of {long:,} tokens in the text; the error bars are one standard deviation over "
        f"the heads of a layer.{start} If attention were uniform, the first token would get "
        f"{1 / long:.2%}."
    )
    rows = []
    for share in found:
        shares = (share[name] for name in ("first", "deviation", f"first_{FIRST}"))
        rows.append((str(share["layer"]), *(f"{x:.1%}" for x in shares)))
    heads = ("layer", "first token", "± over heads", f"first {FIRST}")
    alt = f"The share of token {long:,}'s attention on the first tokens, layer by layer."
    return Section(
        "shares",
        "Attention on the first token, far from it",
        text,
        (Picture("shares", figure, alt),),
        TextTable(heads, tuple(rows)),
        {"sequences": len(ids), "position": long, "layers": found},
    )


def first_shares(asked: Inspection, ids: Tensor) -> list[dict[str, Any]]:
    """Mean attention of the last token of sequences [count, length] to the first, by layer.

    Returns:
        For each chosen layer: its number, and the shares on the first token and on the first
        `FIRST` tokens, averaged over the chosen heads and by head, with the standard deviation of
        the first token's share over the heads.
    """
    sums: dict[int, Tensor] = {}
    last = ids.shape[1] - 1

    def add(attention: Attention) -> None:
        if attention.first + attention.length <= last:
            return
        weights = attention.weights(attention.length - 1, attention.length)[0, :, 0].double().cpu()
        there = attention.places.cpu()
        # Tokens that a sliding layer no longer holds get no attention.
        mine = torch.stack([weights[:, there == 0].sum(1), weights[:, there < FIRST].sum(1)])
        sums[attention.layer] = sums.get(attention.layer, torch.zeros_like(mine)) + mine

    for done, sequence in enumerate(ids, 1):
        watch(asked.model, sequence[None], add)
        asked.on_step(done, len(ids))
    found = []
    for layer, total in sorted(sums.items()):
        if asked.layers is None or layer in asked.layers:
            chosen = total if asked.heads is None else total[:, list(asked.heads)]
            first, early = chosen / len(ids)
            found.append(
                {
                    "layer": layer,
                    "first": float(first.mean()),
                    "deviation": float(first.std(correction=0)),
                    f"first_{FIRST}": float(early.mean()),
                    "first_by_head": first.tolist(),
                    f"first_{FIRST}_by_head": early.tolist(),
                }
            )
    return found


def _draw_shares(figure: Figure, found: list[dict[str, Any]], long: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    layers = [share["layer"] for share in found]
    first, early, reach = (
        [100 * share[name] for share in found] for name in ("first", f"first_{FIRST}", "deviation")
    )
    axes.bar(layers, early, color="#c9d6e2", width=0.8, label=f"first {FIRST} tokens")
    axes.bar(layers, first, color="#2c6e9b", width=0.5, label="first token")
    axes.errorbar(layers, first, yerr=reach, fmt="none", color="#1b2733", lw=1, capsize=2)
    axes.set(ylim=(0, 100), xlabel="layer", ylabel=f"share of token {long:,}'s attention, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style_panel(axes)
    axes.legend(frameon=False, fontsize=8)
