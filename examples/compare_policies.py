"""Compare policies on the same text: how well they predict it, and what they remember.

    python examples/compare_policies.py [MODEL] [FILE.jsonl]

This does in Python what `weir eval` does. Each result is written as soon as it is done, and a run
that was interrupted continues where it stopped. `weir report FILE.jsonl` makes a report of the
results. If `dense`, the plain cache, does not recall something inside the window, then the model
cannot do it, whatever the cache.
"""

import sys
from pathlib import Path

from weir.evals.grid import make_grid, run

model = sys.argv[1] if len(sys.argv) > 1 else "nano"
results = Path(sys.argv[2] if len(sys.argv) > 2 else "compared.jsonl")
tasks = "ppl(tokens=1000), recall(samples=2, farthest=256, before=32)"
grid = make_grid([model], tasks, "dense, streaming_llm, kcenter", budgets=[128])
for record in run(grid, results, resume=results.exists()):
    print(f"{record['task']} under {record['policy']}: {record['value']:.4g}")
