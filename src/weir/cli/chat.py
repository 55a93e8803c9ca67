"""`weir chat`: a conversation in the terminal, without end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weir.cli import app
from weir.cli.common import Chunk, Model, PolicyText, Seed, interruptible, messages, output, size
from weir.errors import WeirError

if TYPE_CHECKING:
    from weir.chat import Conversation

HELP = """/report        what the cache holds, layer by layer
/save FILE     write the conversation to a file
/load FILE     go on with a saved one
/help          this
/quit          leave; so does Ctrl-D. Ctrl-C stops an answer"""


@app.command()
def chat(
    model: Model = "nano",
    policy: PolicyText = "streaming_llm(budget=256)",
    chunk: Chunk = 64,
    seed: Seed = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 for the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.95,
    most: Annotated[int, typer.Option("--max-tokens", min=1, help="Of one answer.")] = 256,
    session: Annotated[
        Path | None, typer.Option(help="A saved conversation to go on with.")
    ] = None,
) -> None:
    """Talk to a model for as long as you like; the cache stays as large as it is."""
    from weir.chat import Conversation
    from weir.load import load
    from weir.policy import policy_of
    from weir.stream import Stream

    wanted = policy_of(policy)
    reader, tokenizer = load(model)
    talk = Conversation(Stream(reader, wanted, chunk=chunk, seed=seed), tokenizer)
    if session is not None:
        talk.load(session)
    kind = "" if tokenizer.chat_template else "; it has no chat template and continues your text"
    messages.print(f"{model} under {talk.stream.policy}{kind}. /help for help.", markup=False)
    while (line := _ask()) is not None:
        if line.startswith("/"):
            try:
                if not _command(talk, line):
                    return
            except WeirError as error:
                messages.print(f"weir: {error}", markup=False)
        elif line.strip():
            _answer(talk, line, most, temperature, top_p)


def _ask() -> str | None:
    """The next line; None at the end of the input. Ctrl-C at the prompt starts a new line."""
    while True:
        try:
            if sys.stdin.isatty():
                return input("> ")
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        except EOFError:
            return None
        except KeyboardInterrupt:
            messages.print()
        except UnicodeDecodeError:
            messages.print("weir: that line is not UTF-8")


def _answer(talk: Conversation, line: str, most: int, temperature: float, top_p: float) -> None:
    with interruptible() as interrupt:
        answer = talk.say(line, most=most, temperature=temperature, top_p=top_p)
        try:
            for piece in answer:
                output.file.write(piece)
                output.file.flush()
                if interrupt:
                    break
        except WeirError as error:
            messages.print(f"weir: {error}", markup=False)
    output.file.write("\n")
    output.file.flush()
    report = talk.stream.report()
    held = (
        "" if not report.get("layers") else f"{sum(report['layers'][0]['slots'].values())} slots, "
    )
    messages.print(
        f"[dim]{talk.stream.seen:,} tokens seen, {held}{size(talk.stream.nbytes)}, "
        f"{talk.rate:.0f} tokens/s[/dim]"
    )


def _command(talk: Conversation, line: str) -> bool:
    """Carry out a command; False to leave."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    if word in ("/quit", "/exit"):
        return False
    if word in ("/save", "/load") and not rest:
        raise WeirError(f"{word} needs a file: {word} FILE")
    if word == "/save":
        talk.stream.save(rest)
        messages.print(f"saved to {rest}", markup=False)
    elif word == "/load":
        talk.load(rest)
        messages.print(f"{talk.stream.seen:,} tokens seen before", markup=False)
    elif word == "/report":
        _report(talk)
    elif word == "/help":
        messages.print(HELP, markup=False)
    else:
        raise WeirError(f"there is no command {word}; /help lists them")
    return True


def _report(talk: Conversation) -> None:
    report = talk.stream.report()
    messages.print(
        f"{report['policy']}: {talk.stream.seen:,} tokens seen, {size(report['bytes'])}",
        markup=False,
    )
    for index, layer in enumerate(report.get("layers", ())):
        held = ", ".join(f"{name} {count}" for name, count in layer["slots"].items())
        messages.print(f"layer {index}: {held}; {size(layer['bytes'])}", markup=False)
