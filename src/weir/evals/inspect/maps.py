"""Average attention logits, layer by layer and head by head, over many short sequences.

StreamingLLM (Xiao et al. 2024), Figures 2, 7, 11, 13 and 14: in most layers above the second, all
queries turn to the first token, whatever it says. Only sums over the sequences are kept, and of a
sequence never more than a block of queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.evals.inspect.attention import Attention, looks_ahead, watch
from weir.evals.inspect.section import Asked, Picture, Section, drawing
from weir.evals.inspect.sequences import LEAST, sentences, shared

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH = 32
"""Sequences that are read together."""
ACROSS = 4
"""Panels side by side that a phone still shows."""
MOST = 16
"""Panels where no layers or heads are chosen."""


def section(asked: Asked) -> Section:
    """The maps of the chosen layers and heads; by default all of a small model.

    Raises:
        WeirError: the text is too short, or the model's attention cannot be looked at.
    """
    if asked.length < LEAST:
        raise WeirError(f"a map of {asked.length} tokens shows nothing; take {LEAST} at least")
    ids = sentences(asked.tokenizer, asked.text, asked.sequences, asked.length, asked.sink)
    means = mean_logits(asked, ids)
    layers, heads = _panels(means, asked.layers, asked.heads)
    fixed = shared(ids, asked.tokenizer)
    ahead = looks_ahead(asked.model)
    with drawing(1.45 * math.ceil(len(layers) * len(heads) / ACROSS) + 0.9) as figure:
        _draw(figure, means, layers, heads)
    named = "; ".join(f"place {place} is {token} in all of them" for place, token in fixed.items())
    text = (
        f"The mean over {len(ids)} sequences of {asked.length} tokens"
        + (f" ({named})" if named else "")
        + ": each row is a query, each column a key, as StreamingLLM's Figures 2, 7, 11, 13 and "
        "14. A bright column is a token that all look at: a sink. Logits "
        "are those that go into the softmax: scaled, and capped where the model caps them. "
        + (
            "Every token sees every other."
            if ahead
            else "Keys that come after a query are left white."
        )
    )
    shown = f"{len(layers)} of {len(means)} layers" if len(layers) < len(means) else "all layers"
    alt = f"Maps of average attention logits, query by key, for {shown} and heads {_list(heads)}."
    return Section(
        "maps",
        "Average attention logits",
        text,
        (Picture("maps", figure, alt),),
        facts=_facts(ids, means, layers, heads, fixed),
    )


def mean_logits(asked: Asked, ids: Tensor) -> dict[int, Tensor]:
    """The mean logits of every layer [heads, length, length], float64; NaN where nobody looks.

    Args:
        asked: the model; and who is told how many sequences are done.
        ids: the sequences [count, length].
    """
    sums: dict[int, Tensor] = {}
    length = ids.shape[1]

    def add(it: Attention) -> None:
        heads = it.queries.shape[1] * it.queries.shape[2]
        if it.layer not in sums:
            sums[it.layer] = torch.full((heads, length, length), math.nan, dtype=torch.float64)
        total = sums[it.layer]
        for start, stop in it.blocks():
            rows = slice(it.first + start, it.first + stop)
            new = it.logits(start, stop).double().sum(dim=0).cpu()
            # Who does not look gave -inf; each query of a place looks at the same places.
            new = new.masked_fill(new.isneginf(), math.nan)
            at = it.places.cpu()
            before = total[:, rows, at]
            total[:, rows, at] = torch.where(before.isnan(), new, before + new)

    done = 0
    for batch in ids.split(BATCH):
        watch(asked.model, batch, add)
        done += len(batch)
        asked.on_step(done, len(ids))
    return {layer: total / len(ids) for layer, total in sorted(sums.items())}


def spread(count: int, most: int) -> tuple[int, ...]:
    """`most` of `count` numbers from 0 on: the first three, and the others evenly up to the last.

    StreamingLLM shows layers 0, 1, 2, 9, 16, 23 and 31.
    """
    if count <= most:
        return tuple(range(count))
    first = min(3, most - 1)
    rest = most - first
    step = (count - first) / rest
    return (*range(first), *(first - 1 + round(step * (n + 1)) for n in range(rest)))


def _panels(
    means: dict[int, Tensor], layers: tuple[int, ...] | None, heads: tuple[int, ...] | None
) -> tuple[Sequence[int], Sequence[int]]:
    """Which layers and heads are drawn."""
    known = list(means)
    every = min(len(mean) for mean in means.values())
    if layers is not None:
        missing = [layer for layer in layers if layer not in means]
        if missing:
            raise WeirError(f"layer {missing[0]} has no attention weights to show")
    if heads is None:
        some = len(layers or known)
        heads = tuple(range(every)) if some * every <= MOST else (0,)
    if layers is None:
        layers = tuple(known[n] for n in spread(len(known), max(4, MOST // len(heads))))
    return layers, heads


def _draw(
    figure: Figure, means: dict[int, Tensor], layers: Sequence[int], heads: Sequence[int]
) -> None:
    from matplotlib.cm import ScalarMappable

    which = [(layer, head) for layer in layers for head in heads]
    across = min(ACROSS, len(which))
    down = -(-len(which) // across)
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, (layer, head) in zip(panels, which, strict=False):
        mean = means[layer][head]
        low, high = map(float, mean[~mean.isnan()].aminmax())
        axes.imshow(mean.numpy(), vmin=low, vmax=high, cmap="viridis", interpolation="nearest")
        axes.set_title(f"layer {layer}, head {head}\n{low:.2g} to {high:.2g}", fontsize=8, pad=2)
        last = len(mean) - 1
        axes.set_xticks([0, last])
        axes.set_yticks([0, last])
        axes.tick_params(labelsize=7, length=2)
        axes.spines[:].set_visible(False)  # which would hide the first of many columns
    for axes in panels[len(which) :]:
        axes.set_axis_off()
    figure.supxlabel("place of the key", fontsize=9)
    figure.supylabel("place of the query", fontsize=9)
    # Each map has a scale of its own: heads differ by far more than the places of one.
    bar = figure.colorbar(
        ScalarMappable(cmap="viridis"), ax=panels.tolist(), location="top", aspect=40, shrink=0.7
    )
    bar.set_ticks([0, 1], labels=["lowest", "highest"])
    bar.set_label("mean logit, each map from its lowest to its highest", fontsize=8)
    bar.ax.tick_params(labelsize=8, length=0)


def _facts(
    ids: Tensor,
    means: dict[int, Tensor],
    layers: Sequence[int],
    heads: Sequence[int],
    fixed: dict[int, str],
) -> dict[str, Any]:
    return {
        "sequences": len(ids),
        "length": ids.shape[1],
        "fixed_tokens": {str(place): token for place, token in fixed.items()},
        "maps": [
            {
                "layer": layer,
                "head": head,
                # Of the logits of all queries but the first token's own.
                "first": float(means[layer][head][1:, 0].nanmean()),
                "others": float(means[layer][head][1:, 1:].nanmean()),
                "logits": [[round(x, 4) for x in row] for row in means[layer][head].tolist()],
            }
            for layer in layers
            for head in heads
        ],
    }


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
