"""Options that several commands share, and how their values are read."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import BadParameter, Context, Option

from weir.cli.common import say


class Positions(StrEnum):
    """Values of `--positions`."""

    rolling = "rolling"
    original = "original"


PositionsName = Annotated[
    Positions, Option(help="Positions counted inside the cache, or in the stream.")
]
ModelName = Annotated[
    str, Option("--model", help="nano, smollm2, a folder, a .gguf file, or a Hub id.")
]
TextPath = Annotated[
    Path, Option("--text", help="The text: UTF-8, plain or .xz; - for standard input.")
]
PolicyText = Annotated[str, Option(help="A pipe or a named policy; see `weir policies`.")]
Budget = Annotated[
    int | None,
    Option("--budget", min=1, help="Slots that the policy keeps, as in --policy h2o --budget 512."),
]
Chunk = Annotated[
    int, Option(min=1, help="New tokens read before the policy decides again what to keep.")
]
PolicyChunk = Annotated[
    int | None,
    Option(
        "--chunk",
        min=1,
        help="New tokens read before the policy decides again what to keep [default: 64, or what a "
        "policy file was measured with]",
    ),
]
Seed = Annotated[int, Option(min=0, help="Seed of all random draws.")]
SlotsName = Annotated[
    str | None,
    Option(
        "--slots",
        help="Storage of the middle slots: exact, int8, int4, k8v4 or fp8 [default: as the policy "
        "says]",
    ),
]
Compile = Annotated[
    bool,
    Option(
        "--compile",
        help="Run decode steps by an engine: native on a CPU, torch.compile on a GPU.",
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object and nothing else.")]
DEFAULT = "weir"
"""The default policy; repeated here, since importing its definition would import PyTorch."""
CHUNK = 64
"""The default chunk, repeated for the same reason."""


def with_given_budget(policy: str, budget: int | None) -> str:
    """Return a policy with the slots of `--budget`; WeirError if it takes none, or has some."""
    if budget is None:
        return policy
    from weir.evals.notation import with_budget

    return with_budget(policy, budget)


def one_model(argument: str | None, option: str | None) -> str:
    """Return the model of a command that takes it as an argument or as `--model`, not both."""
    if argument is not None and option is not None:
        raise BadParameter(f"two models are named, {argument} and --model {option}; name one")
    if (found := argument or option) is None:
        raise BadParameter("Missing argument 'MODEL': nano, a folder, or a Hub id")
    return found


def was_given(context: Context, name: str) -> bool:
    """Return whether an option was typed, even with its default value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def say_unused(context: Context, names: Iterable[str], why: str) -> None:
    """Report those of some options that were typed but have no effect; `why` ends the sentence."""
    typed = [f"--{name.replace('_', '-')}" for name in names if was_given(context, name)]
    if typed:
        *first, last = typed
        listed = f"{', '.join(first)} and {last}" if first else last
        say(f"{listed} {'change' if first else 'changes'} nothing here: {why}")


def numbers(option: str, text: str, least: int = 0) -> list[int]:
    """Parse comma-separated whole numbers from `least` on, the value of an option."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise BadParameter(
            f"{option} takes whole numbers from {least} on with commas between them, not {text!r}"
        )
    return [int(word) for word in words]
