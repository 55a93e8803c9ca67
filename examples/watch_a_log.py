"""Follow a log, show the surprising lines, and ask about a line that was read long ago.

    python examples/watch_a_log.py [MODEL] [FILE] [QUESTION]

Every line is read once, in a cache of fixed size. The script prints the lines whose tokens are
most surprising after the lines before them. The text also goes into an archive, so `recall` finds
a line however long ago it was read. If you name no file, the script makes up a log that has a few
odd lines.
"""

import random
import sys
from statistics import mean, median

import weir

model, tokenizer = weir.load(sys.argv[1] if len(sys.argv) > 1 else "nano")
if len(sys.argv) > 2:
    with open(sys.argv[2], encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
else:
    draw, pages = random.Random(0), ["/", "/about", "/news", "/login"]
    lines = [f"10.0.0.{draw.randint(1, 9)} GET {draw.choice(pages)} 200" for _ in range(100)]
    lines[30] = "kernel: out of memory, killed process postgres"
    lines[50] = "10.0.0.3 GET /../../etc/passwd 403"
    lines[70] = "the old prince was here and asked for his carriage"
question = sys.argv[3] if len(sys.argv) > 3 else "Which process was killed by the kernel?"

stream = weir.Stream(
    model,
    "sink(4) | recent(124) | kcenter(128)",
    chunk=32,
    archive=weir.Archive(),  # in memory; give a path to keep it
    tokenizer=tokenizer,
)
stream.feed(tokenizer("The log:\n").input_ids)
places, nats = [], []  # where each line is in the stream, and how surprising it was
for line in lines:
    start = stream.seen
    nats.append(float(stream.score(tokenizer(f"{line}\n", add_special_tokens=False)).sum()))
    places.append(range(start, stream.seen))

print(f"{len(lines):,} lines, {stream.seen:,} tokens, {stream.nbytes:,} bytes")
held = {it.token for it in stream.holding().tokens()}
kept = [mean(place in held for place in where) for where in places]
# The first lines are surprising because nothing comes before them. The newest are all still held.
middle = [n for n in range(10, len(lines)) if places[n][-1] < stream.seen - 160]
odd = [n for n in middle if nats[n] > 2.5 * median(nats)]
for n in odd:
    print(f"  line {n + 1}, {nats[n]:.0f} nats, {kept[n]:.0%} still held: {lines[n]}")
if odd:
    others = [kept[n] for n in middle if n not in odd]
    print(
        f"still held: {mean(kept[n] for n in odd):.0%} of odd lines, {mean(others):.0%} of others"
    )

print(question)
for excerpt in stream.recall(question, most=2):
    print(f"  read {stream.seen - excerpt.stop:,} tokens ago: {excerpt.text}")
