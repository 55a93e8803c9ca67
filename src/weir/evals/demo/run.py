"""Reads the packaged excerpt under several policies at once, and asks what is left of it.

First every policy reads the book, a step of each in turn. Then each is told names with numbers,
reads on, and is asked for the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.evals.demo.names import Named, ask_names, draw_names, strip_of
from weir.evals.measures import STEP, PerplexityMeter
from weir.stream import BOOK, Stream, encode, read_text

TITLE = "War and Peace"
POLICIES = (
    "dense",
    "window(budget=256)",
    "streaming_llm(budget=256)",
    "streaming_llm(budget=448)",
    "h2o(budget=256)",
    "kcenter(budget=256)",
    "weir(budget=256)",
)
"""What everyone does, what fails, what the paper does, the same with all the window allows; and
those that choose what to remember."""
NAMES = 8
"""How many names with numbers are told."""
AWAY = 1000
"""Tokens between what is told and the question."""
PARTS = 240
"""Parts of the book whose rests are shown."""


@dataclass(frozen=True)
class Story:
    """What is told behind the book, and asked.

    Attributes:
        tokenizer: of the model.
        names: who has which number.
        between: the tokens that are read before the question [n].
    """

    tokenizer: PreTrainedTokenizerBase
    names: Sequence[Named]
    between: Tensor

    def told_to(self, stream: Stream) -> dict[str, Any]:
        """Tell a stream of the names, read on, and ask.

        Returns:
            "held" (of each part of the stream how much is left, 0 to 1), "answers", "knows".
        """
        stream.feed([token for one in self.names for token in one.said])
        stream.feed(self.between)
        held = strip_of(stream, PARTS)
        answers = ask_names(stream, self.names, self.tokenizer)
        right = [said == one.number for said, one in zip(answers, self.names, strict=True)]
        return {"held": held, "answers": answers, "knows": sum(right)}


def book(tokenizer: PreTrainedTokenizerBase, tokens: int) -> Tensor:
    """The first tokens of the packaged excerpt; fewer if it has no more."""
    return encode(tokenizer, read_text(BOOK), tokens)


def with_story(tokenizer: PreTrainedTokenizerBase, tokens: int) -> tuple[Tensor, Story]:
    """The first tokens of the packaged excerpt, and a story that goes on behind them.

    The excerpt is shared out between both where it is too short.
    """
    ids = book(tokenizer, tokens + AWAY)
    first = max(min(tokens, len(ids) - AWAY), len(ids) // 2)
    return ids[:first], Story(tokenizer, draw_names(tokenizer, NAMES), ids[first:])


def read_book(
    model: PreTrainedModel,
    ids: Tensor,
    story: Story | None = None,
    *,
    policies: tuple[str, ...] = POLICIES,
    block: int = 500,
    on_step: Callable[[list[PerplexityMeter]], bool | None] = lambda meters: None,
    on_ask: Callable[[int], bool | None] = lambda asked: None,
) -> dict[str, Any]:
    """Read the tokens `ids` of the book under every policy, and ask what they know of a story.

    Args:
        model: the model.
        ids: what `book` returned.
        story: told behind the book; None asks nothing.
        policies: the policies.
        block: tokens in a block of `ppl_by_block`.
        on_step: called after every `STEP` tokens; reading ends early when it returns True, and
            then nothing is asked.
        on_ask: called with how many policies were asked, from 0 on; True ends that.

    Returns:
        {"model_window", "book", "tokens", "block", "story", "policies": [figures of each]}; the
        figures are those of `weir stream`, "slots" (None for no limit), and what `Story.told_to`
        returns. "story" has "told_at" (a place in the stream), "said" and "away" (how many tokens
        were told, and then read), and "names"; it is None, and
        what was found out by asking is missing, where not every policy was asked.
    """
    meters = [PerplexityMeter(Stream(model, policy), block) for policy in policies]
    for piece in ids.split(STEP):
        for meter in meters:
            meter.take(piece)
        if on_step(meters):
            story = None
            break
    for meter in meters:
        meter.close()
    found = [{**meter.reading.as_json(), "slots": meter.stream.capacity} for meter in meters]
    if story is not None and _ask_all(story, meters, found, on_ask):
        told = {
            "told_at": len(ids),
            "said": sum(len(one.said) for one in story.names),
            "away": len(story.between),
            "names": [[one.name, one.number] for one in story.names],
        }
    else:
        told = None
    return {
        "model_window": model.config.max_position_embeddings,
        "book": f"Leo Tolstoy, {TITLE}",
        "tokens": meters[0].reading.tokens,
        "block": block,
        "story": told,
        "policies": found,
    }


def _ask_all(
    story: Story,
    meters: Sequence[PerplexityMeter],
    found: list[dict[str, Any]],
    on_ask: Callable[[int], bool | None],
) -> bool:
    """Put what each policy knows of a story into its figures; whether all of them were asked."""
    told = []
    for asked, meter in enumerate(meters):
        if on_ask(asked):
            return False
        told.append(story.told_to(meter.stream))
    for figures, more in zip(found, told, strict=True):
        figures.update(more)
    return True
