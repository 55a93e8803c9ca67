"""Generates answers to prompts, and measures their cost.

Each task scores the answers itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.evals.task import Progress, Subject
from weir.models import sink_of, transformers_model
from weir.stream import Detokenizer, Stream, Tokens, cut_at_stop, render_chat


@dataclass(frozen=True)
class GeneratedAnswer:
    """An answer without special tokens and stop text, and its cost at the end.

    `kv_bytes` is the size of the cache, `held` the number of slots in use per KV head, averaged
    over the layers (None if nothing is cached), and `seen` the number of tokens of prompt and
    answer together.
    """

    text: str
    kv_bytes: int
    held: float | None
    seen: int


def ask(
    subject: Subject, text: str, max_new_tokens: int, stops: Sequence[str] = (), chat: bool = False
) -> GeneratedAnswer:
    """Generate the subject's greedy answer to a prompt, on a new stream.

    Any of the texts `stops` ends the answer. `chat` puts the prompt into the chat template.
    """
    ids = prompt_ids(subject.tokenizer, text, chat)
    # Chat templates do not include a learned sink, so it is added here.
    ids = sink_of(transformers_model(subject.model).config).first(ids)
    stream = subject.stream(len(ids), max_new_tokens)
    return generate_answer(stream, subject.tokenizer, ids, max_new_tokens, stops)


def ask_all(
    subject: Subject,
    prompts: Sequence[str],
    max_new_tokens: int,
    stops: Sequence[str],
    chat: bool,
    progress: Progress,
) -> list[GeneratedAnswer]:
    """Generate the answer to each prompt as `ask` does."""
    answers = []
    for prompt in prompts:
        answers.append(ask(subject, prompt, max_new_tokens, stops, chat))
        progress(len(answers) / len(prompts))
    return answers


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool) -> list[int]:
    """Return the ids of a prompt, after the tokenizer's start token or in the model's chat
    template.
    """
    if chat:
        require_template(tokenizer)
        text = render_chat(tokenizer, [{"role": "user", "content": text}])
    ids = list(tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"])
    if not ids:
        raise WeirError("a prompt has no tokens, so there is nothing to answer")
    return ids


def require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without a chat template with a `WeirError`."""
    if tokenizer.chat_template is None:
        raise WeirError(
            "this model has no chat template, which chat=true needs. Use chat=false to let it "
            "continue the prompts as text."
        )


def generate_answer(
    stream: Stream,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Tokens,
    max_new_tokens: int,
    stops: Sequence[str] = (),
    **sampling: Any,
) -> GeneratedAnswer:
    """Generate an answer to a prompt, up to one of the texts `stops`.

    The prompt is ids, or ids and pixels as returned by a processor. The answer is greedy unless
    `sampling`, as for `Stream.generate`, says otherwise.
    """
    stream.feed(prompt)
    tokens: list[int] = []
    growing = Detokenizer(tokenizer, stops)
    for token in stream.generate(max_new_tokens, **sampling):
        tokens.append(token)
        growing.add(token)
        if growing.stopped:
            break
    # Decode all tokens at once, because later tokens may change the text of earlier ones.
    text = cut_at_stop(str(tokenizer.decode(tokens, skip_special_tokens=True)), stops)
    held = [layer["held"] for layer in stream.report().get("layers", ())]
    return GeneratedAnswer(text, stream.nbytes, fmean(held) if held else None, stream.seen)


def feed_aside(stream: Stream, ids: Tensor) -> Tensor:
    """Feed tokens [rows, length], remove them again, and return all their logits.

    The cache is then as before. The stream still has the last logits of these tokens, so feed it
    more tokens before you generate.
    """
    if stream.cache is None:  # recompute: the stream is only its ids
        return copy.deepcopy(stream).feed(ids, all_logits=True)
    states = stream.cache.take_rows()
    logits = stream.feed(ids, all_logits=True)
    for row, state in enumerate(states):
        stream.cache.put_row(row, state, check=False)
    return logits


def generate_rows(stream: Stream, prompt: Tensor, length: int) -> Tensor:
    """Continue all rows of a stream greedily after a prompt [rows, n]; the last token is not fed.

    Returns the tokens [rows, length].
    """
    found = [prompt]
    for _ in range(length):
        found.append(stream.feed(found[-1]).argmax(-1)[:, None].cpu())
    return torch.cat(found[1:], dim=1)


def costs(answers: Sequence[GeneratedAnswer]) -> dict[str, Any]:
    """Summarize the cost of answers as figures of a result.

    These are "kv_bytes" of the largest cache, "tokens" (the mean number in a prompt and its answer
    together), and "share": the slots in use at the end of an answer divided by these tokens,
    averaged over the answers (None under `recompute`).
    """
    shares = [one.held / one.seen for one in answers if one.held is not None]
    return {
        "kv_bytes": max(one.kv_bytes for one in answers),
        "tokens": sum(one.seen for one in answers) / len(answers),
        "share": sum(shares) / len(shares) if shares else None,
    }
