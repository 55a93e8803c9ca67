"""A decode step as one compiled graph: `weir.compile_steps(model)`.

At batch 1 a third of a decode step is Python and small operations; `torch.compile` makes one
program of it all. What happens between folds has constant shapes, so one program serves a stream
for ever: a token goes into its slot, and attention reads the whole slab, behind a mask that ends at
that slot. Prompts, folds, and steps of rows that stand in different places go the usual way.

During a compiled step a `Step` stands where the cache stands otherwise. It holds tensors and
constants only: of anything else the compiler would ask at every step whether it is still the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo import exc
from transformers.cache_utils import Cache

from weir.attention import Form, fused_attention, fuses, two_weight_attention
from weir.errors import WeirError
from weir.pipe import Pipe
from weir.positions import Place
from weir.slab import Slab, lined


@dataclass
class Spot:
    """The slots of a layer, and where its next token goes.

    Attributes:
        keys, values: of all slots [batch, kv_heads, slots, dim].
        read: what attention reads as values: `values`, or these times e^(a-b).
        a, b: log-weights [batch, kv_heads, slots]; a is None where `read` has it already.
        queries: where queries wait for the fold; None if none do. `wanted` of them are older ones.
        window: how many tokens a query sees; None for all.
    """

    keys: Tensor
    values: Tensor
    read: Tensor
    a: Tensor | None
    b: Tensor
    queries: Tensor | None
    wanted: int
    window: int | None

    @classmethod
    def of(cls, slab: Slab, pipe: Pipe, place: Place, form: Form) -> Spot | None:
        """Of a layer; None where its steps have to go the usual way.

        Those are steps without constant shapes, and what hardly any model and policy has: queries
        sharpened by the number of tokens, linear biases, rotations that the model leaves to weir.
        """
        if pipe.slots is None or pipe.log_n or place.alibi is not None:
            return None
        if place.rotary is not None and not form.placed:
            return None
        read, a, b = slab.values, slab.a if pipe.two_weights else None, slab.b
        if slab.weighted is not None and slab.mask is not None:
            read, a, b = slab.weighted, None, slab.mask
        wanted = pipe.needs_queries
        return cls(slab.keys, slab.values, read, a, b, slab.queries, wanted, place.window)


class Step(Cache):
    """What a compiled forward of one token meets in place of the cache.

    Attributes:
        spots: by layer.
        ends: the slot of the new token, by layer [layers], int64.
        waiting: tokens in the tail before it [1], int64.
        largest: what is written there: the largest absolute key or value of each layer [layers].
        tables: cosines and sines by type of layers and width, as `StreamingCache.rotations` has it.
    """

    def __init__(
        self,
        spots: list[Spot],
        ends: Tensor,
        waiting: Tensor,
        tables: dict[tuple[str | None, int], tuple[Tensor, Tensor] | None],
    ) -> None:
        super().__init__(layers=[])
        self.spots = spots
        self.ends = ends
        self.waiting = waiting
        self.largest = torch.zeros(len(spots), device=ends.device)
        self.tables = tables

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensor]:
        """Pass new keys and values on to weir's attention, with the layer they are for."""
        return (self, layer_idx, key_states), value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing: positions come from weir."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Sizes for a mask nobody reads."""
        return query_length, 0

    def rotations(
        self, kind: str | None, width: int, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """As `StreamingCache.rotations`, made before the step began."""
        return self.tables[kind, width]

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, form: Form
    ) -> Tensor:
        """One layer's attention; shapes as in `Layer.attend`, for one token."""
        spot, end = self.spots[layer], self.ends[layer : layer + 1]
        batch, kv_heads, _, dim = keys.shape
        queries = queries.view(batch, kv_heads, -1, 1, dim)
        spot.keys.index_copy_(2, end, keys)
        spot.values.index_copy_(2, end, values)
        if spot.read is not spot.values:
            spot.read.index_copy_(2, end, values)
        if spot.queries is not None:
            spot.queries.index_copy_(2, self.waiting + spot.wanted, lined(queries))
        largest = torch.maximum(keys.abs().amax(), values.abs().amax())
        self.largest[layer : layer + 1].copy_(largest)
        place = torch.arange(spot.b.shape[2], device=end.device)
        seen = place <= end
        if spot.window is not None:
            seen &= place > end - spot.window
        below = spot.b.masked_fill(~seen, -torch.inf)
        if spot.a is None and fuses(form):
            bias = below[:, :, None, None]
            out = fused_attention(queries, spot.keys, spot.read, form, bias)
        else:
            above = below if spot.a is None else spot.a.masked_fill(~seen, -torch.inf)
            out = two_weight_attention(queries, spot.keys, spot.read, above, below, form)
        return out.flatten(1, 2)


class Compiling:
    """How the steps of one model are to be compiled, from its first cache to its last.

    What the compiler has made it finds, and counts, by the code of a function. All models of a
    class share the code of their forward, and the sizes of one would use up the limit of the
    others; so the compiler is given a function around it, with a code of this model's own.

    Args:
        options: for `torch.compile`.

    Raises:
        WeirError: `torch.compile` does not take these options.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._code = _around(lambda: None).__code__.replace()
        try:
            self.of(lambda: None)
        except (TypeError, RuntimeError, exc.TorchDynamoException) as error:
            reason = str(error).strip().splitlines()[0]
            raise WeirError(f"torch.compile does not take these options: {reason}") from None

    def of(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward, compiled; it takes its arguments by name."""
        closure = _around(forward).__closure__
        step = FunctionType(self._code, globals(), "step", None, closure)
        return torch.compile(step, fullgraph=True, dynamic=False, **self._options)


def _around(forward: Callable[..., Any]) -> FunctionType:
    def step(**given: Any) -> Any:
        return forward(**given)

    return cast(FunctionType, step)


class Compiled:
    """A decoder whose steps with caches of weir are compiled.

    Attributes:
        own: the decoder's forward, as it is.
    """

    def __init__(self, decoder: nn.Module, compiling: Compiling) -> None:
        self.own = decoder.forward
        self._graph = compiling.of(self.own)
        self._refused: set[tuple[torch.Size, ...]] = set()

    def __call__(self, step: Step, given: dict[str, Any]) -> Any:
        """The decoder's output for a token; None where it has to go the usual way.

        Args:
            step: what stands for the cache.
            given: the decoder's arguments by name.

        Raises:
            WeirError: the model cannot be compiled here, and why.
        """
        if self._refused and _sizes(step) in self._refused:
            return None
        try:
            return self._graph(**{**given, "past_key_values": step})
        except exc.FailOnRecompileLimitHit:
            self._refused.add(_sizes(step))
            warnings.warn(
                "weir: this model was compiled for as many sizes of batch and cache as "
                "torch.compile allows; steps of others go the usual way",
                stacklevel=2,
            )
            return None
        except exc.TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise WeirError(f"the steps of this model cannot be compiled here: {reason}") from error


def _sizes(step: Step) -> tuple[torch.Size, ...]:
    return tuple(spot.keys.shape for spot in step.spots)
