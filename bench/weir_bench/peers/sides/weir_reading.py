"""weir's policies on the tasks of `quality`, each with the same slots.

Two more stand for others. `context shift` is what llama.cpp's server does under `--context-shift
--keep 4`: a full context loses half of what is not kept, and the rest moves up; as a pipe that is
sinks and half as many newest tokens, folded when as many again have come. `dense` is exact
attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from protocol import serve
from reading import PIECE, Begin, Reader
from torch import Tensor
from transformers import PreTrainedModel

import weir

POLICIES = (
    "weir(budget={slots})",
    "streaming_llm(budget={slots})",
    "snapkv(budget={slots})",
    "keydiff({slots})",
    "tova({slots})",
    "knorm({slots})",
    "kcenter(budget={slots})",
    "sink(4) | recent({most}) | kcenter({few})",
    "window(budget={slots})",
    "dense",
)
"""`{most}` and `{few}` are three quarters of the slots, less the sinks, and a quarter."""
SINKS = 4


class Policy:
    """nano under a policy."""

    def __init__(
        self, model: PreTrainedModel, written: str, chunk: int | None, rows: int, slots: int
    ) -> None:
        few = slots // 4
        half = (slots + PIECE - SINKS) // 2
        policy = written.format(slots=slots, few=few, most=slots - few - SINKS, half=half)
        self.stream, self.rows = weir.Stream(model, policy, chunk=chunk or half), rows

    def feed(self, ids: Tensor) -> Tensor:
        return self.stream.feed(ids, all_logits=True)

    def nbytes(self) -> int:
        return self.stream.nbytes // self.rows


def offers() -> Mapping[str, Begin]:
    """Each policy as it is written."""
    model, _ = weir.load("nano")
    found = {written: partial(Policy, model, written, PIECE) for written in POLICIES}
    return {**found, "context shift": partial(Policy, model, "sink(4) | recent({half})", None)}


if __name__ == "__main__":
    serve(partial(Reader, ("weir-kv", "transformers", "torch"), offers))
