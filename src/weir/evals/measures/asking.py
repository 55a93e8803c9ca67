"""Asking a subject: a prompt of text, on a stream of its own, and what the answers took.

The one way in which all tasks ask whose prompts are texts. What is right, the tasks know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.evals.measures.answers import Answer, answer
from weir.evals.task import Subject


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool) -> list[int]:
    """The ids of a prompt, behind the tokenizer's start token or in the model's chat template.

    Raises:
        WeirError: there is no chat template, or the text makes no tokens.
    """
    if chat:
        turn = [{"role": "user", "content": text}]
        check_template(tokenizer)
        text = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    ids = list(tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"])
    if not ids:
        raise WeirError("a prompt makes no tokens, so there is nothing to answer")
    return ids


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        WeirError: it has none.
    """
    if tokenizer.chat_template is None:
        raise WeirError(
            "this model has no chat template, which chat=true needs; write chat=false to have it "
            "continue the prompts as they are"
        )


def ask(
    subject: Subject, text: str, most: int, stops: Sequence[str] = (), chat: bool = False
) -> Answer:
    """The subject's likeliest answer to a prompt, on a new stream.

    Args:
        subject: who is asked.
        text: the prompt.
        most: tokens of the answer.
        stops: texts that end it.
        chat: put the prompt into the model's chat template.

    Raises:
        WeirError: as `prompt_ids` and `Subject.stream`.
    """
    ids = prompt_ids(subject.tokenizer, text, chat)
    return answer(subject.stream(len(ids), most), subject.tokenizer, ids, most, stops)


def taken(answers: Sequence[Answer]) -> dict[str, Any]:
    """What answers took, as figures of a result.

    Returns:
        "kv_bytes" of the largest cache; "tokens" of prompt and answer together, on average; and
        "share", the slots in use at the end over those tokens, on average (None under `recompute`).
    """
    shares = [one.held / one.seen for one in answers if one.held is not None]
    return {
        "kv_bytes": max(one.kv_bytes for one in answers),
        "tokens": sum(one.seen for one in answers) / len(answers),
        "share": sum(shares) / len(shares) if shares else None,
    }
