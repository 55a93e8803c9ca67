"""Read a book far past the model's window, and ask what its first page said.

    python examples/read_a_book.py [MODEL]

Two policies read the same 1,500 tokens with 256 slots. `streaming_llm` keeps the first four
tokens and the newest ones. `kcenter` keeps tokens whose keys are far apart. In a novel, numbers
are among them. `dense` keeps every token and is asked after 200 tokens. If it cannot answer, the
model cannot, and the other two policies say nothing about forgetting.
"""

import sys

import weir
from weir.stream import BOOK, read_text

model, tokenizer = weir.load(sys.argv[1] if len(sys.argv) > 1 else "nano")
told = {"Anna": "482", "Peter": "915", "Helen": "307"}
first_page = "".join(f" {name} has {number}." for name, number in told.items())
ids = tokenizer(f"{first_page}\n\n{read_text(BOOK)[:12_000]}").input_ids[:1500]

for policy, read in (
    ("dense", ids[:200]),
    ("streaming_llm(budget=256)", ids),
    ("kcenter(budget=256)", ids),
):
    stream = weir.Stream(model, policy)
    stream.feed(read)
    print(f"{policy}: {stream.seen:,} tokens read, {stream.nbytes:,} bytes")
    for name, number in told.items():
        stream.feed(tokenizer(f" {name} has ", add_special_tokens=False).input_ids)
        answer = tokenizer.decode(list(stream.generate(max_new_tokens=3)))
        print(f"  {name} has {answer}; the book said {number}")
