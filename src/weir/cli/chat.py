"""`weir chat`: an endless conversation in the terminal."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weir.cli.app import command
from weir.cli.common import (
    DEFAULT_NAME,
    Compile,
    ModelName,
    PolicyChunk,
    Seed,
    SlotsName,
    messages,
    say,
    say_set_aside,
    say_unused,
    say_window,
    size,
    was_given,
    with_compiled_steps,
    with_products,
)
from weir.cli.loading import Loading, load_model, loads_model
from weir.cli.runtime import Interrupt, interruptible
from weir.errors import WeirError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from weir.policies import Policy
    from weir.stream import Conversation, Stream

HELP = """/report        show what the cache holds, by layer; new tokens wait for a fold
/save FILE     save the conversation to a file
/load FILE     continue a saved conversation
/help          show this help
/quit          leave; so does Ctrl-D. Ctrl-C stops an answer
\"\"\"            begins and ends a message of several lines"""

HEADER = 16
"""Slots for the tokens that a chat template puts in front of an answer."""
QUOTES = '"""'
"""Begins and ends a message of several lines."""
MOST_SLOTS = 8192
"""Most slots of a policy without a budget; with more, an answer is slow on a CPU."""
SHARE = 4
"""A conversation takes at most one part in this many of the free memory."""


@command()
@loads_model()
def chat(
    context: typer.Context,
    model_name: ModelName = "nano",
    policy: Annotated[
        str | None,
        typer.Option(
            help="A pipe or a named policy, see `weir policies`; without a budget it gets what the "
            f"model's window and the memory allow, at most {MOST_SLOTS:,} slots. [default: "
            f"weir.toml beside the model, or else {DEFAULT_NAME}]",
        ),
    ] = None,
    slots: SlotsName = None,
    chunk: PolicyChunk = None,
    seed: Seed = 0,
    system: Annotated[
        str | None,
        typer.Option(help="System message; it stays in the cache for good."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.7,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample from this many of the likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Sample from the likeliest tokens of this total probability."
        ),
    ] = 0.95,
    repetition_penalty: Annotated[
        float,
        typer.Option(min=0.01, help="Values over 1 make tokens of the same answer less likely."),
    ] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    session: Annotated[Path | None, typer.Option(help="A saved conversation to continue.")] = None,
    compiled: Compile = False,
    *,
    loading: Loading,
) -> None:
    """Talk to a model for as long as you like; the cache stays as large as it is."""
    from weir.policies import parse_policy, resolve_chunk, with_slots

    if temperature == 0:
        say_unused(
            context, ("top_k", "top_p"), "at a temperature of 0 the likeliest token is taken"
        )
    system = system or None  # an empty message needs no slots
    # Refuse a wrong policy before anything is loaded.
    asked = with_slots(parse_policy(DEFAULT_NAME if policy is None else policy), slots)
    given = policy is not None or slots is not None
    if session is not None and system is not None:
        raise WeirError(
            "--system is for a new conversation, and --session goes on with one that has begun; "
            "give one of them"
        )
    from weir.stream import Conversation, Stream

    model, tokenizer = load_model(model_name, loading)
    if compiled:
        with_compiled_steps(model, compiled)  # chooses products, too
    else:
        with_products(model)
    if session is None:
        wanted, sized = _size_policy(
            model, tokenizer, asked, given, resolve_chunk(asked, chunk), system
        )
        chunk = resolve_chunk(wanted, chunk)
        say_set_aside(model, policy, slots)
        say_window(model, wanted, chunk)
        stream = Stream(model, wanted, chunk=chunk, seed=seed)
    else:
        stream, sized = Stream.restore(model, session), ""
    conversation = Conversation(stream, tokenizer, system)
    kind = "" if tokenizer.chat_template else "; it has no chat template and continues your text"
    held = stream.policy
    under = f"{held.brief}{sized}" if session is not None or given else _describe(held, sized)
    say(f"{model_name} under {under}{kind}. /help for help.")
    if session is not None:
        _tell_kept(context, stream, asked)
        say(f"{conversation.stream.seen:,} tokens seen before")
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    how["repetition_penalty"] = repetition_penalty
    with interruptible(noted=math.inf, sigterm=False) as interrupt:
        while (words := _read_words(interrupt)) is not None:
            line, quoted = words
            ordered = line.startswith("/") and not quoted
            try:
                if ordered:
                    with interrupt.noting(0):
                        if not _command(conversation, line.strip()):
                            return
                elif line.strip():
                    answer = conversation.say(line, max_new_tokens=max_tokens, **how)
                    with interrupt.noting(1):
                        _write(answer, interrupt)
                    _tell_state(conversation)
            except WeirError as error:
                say(f"weir: {error}")
            except KeyboardInterrupt:
                # If it was within a fold, the stream reports that itself.
                say(f"interrupted{'; nothing has changed' if ordered else ''}")


def _tell_kept(context: typer.Context, stream: Stream, wanted: Policy) -> None:
    """Name the given options that a saved stream overrides by its own."""
    asked = context.params
    assert stream.cache is not None  # only streams with one are saved
    kept = {"chunk": asked["chunk"] == stream.cache.chunk, "seed": asked["seed"] == stream.seed}
    kept |= dict.fromkeys(("policy", "slots"), wanted == stream.policy)
    unused = [name for name, same in kept.items() if not same and was_given(context, name)]
    if unused:
        options = " and ".join(f"--{name}" for name in sorted(unused))
        say(
            f"{options} {'is' if len(unused) == 1 else 'are'} for a new conversation; this one "
            f"keeps its policy, its chunk of {stream.cache.chunk} and its seed {stream.seed}"
        )


def _size_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Policy,
    given: bool,
    chunk: int,
    system: str | None,
) -> tuple[Policy, str]:
    """Return the policy of a conversation, and a description of its size.

    A policy without a budget gets what the model's window and the memory allow; the system message
    has slots of its own, so that it is never evicted.

    Args:
        model, tokenizer: model and tokenizer of the conversation.
        asked: the requested policy, or the default.
        given: whether a policy was requested; if not, a policy file beside the model has priority.
        chunk: tokens between two folds.
        system: the system message; None for none.

    Raises:
        WeirError: not even the smallest budget fits, the template refuses a system message, or the
            policy file beside the model does not fit it.
    """
    from weir.cache import find_model_policy
    from weir.evals.fitting import budget_in, largest_budget
    from weir.evals.notation import takes_budget, with_budget
    from weir.models import free_memory, input_device
    from weir.policies import Pinned, Recompute, parse_policy
    from weir.stream import count_beginning

    pinned = header = 0
    if system is not None:
        pinned, header = count_beginning(model, tokenizer, system), HEADER
    sized = ""
    beside = None if given else find_model_policy(model)
    wanted, policy = beside or asked, str(asked)
    if beside is None and takes_budget(policy) and not isinstance(asked, Recompute):
        most = min(MOST_SLOTS, largest_budget(model, chunk + pinned + header))
        free = free_memory(input_device(model))
        room = sys.maxsize if free is None else free // SHARE
        budget = budget_in(model, policy, room, chunk, most)
        if budget is None:
            memory = "" if free is None else f"{size(room)}, a quarter of the free memory, and "
            first = f" beside the {pinned:,} tokens of --system" if pinned else ""
            shorter = "say less in --system, or " if pinned else ""
            raise WeirError(
                f"{policy} does not fit into {memory}{most:,} slot{'' if most == 1 else 's'}, what "
                f"the model's window leaves{first}; {shorter}give it a budget of its own"
            )
        wanted = parse_policy(with_budget(policy, budget))
        sized = f", chosen by the model's window and the free memory: {budget:,} slots"
    if not pinned or isinstance(wanted, Recompute):
        return wanted, sized
    if any(pipe.slots is None or pipe.needs_marks for pipe in wanted.pipes):
        return wanted, sized  # it evicts nothing, or keeps the beginning by itself
    return Pinned(wanted, pinned, header), f"{sized}, and {pinned} for what it was told first"


def _describe(policy: Policy, sized: str) -> str:
    """Describe a policy that nobody named, by its file if it comes from one beside the model."""
    file = None if policy.origin is None else policy.origin.file
    return f"{policy.brief}{sized}" if file is None else f"{file}, which lies with it{sized}"


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
            say("weir: that line is not UTF-8")


def _write(answer: Iterator[str], interrupt: Interrupt) -> None:
    """Write an answer piece by piece, until it ends or is interrupted."""
    for piece in answer:
        sys.stdout.write(piece)
        sys.stdout.flush()
        if interrupt:
            break
    sys.stdout.write("\n")
    sys.stdout.flush()


def _tell_state(conversation: Conversation) -> None:
    report = conversation.stream.report()
    held = [layer["held"] for layer in report.get("layers", ())]
    slots = f"{max(held):,} slots, " if held else ""
    messages().print(
        f"{conversation.stream.seen:,} tokens seen, {slots}{size(conversation.stream.nbytes)}, "
        f"{conversation.rate:,.0f} tokens/s",
        style="dim",
        highlight=False,
    )


def _command(conversation: Conversation, line: str) -> bool:
    """Run a slash command; return False to leave."""
    from weir.policies import expand_home

    word, _, rest = line.partition(" ")
    if word in ("/quit", "/exit"):
        return False
    if word in ("/save", "/load") and not rest.strip():
        raise WeirError(f"{word} needs a file: {word} FILE")
    file = expand_home(rest.strip() if word in ("/save", "/load") else "")
    if word == "/save":
        conversation.stream.save(file)
        say(f"saved to {file}")
    elif word == "/load":
        conversation.load(file)
        say(f"{conversation.stream.seen:,} tokens seen before")
    elif word == "/report":
        _report(conversation)
    elif word == "/help":
        say(HELP)
    else:
        raise WeirError(f"there is no command {word}; /help lists them")
    return True


def _report(conversation: Conversation) -> None:
    stream = conversation.stream
    report = stream.report()
    say(f"{stream.policy.brief}: {stream.seen:,} tokens seen, {size(report['bytes'])}")
    for index, layer in enumerate(report.get("layers", ())):
        say(f"layer {index}: {_held(layer['slots'])}; {size(layer['bytes'])}")


def _held(slots: dict[str, int]) -> str:
    """Describe a layer's slots by pool; before the first fold no pool holds anything."""
    if not any(slots.values()):
        return "nothing yet"
    if not any(count for name, count in slots.items() if name != "new"):
        return f"{slots['new']} new, which wait for the first fold"
    return ", ".join(f"{name} {n}" for name, n in slots.items() if n or name == "new")
