"""Write a pool: milestones, which are tokens at equal distances over the whole past.

    python examples/own_pool.py [MODEL]

The score of a place in the stream is the largest power of two that divides it. After 100 tokens,
the four best places are 64, 32, 96 and 16. The longer the stream, the wider the distances. No
random number is drawn.
"""

import sys
from dataclasses import dataclass

from torch import Tensor

import weir
from weir.pools import Fold, Ranked, pool
from weir.slab import Slots
from weir.stream import BOOK, read_text


@pool("milestones")
@dataclass(frozen=True)
class Milestones(Ranked):
    """Keep the `n` tokens whose places in the stream are divided by the largest powers of two."""

    n: int = 64

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """The largest power of two in each place, counted from 1 [batch, kv_heads, slots]."""
        place = slots.position + 1
        return (place & -place).float()


model, tokenizer = weir.load(sys.argv[1] if len(sys.argv) > 1 else "nano")
ids = tokenizer(read_text(BOOK)[:6_000]).input_ids
for policy in ("sink(4) | recent(252)", "sink(4) | recent(236) | milestones(16)"):
    stream = weir.Stream(model, policy)
    nll = stream.score(ids)[0, 1:]  # nothing predicts the first token
    print(f"{policy}: perplexity {nll.mean().exp():.1f} over {stream.seen:,} tokens")

slots = stream.slots(layer=0)
mine = slots.pool == slots.pools.index("milestones")
print("milestones are at", sorted(slots.position[mine & (slots.position >= 0)].unique().tolist()))
