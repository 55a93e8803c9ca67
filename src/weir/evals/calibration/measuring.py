"""How far each layer's attention is from exact attention in every size it might have: one pass.

The model reads a text exactly, passage by passage. What each of its layers is given on the way is
also streamed through caches of other sizes, and their answers are compared with the exact ones; so
errors of lower layers do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache import Forward
from weir.cache.layer import Layer
from weir.evals.listening import Listening
from weir.models import input_device
from weir.policies import Pipe
from weir.slab import AttentionParams

PIECE = 512
"""Tokens that the model reads in one call."""


def measure(
    model: PreTrainedModel,
    passages: Sequence[Tensor],
    sizes: Mapping[int, Sequence[Pipe]],
    *,
    chunk: int = 64,
    seed: int = 0,
    on_step: Callable[[float], None] = lambda share: None,
) -> dict[int, list[float]]:
    """The relative error of every size of every layer.

    It is |z - exact| / |exact| (Frobenius, over all heads and passages) of the answers to the
    second half of each passage, where something has gone.

    Args:
        model: a causal language model.
        passages: token ids, each [length] and no longer than the model's window.
        sizes: by layer, the pipes that are tried.
        chunk: tokens between two folds.
        seed: of all draws.
        on_step: told which share of everything is done.

    Raises:
        WeirError: the model cannot be served, or makes keys or values that are no numbers.
    """
    wrong = {layer: [0.0] * len(pipes) for layer, pipes in sizes.items()}
    whole = dict.fromkeys(sizes, 0.0)
    for number, passage in enumerate(passages):
        reader = _Reader(model, len(passage), sizes, chunk, seed)
        try:
            for begin in range(0, len(passage), PIECE):
                reader.read(model, passage[begin : begin + PIECE], begin)
                on_step((number + min(1, (begin + PIECE) / len(passage))) / len(passages))
        finally:
            reader.detach()
        for layer in sizes:
            whole[layer] += reader.whole[layer]
            wrong[layer] = [a + b for a, b in zip(wrong[layer], reader.wrong[layer], strict=True)]
    return {
        layer: [(part / whole[layer]) ** 0.5 if whole[layer] else 0.0 for part in wrong[layer]]
        for layer in sizes
    }


class _Reader(Listening):
    """An exact cache of one passage, and beside each of its layers others of all sizes.

    Attributes:
        wrong: by layer and size, the sum of squares of what was answered otherwise.
        whole: by layer, the sum of squares of what was to be answered.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        length: int,
        sizes: Mapping[int, Sequence[Pipe]],
        chunk: int,
        seed: int,
    ) -> None:
        # As many slots as tokens: nothing goes, and positions are those that rolling caches have.
        super().__init__(model, f"window(budget={length})", chunk=chunk, seed=seed)
        self.half = length // 2
        self.at = 0
        self.others = {
            layer: [Layer(replace(self.stack[layer].spec, pipe=pipe)) for pipe in pipes]
            for layer, pipes in sizes.items()
        }
        self.wrong = {layer: [0.0] * len(pipes) for layer, pipes in sizes.items()}
        self.whole = dict.fromkeys(sizes, 0.0)

    @torch.no_grad()
    def read(self, model: PreTrainedModel, ids: Tensor, begin: int) -> None:
        """Read tokens [length], the first of which is the passage's `begin`-th."""
        self.at = begin
        decoder = self.attachment.facts.decoder  # logits would be large
        decoder(input_ids=ids[None].to(input_device(model)), past_key_values=self, use_cache=True)

    def hear(
        self,
        forward: Forward,
        layer: int,
        asked: tuple[Tensor, Tensor, Tensor],
        form: AttentionParams,
        out: Tensor,
    ) -> None:
        """Ask the layer's other sizes the same, and add up how far they are off."""
        plan = forward.plan.on(out.device)
        exact = out[:, :, max(0, self.half - self.at) :].double()
        for place, other in enumerate(self.others.get(layer, ())):
            answer = other.attend(*asked, form, plan)
            other.commit()
            off = answer[:, :, out.shape[2] - exact.shape[2] :].double() - exact
            self.wrong[layer][place] += float(off.square().sum())
        if layer in self.whole:
            self.whole[layer] += float(exact.square().sum())
