"""The share of a late token's attention that lies on the first tokens, layer by layer.

StreamingLLM (Xiao et al. 2024), section F and Figure 12: of the 4096th token's attention the first
token gets more than half in most layers of Llama-2-7B. The late token's weights are all that is
computed: one row of each map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.evals.inspect.attention import Attention, looks_ahead, watch
from weir.evals.inspect.section import Asked, Picture, Section, Table, drawing
from weir.evals.inspect.sequences import LEAST, count_of, pieces, shared
from weir.models import window_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 4096
"""Tokens, in the paper."""
SEQUENCES = 16
"""Long sequences are averaged over; the paper has 256."""
FIRST = 4
"""As many tokens as StreamingLLM keeps for sinks."""


@dataclass(frozen=True)
class Share:
    """What one layer's late queries give to the first tokens; means over the sequences.

    Attributes:
        layer: which layer.
        first: to the first token, by head [heads].
        early: to the first `FIRST` tokens, by head [heads].
    """

    layer: int
    first: Tensor
    early: Tensor

    @property
    def spread(self) -> float:
        """The standard deviation over the heads of the share on the first token."""
        return float(self.first.std(correction=0))


def section(asked: Asked) -> Section:
    """The shares of every layer, or of the chosen ones; over the chosen heads.

    Raises:
        WeirError: the text is too short, the model looks both ways, or its attention cannot be
            looked at.
    """
    if looks_ahead(asked.model):
        raise WeirError(
            f"{asked.model.config.model_type} sees its whole text at once, so no token of it is a "
            "late one; the maps show where its attention lies"
        )
    long = count_of(
        asked.tokenizer,
        asked.text,
        min(asked.tokens or MOST, window_of(asked.model.config) or MOST),
    )
    if long < LEAST:
        raise WeirError(
            f"the text has {long} tokens and is too short to inspect; take a longer one"
        )
    ids = pieces(asked.tokenizer, asked.text, min(SEQUENCES, asked.sequences), long, asked.sink)
    found = [
        _of_heads(share, asked.heads)
        for share in first_shares(asked, ids)
        if asked.layers is None or share.layer in asked.layers
    ]
    if not found:
        raise WeirError("the chosen layers have no attention weights to show")
    with drawing(2.9) as figure:
        _draw(figure, found, long)
    fixed = shared(ids, asked.tokenizer)
    start = f" The first token is {fixed[0]} in all of them." if 0 in fixed else ""
    several = "the first sequence" if len(ids) == 1 else f"the first {len(ids)} sequences"
    text = (
        f"Of the attention that token {long:,} gives, after the softmax: how much lies on the "
        f"first token, and how much on the first {FIRST}, as StreamingLLM's Figure 12. Means over "
        f"{several} of {long:,} tokens in the text; bars are one standard deviation over the "
        f"heads of a layer."
        f"{start} Were all tokens looked at alike, the first would get {1 / long:.2%}."
    )
    table = Table(
        ("layer", "first token", "± over heads", f"first {FIRST}"),
        tuple(
            (
                str(share.layer),
                f"{float(share.first.mean()):.1%}",
                f"{share.spread:.1%}",
                f"{float(share.early.mean()):.1%}",
            )
            for share in found
        ),
    )
    facts = {
        "sequences": len(ids),
        "position": long,
        "layers": [
            {
                "layer": share.layer,
                "first": float(share.first.mean()),
                "deviation": share.spread,
                f"first_{FIRST}": float(share.early.mean()),
                "first_by_head": share.first.tolist(),
                f"first_{FIRST}_by_head": share.early.tolist(),
            }
            for share in found
        ],
    }
    alt = f"The share of token {long:,}'s attention on the first tokens, layer by layer."
    title = "Attention on the first token, far from it"
    return Section("shares", title, text, (Picture("shares", figure, alt),), table, facts)


def first_shares(asked: Asked, ids: Tensor) -> list[Share]:
    """What the last token of each sequence gives to the first, for every layer.

    Args:
        asked: the model; and who is told how many sequences are done.
        ids: the sequences [count, length].
    """
    sums: dict[int, Tensor] = {}
    last = ids.shape[1] - 1

    def add(it: Attention) -> None:
        if it.first + it.length <= last:
            return
        weights = it.weights(it.length - 1, it.length)[0, :, 0].double().cpu()
        there = it.places.cpu()
        # What a sliding layer no longer holds gets nothing.
        mine = torch.stack([weights[:, there == 0].sum(1), weights[:, there < FIRST].sum(1)])
        sums[it.layer] = sums.get(it.layer, torch.zeros_like(mine)) + mine

    for done, sequence in enumerate(ids, 1):
        watch(asked.model, sequence[None], add)
        asked.on_step(done, len(ids))
    return [Share(layer, *(total / len(ids))) for layer, total in sorted(sums.items())]


def _of_heads(share: Share, heads: tuple[int, ...] | None) -> Share:
    if heads is None:
        return share
    return Share(share.layer, share.first[list(heads)], share.early[list(heads)])


def _draw(figure: Figure, found: list[Share], long: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    layers = [share.layer for share in found]
    first = [100 * float(share.first.mean()) for share in found]
    early = [100 * float(share.early.mean()) for share in found]
    axes.bar(layers, early, color="#c9d6e2", width=0.8, label=f"first {FIRST} tokens")
    axes.bar(layers, first, color="#2c6e9b", width=0.5, label="first token")
    axes.errorbar(
        layers, first, yerr=[100 * share.spread for share in found], fmt="none", color="#1b2733",
        lw=1, capsize=2,
    )  # fmt: skip
    axes.set_ylim(0, 100)
    axes.set_xlabel("layer")
    axes.set_ylabel(f"share of token {long:,}'s attention, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e3e7ea", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
