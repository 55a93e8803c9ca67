"""Print llama.cpp's token ids for GGUF files, for tests that compare weir's tokenizers with them.

    .peers/llamacpp_native/bin/python llamacpp_tokens.py one.gguf other.gguf <texts.json

Prints a line of JSON for each file: the ids of each text, and all tokens that end an answer. If a
file cannot be loaded, the line is null, and standard error has the reason.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import llama_cpp
import llamacpp_log


def main(texts: list[str], files: list[str]) -> None:
    """Print the ids of the texts for each file."""
    llamacpp_log.start()
    for file in files:
        sys.stdout.write(json.dumps(tokens(texts, file)) + "\n")


def tokens(texts: list[str], file: str) -> dict[str, Any] | None:
    """Return the ids of each text and the ids that end an answer, or None if loading fails."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(file.encode(), params)
    if not model:
        return None
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    count = llama_cpp.llama_vocab_n_tokens(vocabulary)
    found = {
        "ids": [_ids(vocabulary, text.encode()) for text in texts],
        "ends": [id for id in range(count) if llama_cpp.llama_vocab_is_eog(vocabulary, id)],
    }
    llama_cpp.llama_model_free(model)
    return found


def _ids(vocabulary: Any, text: bytes) -> list[int]:
    """Return the ids of a text. Special tokens in the text are recognized, and those that the
    tokenizer puts around a text are added.
    """
    room = (llama_cpp.llama_token * (len(text) + 8))()
    count = llama_cpp.llama_tokenize(vocabulary, text, len(text), room, len(room), True, True)
    if count < 0:
        raise RuntimeError(f"{-count} tokens for {len(text)} bytes")
    return list(room[:count])


if __name__ == "__main__":
    main(json.load(sys.stdin), sys.argv[1:])
