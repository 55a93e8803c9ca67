"""`weir size`: compute the memory of a model and its streams, without loading the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from weir.cli import options
from weir.cli.app import command
from weir.cli.common import in_words, print_json, print_line
from weir.cli.common import size as for_people
from weir.cli.loading import Loading, load_model, loads_model
from weir.cli.pinning import AUTO, PinSlots, pin_format, read_pin

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from weir.policies import Policy


@command()
@loads_model("dtype", "weights", "revision", "trust_remote_code")
def size(
    context: Context,
    argument: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="nano, smollm2, a folder, a .gguf file, a config.json, or a Hub id; --model does "
            "the same. One of the two is required.",
        ),
    ] = None,
    model_name: Annotated[str | None, Option("--model", help="The same as MODEL.")] = None,
    policy: Annotated[
        str | None,
        Option(
            help=f"{options.POLICY_FORMS} [default: weir.toml next to the "
            f"model, or else {options.DEFAULT}]"
        ),
    ] = None,
    budget: options.Budget = None,
    tokens: Annotated[
        int | None,
        Option(min=1, help="Tokens of a stream, for policies without a limit, such as dense."),
    ] = None,
    slots: options.SlotsName = None,
    chunk: options.PolicyChunk = None,
    positions: options.PositionsName = options.Positions.rolling,
    pin: Annotated[
        str | None,
        Option(
            help="Slots for the beginning of a conversation, as in `weir serve`; auto needs --rows "
            "[default: with --rows, as in `weir serve`; otherwise 0]"
        ),
    ] = None,
    pin_slots: PinSlots = None,
    rows: Annotated[
        int | None,
        Option(
            min=1,
            help="Also count the memory that `weir serve` takes with this many rows, with and "
            "without its option --data.",
        ),
    ] = None,
    memory: Annotated[
        str | None, Option(help="Memory to fill with streams, such as 80GB or 24GiB.")
    ] = None,
    bandwidth: Annotated[
        str | None,
        Option(
            help="Memory bandwidth, such as 3.35TB/s, for an estimate of the tokens per second."
        ),
    ] = None,
    as_json: options.AsJson = False,
    *,
    loading: Loading,
) -> None:
    """Show how many bytes a stream and the weights take, and how many streams fit.

    Only the model's configuration is read, unless the policy depends on the weights, as the default
    policy does. In that case the weights are loaded if they are in a local folder or file.
    """
    from weir.cache import (
        depends_on_weights,
        find_model_policy,
        fit_to_model,
        read_bytes,
        size_of,
    )
    from weir.errors import WeirError
    from weir.loading import skeleton
    from weir.models import sink_of
    from weir.native import BITS, describe_weights
    from weir.policies import (
        Pipe,
        parse_policy,
        pinned_slots,
        resolve_chunk,
        with_pin,
        with_slots,
    )

    model_name = options.one_model(argument, model_name)
    room = None if memory is None else read_bytes(memory)
    pace = None if bandwidth is None else read_bytes(bandwidth)
    model = skeleton(model_name, **loading)
    wanted: Policy | None = None
    if policy is None and budget is None and slots is None:
        wanted = find_model_policy(model_name, loading.get("revision"))
    if wanted is None:
        asked = options.DEFAULT if policy is None else policy
        wanted = with_slots(parse_policy(options.with_given_budget(asked, budget)), slots)
    unknown, why = False, ""
    if depends_on_weights(wanted):
        loaded, why = _load_if_here(model_name, loading)
        model, unknown = (model, True) if loaded is None else (loaded, False)
    length = None
    if isinstance(wanted, Pipe) and wanted.slots is None:
        if tokens is None:
            raise WeirError(
                f"{wanted} has no limit, so its size depends on the length of the stream. Give a "
                "length, as in --tokens 8192, or use a policy with a budget."
            )
        name = f"{wanted} at {in_words(tokens, 'token')}"
        if wanted.keeps_all:
            length, wanted = tokens, Pipe(wanted.pools, name, wanted.formats)
        else:
            pools = (p if p.slots() is not None else p.resized(tokens) for p in wanted.pools)
            wanted = Pipe(tuple(pools), name, wanted.formats)
    else:
        options.say_unused(
            context,
            ("tokens",),
            f"the size of {wanted.brief} does not depend on the length of the stream",
        )
    chunk = resolve_chunk(wanted, chunk)
    form = pin_format(pin, pin_slots)
    pinned: int | None = 0
    if pin == AUTO:
        if rows is None:
            raise WeirError("--pin auto depends on the number of rows. Add --rows, as in --rows 8.")
        from weir.serve import choose_pin

        how: dict[str, Any] = {"chunk": chunk, "rows": rows, "kept": None, "loading": loading}
        pinned = choose_pin(model_name, wanted, format=form, **how)
    elif pin is not None or rows is not None:
        pinned = read_pin(pin)  # by default, a server pins a quarter of the slots
    most: int | None = None
    if unknown:
        coarse = with_pin(_in_8_bits(wanted), pinned, form)
        most = size_of(model, coarse, chunk=chunk, positions=positions.value).stream
    wanted = with_pin(wanted, pinned, form)
    wanted = fit_to_model(wanted, model, chunk)
    found = size_of(model, wanted, chunk=chunk, positions=positions.value, tokens=length)
    sink = sink_of(model.config)
    streams = None if room is None else found.streams_in(room)
    bits = loading.get("weights")
    facts: dict[str, Any] = {
        "model": model_name,
        "policy": found.policy,
        "chunk": chunk,
        "dtype": found.dtype,
        "weights_format": bits if bits in BITS else describe_weights(model)[1],
        "layers": len(found.slots),
        "slots": list(found.slots),
        "sink": {"kind": sink.kind, "tokens": list(sink.tokens), "slots": sink.slots},
        "stream_bytes": found.stream,
        "stream_bytes_at_most": found.stream if most is None else most,
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
    if rows is not None:
        facts["server"] = _count_server(rows, wanted, found.weights, found.stream)
    if as_json:
        print_json(facts)
    else:
        more = {
            "policy": wanted.brief,
            "head_slots": found.head_slots,
            "dense": length is not None,
            "unknown": why,
        }
        held = [pinned_slots(pipe.pools) for pipe in wanted.pipes]
        more["pinned"] = min((slots for slots in held if slots is not None), default=0)
        _show(facts | more)
    if room is not None and not streams:
        raise WeirError(
            f"{memory} is too small for a stream: the weights take {for_people(found.weights)} "
            f"and a stream takes {for_people(found.stream)}. Use more --memory or a smaller "
            "policy."
        )


def _load_if_here(name: str, loading: Loading) -> tuple[PreTrainedModel | None, str]:
    """Load a model if its weights are in a local folder or file.

    If they are not there or do not fit, returns None and the reason. Weights that cannot be read
    are an error.
    """
    from weir.errors import TooLargeError
    from weir.loading import has_weights

    if not has_weights(name):
        path = Path(name).expanduser()
        kinds = {"this folder": path.is_dir(), "this file": path.is_file()}
        place = next((kind for kind, here in kinds.items() if here), "a local folder or file")
        return None, f"are not in {place}"
    try:
        return load_model(name, loading)[0], ""
    except TooLargeError:
        return None, "do not fit in the memory of this machine"


def _count_server(rows: int, policy: Policy, weights: int, stream: int) -> dict[str, Any]:
    """Count the memory of a server with this many rows."""
    from weir.serve import MemoryEstimate
    from weir.serve.sessions.store import DEFAULT_KEPT

    held = MemoryEstimate(policy, weights, stream, rows, DEFAULT_KEPT, None)
    return {
        "rows": rows,
        "rows_bytes": rows * stream,
        "turns": held.kept,
        "turns_bytes": held.kept * stream,
        "prompt_states": held.prefixes,
        "prompt_states_bytes": held.prefixes * stream,
        "total_bytes": held.total,
    }


def _in_8_bits(policy: Policy) -> Policy:
    """Return a policy with 8-bit slots, if the policy leaves their format to the weights."""
    from weir.errors import WeirError
    from weir.policies import PolicyWrapper, with_slots

    if isinstance(policy, PolicyWrapper):
        return policy.around(_in_8_bits(policy.policy))
    try:
        return with_slots(policy, "int8")
    except WeirError:  # the policy sets the format
        return policy


def _show(facts: dict[str, Any]) -> None:
    low, high = facts["head_slots"]
    count = f"{high:,}" if low == high else f"{low:,} to {high:,}"
    step = facts["step_bytes"]
    policy = facts["policy"]
    # If a policy lists many layers, its brief form already gives the slots.
    if not policy.endswith(" slots"):
        policy += f", {count} {'slot' if count == '1' else 'slots'} per KV head"
    stream, most = (for_people(facts[key]) for key in ("stream_bytes", "stream_bytes_at_most"))
    if facts["stream_bytes_at_most"] > facts["stream_bytes"]:
        stream += (
            f" with 4-bit slots, or {most} with 8-bit slots: the default policy chooses by the "
            f"weights, which {facts['unknown']}"
        )
    if facts["pinned"]:
        # Without --rows and --pin, a stream has no such slots, so it is smaller than a row.
        slots = in_words(facts["pinned"], "slot")
        stream += f". This includes {slots} for the beginning of a conversation (see --pin)"
    if not facts["dense"]:
        policy += f", and room for {in_words(facts['chunk'], 'new token')}"
    both = for_people(step["weights"] + step["each_stream"])
    dtype = facts["dtype"]
    if facts["weights_format"] != dtype:
        dtype = f"weights in {facts['weights_format']}, keys and values in {dtype}"
    lines = [
        ("model", f"{facts['model']}, {in_words(facts['layers'], 'layer')}, {dtype}"),
        ("policy", policy),
        ("weights", for_people(facts["weights_bytes"])),
        ("a stream", stream),
        (
            "a step",
            f"reads {both}: {for_people(step['weights'])} of weights, and "
            f"{for_people(step['each_stream'])} for each stream",
        ),
    ]
    sink = facts["sink"]
    if sink["kind"] == "zero":
        lines.insert(
            1,
            (
                "sink",
                "a Zero Sink (1 is added to the denominator of attention), which needs no slot",
            ),
        )
    elif sink["kind"] == "learnable":
        tokens = sink["slots"]
        learned = "a learned token" if tokens == 1 else f"{tokens} learned tokens"
        lines.insert(1, ("sink", f"{learned} before every text, so sink({tokens}) is enough"))
    if (server := facts.get("server")) is not None:
        turns = server["turns_bytes"]
        lines += [
            (
                "server",
                f"with --data {for_people(server['total_bytes'] - turns)}: weights "
                f"{for_people(facts['weights_bytes'])}, {in_words(server['rows'], 'row')} "
                f"{for_people(server['rows_bytes'])}, states of "
                f"{in_words(server['prompt_states'], 'prompt')} "
                f"{for_people(server['prompt_states_bytes'])}",
            ),
            (
                "",
                f"without --data {for_people(server['total_bytes'])}: also the states of "
                f"{in_words(server['turns'], 'turn')}, {for_people(turns)}",
            ),
        ]
    if facts["streams"] is not None:
        room = for_people(facts["memory_bytes"])
        lines.append(("streams", f"{facts['streams']:,} fit in {room} next to the weights"))
    if facts["tokens_per_s"] is not None:
        paces = facts["tokens_per_s"]
        text = f"at most {paces['one']:,.0f} tokens/s for one stream"
        if "all" in paces:
            text += f", {paces['all']:,.0f} for all {facts['streams']:,} together"
        lines.append(("pace", f"{text}, at {for_people(facts['bandwidth_bytes_per_s'])}/s"))
    for name, text in lines:
        print_line(f"{name:<9} {text}")
