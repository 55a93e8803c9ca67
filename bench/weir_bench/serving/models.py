"""Make the folders with the models that servers are measured with.

Models without a chat template, such as nano, get a simple one. Otherwise, their answers would end
with the first line.
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
"""Names and sizes of random models: SmolLM2-135M's shape, and a tiny one for quick runs."""


def make_folder(name: str, folder: Path) -> Path:
    """Make a folder with a float32 model for `weir serve` and its peers, and return its path.

    Args:
        name: "nano", "135m" (random, of SmolLM2-135M's shape), "tiny" (random), a folder or a Hub
            id.
        folder: the folder to create.

    Raises:
        WeirError: the model does not exist, or the folder cannot be written.
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
    """Return a tokenizer of `size` tokens that encodes bytes.

    Every token, including those that no text is encoded to, decodes to a different text.
    """
    known = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_lowercase
    made = ("Ġ" + "".join(w) for n in (2, 3, 4) for w in itertools.product(letters, repeat=n))
    known += itertools.islice(made, size - len(known))
    backend = Tokenizer(models.BPE({word: n for n, word in enumerate(known)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
