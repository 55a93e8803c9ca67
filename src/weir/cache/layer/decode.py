"""One token for every row, in buffers of constant shape: what a compiled step reads and writes.

What happens between folds has constant shapes, so one program serves a stream for ever: a token
goes into its slot, and attention reads the whole slab, behind a mask that ends at that slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weir.policies import Pipe
from weir.slab import Form, Place, Slab


@dataclass
class Spot:
    """The slots of a layer, and where its next token goes.

    Attributes:
        keys, values: of all slots [batch, kv_heads, slots, dim].
        a, b: log-weights [batch, kv_heads, slots]; a is None where it is b everywhere.
        split: both as `split_attention` reads them; None where a is b.
        queries: where queries wait for the fold; None if none do. `wanted` of them are older ones.
        window: how many tokens a query sees; None for all.
    """

    keys: Tensor
    values: Tensor
    a: Tensor | None
    b: Tensor
    split: tuple[Tensor, Tensor, Tensor] | None
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
        a = slab.a if pipe.two_weights else None
        queries, wanted = slab.queries, pipe.needs_queries
        return cls(slab.keys, slab.values, a, slab.b, slab.split, queries, wanted, place.window)
