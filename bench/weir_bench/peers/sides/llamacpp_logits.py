"""Print llama.cpp's logits for GGUF files, for tests that compare weir's logits with them.

    .peers/llamacpp_native/bin/python llamacpp_logits.py '[3, 1, 4]' one.gguf other.gguf

Prints a line of JSON for each file: logits [tokens, vocabulary], or null if the file cannot be
loaded. Standard error then has the reason. Keys and values are float32, and layers with a sliding
window keep all tokens in the cache.
"""

from __future__ import annotations

import json
import sys

import llama_cpp
import llamacpp_log
import numpy as np


def main(ids: list[int], files: list[str]) -> None:
    """Print the logits of each file."""
    llamacpp_log.start()
    for file in files:
        sys.stdout.write(json.dumps(logits(ids, file)) + "\n")


def logits(ids: list[int], file: str) -> list[list[float]] | None:
    """Read tokens with a file's model, and return the logits after each token."""
    model = llama_cpp.llama_model_load_from_file(
        file.encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        return None
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = len(ids)
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.swa_full = True
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for place, token in enumerate(ids):
        batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
    status = llama_cpp.llama_decode(context, batch)
    if status:
        raise RuntimeError(f"llama_decode of {file} failed: {status}")
    count = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rows = [llama_cpp.llama_get_logits_ith(context, place) for place in range(len(ids))]
    found = [np.ctypeslib.as_array(row, shape=(count,)).tolist() for row in rows]
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return found


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
