"""Read the tasks of `quality` with weir's policies, each with the same number of slots.

Two policies represent other methods. `context shift` does the same as llama.cpp's server with
`--context-shift --keep 4`: when the context is full, half of the tokens after the first four are
dropped, and the rest moves up. The pipe for this keeps the first four tokens and half of the other
slots for the newest tokens, and folds when the other half is full. `dense` is exact attention.
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
"""The policies. `{few}` is a quarter of the slots, and `{most}` the rest without the sinks."""
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
    """Return functions that make nano under each policy, by the policy's text."""
    model, _ = weir.load("nano")
    found = {written: partial(Policy, model, written, PIECE) for written in POLICIES}
    return {**found, "context shift": partial(Policy, model, "sink(4) | recent({half})", None)}


if __name__ == "__main__":
    serve(partial(Reader, ("weir-kv", "transformers", "torch"), offers))
