"""A small tokenizer, and books with the names that exercises are about."""

from __future__ import annotations

import random

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from weir.loading.loader import ASSETS
from weir.stream.text import read_text
from weir.train import corpus
from weir.train.exercises import NAMES, Words

VOCABULARY = 640


@pytest.fixture(scope="session")
def books() -> list[str]:
    """Return two books: the beginning of *War and Peace*, and statements about who has what."""
    draw = random.Random(0)
    gossip = [
        f"Then {name} has {draw.randrange(1000)}." for name in draw.choices(NAMES[:24], k=1500)
    ]
    return [read_text(ASSETS / "war-and-peace.txt.xz")[8000:48000], "\n".join(gossip)]


@pytest.fixture(scope="session")
def tokenizer(books: list[str]) -> PreTrainedTokenizerBase:
    return corpus.with_sinks(corpus.train_backend(books, VOCABULARY), 1)


@pytest.fixture(scope="session")
def words(tokenizer: PreTrainedTokenizerBase) -> Words:
    return Words.of(tokenizer)


@pytest.fixture(scope="session")
def tokens(books: list[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the books' token ids."""
    return corpus.encode(books, tokenizer)
