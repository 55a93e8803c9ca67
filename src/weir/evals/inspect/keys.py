"""The geometry of keys and values: t-SNE with greedy centers, and how clusterable they are.

SubGen (Zandieh et al. 2024), section 3.1 and Figure 1: the keys that a Llama-2-7B caches over 1,024
tokens are said to be more clusterable than its values, thanks to rotary embedding. So keys are
measured as a cache holds them, rotated to their places, once more as if all stood at place 0, and
beside the values. Clusterability is a number here (`covering`), of every KV head and with an
interval over passages of the text.

The first token is left out, or all tokens of a learned sink. It is the sink of most models and lies
far from all others, and one such point is far in every coordinate; shuffled, it puts one far
coordinate into as many points of the control as there are coordinates, and any set of points would
look clusterable beside that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from weir.evals.attention_error import Captured, capture_each
from weir.evals.data import needed
from weir.evals.inspect.covering import FEWEST, centers, cover
from weir.evals.inspect.keys_pictures import Cloud, Measured, draw_clouds, draw_curves, draw_scores
from weir.evals.inspect.passages import longest, passages
from weir.evals.inspect.section import Asked, Picture, Section, Table
from weir.evals.inspect.vectors import as_read, turned_back
from weir.evals.measures import around_mean
from weir.models import describe

KEYS, TURNED, VALUES = "keys", "keys at place 0", "values"
USUAL = 1024
"""Tokens of a passage, as in the paper, where the model's window holds them."""
TEXTS = 5
"""Passages, at most."""
LAYERS = 5
"""Of a deep model so many are looked at where none are chosen, evenly spread, as in the paper."""
CENTERS = 16
"""Of the paper's figure."""
PERPLEXITY = 30.0
"""Of t-SNE, as everyone takes it; a third of the tokens where they are few."""
MOST_ROWS = 40
"""Heads that have a row of the table each; where there are more, layers have."""


@dataclass(frozen=True)
class Vectors:
    """Keys or values of one KV head over one passage, but for its sink [tokens - sink, dim]."""

    layer: int
    head: int
    kind: str
    points: Tensor


def section(asked: Asked) -> Section:
    """Clusterability of keys and values of chosen layers and heads, as pictures and numbers.

    Raises:
        WeirError: the text is too short, the model cannot be served, or scikit-learn is missing.
    """
    _manifold()  # before anything is read
    texts = passages(asked, longest(asked, USUAL), TEXTS, FEWEST + left_out(asked))
    layers = layers_of(asked)
    measured, vectors = measure(asked, texts, layers)
    clouds = []
    for it in vectors:
        clouds.append(cloud_of(it, asked.seed))
        asked.on_step(len(texts) * len(layers) + len(clouds), _steps(texts, layers))
    shown = ", ".join(map(str, some_of(layers)))
    pictures = (
        Picture(
            "keys-plane",
            draw_clouds(clouds, left_out(asked)),
            f"Keys and values of one head of layers {shown} in a plane, greedy centers marked.",
        ),
        Picture(
            "keys-covering",
            draw_curves(measured),
            "Covering radius, as a share of a shuffled control's, by the number of centers.",
        ),
        Picture(
            "keys-scores",
            draw_scores(measured),
            "Clusterability of keys and values of every KV head, by layer.",
        ),
    )
    title = "Are keys more clusterable than values?"
    table = _table(measured)
    return Section("keys", title, _text(texts, measured), pictures, table, _facts(texts, measured))


def layers_of(asked: Asked) -> tuple[int, ...]:
    """The chosen layers; where none are, a few from the first to the last."""
    if asked.layers is not None:
        return asked.layers
    return some_of(range(len(describe(asked.model).layers)))


def left_out(asked: Asked) -> int:
    """How many tokens are left out: those of a learned sink, or the first."""
    return max(1, len(asked.sink.tokens))


def some_of(layers: Sequence[int]) -> tuple[int, ...]:
    """A few of some layers, evenly from the first to the last."""
    few = min(len(layers), LAYERS)
    return tuple(layers[round(n * (len(layers) - 1) / max(1, few - 1))] for n in range(few))


def measure(
    asked: Asked, texts: Tensor, layers: Sequence[int]
) -> tuple[list[Measured], list[Vectors]]:
    """The coverings of every head over all passages, and the vectors that are to be drawn.

    One layer of one passage is held at a time. Of the first passage and a few layers one head is
    kept, drawn by lot as in the paper where none is chosen.

    Args:
        asked: the model, the heads, the seed, and who is told of layers and passages done.
        texts: [passages, length], int64.
        layers: which layers.

    Returns:
        Coverings by layer, head and kind; and the first passage's vectors.
    """
    found: dict[tuple[int, int, str], Measured] = {}
    kept: list[Vectors] = []
    sink = left_out(asked)
    lot, drawn, done = random.Random(asked.seed), some_of(layers), 0

    def take(number: int, it: Captured) -> None:
        nonlocal done
        chosen = asked.kv_heads(it.queries.shape[1] // it.keys.shape[1])
        heads = list(range(it.keys.shape[1]) if chosen is None else chosen)
        head = lot.choice(heads) if chosen is None else heads[0]
        for kind, x in kinds_of(it).items():
            points = x[0, heads, sink:]
            covering = cover(points, asked.seed + 1000 * number + it.layer)
            for row, name in enumerate((it.layer, each, kind) for each in heads):
                mine = found.setdefault(name, Measured(*name, covering.counts))
                mine.radius.append(covering.radius[row].tolist())
                mine.control.append(covering.control[row].tolist())
                mine.scores.append(float(covering.score[row]))
            if number == 0 and kind != TURNED and it.layer in drawn:
                kept.append(Vectors(it.layer, head, kind, x[0, head, sink:].clone()))
        done += 1
        asked.on_step(done, _steps(texts, layers))

    for number, ids in enumerate(texts):
        capture_each(asked.model, ids, partial(take, number), layers)
    return list(found.values()), kept


def kinds_of(it: Captured) -> dict[str, Tensor]:
    """What is compared of a layer, by kind [1, kv_heads, length, dim].

    Keys at place 0 are missing where a layer rotates nothing.
    """
    back = turned_back(it)
    found = {KEYS: as_read(it, it.keys), TURNED: back, VALUES: it.values}
    return {kind: x for kind, x in found.items() if x is not None}


def cloud_of(it: Vectors, seed: int) -> Cloud:
    """Where t-SNE (van der Maaten and Hinton 2008) puts vectors in a plane, and greedy centers.

    The same for the same seed on one machine.

    Raises:
        WeirError: scikit-learn is missing.
    """
    count = len(it.points)
    # Where all vectors are one, principal components have no length to be scaled by.
    start = "pca" if bool((it.points != it.points[:1]).any()) else "random"
    tsne = _manifold().TSNE(
        perplexity=min(PERPLEXITY, (count - 1) / 3), init=start, random_state=seed % 2**32
    )
    place = torch.from_numpy(tsne.fit_transform(it.points.cpu().numpy()))
    center = centers(it.points[None], min(CENTERS, count // 2))[0]
    return Cloud(it.layer, it.head, it.kind, place, center.cpu())


def _manifold() -> Any:
    return needed("sklearn.manifold", "a picture of keys in a plane", "inspect")


def _steps(texts: Tensor, layers: Sequence[int]) -> int:
    """A layer of a passage is a step, and so is a picture in the plane."""
    return len(texts) * len(layers) + 2 * len(some_of(layers))


def _mean(measured: Sequence[Measured]) -> tuple[float, float | None]:
    """The mean score of some heads, and its interval over passages."""
    return around_mean(
        [fmean(scores) for scores in zip(*(it.scores for it in measured), strict=True)]
    )


def _cell(measured: Sequence[Measured]) -> str:
    if not measured:
        return "—"
    mean, reach = _mean(measured)
    return f"{mean:.2f}" if reach is None else f"{mean:.2f} ± {reach:.2f}"


def _of(measured: Sequence[Measured], **wanted: Any) -> list[Measured]:
    """Those that have these attributes."""
    return [it for it in measured if all(getattr(it, k) == v for k, v in wanted.items())]


def _kinds(measured: Sequence[Measured]) -> list[str]:
    return [kind for kind in (KEYS, TURNED, VALUES) if _of(measured, kind=kind)]


def _text(texts: Tensor, measured: Sequence[Measured]) -> str:
    figures = ", ".join(f"{kind} {_cell(_of(measured, kind=kind))}" for kind in _kinds(measured))
    count, length = texts.shape
    over = f"{count} passages of {length:,} tokens" if count > 1 else f"{length:,} tokens"
    turned = ", rotated to their places; at place 0, they are turned back"
    turned = turned if TURNED in _kinds(measured) else ""
    sure = ", 95 % intervals over the passages" if count > 1 else ""
    return (
        "SubGen's Figure 1 shows keys that fall into clusters, and values that do not, by t-SNE "
        f"with {CENTERS} greedy centers. A plane can mislead, so there is a number: k greedy "
        "centers cover all vectors within some radius, and clusterability is by which share that "
        "radius is smaller than for the same coordinates shuffled over the tokens, the mean over "
        "k = 2, 4, 8, ... up to half of the tokens. 0: as little structure as that control has; "
        f"1: no more different vectors than centers. Over {over}, the mean over heads is: "
        f"{figures}{sure}. Keys are as a cache holds them{turned}. The first token, which is the "
        "sink of most models, is left out, and so are all tokens of a learned sink."
    )


def _table(measured: Sequence[Measured]) -> Table:
    names = list(dict.fromkeys((it.layer, it.head) for it in measured))
    layers = list(dict.fromkeys(it.layer for it in measured))
    groups: list[tuple[str, dict[str, int]]] = [
        (f"layer {layer}, head {head}", {"layer": layer, "head": head}) for layer, head in names
    ]
    if len(names) > MOST_ROWS:
        groups = [(f"layer {layer}", {"layer": layer}) for layer in layers]
    groups.append(("all", {}))
    kinds = _kinds(measured)
    rows = [
        (name, *(_cell(_of(measured, kind=kind, **which)) for kind in kinds))
        for name, which in groups
    ]
    return Table(("KV head", *kinds), tuple(rows))


def _facts(texts: Tensor, measured: Sequence[Measured]) -> dict[str, Any]:
    means = {kind: _mean(_of(measured, kind=kind)) for kind in _kinds(measured)}
    return {
        "passages": texts.shape[0],
        "tokens": texts.shape[1],
        "mean": {kind: {"score": mean, "reach": reach} for kind, (mean, reach) in means.items()},
        "heads": [
            {
                "layer": it.layer,
                "head": it.head,
                "kind": it.kind,
                "score": around_mean(it.scores)[0],
                "reach": around_mean(it.scores)[1],
                "scores": it.scores,
                "k": list(it.counts),
                "radius": it.radius,
                "control": it.control,
            }
            for it in measured
        ],
    }
