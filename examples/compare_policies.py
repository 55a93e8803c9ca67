"""Measure two policies on the same text: how they read on, and what they remember.

    python examples/compare_policies.py [MODEL] [FILE.jsonl]

What `weir eval` does, from Python. Each cell's line is written when it is done, a run that was
killed goes on where it was, and `weir report FILE.jsonl` makes pages of it. What `dense` does not
recall inside the window, the model cannot do.
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
