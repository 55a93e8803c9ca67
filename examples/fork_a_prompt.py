"""Read a prompt once, and generate many answers to it.

    python examples/fork_a_prompt.py [MODEL]

`take_row` returns the whole state of a row of a cache, and `put_row` puts it into any number of
rows of another cache. A prompt of a million tokens is read once, and each answer costs one copy
of a fixed size.
"""

import sys

import torch

import weir
from weir.stream import BOOK, read_text

model, tokenizer = weir.load(sys.argv[1] if len(sys.argv) > 1 else "nano")
answers, policy = 4, "streaming_llm(budget=128)"
text = read_text(BOOK)[:4_000].rpartition("\n")[0]
prompt = tokenizer(text, return_tensors="pt").input_ids

stream = weir.Stream(model, policy)
logits = stream.feed(prompt)
state = stream.cache.take_row(0)

forks = weir.StreamingCache(model, policy, batch=answers)
for row in range(answers):
    forks.put_row(row, state)

luck = torch.Generator().manual_seed(0)
logits = logits.expand(answers, -1).cpu()
written = torch.empty(answers, 0, dtype=torch.long)
for _ in range(30):  # one decode call for all of them
    token = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=luck)
    written = torch.cat([written, token], dim=1)
    with torch.no_grad():
        logits = model(token.to(model.device), past_key_values=forks).logits[:, -1].cpu()

print(f"a prompt of {stream.seen:,} tokens, read once; each answer takes {stream.nbytes:,} bytes")
for answer in written:
    print(f"  … {' '.join(tokenizer.decode(answer).split())}")
