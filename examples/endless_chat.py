"""Chat with a model without end: each turn is fed once, and the cache keeps its size.

    python examples/endless_chat.py [MODEL]

Lines come from the keyboard or from a pipe. Ctrl-D ends the chat.
"""

import sys

import weir
from weir.stream import Conversation

model, tokenizer = weir.load(sys.argv[1] if len(sys.argv) > 1 else "nano")
stream = weir.Stream(model, "streaming_llm(budget=256)", seed=0)
conversation = Conversation(stream, tokenizer)
if tokenizer.chat_template is None:
    print("This model has no chat template: it continues what you write.")

while True:
    try:
        said = input("> ").strip()
    except EOFError:
        break
    if said:
        for piece in conversation.say(said, max_new_tokens=40, temperature=0.7, top_p=0.95):
            print(piece, end="", flush=True)
        print(f"\n  ({stream.seen:,} tokens so far, {stream.nbytes:,} bytes)")

print(f"{stream.seen:,} tokens in {stream.nbytes:,} bytes")
