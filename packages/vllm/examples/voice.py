"""A voice-like session of 100,000 tokens in 100 blocks: hearing and speaking alternate.

    python examples/voice.py MODEL [--tokens 100000]

The session is one request of vLLM's AsyncLLM with StreamingInput: every `StreamingInput` adds what
was heard since, and the model answers. Without the plug-in, the session would need 3,125 blocks.
"""

import argparse
import asyncio
import os
import random

os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

HEARD, SAID = 200, 20


def parameters():
    return SamplingParams(
        max_tokens=SAID, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )


async def talk(options):
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=options.model,
            additional_config={"weir": "streaming_llm(budget=1024)"},
            max_model_len=1_000_000,
            block_size=32,
            num_gpu_blocks_override=100,
            max_num_batched_tokens=256,
            max_num_seqs=2,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            enforce_eager=True,
        )
    )
    vocabulary = engine.model_config.get_vocab_size()
    draw = random.Random(0)
    answered = asyncio.Event()
    seen = 0

    async def listen():
        while seen < options.tokens:
            heard = [draw.randrange(100, vocabulary) for _ in range(HEARD)]
            yield StreamingInput(prompt={"prompt_token_ids": heard}, sampling_params=parameters())
            await answered.wait()
            answered.clear()

    said = turns = 0
    async for output in engine.generate(listen(), parameters(), request_id="session"):
        if not output.outputs:
            continue
        said += len(output.outputs[0].token_ids)
        if said == SAID:
            # vLLM does not keep the last token of an answer, which it has not computed yet.
            seen += HEARD + SAID - 1
            said, turns = 0, turns + 1
            if turns % 50 == 0:
                print(f"{turns} turns, {seen} tokens", flush=True)
            answered.set()
    print(f"done: {turns} turns, {seen} tokens")
    engine.shutdown()
    return turns, seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=100_000)
    asyncio.run(talk(parser.parse_args()))
