"""Books into token ids: the tokenizer's training, and one long array of ids.

Knows nothing about models, exercises or what a sink is for.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

START = "<|start|>"
PAD = "<|pad|>"


def train_tokenizer(
    books: list[str], vocabulary: int = 4096, sinks: int = 1
) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer whose digits are tokens of their own, for any script.

    Every text it encodes begins with `sinks` dedicated tokens, the only place where they ever
    stand: where a text says "<|start|>", it is spelled out. A text too short for the vocabulary
    makes a smaller one.
    """
    return with_sinks(train_backend(books, vocabulary), sinks)


def train_backend(books: list[str], vocabulary: int) -> Tokenizer:
    """The tokenizer without what stands in front: the same ids whatever sink a model has."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[START, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(books, trainer)
    return backend


def with_sinks(backend: Tokenizer, sinks: int) -> PreTrainedTokenizerBase:
    """The tokenizer of a model with so many tokens in front of every sample; 0 puts none there.

    The first is `<|start|>`, which is in the vocabulary in any case; more come behind its end, so
    that a text's ids are the same for any number.
    """
    backend = Tokenizer.from_str(backend.to_str())
    front = [START, *(f"<|start {number}|>" for number in range(2, sinks + 1))][:sinks]
    backend.add_special_tokens(front)
    backend.post_processor = processors.TemplateProcessing(
        single=[*front, "$A"],
        special_tokens=[(token, backend.token_to_id(token)) for token in front],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=front[0] if front else None,
        pad_token=PAD,
        padding_side="left",  # `generate` goes on from the last column
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def encode(books: list[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """All books as one array of ids [tokens] (uint16), without start tokens."""
    # Paragraphs, not books: the tokenizer takes them in parallel. Where a single line break stands
    # between words it is a token of its own, so cuts after it change nothing.
    paragraphs = [part for book in books for part in re.split(r"(?<=\S\n)(?=\S)", book)]
    encoded = tokenizer(paragraphs, add_special_tokens=False, return_attention_mask=False)
    return np.fromiter(itertools.chain.from_iterable(encoded["input_ids"]), dtype=np.uint16)


def load_or_train(path: Path, books: list[str], vocabulary: int) -> Tokenizer:
    """`train_backend`, kept in a file at `path` so that a resumed run need not repeat it."""
    if not path.exists():
        unfinished = path.with_suffix(".tmp")
        train_backend(books, vocabulary).save(str(unfinished))
        unfinished.replace(path)
    return Tokenizer.from_file(str(path))


def load_or_encode(path: Path, books: list[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """`encode`, kept in a `.npy` file at `path` so that a resumed run need not repeat it."""
    if not path.exists():
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            np.save(file, encode(books, tokenizer))
        unfinished.replace(path)
    return np.load(path, mmap_mode="r")
