"""`generate()` in a cache of fixed size, which transformers loads from this folder or the Hub."""

import weir
from weir.models import CACHE


def generate(
    model,
    policy=None,
    chunk=None,
    seed=0,
    positions="rolling",
    prefill="chunked",
    cache=None,
    past_key_values=None,
    **asked,
):
    """Decode as `model.generate` does, in a `weir.StreamingCache`.

    Args:
        model: the model whose `generate` was called.
        policy, chunk, seed, positions, prefill: arguments of `weir.StreamingCache`.
        cache: a `weir.StreamingCache` to continue in; the arguments above are ignored then.
        past_key_values: the same, under the name that transformers before 5.24 uses.
        asked: all other arguments of `generate`, including a streamer.

    Returns:
        What `model.generate` returns.
    """
    held = past_key_values if cache is None else cache
    if held is None:
        made = {"chunk": chunk, "seed": seed, "positions": positions, "prefill": prefill}
        held = weir.StreamingCache(model, policy, **made)
    return model.generate(**{CACHE: held}, **asked)
