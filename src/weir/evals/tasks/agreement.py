"""`agreement`: how many of the tokens that KVzip keeps are also held by a policy.

KVzip (Kim et al. 2025, arXiv:2505.23416) reads the whole text and lets the model repeat it, so it
knows which tokens a repetition needs. A streaming policy has to decide earlier, with less
information.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.policies import KVzip
from weir.pools import Count
from weir.stream import Stream, read_stream


@task("agreement")
@dataclass(frozen=True)
class Agreement(Task):
    """Measures how many of the tokens that KVzip keeps are also held by the policy.

    In every layer, KVzip keeps as many tokens of a passage as the policy has slots in its largest
    layer. Each passage is read from its beginning, on a new stream. All layers and KV heads count
    equally, except layers with their own window, which do not count.

    Attributes:
        tokens: tokens of a passage.
        passages: number of consecutive passages of the text.
        asks: whether KVzip asks the model in words to repeat a passage.
    """

    tokens: Count = 1024
    passages: Count = 4
    text: str | None = None
    asks: bool = True

    drawn: ClassVar[bool] = False
    metrics: ClassVar[dict[str, Better]] = {"agreement": "higher"}

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Read every passage under both policies, and compare which tokens they hold.

        Returns:
            "agreement", the share of KVzip's tokens that the policy also holds; "chance", the share
            of all tokens that the policy holds, which would be the agreement of random tokens;
            "slots", "tokens", "passages", "kv_bytes".
        """
        needed = self.tokens * self.passages
        ids = read_stream(subject.tokenizer, self.text, needed).ids
        if len(ids) < needed:
            raise WeirError(
                f"{self.passages} passages of {self.tokens:,} tokens take {needed:,}, but the text "
                f"has only {len(ids):,}. Use fewer or shorter passages."
            )
        both = wanted = held = every = largest = 0
        for number, passage in enumerate(ids.split(self.tokens)):
            stream = subject.stream(self.tokens)
            stream.feed(passage)
            stream.slots()  # raises if nothing is cached
            slots = stream.capacity
            if slots is None or slots >= self.tokens:
                raise WeirError(
                    f"{subject.policy} has room for all {self.tokens:,} tokens of a passage. Use a "
                    "smaller budget or longer passages."
                )
            reference = Stream(
                subject.model,
                KVzip(slots + 1, newest=1, asks=self.asks),
                chunk=subject.chunk,
                positions=subject.positions,
                tokenizer=subject.tokenizer,
            )
            reference.feed(passage)
            assert reference.cache is not None
            for layer, most in enumerate(reference.cache.slots_by_layer):
                if most != slots + 1:
                    continue
                mine, theirs = (self._held(one, layer) for one in (stream, reference))
                both += int((mine & theirs).sum())
                wanted += int(theirs.sum())
                held += int(mine.sum())
                every += mine.numel()
            largest = max(largest, stream.nbytes)
            progress((number + 1) / self.passages)
        return {
            "agreement": both / wanted,
            "chance": held / every,
            "slots": slots,
            "tokens": self.tokens,
            "passages": self.passages,
            "kv_bytes": largest,
        }

    def _held(self, stream: Stream, layer: int) -> Tensor:
        """Return which tokens each KV head of a layer holds [kv_heads, tokens], bool."""
        position = stream.slots(layer).position[0]
        found = torch.zeros(len(position), self.tokens + 1, dtype=torch.bool)
        found.scatter_(1, position.cpu().where(position.cpu() >= 0, self.tokens), True)
        return found[:, :-1]
