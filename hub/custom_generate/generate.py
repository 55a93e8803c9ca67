"""`generate()` in a cache of fixed size, as transformers loads it from a folder or the Hub."""

import weir


def generate(
    model,
    policy=None,
    chunk=None,
    seed=0,
    positions="rolling",
    prefill="chunked",
    past_key_values=None,
    **asked,
):
    """Decode as `model.generate` does, in a `weir.StreamingCache`.

    Args:
        model: the model whose `generate` was called.
        policy, chunk, seed, positions, prefill: of the cache, as for `weir.StreamingCache`.
        past_key_values: a `weir.StreamingCache` to go on in; what was said of a new one is not
            looked at then.
        asked: all that `generate` was asked for, a streamer too.

    Returns:
        What `model.generate` returns.
    """
    if past_key_values is None:
        made = {"chunk": chunk, "seed": seed, "positions": positions, "prefill": prefill}
        past_key_values = weir.StreamingCache(model, policy, **made)
    return model.generate(past_key_values=past_key_values, **asked)
