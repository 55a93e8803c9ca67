"""`weir size`: the memory of a model and its streams, without loading the model."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument, Context, Option

from weir.cli import options
from weir.cli.app import command
from weir.cli.common import print_json, print_line
from weir.cli.common import size as for_people
from weir.cli.loading import Loading, loads_model


@command()
@loads_model("dtype", "weights", "revision", "trust_remote_code")
def size(
    context: Context,
    argument: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="nano, smollm2, a folder, a .gguf file, a config.json, a Hub id; or --model.",
        ),
    ] = None,
    model_name: Annotated[str | None, Option("--model", help="Instead of MODEL.")] = None,
    policy: options.PolicyText = options.DEFAULT,
    budget: options.Budget = None,
    tokens: Annotated[
        int | None, Option(min=1, help="Length of a stream, for policies without a limit.")
    ] = None,
    slots: options.SlotsName = None,
    chunk: options.PolicyChunk = None,
    pin: Annotated[
        int, Option(min=0, help="Slots for a conversation's beginning, as in `weir serve`.")
    ] = 0,
    memory: Annotated[str | None, Option(help="Memory to fill with streams: 80GB, 24 GiB.")] = None,
    bandwidth: Annotated[
        str | None, Option(help="Memory bandwidth to compute tokens per second from: 3.35TB/s.")
    ] = None,
    as_json: options.AsJson = False,
    *,
    loading: Loading,
) -> None:
    """Say how many bytes a stream and the weights take, and how many streams fit.

    Only the model's configuration is read; no weights are loaded.
    """
    from weir.cache import fit_to_model, read_bytes, size_of
    from weir.errors import WeirError
    from weir.models import sink_of, skeleton
    from weir.policies import Pipe, parse_policy, resolve_chunk, with_pin, with_slots

    model_name = options.one_model(argument, model_name)
    room = None if memory is None else read_bytes(memory)
    pace = None if bandwidth is None else read_bytes(bandwidth)
    model = skeleton(model_name, **loading)
    wanted = with_slots(parse_policy(options.with_given_budget(policy, budget)), slots)
    if isinstance(wanted, Pipe) and wanted.slots is None:
        if tokens is None:
            raise WeirError(
                f"{wanted} has no limit: say how long a stream is, as in --tokens 8192, or take a "
                "policy with a budget"
            )
        pools = (p if p.slots() is not None else p.resized(tokens) for p in wanted.pools)
        wanted = Pipe(tuple(pools), f"{wanted} at {tokens:,} tokens", wanted.formats)
    else:
        options.say_unused(
            context, ("tokens",), f"{wanted.brief} is of one size however long a stream is"
        )
    wanted = fit_to_model(with_pin(wanted, pin), model, chunk)
    chunk = resolve_chunk(wanted, chunk)
    found, sink = size_of(model, wanted, chunk=chunk), sink_of(model.config)
    streams = None if room is None else found.streams_in(room)
    facts: dict[str, Any] = {
        "model": model_name,
        "policy": found.policy,
        "chunk": chunk,
        "dtype": found.dtype,
        "layers": len(found.slots),
        "slots": list(found.slots),
        "sink": {"kind": sink.kind, "tokens": list(sink.tokens), "slots": sink.slots},
        "stream_bytes": found.stream,
        "weights_bytes": found.weights,
        "step_bytes": {"weights": found.step_weights, "each_stream": found.step_stream},
        "memory_bytes": room,
        "streams": streams,
        "bandwidth_bytes_per_s": pace,
        "tokens_per_s": None,
    }
    if pace is not None:
        facts["tokens_per_s"] = {"one": found.tokens_per_second(pace)}
        if streams:
            facts["tokens_per_s"]["all"] = found.tokens_per_second(pace, streams)
    if as_json:
        print_json(facts)
    else:
        _show(facts | {"policy": wanted.brief})
    if room is not None and not streams:
        raise WeirError(
            f"{memory} holds no stream: the weights take {for_people(found.weights)} and a stream "
            f"{for_people(found.stream)}"
        )


def _show(facts: dict[str, Any]) -> None:
    slots = facts["slots"]
    count = f"{slots[0]:,}" if len(set(slots)) == 1 else f"{min(slots):,} to {max(slots):,}"
    step = facts["step_bytes"]
    policy = facts["policy"]
    if not policy.endswith(" slots"):  # the brief form of a long list ends so
        policy += f", {count} slots a layer"
    both = for_people(step["weights"] + step["each_stream"])
    lines = [
        ("model", f"{facts['model']}, {facts['layers']} layers, {facts['dtype']}"),
        ("policy", f"{policy} and {facts['chunk']:,} new tokens"),
        ("weights", for_people(facts["weights_bytes"])),
        ("a stream", for_people(facts["stream_bytes"])),
        (
            "a step",
            f"{both} read: weights {for_people(step['weights'])}, and each stream "
            f"{for_people(step['each_stream'])}",
        ),
    ]
    sink = facts["sink"]
    if sink["kind"] == "zero":
        lines.insert(1, ("sink", "a Zero Sink, which needs no slot"))
    elif sink["kind"] == "learnable":
        tokens = sink["slots"]
        learned = "a learned token" if tokens == 1 else f"{tokens} learned tokens"
        lines.insert(1, ("sink", f"{learned} in front of every text, so sink({tokens}) is enough"))
    if facts["streams"] is not None:
        room = for_people(facts["memory_bytes"])
        lines.append(("streams", f"{facts['streams']:,} fit into {room} beside the weights"))
    if facts["tokens_per_s"] is not None:
        paces = facts["tokens_per_s"]
        text = f"{paces['one']:,.0f} tokens/s of one stream at most"
        if "all" in paces:
            text += f", {paces['all']:,.0f} of all {facts['streams']:,} together"
        lines.append(("pace", f"{text}, at {for_people(facts['bandwidth_bytes_per_s'])}/s"))
    for name, text in lines:
        print_line(f"{name:<9} {text}")
