"""`weir chat`: a conversation in the terminal, without end."""

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
    Chunk,
    Interrupt,
    ModelName,
    PolicyText,
    Seed,
    SlotsName,
    interruptible,
    load_model,
    messages,
    say,
    size,
    with_products,
)
from weir.errors import WeirError

if TYPE_CHECKING:
    from weir.stream import Conversation

HELP = """/report        what the cache holds, layer by layer
/save FILE     write the conversation to a file
/load FILE     go on with a saved one
/help          this
/quit          leave; so does Ctrl-D. Ctrl-C stops an answer"""


@command()
def chat(
    model_name: ModelName = "nano",
    policy: PolicyText = "streaming_llm(budget=256)",
    slots: SlotsName = "exact",
    chunk: Chunk = 64,
    seed: Seed = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 for the likeliest token.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest that make up this.")
    ] = 0.95,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 256,
    session: Annotated[
        Path | None, typer.Option(help="A saved conversation to go on with.")
    ] = None,
) -> None:
    """Talk to a model for as long as you like; the cache stays as large as it is."""
    from weir.policies import policy_of, with_slots
    from weir.stream import Conversation, Stream

    wanted = with_slots(policy_of(policy), slots)
    model, tokenizer = load_model(model_name)
    conversation = Conversation(
        Stream(with_products(model), wanted, chunk=chunk, seed=seed), tokenizer
    )
    if session is not None:
        conversation.load(session)
    kind = "" if tokenizer.chat_template else "; it has no chat template and continues your text"
    say(f"{model_name} under {conversation.stream.policy}{kind}. /help for help.")
    if session is not None:
        say(f"{conversation.stream.seen:,} tokens seen before")
    with interruptible(noted=math.inf) as interrupt:
        while (line := _read_line(interrupt)) is not None:
            try:
                if line.startswith("/"):
                    with interrupt.noting(0):
                        if not _command(conversation, line.strip()):
                            return
                elif line.strip():
                    answer = conversation.say(
                        line, max_new_tokens=max_tokens, temperature=temperature, top_p=top_p
                    )
                    with interrupt.noting(1):
                        _write(answer, interrupt)
                    _tell_state(conversation)
            except WeirError as error:
                say(f"weir: {error}")
            except KeyboardInterrupt:
                # Within a fold, perhaps: then the stream says so itself.
                say(f"interrupted{'; nothing has changed' if line.startswith('/') else ''}")


def _read_line(interrupt: Interrupt) -> str | None:
    """The next line; None at the end of the input. Ctrl-C at the prompt starts a new line."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then edits lines and remembers them)
    while True:
        try:
            with interrupt.noting(0):
                if terminal:
                    return input("> ")
                # Bytes, so that a line that is not UTF-8 spoils no other.
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
    """Each piece as it comes, until it ends or is interrupted."""
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
    """Carry out a command; False to leave."""
    word, _, rest = line.partition(" ")
    file = Path(rest.strip()).expanduser()
    if word in ("/quit", "/exit"):
        return False
    if word in ("/save", "/load") and not rest.strip():
        raise WeirError(f"{word} needs a file: {word} FILE")
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
    report = conversation.stream.report()
    say(f"{report['policy']}: {conversation.stream.seen:,} tokens seen, {size(report['bytes'])}")
    for index, layer in enumerate(report.get("layers", ())):
        held = ", ".join(f"{name} {count}" for name, count in layer["slots"].items())
        say(f"layer {index}: {held}; {size(layer['bytes'])}")
