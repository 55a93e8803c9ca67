"""GGUF files: headers, configurations, tokenizers and weights, as transformers has them."""

from weir.models.gguf.files import SMOLLM2, SMOLLM2_HUB, find_gguf, smollm2_package
from weir.models.gguf.header import GGUFHeader, TensorInfo, read_header, shard_paths
from weir.models.gguf.reading import read_config, unpack
