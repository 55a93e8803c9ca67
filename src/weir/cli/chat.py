"""`weir chat`: an endless conversation in the terminal."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from weir.cli import options
from weir.cli.app import command
from weir.cli.common import (
    KERNELS,
    in_words,
    messages,
    prepare_model,
    say,
    say_set_aside,
    say_steps,
    say_window,
    size,
    waiting,
)
from weir.cli.kept_chats import (
    Keeper,
    begin,
    find_newest,
    name_anywhere,
    open_archive,
    session_of,
)
from weir.cli.loading import Loading, load_model, loads_model
from weir.cli.runtime import Interrupt, Terminated, interruptible
from weir.errors import WeirError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from weir.cache import Holding
    from weir.policies import Policy
    from weir.stream import Conversation, Passage, Stream, Transcript

HELP = """/forgotten       show how much of each turn the cache still holds
/remembers TEXT  show whether the cache still holds a text that was said
/report          show what each layer of the cache holds ("new": not folded yet)
/save FILE       save the state of the cache to a file (--continue works without this)
/load FILE       continue a saved conversation
/help            show this help
/quit            leave (also Ctrl-D). Ctrl-C stops an answer
\"\"\"              begin and end a message of several lines"""

PLAIN_NAMES = {
    "sink": "the first",
    "beginning": "the first",
    "recent": "the newest",
    "header": "",
    "kept": "",
}
"""Words for the tokens that a pool keeps. A pool with an empty text is not mentioned, and a pool
without an entry is described by its name.
"""
FORMAT_WORDS = {"int8": "8 bits", "int4": "4 bits", "k8v4": "8 and 4 bits", "fp8": "8-bit floats"}
HEADER = 16
"""Slots for the tokens that a chat template puts before an answer."""
QUOTES = '"""'
"""Begins and ends a message of several lines."""
MOST_SLOTS = 8192
"""The most slots for a policy without a budget. With more, answers on a CPU are slow."""
MOST_LINES = 12
"""Lines of the longest list that /forgotten, /remembers and /report print, without the lines that
introduce or end it.
"""
PREVIEW = 48
"""Number of characters of a turn that are shown."""
RECALLED = 120
"""Number of characters of a recalled passage that are shown."""
SHARE = 4
"""The free memory is divided by this number: a conversation takes at most a quarter of it."""


@command()
@loads_model()
def chat(
    context: Context,
    argument: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="nano, smollm2, a folder, a .gguf file, or a Hub id; --model does the same. "
            "[default: nano]",
        ),
    ] = None,
    model_name: Annotated[str | None, Option("--model", help="The same as MODEL.")] = None,
    policy: Annotated[
        str | None,
        Option(
            help=f"{options.POLICY_FORMS}. If the policy takes a budget and you give none, it gets "
            "as many slots as fit in the model's window and in a quarter of the free memory, at "
            f"most {MOST_SLOTS:,}. weir serve and weir size use the policy's default budget "
            "instead, because their memory is for many conversations. [default: weir.toml next to "
            f"the model, or else {options.DEFAULT}]"
        ),
    ] = None,
    budget: options.Budget = None,
    slots: Annotated[
        str | None,
        Option(
            "--slots",
            help=f"{options.SLOT_FORMATS} [default: set by the policy; if there is no --policy, no "
            "--budget and no weir.toml: exact if enough memory is free]",
        ),
    ] = None,
    chunk: options.PolicyChunk = None,
    seed: options.Seed = 0,
    system: Annotated[
        str | None,
        Option(
            help="System message; it is never evicted from the cache, except under recompute, and "
            "under policies such as pinned, whose own pools determine how much of it stays."
        ),
    ] = None,
    temperature: Annotated[
        float, Option(min=0.0, help="Sampling temperature; 0 always takes the likeliest token.")
    ] = 0.7,
    top_k: Annotated[
        int | None, Option(min=1, help="Sample from only this many of the likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float,
        Option(
            min=0.0,
            max=1.0,
            help="Sample from the likeliest tokens whose probabilities add up to this.",
        ),
    ] = 0.95,
    min_p: Annotated[
        float | None,
        Option(
            min=0.0,
            max=1.0,
            help="Leave out tokens whose probability is less than this fraction of the "
            "likeliest token's.",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float,
        Option(
            min=0.01, help="Values over 1 make tokens that the answer already contains less likely."
        ),
    ] = 1.0,
    max_tokens: Annotated[int, Option(min=1, help="Most tokens of an answer.")] = 256,
    session: Annotated[
        Path | None, Option(help="A file that /save wrote, to continue its conversation.")
    ] = None,
    go_on: Annotated[
        bool,
        Option(
            "--continue",
            help="Continue the last conversation; if you name a model, the last one with that "
            "model.",
        ),
    ] = False,
    keep: Annotated[
        bool,
        Option(
            "--keep/--no-keep",
            help="Save the conversation as it goes, so that --continue can go on with it.",
        ),
    ] = True,
    recall: Annotated[
        int,
        Option(
            min=0,
            help="The most tokens of forgotten text to put before a message that asks for it; 0 "
            "for none. At most a quarter of the cache.",
        ),
    ] = 256,
    compiled: options.CompileOnGPU = False,
    *,
    loading: Loading,
) -> None:
    """Talk to a model for as long as you like, in a cache of fixed size.

    The conversation is saved as it goes, in ~/.local/state/weir/chats. --continue goes on with it,
    and --recall finds text again after it has left the cache.
    """
    from weir.policies import parse_policy, resolve_chunk, with_slots

    if temperature == 0:
        options.say_unused(
            context,
            ("top_k", "top_p", "min_p"),
            "at temperature 0 the likeliest token is always taken",
        )
    asked = options.model_or_none(argument, model_name)
    system = system or None  # an empty message needs no slots
    # Refuse a wrong policy before anything is loaded.
    if budget is not None:
        policy = options.with_given_budget(policy or options.DEFAULT, budget)
    wanted = with_slots(parse_policy(options.DEFAULT if policy is None else policy), slots)
    begun = "--session" if session is not None else "--continue" if go_on else ""
    if session is not None and go_on:
        raise WeirError(
            "--session and --continue both name a conversation to go on with. Give only one of "
            "them."
        )
    if begun and system is not None:
        raise WeirError(
            f"--system is only for a new conversation, and {begun} goes on with an old one. Leave "
            "out one of them."
        )
    from weir.stream import Conversation, Stream, check_template

    kept: Transcript | None = None
    if go_on:
        kept = find_newest(asked)
        system = kept.facts["system"]
        loading = kept.facts["loading"] | loading
    name = "nano" if asked is None else asked
    if kept is not None:
        name = str(kept.facts["model"])
    model, tokenizer = load_model(name, loading)
    check_template(tokenizer)
    prepare_model(model, compiled=compiled)
    reason = ""
    if kept is not None:
        stream = _restore(model, kept)
    elif session is not None:
        stream = Stream.restore(model, session)
    else:
        given = policy is not None or slots is not None
        sized, reason = _size_policy(model, tokenizer, wanted, given, chunk, system)
        say_set_aside(model, policy, slots)
        say_window(model, sized, resolve_chunk(sized, chunk))
        stream = Stream(model, sized, chunk=chunk, seed=seed)
    say(f"{name} {describe(stream.policy)}{reason}. /help for help.")
    say_steps(stream.report()["steps"])
    if tokenizer.chat_template is None:
        say("the model has no chat template, so it continues your text")
    if begun:
        _tell_kept(context, stream, wanted)
    if keep and kept is None:
        chunk = options.CHUNK if stream.cache is None else stream.cache.chunk
        facts = {"policy": str(stream.policy), "chunk": chunk, "seed": stream.seed}
        kept = begin({"model": name_anywhere(name), "loading": loading, **facts, "system": system})
    archive = open_archive(kept)
    conversation = Conversation(stream, tokenizer, system, kept, archive, recall, _say_lost)
    keeper = Keeper(conversation, stream.seen if go_on else -1)
    if begun:
        left = list(kept.after(stream.seen)) if go_on and kept is not None else []
        if tokens := sum(len(turn.ids) for turn in left):
            with waiting(f"recomputing {in_words(tokens, 'token')}"):
                conversation.read_again(left)
        say(f"the conversation continues after {in_words(stream.seen, 'token')}")
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    how["repetition_penalty"] = repetition_penalty
    with interruptible(noted=math.inf) as interrupt:
        try:
            _talk(conversation, keeper, interrupt, max_new_tokens=max_tokens, **how)
        finally:
            with waiting("saving the conversation"):
                keeper.save(last=True)
            if conversation.archive is not None:
                conversation.archive.close()
            if conversation.transcript is not None:
                conversation.transcript.close()


def _talk(conversation: Conversation, keeper: Keeper, interrupt: Interrupt, **how: Any) -> None:
    """Read messages and commands and answer them, until the user leaves."""
    full = _forgets(conversation)
    waits = f"{KERNELS}, then reading"
    while (words := _read_words(interrupt)) is not None:
        line, quoted = words
        ordered = line.startswith("/") and not quoted
        try:
            if ordered:
                with interrupt.noting(0):
                    if not _command(conversation, line.strip()):
                        return
            elif line.strip():
                with interrupt.noting(1), contextlib.closing(conversation.say(line, **how)) as said:
                    _write(said, interrupt, waits)
                waits = "reading"
                if interrupt.terminated:
                    raise Terminated
                _tell_state(conversation)
                if not full and (full := _forgets(conversation)):
                    say(_forgetting(conversation))
                keeper.save()
        except WeirError as error:
            say(f"weir: {error}")
        except KeyboardInterrupt:
            # If the interrupt came during a fold, the stream reports that.
            say(f"interrupted{'. Nothing has changed.' if ordered else ''}")


def _forgetting(conversation: Conversation) -> str:
    """Return a message that the cache has begun to forget, and what the user can do about it."""
    told = ["from here on, parts of this conversation are forgotten."]
    if conversation.transcript is not None:
        told.append(
            "/forgotten shows which ones, and /remembers TEXT shows whether a text is still in "
            "the cache."
        )
    if _recalls(conversation):
        told.append(
            "If a question is about forgotten text, weir finds it and shows it to the model."
        )
    return " ".join(told)


def _restore(model: PreTrainedModel, kept: Transcript) -> Stream:
    """Return the stream of a saved conversation, or a new stream that will read the conversation
    again.
    """
    from weir.stream import Stream

    facts, start = kept.facts, kept.turns[0].start
    if kept.path is not None and (file := session_of(kept.path)).exists():
        try:
            return Stream.restore(model, file)
        except WeirError as error:
            if start:
                raise
            say(f"weir: {error}; recomputing the conversation from its transcript")
    if start:
        raise WeirError(
            f"{kept.path} continues a saved stream that no longer exists, so the conversation "
            "cannot be continued. Start a new one with weir chat."
        )
    return Stream(model, facts["policy"], chunk=facts["chunk"], seed=facts["seed"])


def _tell_kept(context: Context, stream: Stream, wanted: Policy) -> None:
    """Name the given options that a saved stream overrides."""
    asked, cache = context.params, stream.cache
    of_chunk = "" if cache is None else f", its chunk of {cache.chunk}"
    kept = {
        "chunk": cache is None or asked["chunk"] == cache.chunk,
        "seed": asked["seed"] == stream.seed,
    }
    kept |= dict.fromkeys(("policy", "budget", "slots"), wanted == stream.policy)
    unused = [name for name, same in kept.items() if not same and options.was_given(context, name)]
    if unused:
        named = " and ".join(f"--{name}" for name in sorted(unused))
        say(
            f"{named} {'applies' if len(unused) == 1 else 'apply'} only to a new conversation; "
            f"this one keeps its policy{of_chunk} and its seed {stream.seed}"
        )


def _size_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    wanted: Policy,
    given: bool,
    chunk: int | None,
    system: str | None,
) -> tuple[Policy, str]:
    """Choose the policy of a conversation; returns it, and the reason for the chat's first line.

    A policy without a budget gets as many slots as the model's window and the memory allow. The
    default policy gets exact slots if the largest number of slots fits even in this format. The
    system message gets separate slots, so that it is never evicted. Unless --policy, --budget or
    --slots was `given`, a policy file next to the model replaces the `wanted` policy.
    """
    from weir.cache import find_model_policy
    from weir.evals.fitting import budget_in, largest_budget
    from weir.evals.notation import takes_budget, with_budget
    from weir.models import free_memory, input_device
    from weir.policies import Pinned, Recompute, parse_policy, resolve_chunk, with_slots
    from weir.stream import BrokenTemplate, count_beginning

    pinned = header = 0
    if system is not None:
        try:
            pinned, header = count_beginning(model, tokenizer, system), HEADER
        except BrokenTemplate:
            raise
        except WeirError as error:
            raise WeirError(
                f"{error}. Leave out --system, and put the text in your first message instead."
            ) from None
    reason, policy = "", str(wanted)
    if not given and (beside := find_model_policy(model)) is not None:
        wanted = beside
        file = None if beside.origin is None else beside.origin.file
        reason = f", from {file} next to the model"
    elif takes_budget(policy) and not isinstance(wanted, Recompute):
        chunk = resolve_chunk(wanted, chunk)
        most = min(MOST_SLOTS, largest_budget(model, chunk + pinned + header))
        free = free_memory(input_device(model))
        room = sys.maxsize if free is None else free // SHARE
        form = ""
        if not given:
            # With exact slots, answers match the model's own. They are used if the largest number
            # of slots fits even in this format.
            exact = str(with_slots(wanted, "exact"))
            form = "exact " if budget_in(model, exact, room, chunk, most) == most else "quantized "
            policy = exact if form == "exact " else policy
        budget = budget_in(model, policy, room, chunk, most)
        if budget is None:
            memory = "" if free is None else f"{size(room)} (a quarter of the free memory) and "
            first = f" after the {pinned:,} tokens of --system" if pinned else ""
            shorter = "shorten --system, or " if pinned else ""
            raise WeirError(
                f"{policy} does not fit in {memory}the {in_words(most, 'available slot')}{first}. "
                f"To fix this, {shorter}give the policy a smaller budget with --budget."
            )
        wanted = parse_policy(with_budget(policy, budget))
        reason = (
            f". It has {budget:,} {form}slots, as many as fit in the window and a quarter of the "
            f"free memory, up to {MOST_SLOTS:,}"
        )
    if not pinned or isinstance(wanted, Recompute):
        return wanted, reason
    if any(pipe.slots is None or pipe.needs_marks for pipe in wanted.pipes):
        return wanted, reason  # it evicts nothing, or already keeps the beginning
    return Pinned(wanted, pinned, header), reason


def describe(policy: Policy) -> str:
    """Describe in words what a policy keeps: "keeps the first 4 and the newest 252 tokens"."""
    from weir.policies import Recompute

    if isinstance(policy, Recompute):
        return f"recomputes the last {policy.budget:,} tokens at every step"
    pipe, *others = policy.pipes
    if pipe.slots is None:
        return "keeps everything; memory grows with the conversation"
    if any(other != pipe for other in others):
        return f"keeps {policy.brief}"
    counts: Counter[str] = Counter()
    for pool in pipe.pools:
        counts[PLAIN_NAMES.get(pool.name, pool.name)] += pool.slots() or 0
    counts.pop("", None)
    parts = [
        f"{name} {count:,}" if name.startswith("the ") else f"{in_words(count, 'token')} by {name}"
        for name, count in counts.items()
    ]
    listed = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    tokens = "" if "token" in listed else " tokens"
    form = "" if pipe.format is None else f" in {FORMAT_WORDS.get(pipe.format.name)}"
    return f"keeps {listed}{tokens}{form}"


def _read_words(interrupt: Interrupt) -> tuple[str, bool] | None:
    """Read the user's next message and whether it was quoted; None at the end of the input."""
    line = _read_line(interrupt)
    if line is None or not line.startswith(QUOTES):
        return None if line is None else (line, False)
    lines = [line.removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        more = _read_line(interrupt, "... ")
        if more is None:
            return "\n".join(lines), True
        lines.append(more)
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n"), True


def _read_line(interrupt: Interrupt, prompt: str = "> ") -> str | None:
    """Read the next line; None at the end of the input. Ctrl-C at the prompt starts a new line."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then edits lines and remembers them)
    while True:
        try:
            with interrupt.noting(0):
                if terminal:
                    return input(prompt)
                # Read bytes, so that a line that is not UTF-8 does not affect the others.
                read = sys.stdin.buffer.readline()
            return read.decode("utf-8").rstrip("\r\n") if read else None
        except EOFError:
            say("")
            return None
        except KeyboardInterrupt:
            say("")
        except UnicodeDecodeError:
            say("weir: that line is not UTF-8 and was ignored")


def _write(answer: Iterator[str], interrupt: Interrupt, waits: str) -> None:
    """Write an answer piece by piece, until it ends or is interrupted. `waits` says what the
    program does before the first piece.
    """
    with waiting(waits):
        piece = next(answer, None)
    while piece is not None:
        sys.stdout.write(piece)
        sys.stdout.flush()
        piece = None if interrupt else next(answer, None)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _say_lost(text: str) -> None:
    """Report why the archive can no longer be used."""
    say(f"weir: {text}")


def _recalls(conversation: Conversation) -> bool:
    """Return whether the conversation recalls text that has left the cache."""
    return conversation.archive is not None and conversation.most_recalled > 0


def _tell_state(conversation: Conversation) -> None:
    """Print the recalled text and the figures of an answer, and advice if the answer repeats
    itself.
    """
    for one in conversation.recalled:
        who = {"user": "you", "assistant": "the model"}.get(one.role, one.role)
        when = time.strftime("%d %b %Y %H:%M", time.localtime(one.time)).lstrip("0")
        words = " ".join(one.text.split())
        shown = f"{words[:RECALLED]}…" if len(words) > RECALLED else words
        messages().print(
            f"recalled from {who}, {when}: {shown}", style="dim", highlight=False, markup=False
        )
    report = conversation.stream.report()
    held = [layer["held"] for layer in report.get("layers", ())]
    slots = f"{in_words(max(held), 'slot')}, " if held else ""
    messages().print(
        f"{in_words(conversation.stream.seen, 'token')} seen, "
        f"{slots}{size(conversation.stream.nbytes)}, "
        f"{conversation.rate:,.0f} tokens/s",
        style="dim",
        highlight=False,
    )
    if conversation.repeats:
        say(
            "the model repeats itself. Leave, then continue with weir chat --continue "
            "--repetition-penalty 1.2, or with a higher --temperature."
        )


def _forgets(conversation: Conversation) -> bool:
    """Return whether a layer has evicted tokens of the conversation."""
    layers = conversation.stream.report().get("layers", ())
    return any(layer["held"] < conversation.stream.seen for layer in layers)


def _command(conversation: Conversation, line: str) -> bool:
    """Run a slash command; return False to leave."""
    from weir.policies import expand_home

    word, _, rest = line.partition(" ")
    rest = rest.strip()
    if word in ("/quit", "/exit"):
        return False
    if word in ("/save", "/load", "/remembers") and not rest:
        what = (
            "some text, as in /remembers TEXT"
            if word == "/remembers"
            else f"a file, as in {word} FILE"
        )
        raise WeirError(f"{word} needs {what}")
    if word == "/save":
        conversation.stream.save(file := expand_home(rest))
        say(f"saved to {file}")
    elif word == "/load":
        _load(conversation, expand_home(rest))
    elif word == "/report":
        _report(conversation)
    elif word == "/forgotten":
        _tell_forgotten(conversation)
    elif word == "/remembers":
        _tell_held(conversation, rest)
    elif word == "/help":
        say(HELP)
    else:
        raise WeirError(f"unknown command {word}. Type /help for the list.")
    return True


def _load(conversation: Conversation, file: Path) -> None:
    """Continue a saved stream, with a new transcript."""
    from weir.stream import Stream

    stream, before = Stream.restore(conversation.stream.model, file), conversation.transcript
    conversation.stream = stream
    if before is not None:
        assert stream.cache is not None
        before.close()
        same = {"policy": str(stream.policy), "chunk": stream.cache.chunk, "seed": stream.seed}
        conversation.transcript = begin({**before.facts, **same})
    if conversation.archive is not None:
        conversation.archive.close()
    conversation.use_archive(open_archive(conversation.transcript))
    say(f"the conversation continues after {in_words(stream.seen, 'token')}")


def _tell_forgotten(conversation: Conversation) -> None:
    """List the turns of a conversation, with the share of each that is held."""
    transcript, holding = _look(conversation)
    passages, loaded = transcript.passages(holding), transcript.loaded(holding)
    if loaded is not None:
        many = in_words(loaded.tokens, "loaded token")
        say(f"{many}, {_held_words(loaded)}: a saved state has no text")
    shown = passages if len(passages) <= MOST_LINES else passages[-MOST_LINES:]
    if len(shown) < len(passages):
        say(f"the last {len(shown)} of {len(passages)} passages:")
    for passage in shown:
        first, last = passage.turns
        turns = f"turn {first}" if first == last else f"turns {first} to {last}"
        words = " ".join(passage.text.split())
        beginning = f"{words[:PREVIEW]}…" if len(words) > PREVIEW else words
        tokens = in_words(passage.tokens, "token")
        say(f"{turns}, {tokens}, {_held_words(passage)}: {beginning}")
    if shown and all(one.held == 1 for one in (*passages, loaded) if one is not None):
        say("nothing has been forgotten yet")


def _held_words(passage: Passage) -> str:
    """Say how much of a passage is held."""
    return {0.0: "gone", 1.0: "whole"}.get(passage.held, f"{passage.held:.0%} held")


def _tell_held(conversation: Conversation, text: str) -> None:
    """Report how much of the last occurrences of a text is still in the cache."""
    transcript, holding = _look(conversation)
    places = transcript.find(text, holding, conversation.tokenizer)
    found = list(itertools.islice(places, MOST_LINES))
    if not found:
        say(f"{text!r} does not occur in this conversation")
    for place in found:
        said = f"turn {place.turn}, {'you' if place.by_user else 'the model'}"
        held = sum(place.shares) / len(place.shares)
        if held == 0:
            say(f"{said}: gone")
            continue
        nowhere = place.shares.count(0)
        gone = (
            f"; {nowhere} of its {in_words(len(place.shares), 'token')} "
            f"{'is' if nowhere == 1 else 'are'} in no layer"
            if nowhere
            else ""
        )
        many = "in the cache" if held == 1 else f"in {held:.0%} of layers and heads{gone}"
        say(f"{said}: {many}, kept by {', '.join(place.pools)}")


def _look(conversation: Conversation) -> tuple[Transcript, Holding]:
    """Return the transcript, and which tokens the stream still holds."""
    if conversation.transcript is None:
        raise WeirError(
            "with --no-keep weir does not record the conversation, so it cannot look for text in "
            "it. Start weir chat without --no-keep."
        )
    if not conversation.transcript.turns:
        raise WeirError(
            "nothing has been said since this conversation began or was loaded. Send a message "
            "first."
        )
    return conversation.transcript, conversation.stream.holding()


def _report(conversation: Conversation) -> None:
    """Print the slots of each layer; layers with the same slots share a line."""
    stream = conversation.stream
    report = stream.report()
    say(f"{stream.policy.brief}: {in_words(stream.seen, 'token')} seen, {size(report['bytes'])}")
    said = [
        f"{_held(layer['slots'])}; {size(layer['bytes'])}" for layer in report.get("layers", ())
    ]
    places: dict[str, list[int]] = {}
    for index, line in enumerate(said):
        places.setdefault(line, []).append(index)
    for line, layers in itertools.islice(places.items(), MOST_LINES):
        say(f"{_ranges(layers)}: {line}{' each' if len(layers) > 1 else ''}")
    if len(places) > MOST_LINES:
        say(f"{in_words(len(places) - MOST_LINES, 'more line')} not shown")


def _ranges(layers: list[int]) -> str:
    """Format layer numbers: "layers 0 to 3, 7"."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    runs = zip(starts, ends, strict=True)
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in runs]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(texts)}"


def _held(slots: dict[str, int]) -> str:
    """Describe a layer's slots by pool. Before the first fold, no pool holds anything."""
    if not any(slots.values()):
        return "nothing yet"
    if not any(count for name, count in slots.items() if name != "new"):
        return f"{slots['new']} new, waiting for the first fold"
    return ", ".join(f"{name} {n}" for name, n in slots.items() if n or name == "new")
