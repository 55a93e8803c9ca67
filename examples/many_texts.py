"""Continue many texts of different lengths in one batch, each as if it were alone.

    python examples/many_texts.py [MODEL]

Pad the texts on the left. Padding never enters the cache. Each row has separate slots, its own
tokens decide what stays in them, and it can end before the others.
"""

import sys

import weir

model, tokenizer = weir.load(sys.argv[1] if len(sys.argv) > 1 else "nano")
tokenizer.padding_side = "left"
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
texts = [
    "One day",
    "It was a very fine day in the autumn, and the road was full of people",
    "The old prince said nothing",
    '"Who goes there?" cried the sergeant, and',
]

batch = tokenizer(texts, return_tensors="pt", padding=True)
cache = weir.StreamingCache(model, "streaming_llm(budget=64)", chunk=16)
output = model.generate(**batch, past_key_values=cache, max_new_tokens=60, do_sample=False)
for row in output:
    print(" ".join(tokenizer.decode(row, skip_special_tokens=True).split()))
print(f"tokens of each row, without padding: {cache.seen}; {cache.nbytes:,} bytes for all")
