"""Run an agent in one endless stream: it calls a tool, reads the result, and goes on.

    python examples/agent_loop.py [MODEL]

There are two tools: `look_up` finds a number in a directory, and `dial` says who answers at a
number. The agent looks up each name once. After that the model has to write the number from what
the stream still holds. Results of tools are fed like any other text. Between calls, the agent
reads a book. Nothing is read twice.
"""

import random
import re
import sys

import weir
from weir.stream import BOOK, read_text

model, tokenizer = weir.load(sys.argv[1] if len(sys.argv) > 1 else "nano")
draw = random.Random(1)
DIRECTORY = {"Anna": "482", "Peter": "915", "Helen": "307", "Mary": "648"}


def ids(text):
    return tokenizer(text, add_special_tokens=False).input_ids


def look_up(name):
    """The first tool."""
    return f" {name} has {DIRECTORY[name]}."


def dial(number):
    """The second tool."""
    return next((name for name, its in DIRECTORY.items() if its == number), "nobody")


stream = weir.Stream(model, "kcenter(budget=256)")
stream.feed(tokenizer("The clerk has a telephone, and he calls all day.").input_ids)
book = ids(read_text(BOOK)[:10_000])
known, dialed, reached = set(), 0, 0
for turn in range(16):
    name = draw.choice(list(DIRECTORY))
    if name not in known:
        stream.feed(ids(look_up(name)))
        known.add(name)
        print(f"look_up({name!r})")
    else:
        stream.feed(ids(f" {name} has "))
        written = tokenizer.decode(list(stream.generate(max_new_tokens=3)))
        number = "".join(re.findall(r"\d", written))
        answers = dial(number)
        stream.feed(ids(f". {answers} answers."))
        dialed, reached = dialed + 1, reached + (answers == name)
        print(f"dial({number!r}): {answers} answers, {name} was wanted")
    stream.feed(book[60 * turn : 60 * (turn + 1)])

print(f"{reached} of {dialed} reached by heart")
print(f"{stream.seen:,} tokens in {stream.nbytes:,} bytes, whatever the number of turns")
