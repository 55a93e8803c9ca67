"""Measures the perplexity of a stream whose sinks are hidden from some layers or heads.

StreamingLLM (Xiao et al. 2024), Table 1, in parts: the model reads a text under `sink(4) |
recent(n)`, and the slots of the sinks are left empty in all layers, in only one layer, in all
layers except one, or in one KV head. Everything else is the same, including the newest tokens, so
the change shows what those sinks are worth. Tokens are scored only after something has been
evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.evals.inspect.attention import looks_ahead
from weir.evals.inspect.maps import FIRST
from weir.evals.inspect.section import (
    MOST_TOKENS,
    Inspection,
    Picture,
    Section,
    drawing,
    style_panel,
)
from weir.evals.report import TextTable
from weir.models import ModelSpec, describe, window_of
from weir.policies import Layered, Pipe
from weir.pools import Fold, Pool, Recent, Sink
from weir.slab import Slots
from weir.stream import Stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGET = 1024
"""Largest number of slots; half of the model's window if that is less."""
CHUNK = 64
SCORED = 2000
"""Number of tokens that are scored by default."""
LEAST = 100
"""Smallest number of tokens for a measurement."""
MOST_HEADS = 64
"""Largest number of KV heads that are measured one by one if none are chosen."""


@dataclass(frozen=True)
class SinkOfSome(Pool):
    """`sink(n)` whose slots stay empty in the KV heads `hidden`."""

    name = "sink"
    in_order = True

    n: int
    hidden: tuple[int, ...] = ()

    def slots(self) -> int:
        """One slot per sink token."""
        return self.n

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Fold like `sink`, and drop the tokens of hidden heads."""
        before = len(held)
        held, new = Sink(self.n).fold(held, new, fold)
        if self.hidden and len(held) > before:
            index = torch.arange(len(held), device=held.position.device)
            index = index.expand(held.position.shape).clone()
            index[:, list(self.hidden)] = -1
            held = held.take(index)
        return held, new


Hidden = dict[int, tuple[int, ...]]
"""By layer, the KV heads without sinks."""


@dataclass(frozen=True)
class StreamSetup:
    """Sizes of the stream that reads a text. `recent` is the number of newest tokens that it keeps.

    `kv_heads` has the number of KV heads of each layer, except for layers that keep their own
    sliding window whatever the policy is.
    """

    kv_heads: dict[int, int]
    recent: int
    chunk: int

    @property
    def start(self) -> int:
        """The first token before which something has been evicted."""
        return FIRST + self.recent + self.chunk

    def policy(self, hidden: Hidden) -> Layered:
        """`sink(4) | recent(n)`, without the sinks of some KV heads of some layers."""
        sinks = [SinkOfSome(FIRST, hidden.get(layer, ())) for layer in self.kv_heads]
        pipes = tuple(Pipe((sink, Recent(self.recent)), "sinks") for sink in sinks)
        return Layered(pipes, "by layer")

    def all_of(self, layers: Iterable[int]) -> Hidden:
        """Map some layers to all of their KV heads."""
        return {layer: tuple(range(self.kv_heads[layer])) for layer in layers}


def section(asked: Inspection) -> Section:
    """Measure perplexity without the sinks of one layer, with only those of one layer, and by KV
    head.
    """
    if looks_ahead(asked.model):
        raise WeirError(
            f"{asked.model.config.model_type} sees its whole text at once, so it has no stream "
            "whose first tokens could be evicted"
        )
    known = describe(asked.model)
    setup = set_up(asked, known)
    layers = [n for n in setup.kv_heads if asked.layers is None or n in asked.layers]
    if not layers:
        raise WeirError("the chosen layers keep their own sliding windows, whatever the policy is")
    ids = asked.ids(asked.tokens or setup.start + SCORED)
    if len(ids) < setup.start + LEAST:
        raise WeirError(
            f"{len(ids):,} tokens are too few to measure the effect of sinks under "
            f"{FIRST + setup.recent} slots. Use at least {setup.start + LEAST:,} tokens."
        )
    heads = _heads(asked, known, setup, layers)
    total, done = 2 + 2 * len(layers) + len(heads), 0

    def read(hidden: Hidden) -> Tensor:
        nonlocal done
        losses = losses_of(asked, ids, setup, hidden)
        asked.on_step(done := done + 1, total)
        return losses

    def loss(layer: int, head: int | None, hidden: Hidden) -> dict[str, Any]:
        """Perplexity, the rise of the loss in nats per token, and the rise's standard error."""
        mine = read(hidden)
        apart = mine - seen
        rise, error = float(apart.mean()), float(apart.std()) / len(apart) ** 0.5
        return {"layer": layer, "head": head, "ppl": _ppl(mine), "rise": rise, "error": error}

    seen = read({})
    unseen = read(setup.all_of(setup.kv_heads))
    facts: dict[str, Any] = {
        "tokens": len(ids),
        "scored": len(ids) - setup.start,
        "sinks": FIRST,
        "recent": setup.recent,
        "chunk": setup.chunk,
        "ppl": _ppl(seen),
        "ppl_without": _ppl(unseen),
        "hidden_in": [loss(layer, None, setup.all_of([layer])) for layer in layers],
        "seen_by": [
            loss(layer, None, setup.all_of(setup.kv_heads.keys() - {layer})) for layer in layers
        ],
        "hidden_in_head": [loss(layer, head, {layer: (head,)}) for layer, head in heads],
    }
    text = (
        f"The perplexity of {facts['scored']:,} tokens, read as a stream under sink({FIRST}) | "
        f"recent({setup.recent}) with positions inside the cache, is {facts['ppl']:,.1f} if every "
        f"layer sees the first {FIRST} tokens, and {facts['ppl_without']:,.1f} if none does. In "
        "the first picture, these tokens are hidden in one layer, and all other layers see them. "
        "In the second, only one layer sees them. The newest tokens are the same in all runs. If "
        "the loss hardly rises when the first tokens are hidden in a layer, this layer does not "
        "need its sinks. In the table, 'rise, nats' is this rise of the mean loss per token, plus "
        "or minus its standard error over the tokens."
    )
    pictures = [
        Picture(
            "layers-without",
            _draw(facts, "hidden_in", "hidden in this layer alone"),
            "Perplexity when the sinks are hidden in one layer, for each layer.",
        ),
        Picture(
            "layers-alone",
            _draw(facts, "seen_by", "seen by this layer alone"),
            "Perplexity when one layer alone sees the sinks, for each layer.",
        ),
    ]
    if heads:
        text += (
            f" In the third picture, the first {FIRST} tokens are hidden in one KV head of one "
            "layer."
        )
        alt = "Rise of the loss when the sinks are hidden in one KV head, by layer and head."
        pictures.append(Picture("layers-heads", _heat(facts["hidden_in_head"]), alt))
    rows = []
    for one, other in zip(facts["hidden_in"], facts["seen_by"], strict=True):
        rise = f"{one['rise']:+.3f} ± {one['error']:.3f}"
        rows.append((str(one["layer"]), f"{one['ppl']:,.1f}", rise, f"{other['ppl']:,.1f}"))
    table = TextTable(("layer", "ppl hidden", "rise, nats", "ppl alone"), tuple(rows))
    return Section("layers", "Where sinks matter", text, tuple(pictures), table, facts)


def set_up(asked: Inspection, facts: ModelSpec) -> StreamSetup:
    """Return the setup for a model: half of its window in slots, at most `BUDGET`."""
    kv_heads = {
        n: layer.heads.kv_heads
        for n, layer in enumerate(facts.layers)
        if layer.positions.window is None or facts.sliding
    }
    most = min(window_of(asked.model.config) or MOST_TOKENS, facts.sliding or BUDGET * 2)
    budget = max(2 * FIRST, min(BUDGET, most // 2))
    return StreamSetup(kv_heads, budget - FIRST, max(1, min(CHUNK, budget // 4)))


def losses_of(asked: Inspection, ids: Tensor, setup: StreamSetup, hidden: Hidden) -> Tensor:
    """The loss of each scored token of a text, in nats [tokens - start], float64."""
    stream = Stream(asked.model, setup.policy(hidden), chunk=setup.chunk)
    try:
        # There is a loss for every token, so the loss at index `start` is that of token `start`.
        return stream.score(ids[None])[0].double().cpu()[setup.start :]
    finally:
        if stream.cache is not None:
            stream.cache.detach()


def _heads(
    asked: Inspection, facts: ModelSpec, setup: StreamSetup, layers: Sequence[int]
) -> list[tuple[int, int]]:
    """(layer, KV head) pairs to measure one by one."""
    chosen = asked.kv_heads(facts.layers[layers[0]].heads.group)
    every = [(layer, head) for layer in layers for head in range(setup.kv_heads[layer])]
    if chosen is None:
        return every if len(every) <= MOST_HEADS else []
    return [(layer, head) for layer, head in every if head in chosen]


def _ppl(losses: Tensor) -> float:
    return float(losses.mean().clamp(max=700.0).exp())


def _draw(facts: dict[str, Any], case: str, label: str) -> Figure:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    with drawing(2.8) as figure:
        axes = figure.subplots()
        for name, color, where in (
            ("ppl_without", "#c0392b", "hidden everywhere"),
            ("ppl", "#77828c", "seen everywhere"),
        ):
            axes.axhline(facts[name], color=color, lw=1, ls="--", label=where)
        points = ([loss[name] for loss in facts[case]] for name in ("layer", "ppl"))
        axes.plot(*points, "o", ms=6, color="#2c6e9b", label=label)
        axes.set_yscale("log")  # log perplexity is nats
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.08, y=0.12)
        axes.set(xlabel="layer", ylabel="perplexity")
        style_panel(axes)
        style = {"frameon": False, "fontsize": 8, "ncols": 3, "title": "sinks", "title_fontsize": 8}
        figure.legend(loc="outside upper center", **style)
    return figure


def _heat(losses: list[dict[str, Any]]) -> Figure:
    of = {(loss["layer"], loss["head"]): loss["rise"] for loss in losses}
    layers, heads = (list(dict.fromkeys(which)) for which in zip(*of, strict=True))
    rises = [[of.get((layer, head), float("nan")) for head in heads] for layer in layers]
    far = max(map(abs, of.values())) or 1.0
    with drawing(0.9 + 0.32 * len(layers)) as figure:
        axes = figure.subplots()
        image = axes.imshow(rises, cmap="coolwarm", vmin=-far, vmax=far, aspect="auto")
        axes.set_xticks(range(len(heads)), [str(head) for head in heads])
        axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
        for (layer, head), rise in of.items() if len(of) <= MOST_HEADS // 2 else ():
            color = "white" if abs(rise) > 0.7 * far else "#1b2733"
            place = heads.index(head), layers.index(layer)
            axes.text(*place, f"{rise:+.3f}", ha="center", va="center", color=color)
        axes.set(xlabel="KV head whose sinks are hidden", ylabel="layer")
        figure.colorbar(image, label="nats per token")
    return figure
