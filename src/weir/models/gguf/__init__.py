"""Readers of GGUF files: headers, and configurations, tokenizers and weights in transformers'
form.
"""

from weir.models.gguf.config import config_of, read_config
from weir.models.gguf.files import (
    SMOLLM2,
    SMOLLM2_HUB,
    find_gguf,
    is_named_gguf,
    smollm2_package,
)
from weir.models.gguf.header import read_header
from weir.models.gguf.tokenizer import read_tokenizer, tokenizer_of
from weir.models.gguf.weights import Filling, check_readable, fill, make_empty, plan_fillings
