"""Engines of vLLM in this process, and what they answer."""

import gc
import os
from contextlib import contextmanager

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

BLOCK = 32
"""Tokens of a block, the fewest that vLLM's attention for CPUs takes."""


@contextmanager
def engine(folder, policy=None, **settings):
    """Make an engine for the time of a `with`."""
    settings = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "block_size": BLOCK,
        "max_model_len": 100_000,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 300,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        **settings,
    }
    if policy is not None:
        settings["additional_config"] = {"weir": policy}
    made = LLM(str(folder), **settings)
    try:
        yield made
    finally:
        made.llm_engine.engine_core.shutdown()
        del made
        gc.collect()
        cleanup_dist_env_and_memory()


def scheduler_of(llm):
    """Return the scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def pool_of(llm):
    """Return the pool of blocks."""
    return scheduler_of(llm).kv_cache_manager.block_pool


def held(llm):
    """Return how many blocks requests hold."""
    pool = pool_of(llm)
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def greedy(tokens, **more):
    """Return parameters for greedy answers of so many tokens, with log-probabilities."""
    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False, **more
    )


def ask(llm, prompts, tokens=16, **more):
    """Return each answer's tokens and log-probabilities, and its number of cached tokens.

    The log-probabilities begin with those of the prompt, if `prompt_logprobs=0` asks for them.
    """
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    answers = []
    for answer in llm.generate(prompts, greedy(tokens, **more), use_tqdm=False):
        (output,) = answer.outputs
        before = answer.prompt_logprobs[1:] if answer.prompt_logprobs else []
        said = [d[x].logprob for d, x in zip(before, answer.prompt_token_ids[1:], strict=False)]
        said += [d[x].logprob for d, x in zip(output.logprobs, output.token_ids, strict=True)]
        answers.append((list(output.token_ids), torch.tensor(said), answer.num_cached_tokens))
    return answers


@contextmanager
def variables(**values):
    """Set environment variables for the time of a `with`."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
