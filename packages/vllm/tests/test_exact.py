"""What vLLM computes under the plug-in is what weir computes with a chunk of one block."""

import pytest

from engines import ask, engine
from reference import allowed, weir_says
from small_models import random_tokens

POLICY = "sink(32) | recent(128)"
MODELS = [
    "llama",
    "llama3-rope",
    "linear-rope",
    "yarn-rope",
    "mistral",
    "qwen2",
    "qwen3",
    "stablelm",
    "gemma3",
]


@pytest.mark.parametrize("name", MODELS)
def test_prompts_and_steps_equal_weir(models, name):
    """A prompt that crosses many folds in one step, and steps after it."""
    folder = models(name)
    prompt = random_tokens(1000)
    with engine(folder, POLICY) as llm:
        ((said, ours, _),) = ask(llm, [prompt], tokens=80, prompt_logprobs=0)
    theirs = weir_says(folder, POLICY, prompt + said)
    plain = weir_says(folder, "sink(31) | recent(129)", prompt + said)
    print(
        name,
        "off",
        float((ours - theirs).abs().max()),
        "allowed",
        allowed(folder),
        "broken",
        float((plain - theirs).abs().max()),
    )
    assert len(ours) == len(theirs) == 1079
    assert (ours - theirs).abs().max() <= allowed(folder)
    assert (plain - theirs).abs().max() > 10 * allowed(folder)


def test_bfloat16_is_as_close_after_the_window_moves_as_before(models):
    """The numbers of a bfloat16 key have another order in a block than those of a float32 key.
    Sinks must be rotated correctly in this order, too.
    """
    folder = models("llama")
    prompt = random_tokens(1000)
    with engine(folder, POLICY, dtype="bfloat16") as llm:
        ((said, ours, _),) = ask(llm, [prompt], tokens=40, prompt_logprobs=0)
    off = (ours - weir_says(folder, POLICY, prompt + said)).abs()
    assert off[191:].mean() < 1.5 * off[:160].mean()
