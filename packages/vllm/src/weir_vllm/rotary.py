"""Rotary embeddings at any position of a stream.

vLLM reads cosines and sines from a table that ends at the model's window. `Endless` computes those
of a step's positions instead, with angles in float64, so that they are exact after millions of
tokens. It also rotates copies of sinks.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm._custom_ops import rotary_embedding
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.rotary_embedding import (
    Gemma4RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)

from weir_vllm.errors import StreamError

CHECKED = 512
"""Positions at which a model's own table is compared with what is computed here."""


class Endless:
    """A rotary embedding of vLLM that can be made to work at any position.

    Attributes:
        endless: whether `make_endless` has been called. The other attributes exist only then.
            Before, the embedding works like vLLM's.
        turns: the full turns of each pair of dimensions per position, in float64.
        magnitude: the factor of all cosines and sines.
        known: the last step, its positions, and what `find_table` returned for them.
    """

    endless = False

    def make_endless(self: Any) -> None:
        """Compute angles from now on, instead of reading them from the model's table.

        Raises:
            StreamError: the computed angles differ from those in the table.
        """
        if self.endless:
            return
        frequencies, magnitude = self.find_frequencies()
        self.register_buffer("turns", frequencies.double() / (2 * torch.pi), persistent=False)
        self.magnitude = magnitude
        table = self.cos_sin_cache[:CHECKED].float()
        places = torch.arange(len(table), device=table.device)
        ours = self.tabulate(places, torch.float32)
        angle = places[:, None] * frequencies.float()
        # Both round an angle once, and its cosine once; the table may be in lower precision.
        stored = torch.finfo(self.cos_sin_cache.dtype).eps
        allowed = 4 * torch.finfo(torch.float32).eps * (1 + angle) + 2 * stored
        if ((ours - table).abs() > magnitude * allowed.repeat(1, 2)).any():
            raise StreamError(
                f"the rotary embedding {type(self).__name__} computes other angles than weir-vllm "
                "expects of this class, so positions past its table cannot be computed"
            )
        self.known = None, None, None, None
        self.endless = True

    def find_frequencies(self: Any) -> tuple[torch.Tensor, float]:
        """Return the angles of one position, and the factor of all cosines and sines."""
        return self._compute_inv_freq(self.base), 1.0

    def turn(self: Any, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of rotations by so many positions, without the magnitude."""
        turns = by.double()[:, None] * self.turns.to(by.device)
        angles = ((turns - turns.round()) * (2 * torch.pi)).float()
        return angles.cos(), angles.sin()

    def tabulate(self: Any, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows that vLLM's table would have at these positions."""
        return (torch.cat(self.turn(positions), -1) * self.magnitude).to(dtype)

    def forward(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate queries and keys to their positions."""
        if not self.endless:
            return super().forward(positions, query, key)  # type: ignore[misc]
        if torch.compiler.is_compiling():  # the compiler notices that all layers share one table
            table = self.tabulate(positions.flatten(), query.dtype)
            places = torch.arange(positions.numel(), device=positions.device)
            return RotaryEmbedding.forward_static(
                places, query, key, self.head_size, self.rotary_dim, table, self.is_neox_style
            )
        table, places = self.find_table(positions, query.dtype)
        rotary_embedding(places, query, key, self.head_size, table, self.is_neox_style)
        return query, key

    def find_table(
        self: Any, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the table of a step, and the rows of its tokens. A step makes it only once."""
        context = get_forward_context() if is_forward_context_available() else None
        step, given, table, places = self.known
        if context is None or step is not context or given is not positions:
            table = self.tabulate(positions.flatten(), dtype)
            places = torch.arange(positions.numel(), device=positions.device)
            self.known = context, positions, table, places
        return table, places


class EndlessRotary(Endless, RotaryEmbedding):
    """The original rotary embedding."""


class EndlessLlama3Rotary(Endless, Llama3RotaryEmbedding):
    """With the scaling of Llama 3."""


class EndlessNTKRotary(Endless, NTKScalingRotaryEmbedding):
    """With a fixed NTK scaling."""


class EndlessGemma4Rotary(Endless, Gemma4RotaryEmbedding):
    """With the proportional frequencies of Gemma 4."""


class EndlessLinearRotary(Endless, LinearScalingRotaryEmbedding):
    """With positions divided by a factor."""

    def find_frequencies(self) -> tuple[torch.Tensor, float]:
        """Divide the frequencies, which has the same effect as dividing the positions."""
        if len(self.scaling_factors) != 1:
            raise StreamError(
                f"rotary embeddings with several scaling factors are not served, got "
                f"{self.scaling_factors}"
            )
        return self._compute_inv_freq(self.base) / self.scaling_factors[0], 1.0


class EndlessYaRNRotary(Endless, YaRNScalingRotaryEmbedding):
    """With the scaling of YaRN."""

    def find_frequencies(self) -> tuple[torch.Tensor, float]:
        """Return YaRN's frequencies and the magnitude it gives to queries and keys."""
        return self._compute_inv_freq(self.scaling_factor), self.mscale


SERVED = {
    made.__mro__[2].__name__: made
    for made in (
        EndlessRotary,
        EndlessLlama3Rotary,
        EndlessNTKRotary,
        EndlessGemma4Rotary,
        EndlessLinearRotary,
        EndlessYaRNRotary,
    )
}
"""The endless versions of vLLM's rotary embeddings, by the name of vLLM's class."""


def register_rotary() -> None:
    """Let vLLM make `Endless` embeddings in place of its own."""
    for name, made in SERVED.items():
        there = op_registry_oot.setdefault(name, made)
        if there is not made:
            raise StreamError(
                f"another plug-in has replaced {name} with "
                f"{there.__module__}.{there.__qualname__}, and weir-vllm cannot be used with it. "
                "Uninstall that plug-in."
            )
