"""Folders with models that servers are measured with: whatever is asked, they answer at length.

A model with a chat template is asked in it and ends where its answer's length says; nano has none,
and would end with its line.
"""

from __future__ import annotations

import itertools
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from weir.errors import WeirError, quote
from weir.loading import load
from weir_bench.figure import QUICK, Setting, Sizes
from weir_bench.model import twin_of

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SHAPES = {"135m": Sizes(), "tiny": QUICK}
"""Random models by what they are called: SmolLM2-135M's shape, and one that is only quick."""


def make_folder(name: str, folder: Path) -> Path:
    """A folder with a model for `weir serve` and its peers, in float32.

    Args:
        name: "nano", "135m" (random, of SmolLM2-135M's shape), "tiny" (random), a folder or a Hub
            id.
        folder: where it is put; it is made.

    Raises:
        WeirError: there is no such model.
    """
    disable_progress_bar()
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    if name in SHAPES:
        sizes = SHAPES[name]
        model, tokenizer = twin_of(Setting(sizes)), words(sizes.vocabulary)
    else:
        model, tokenizer = load(name, dtype="float32")
    if tokenizer.chat_template is None:
        tokenizer.chat_template = TEMPLATE
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError as error:
        raise WeirError(f"cannot write to {quote(str(folder))}: {error.strerror}") from None
    return folder


def words(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer that reads bytes and writes words: each of its tokens is text of its own."""
    known = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_lowercase
    made = ("Ġ" + "".join(w) for n in (2, 3, 4) for w in itertools.product(letters, repeat=n))
    known += itertools.islice(made, size - len(known))
    backend = Tokenizer(models.BPE({word: n for n, word in enumerate(known)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
