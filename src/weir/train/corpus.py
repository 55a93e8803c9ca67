"""Converts books to token ids: trains the tokenizer, and encodes into one long array.

This module knows nothing about models, exercises or the purpose of sinks.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from weir.stream import replace_atomically

START = "<|start|>"
PAD = "<|pad|>"
FEWEST_WORDS, MOST_WORDS = 300, 65_000
"""The smallest and the largest vocabulary. Ids are stored in 16 bits."""


def train_backend(books: list[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, for any script, in which every digit is a separate token.

    Its only sink token is `<|start|>`, which is there even if a model has no sink, so text has the
    same ids whatever sink a model has. If the books are too short for the vocabulary, the
    vocabulary becomes smaller.
    """
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
    """Make the tokenizer of a model with `sinks` tokens in front of every sample; 0 for none.

    The first is `<|start|>`, which every vocabulary has; others are added at the vocabulary's end,
    so that a text's ids are the same for any number of them. A literal "<|start|>" in a text is
    encoded as ordinary characters.
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
        padding_side="left",  # `generate` continues from the last column
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def encode(books: list[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Encode all books into one array of ids [tokens] (uint16), without start tokens."""
    # Encode paragraphs instead of books, because the tokenizer encodes them in parallel. A single
    # line break between words is a separate token, so cutting after it changes nothing.
    paragraphs = [part for book in books for part in re.split(r"(?<=\S\n)(?=\S)", book)]
    encoded = tokenizer(paragraphs, add_special_tokens=False, return_attention_mask=False)
    return np.fromiter(itertools.chain.from_iterable(encoded["input_ids"]), dtype=np.uint16)


def load_or_train(path: Path, books: list[str], vocabulary: int) -> Tokenizer:
    """Load the tokenizer at `path`. If there is none, train it and save it for resumed runs."""
    if not path.exists():
        with replace_atomically(path) as new:
            train_backend(books, vocabulary).save(str(new))
    return Tokenizer.from_file(str(path))


def load_or_encode(path: Path, books: list[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Load the ids in the `.npy` file at `path`. If there is none, encode the books and save their
    ids for resumed runs.
    """
    if not path.exists():
        with replace_atomically(path) as new:
            np.save(new, encode(books, tokenizer))
    return np.load(path, mmap_mode="r")
