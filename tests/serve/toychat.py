"""A chat format so small that a model learns it in seconds: letters that count up.

A system turn names the letter to stop at. A user says some letters that follow each other. The
assistant continues with the next ones, up to the letter that the system turn named, and ends its
turn. So an answer can be longer than a small cache, and only the very beginning says where it must
end. Only the assistant ends there: a user's letters can go past that letter.
"""

from __future__ import annotations

import random

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

LETTERS = 24
START, OPEN, END, SYSTEM, USER, ASSISTANT = range(6)
FIRST = 6
"""The id of the first letter. After the letters come as many words, with which system turns name
them."""
WORDS = FIRST + LETTERS
HEADER = [END, OPEN, ASSISTANT]
LENGTH = 64


def beginning(stop: int) -> list[int]:
    """Return the start of a conversation whose answers end at `stop`, before the user speaks."""
    return [START, OPEN, SYSTEM, *letters(0, 5), WORDS + stop, END, OPEN, USER]


def asked(dice: random.Random) -> list[int]:
    """Return what a user says."""
    return letters(dice.randrange(LETTERS), dice.randint(1, 12))


def letters(first: int, count: int) -> list[int]:
    """Return this many letters in order. The first letter follows the last one."""
    return [FIRST + (first + n) % LETTERS for n in range(count)]


def answer(said: list[int], stop: int) -> list[int]:
    """Return how the assistant continues."""
    first = said[-1] - FIRST + 1
    return [*letters(first, 1 + (stop - first) % LETTERS), END]


def conversation(dice: random.Random) -> list[int]:
    """Return the first tokens of a conversation."""
    stop = dice.randrange(LETTERS)
    ids = beginning(stop)
    while len(ids) < LENGTH:
        said = asked(dice)
        ids += [*said, *HEADER, *answer(said, stop), OPEN, USER]
    return ids[:LENGTH]


def train(steps: int = 200, batch: int = 32, seed: int = 0) -> LlamaForCausalLM:
    """Return a model that was trained on such conversations."""
    torch.manual_seed(seed)
    dice = random.Random(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS + LETTERS,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=LENGTH,
            initializer_range=0.1,
            bos_token_id=START,
            eos_token_id=END,
            pad_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-2, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-2, total_steps=steps)
    for _ in range(steps):
        ids = torch.tensor([conversation(dice) for _ in range(batch)])
        logits = model(ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()
