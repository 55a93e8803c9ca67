"""`weir serve`: serve endless sessions to many clients, over the HTTP APIs of OpenAI, Anthropic and
Ollama.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from weir.cli import options
from weir.cli.app import command
from weir.cli.common import (
    KERNELS,
    in_words,
    prepare_model,
    say,
    say_set_aside,
    say_window,
    size,
    waiting,
)
from weir.cli.loading import Loading, load_model, loads_model
from weir.cli.pinning import AUTO, PinSlots, pin_format, read_pin
from weir.errors import WeirError

if TYPE_CHECKING:
    from weir.policies import Policy
    from weir.serve import Engine, EngineClient


@command()
@loads_model()
def serve(
    context: Context,
    argument: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="nano, smollm2, a folder, a .gguf file, or a Hub id; --model does the same. One "
            "of the two is required.",
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
    slots: options.SlotsName = None,
    chunk: options.PolicyChunk = None,
    rows: Annotated[
        int,
        Option(
            min=1,
            help="Number of rows, which is the number of turns answered at the same time.",
        ),
    ] = 8,
    pin: Annotated[
        str | None,
        Option(
            help="Number of tokens of the system message and the tools that are never evicted. "
            "Each takes a separate slot in every row. auto: as many as fit in half of the free "
            "memory, at most 32,768; 0: none [default: a quarter of the policy's slots]",
        ),
    ] = None,
    pin_slots: PinSlots = None,
    deterministic: Annotated[
        bool,
        Option(
            "--deterministic",
            help="Decode each row alone, so that an answer does not depend on other rows.",
        ),
    ] = False,
    compiled: options.CompileOnGPU = False,
    keep: Annotated[
        int | None,
        Option(
            min=1,
            help="Without --data, or with --cluster: number of finished turns whose state is kept "
            "in memory [default: as many as fit, at most 256]. With --data and --disk, it "
            "matters only if the disk becomes full before the limit of --disk is reached. To make "
            "room, old turns are then deleted from the disk, except the turns used last: this many "
            "of them stay. If this does not make enough room, up to this many new turns are kept "
            "in memory until there is room again [default: none]. With --data and neither --disk "
            "nor --cluster, it is refused.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        Option(
            help="Folder for the states of turns, instead of memory. With --cluster also an fsspec "
            "address such as s3://bucket/folder."
        ),
    ] = None,
    disk: Annotated[
        str | None, Option(help="With --data: the most bytes to use there, such as 200GB.")
    ] = None,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")
    ] = 8000,
    keys: Annotated[
        Path | None, Option(help="A file with the SHA-256 hash of each accepted API key.")
    ] = None,
    name: Annotated[
        str | None, Option(help="The name of the model for clients [default: MODEL]")
    ] = None,
    alias: Annotated[
        list[str] | None,
        Option(
            help="Another name of the model, for clients that insist on one; can be repeated. '*' "
            "accepts every name."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        Option(
            help="Another name of this machine that requests may be sent to, such as "
            "host.docker.internal; can be repeated. With --keys every name is accepted."
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        Option(
            help="The origin of a web page that may use the server from a browser, such as "
            "http://localhost:3000; can be repeated. With --keys, '*' allows all."
        ),
    ] = None,
    note_changes: Annotated[
        bool,
        Option(
            "--note-changes",
            help="If the system message of a conversation changes slightly, for example because it "
            "contains the time, continue the conversation with a note about the change "
            "instead of reading it again.",
        ),
    ] = False,
    archive: Annotated[
        str | None,
        Option(
            help="Keep the text of conversations in at most this many bytes, such as 10GB, so that "
            "text can be found again after it has left the cache. The text is stored in the folder "
            "of --data, or without --data in memory."
        ),
    ] = None,
    recall: Annotated[
        int | None,
        Option(
            min=0,
            help="With --archive: the most tokens of forgotten text to put before a message that "
            "asks for such text. A request can set another number (weir.recall). 0 for none "
            "[default: 256]",
        ),
    ] = None,
    max_prompt: Annotated[
        int, Option(min=1, help="The most tokens that one request may add to a conversation.")
    ] = 1_000_000,
    max_answer: Annotated[int, Option(min=1, help="The most tokens of an answer.")] = 65_536,
    queue: Annotated[int, Option(min=1, help="The most turns that wait for a row.")] = 64,
    drain: Annotated[
        float, Option(min=1, help="Seconds after SIGTERM in which answers may finish.")
    ] = 30.0,
    cluster: Annotated[
        str | None,
        Option(
            help="Serve from replicas on Ray: local, or host:port of a cluster's head node. Needs "
            "--data, and cannot be combined with --disk, --archive or --compile."
        ),
    ] = None,
    replicas: Annotated[int, Option(min=1, help="With --cluster: number of replicas.")] = 2,
    *,
    loading: Loading,
) -> None:
    """Serve endless conversations with a model, in an amount of memory that is fixed at the start.

    Clients of OpenAI's API need only the address. Without --keys, only this machine is served.
    """
    from weir.cache import find_model_policy, read_bytes
    from weir.loading import check_has_weights
    from weir.policies import Pinned, parse_policy, resolve_chunk, with_pin, with_slots
    from weir.serve import (
        Engine,
        EngineClient,
        Limits,
        ResponseStore,
        WorkerProcess,
        choose_pin,
        estimate_memory,
    )
    from weir.serve.api import Access, Keys, bind, log_event, log_json, make_app, run_app
    from weir.serve.sessions.disk_turns import DiskTurns, claim_folder
    from weir.serve.sessions.prefix_folder import PrefixFolder
    from weir.serve.sessions.store import SessionStore
    from weir.serve.sessions.store_format import StoreFormat
    from weir.stream import RECALL

    model_name = options.one_model(argument, model_name)
    check_has_weights(model_name)  # the memory can be estimated without them
    if budget is not None:
        policy = options.with_given_budget(policy or options.DEFAULT, budget)
    if cluster is None:
        options.say_unused(context, ("replicas",), "it needs --cluster")
    if disk is not None and data is None:
        raise WeirError(
            "--disk limits the folder of --data, and no --data is given. Add --data FOLDER."
        )
    _refuse_in_cluster("--disk", cluster, given=disk is not None)
    if cluster is not None and data is None:
        raise WeirError(
            "--cluster needs a place that all replicas share. Add --data with a folder or an "
            "address."
        )
    _refuse_in_cluster("--compile", cluster, given=compiled)
    if keep is not None and data is not None and cluster is None and disk is None:
        raise WeirError(
            "--keep has no use with --data alone, because all turns are then saved on the disk. "
            "Leave out --keep, or add --disk, which limits the disk and removes old turns."
        )
    _refuse_in_cluster("--archive", cluster, given=archive is not None)
    if recall is not None and archive is None:
        raise WeirError(
            "--recall needs --archive, which keeps what can be recalled. Use --archive 10GB."
        )
    most = None if disk is None else read_bytes(disk)
    archived = None if archive is None else read_bytes(archive)

    given = policy is not None or slots is not None
    beside = None if given else find_model_policy(model_name, loading.get("revision"))
    named = beside or parse_policy(options.DEFAULT if policy is None else policy)
    plain = with_slots(named, slots)
    chunk = resolve_chunk(plain, chunk)
    form = pin_format(pin, pin_slots)
    # The number of tokens for --pin auto is chosen below. It depends on the free memory, and asking
    # a GPU for it must wait until the worker process has been forked.
    wanted = with_pin(plain, None if pin == AUTO else read_pin(pin), form)
    limits = Limits(prompt=max_prompt, answer=max_answer, queue=queue, drain=drain)
    accepted = Keys() if keys is None else Keys.read(keys)
    hosts, origins, aliases = allow_host or [], allow_origin or [], alias or []
    Access(hosts, origins, has_keys=bool(accepted))  # refuses wrong hosts and origins
    if accepted:
        options.say_unused(context, ("allow_host",), "with --keys, every host name is accepted")
    if data is not None and cluster is None:
        os.close(claim_folder(Path(data)))  # before the model is loaded, which can take minutes
    # The worker is forked before this process has sockets, threads or a GPU.
    worker = WorkerProcess(fork=True) if cluster is None else None
    # Bound before the model is loaded, so that a port in use is reported at once.
    bound = bind(host, port, accepted)
    with contextlib.ExitStack() as ending:
        ending.callback(bound.close)
        if worker is not None:
            ending.callback(worker.close)
        kept = keep if data is None or cluster is not None else keep or 0
        if pin == AUTO:
            how: dict[str, Any] = {"chunk": chunk, "rows": rows, "kept": kept, "loading": loading}
            wanted = with_pin(plain, choose_pin(model_name, plain, format=form, **how), form)
        if beside is not None and beside.origin is not None:
            say(f"using the policy file {beside.origin.file} next to the model")
        say_set_aside(model_name, policy, slots, loading.get("revision"))
        memory = estimate_memory(
            model_name, wanted, chunk=chunk, rows=rows, kept=kept, loading=loading
        )
        if most is not None and most < memory.row:
            raise WeirError(
                f"--disk {size(most)} is too small: the state of one turn takes "
                f"{size(memory.row)}. Use a larger --disk."
            )
        pinned = memory.policy
        named = pinned.policy if isinstance(pinned, Pinned) and wanted is not plain else pinned
        say(f"{model_name} under {named.brief}")
        say_pinned(wanted)
        ends = f"states of {in_words(memory.kept, 'turn')} {size(memory.kept * memory.row)}, "
        say(
            f"memory: {size(memory.total)} in all: weights {size(memory.weights)}, "
            f"{in_words(rows, 'row')} of {size(memory.row)}, {ends if memory.kept else ''}states "
            f"of {memory.prefixes} "
            f"prompts {size(memory.prefixes * memory.row)}"
        )
        say(
            f"on top of that: at most {size(limits.memory)} for requests in progress, and "
            f"{size(limits.parcel)} while a session is exported or imported"
        )
        if name is None and Path(model_name).exists():
            say(f"clients name this model {model_name}; set a shorter name with --name")
        known = (
            in_words(len(accepted), "key") if accepted else "no keys: only this machine is served"
        )
        if cluster is not None and data is not None:
            from weir.serve.cluster import running
            from weir.serve.cluster.replica import Settings

            settings = Settings(
                model_name,
                str(wanted),
                chunk,
                rows,
                data if "://" in data else str(Path(data).absolute()),
                name or model_name,
                memory.kept,
                accepted.hashes,
                limits,
                deterministic=deterministic,
                loading=loading,
                aliases=tuple(aliases),
                hosts=tuple(hosts),
                origins=tuple(origins),
                notes_changes=note_changes,
            )
            with running.joined(cluster):
                with waiting(f"{in_words(replicas, 'replica')} on {cluster}"):
                    started = running.Replicas(settings, replicas)
                say(
                    f"{in_words(replicas, 'replica')}, each with this memory; states of turns are "
                    f"in {data}, at most {size(memory.row)} each"
                )
                say(f"{_url(*bound.getsockname()[:2])} ({known})")
                started.serve(bound, limits)
            return
        model, tokenizer = load_model(model_name, loading)
        say_window(model, wanted, chunk)
        place = prefixes = None
        if data is not None:
            place = DiskTurns(Path(data), StoreFormat.of(model, wanted, chunk), most)
            together = "" if most is None else f", and {size(most)} together"
            say(f"states of turns are in {data}, at most {size(memory.row)} each{together}")
        store = ending.enter_context(SessionStore(place, keep=memory.kept))
        if place is not None:
            prefixes = PrefixFolder(Path(data or "") / "prefixes", place.store_format)
            ending.callback(prefixes.close)
        if archived is not None:
            tokens = RECALL if recall is None else recall
            opened = store.place.open_archive(archived)
            where = "memory" if data is None else str(Path(data) / "archive.db")
            say(
                f"weir: {opened.problem}; nothing is recalled"
                if opened.problem
                else (
                    f"the text of conversations is in {where}, at most {size(archived)}; up to "
                    f"{in_words(tokens, 'token')} of it are recalled in a turn"
                )
            )
        book = ResponseStore(None if data is None else Path(data) / "book.db", limits.texts)
        ending.callback(book.close)
        # Wait for the kernel, so that it is checked in `warm_up` and not during an answer, and all
        # answers are computed with the same rounding.
        prepare_model(model, native=not deterministic, wait=True)
        engine = Engine(
            model,
            wanted,
            rows,
            store,
            chunk=chunk,
            queue=limits.queue,
            shared=len(accepted) > 1,
            deterministic=deterministic,
            prefix_place=prefixes,
        )
        with waiting(f"{KERNELS}, then reading a first text"):
            engine.warm_up()
        if compiled:
            compile_or_say(engine)
        client = EngineClient(
            engine,
            tokenizer,
            name or model_name,
            limits,
            book,
            worker=worker,
            aliases=aliases,
            notes_changes=note_changes,
            recall=0 if archived is None else RECALL if recall is None else recall,
        )
        say_sampling(client)
        log_json()
        steps = engine.cache.steps
        log_event("decode steps", run=steps["run"], reason=steps["reason"])
        app = make_app(client, accepted, hosts, origins)
        address, number = bound.getsockname()[:2]
        say(f"{_url(address, number)} ({known})")
        run_app(app, bound, limits, lambda: drain_and_say(client, limits.drain))


def drain_and_say(client: EngineClient, seconds: float) -> None:
    """Let running answers finish, and report what the server is waiting for."""
    load = client.engine.load()
    if many := load.busy + load.waiting:
        say(
            f"waiting up to {seconds:g} s for {in_words(many, 'answer')} to finish. Ctrl-C ends "
            "the server at once."
        )
    client.drain(seconds)


def say_pinned(policy: Policy) -> None:
    """Report how many tokens of a system message and tools stay in the cache."""
    from weir.policies import pinned_slots

    found = [pinned_slots(pipe.pools) for pipe in policy.pipes]
    if pinned := min((slots for slots in found if slots is not None), default=0):
        say(
            f"the first {pinned:,} tokens of the system message and tools are never evicted (see "
            "--pin). Coding agents send 10,000 to 25,000."
        )


def _refuse_in_cluster(option: str, cluster: str | None, *, given: bool) -> None:
    """Refuse an option that replicas do not have."""
    if given and cluster is not None:
        raise WeirError(
            f"{option} is for a single server, and --cluster is given. Leave out one of them."
        )


def say_sampling(client: EngineClient) -> None:
    """Report the default sampling settings, if the model's files set any."""
    usual, unused = client.defaults, client.unused_defaults
    shown = [f"{name} {value:g}" for name, value in vars(usual.sampling).items() if value]
    if usual.repetition != 1:
        shown.append(f"repetition_penalty {usual.repetition:g}")
    if shown != ["temperature 1"]:
        say(
            f"by default, answers are sampled with {', '.join(shown)}, from the model's "
            "generation configuration"
        )
    if unused:
        say(
            "these settings of the model's generation configuration are not used: "
            f"{', '.join(unused)}"
        )


def compile_or_say(engine: Engine) -> None:
    """Compile an engine's decode steps, or report why they run uncompiled."""
    from weir.serve import compile_engine, sizes_of

    try:
        compiles = compile_engine(engine)
    except WeirError as error:
        say(f"{error}; decode steps run uncompiled")
        return
    if compiles:
        *some, most = sizes_of(engine)
        sizes = ", ".join([*map(str, some), in_words(most, "row")])
        say(f"decode steps are being compiled while the server answers, for {sizes} at a time")
    elif engine.model.device.type == "cpu":
        say("--compile is for a GPU. On a CPU, decode steps are native or run in PyTorch.")


def _url(address: str, port: int) -> str:
    """Return the server's base URL for clients."""
    return f"http://{f'[{address}]' if ':' in address else address}:{port}/v1"
