"""What weir says, in a process without vLLM.

vLLM looks for Triton kernels in all modules of its process, and stumbles over the modules of numba,
which weir imports.
"""

import functools
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


@functools.cache
def _process():
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def weir_says(folder, policy, tokens, block=32):
    """Return weir's log-probability of each token but the first, with a chunk of one block."""
    import torch

    return torch.tensor(_process().submit(_score, str(folder), policy, tokens, block).result())


def allowed(folder):
    """Return how far apart the log-probabilities of two runs may be.

    This is computed from how far roundings move this model's logits. A log-probability is a logit
    minus the logarithm of a sum. This logarithm moves no further than the logit that moves most.
    """
    return _process().submit(_allowed, str(folder)).result()


@functools.cache
def _model(folder):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _score(folder, policy, tokens, block):
    import torch
    import weir

    stream = weir.Stream(_model(folder), policy, chunk=block)
    with torch.no_grad():
        scores = stream.score(torch.tensor([tokens]))[0]
    return (-scores[-(len(tokens) - 1) :]).tolist()


def _allowed(folder):
    from roundings import nll_off

    return nll_off(_model(folder), tokens=1)


def convert_smollm2(folder):
    """Save SmolLM2-135M-Instruct as a folder of Hugging Face's format."""
    _process().submit(_convert_smollm2, str(folder)).result()


def _convert_smollm2(folder):
    import weir

    for part in weir.load("smollm2", dtype="float32"):
        part.save_pretrained(folder)
