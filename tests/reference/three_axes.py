"""Streams on three axes, one token at a time, from the papers alone: what weir is checked against.

Wang et al. 2024, "Qwen2-VL", section 2.1: a word has the same place in time, height and width. The
pieces of an image share a place in time, and spread over height and width (those of a video also
over time). The next word or image begins after the longer side. Xiao et al. 2024, section 3.2,
count places within the cache: here, those of the words and images that are still held. If only a
part of an image is held, its pieces keep their places relative to each other.

This is slow but simple.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from reference.naive import Naive
from reference.streaming import Kept, without_middle

Place = tuple[int, int, int]


@dataclass(frozen=True)
class Spot:
    """The place of one token within its word or image.

    Attributes:
        group: the number of its word or image in the stream.
        reach: the distance from the beginning of its word or image to the beginning of the next.
        within: its place in time, height and width, from the beginning of its word or image.
    """

    group: int
    reach: int = 1
    within: Place = (0, 0, 0)


def spots(ids: list[int], image: int, rows: int, columns: int) -> list[Spot]:
    """The spots of words and images, each image a run of `rows` times `columns` tokens `image`."""
    found: list[Spot] = []
    group, place = 0, 0
    while place < len(ids):
        if ids[place] == image:
            for row in range(rows):
                for column in range(columns):
                    found.append(Spot(group, max(rows, columns), (0, row, column)))
            place += rows * columns
        else:
            found.append(Spot(group))
            place += 1
        group += 1
    return found


def placed(held: list[Spot]) -> list[Place]:
    """Places within a cache that holds these tokens, in the order of the stream."""
    places, begins, group = [], 0, held[0].group
    reach = held[0].reach
    for spot in held:
        if spot.group != group:
            begins, group, reach = begins + reach, spot.group, spot.reach
        places.append(tuple(begins + step for step in spot.within))
    return places


def angles(places: Any, decoder: Any, sections: list[int]) -> Tensor:
    """Angles of pairs of dimensions at places [..., 3], in float64."""
    by_axis = torch.tensor(places, dtype=torch.float64)
    parts, done = [], 0
    for index, count in enumerate(sections):
        frequencies = decoder.rotary_emb.inv_freq[done : done + count].double()
        parts.append(by_axis[..., index % 3, None] * frequencies)
        done += count
    return torch.cat(parts, dim=-1)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """`x` [..., dim] with dimensions i and i + half rotated by the i-th angle, in float64."""
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class KeptOnAxes(Kept):
    """The unrotated keys and the values that StreamingLLM keeps in every layer, on three axes."""

    def __init__(self, model: PreTrainedModel, sinks: int, budget: int, stream: list[Spot]) -> None:
        super().__init__(model, sinks, budget, ())
        self.decoder: Any = model.get_decoder()
        self.stream = stream
        self.held: dict[int, list[int]] = {}
        self.count: dict[int, int] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys, rotated by their distance to the query, and values, and drop the middle."""
        place = self.count.get(layer_idx, 0)
        self.count[layer_idx] = place + 1
        held = [*self.held.get(layer_idx, []), place]
        keys, values = key_states, value_states
        if layer_idx in self.keys:
            keys = torch.cat([self.keys[layer_idx], keys], dim=2)
            values = torch.cat([self.values[layer_idx], values], dim=2)
        sinks, budget = self.limits[layer_idx]
        self.keys[layer_idx] = without_middle(keys, sinks, budget)
        self.values[layer_idx] = without_middle(values, sinks, budget)
        self.held[layer_idx] = held
        if len(held) > budget:
            self.held[layer_idx] = held[:sinks] + held[len(held) - (budget - sinks) :]
        places = placed([self.stream[it] for it in held])
        apart = [tuple(p - q for p, q in zip(one, places[-1], strict=True)) for one in places]
        sections = self.decoder.config.rope_parameters["mrope_section"]
        return turned(keys, angles(apart, self.decoder, sections)).float(), values


@torch.no_grad()
def streaming_on_axes(
    model: PreTrainedModel, embeddings: Tensor, stream: list[Spot], sinks: int, budget: int
) -> Tensor:
    """Logits after each token of a stream under StreamingLLM.

    Args:
        model: a model with three axes.
        embeddings: the inputs of its decoder [1, length, width].
        stream: the spot of each token.
        sinks: tokens from the start of the stream that stay.
        budget: tokens that stay in all; a new one attends to these and to itself.

    Returns:
        [1, length, vocabulary].
    """
    kept = KeptOnAxes(model, sinks, budget, stream)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    logits = []
    for one in embeddings.split(1, dim=1):
        given = {"inputs_embeds": one, "position_ids": zero, "past_key_values": kept}
        logits.append(model(**given, use_cache=True).logits)
    return torch.cat(logits, dim=1)


@dataclass
class NaiveOnAxes(Naive):
    """The naive loop on three axes.

    Attributes:
        stream: the spot of each token of the stream.
    """

    stream: list[Spot] = field(default_factory=list)

    def placed(self, places: list[int]) -> list[Any]:
        """Places within the cache, on each axis."""
        order = sorted(set(places))
        found = placed([self.stream[place] for place in order])
        return [found[order.index(place)] for place in places]

    def rotate(self, x: Tensor, places: Any) -> Tensor:
        """`x` [n, dim] at places on each axis, or at a place of the stream, in float64."""
        if isinstance(places, int):
            places = placed(self.stream[: places + 1])[-1]
        decoder = self.model.model
        sections = decoder.config.rope_parameters["mrope_section"]
        return turned(x, angles(places, decoder, sections))
