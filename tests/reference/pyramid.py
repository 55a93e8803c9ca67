"""PyramidKV's budgets, from the paper alone: what `weir.policies.wrappers` is checked against.

Cai et al. 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling":
k^(m-1) = k_total / (beta m), k^0 = 2 k_total / m - k^(m-1), and in between an arithmetic sequence.
"""

from __future__ import annotations


def exact_budgets(total: float, layers: int, beta: float) -> list[float]:
    """The budget of each of two or more layers, from the bottom one up; not rounded."""
    top = total / (beta * layers)
    out = [2 * total / layers - top]
    step = (out[0] - top) / (layers - 1)
    while len(out) < layers:
        out.append(out[-1] - step)
    return out
