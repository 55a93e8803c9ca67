"""What StreamingLLM (Xiao et al. 2024) reports of its 160-million-parameter models."""

from __future__ import annotations

VARIANTS = {
    "none": "Vanilla",
    "zero": "Zero Sink",
    "learnable": "Learnable Sink",
    "learnable:2": "2 Sink Tokens",
}
"""Our name of each model, and the paper's."""
CONFIGS = (0, 1, 2, 4)
"""x of the cache configurations x+y: x initial tokens, and y recent ones."""
SLOTS = 1024
"""x + y, which is half of the window."""
PERPLEXITY = {
    "none": (27.87, 18.49, 18.05, 18.05),
    "zero": (29214.0, 19.90, 18.27, 18.01),
    "learnable": (1235.0, 18.01, 18.01, 18.02),
    "learnable:2": (1262.0, 25.73, 18.05, 18.05),
}
"""Tables 3 and 10: streaming perplexity of the first book of PG-19's test set, by `CONFIGS`."""
BENCHMARKS = ("ARC-c", "ARC-e", "HellaSwag", "LAMBADA", "OpenbookQA", "PIQA", "Winogrande")
ACCURACY = {
    "none": (18.6, 45.2, 29.4, 39.6, 16.0, 62.2, 50.1),
    "learnable": (19.6, 45.6, 29.8, 39.9, 16.6, 62.6, 50.8),
    "learnable:2": (18.7, 45.6, 29.6, 37.5, 15.8, 64.3, 50.4),
}
"""Tables 4 and 9: zero-shot accuracy in per cent, by `BENCHMARKS`."""
