"""What each policy is good for, in groups: for who chooses one. Knows nothing of what they do.

Their own docstrings say what they keep; `weir policies NAME` has those.
"""

from __future__ import annotations

SHARED = {
    "budget": "slots of each KV head, in each layer.",
    "sinks": "first tokens of the stream that stay.",
}
"""Parameters that mean the same wherever a policy has them and does not say more."""
POLICIES: dict[str, dict[str, str]] = {
    "Plain": {
        "dense": "everything, exactly; memory grows with the stream",
        "window": "the newest tokens; most models fail once the first is gone",
        "recompute": "the oracle of comparisons: reads its window anew, slowly",
    },
    "The five papers": {
        "streaming_llm": "reading on without end, at the least cost",
        "reservoir": "reading on, with a fair sample of all that came between",
        "subgen": "SubGen's Algorithm 1 to the letter",
        "kcenter": "names and numbers told long ago; what SubGen's tests ran",
        "balancekv": "attention over all of a long prompt, estimated",
        "uniform": "the baseline of balancekv: a plain sample",
        "buzz": "much-read tokens from every stretch of the stream",
    },
    "The field": {
        "h2o": "tokens that were read the most so far",
        "snapkv": "a long prompt and one answer: what its end looks at",
        "pyramidkv": "as snapkv, with more slots in the lower layers",
        "defensivekv": "tokens that any query needed, not only the average one",
        "reskv": "hearing an average of what was evicted",
        "attention_matching": "slots weighed for what was evicted (experimental)",
        "certified": "being told how far off what was dropped leaves it",
        "tova": "what the last token looks at; next to no bookkeeping",
        "keydiff": "unusual keys; needs no attention at all",
        "keyformer": "much-read tokens, with noise against bad luck",
        "lacache": "a ladder: other old tokens in each layer",
    },
    "weir's own": {
        "weir": "reading on and remembering, in half the bytes; the default",
    },
    "Around another policy": {
        "quantized": "twice the tokens in the same bytes",
        "pyramid": "more slots in the lower layers",
        "pinned": "a conversation's beginning, never evicted",
    },
}
"""By group, in the order of a list; every named policy of weir stands in one."""
