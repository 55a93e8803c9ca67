"""`ppl`: streaming perplexity over concatenated books, by position and by book.

StreamingLLM (Xiao et al. 2024), section 4.1 and Tables 1, 2 and 6: every token of one long stream
is predicted from the tokens that the policy still holds. Policies express the cache configurations
of the paper's tables: `window(2048)` is 0+2048, `streaming_llm(2048, sinks=4)` is 4+2044.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from weir.evals.perplexity import STEP, PerplexityMeter, perplexity_of
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.pools import Bounds, Count
from weir.stream import read_stream


@task("ppl")
@dataclass(frozen=True)
class Perplexity(Task):
    """Measures streaming perplexity of books, one after the other, with one cache.

    Attributes:
        tokens: number of tokens to read; with `none`, all.
        text: a file of books; with `none`, the packaged excerpt.
        block: tokens in a block of `ppl_by_block`.
        start: a text that replaces the tokenizer's start token.
    """

    tokens: Annotated[int, Bounds(2)] | None = 20_000
    text: str | None = None
    block: Count = 1000
    start: str | None = None

    drawn: ClassVar[bool] = False
    metrics: ClassVar[dict[str, Better]] = {"ppl": "lower"}

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Read the stream once and measure perplexity.

        Returns:
            "ppl", "tokens", "nll" (mean, nats), "block", "ppl_by_block", "last_block" (tokens of
            the last block, which may be fewer), "by_book" (the "tokens" and "ppl" of each book),
            "kv_bytes". The first token of the stream is not predicted, so it counts in "tokens",
            but in no loss.
        """
        books = read_stream(subject.tokenizer, self.text, self.tokens, self.start)
        meter = PerplexityMeter(subject.stream(), self.block)
        by_book: list[dict[str, Any]] = []
        nll, scored, begun, largest = 0.0, 0, 0, 0
        for piece in books.pieces(STEP):
            meter.take(piece)
            largest = max(largest, meter.kv_bytes)
            progress(meter.tokens / len(books.ids))
            if meter.tokens in books.edges:
                ppl = perplexity_of(meter.nll - nll, meter.scored - scored)
                by_book.append({"tokens": meter.tokens - begun, "ppl": ppl})
                nll, scored, begun = meter.nll, meter.scored, meter.tokens
        meter.close()
        return {
            "ppl": meter.ppl,
            "tokens": meter.tokens,
            "nll": meter.nll / meter.scored,
            "block": self.block,
            "last_block": meter.last_block,
            "ppl_by_block": meter.ppl_by_block,
            "by_book": by_book,
            "kv_bytes": largest,
        }
