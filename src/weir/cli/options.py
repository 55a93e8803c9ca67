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
    Positions,
    Option(help="Positions of tokens: counted in the cache (rolling) or in the stream (original)."),
]
ModelName = Annotated[
    str, Option("--model", help="nano, smollm2, a folder, a .gguf file, or a Hub id.")
]
TextPath = Annotated[
    Path, Option("--text", help="The text file: UTF-8, plain or .xz; - for standard input.")
]
POLICY_FORMS = (
    "A named policy, a pipe of pools such as 'sink(4) | recent(252)', or a .toml file that weir "
    "calibrate wrote; see `weir policies`"
)
"""Help about what `--policy` accepts."""
SLOT_FORMATS = (
    "Format of all slots but those of the first and the newest tokens: exact, int8, int4, k8v4 or "
    "fp8"
)
"""Help about what `--slots` accepts."""
PolicyText = Annotated[str, Option(help=f"{POLICY_FORMS}.")]
Budget = Annotated[
    int | None,
    Option(
        "--budget",
        min=1,
        help="Number of slots that the policy keeps, as in --policy h2o --budget 512.",
    ),
]
Chunk = Annotated[
    int,
    Option(
        min=1,
        help="Number of new tokens to read before the policy chooses again which tokens to keep.",
    ),
]
PolicyChunk = Annotated[
    int | None,
    Option(
        "--chunk",
        min=1,
        help="Number of new tokens to read before the policy chooses again which tokens to keep "
        "[default: 64, or what a policy file was measured with]",
    ),
]
Seed = Annotated[int, Option(min=0, help="Seed of all random draws.")]
SlotsName = Annotated[
    str | None,
    Option(
        "--slots",
        help=f"{SLOT_FORMATS} [default: set by the policy]",
    ),
]
Compile = Annotated[
    bool,
    Option(
        "--compile",
        help="Run decode steps faster: natively on a CPU, under torch.compile on a GPU.",
    ),
]
CompileOnGPU = Annotated[
    bool, Option("--compile", help="On a GPU, run decode steps under torch.compile.")
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object and nothing else.")]
DEFAULT = "weir"
"""The default policy. It is repeated here because importing its definition would import PyTorch."""
CHUNK = 64
"""The default chunk, repeated for the same reason."""


def with_given_budget(policy: str, budget: int | None) -> str:
    """Return a policy with `--budget` slots. Refuse a policy that has a budget or takes none."""
    if budget is None:
        return policy
    from weir.evals.notation import with_budget

    return with_budget(policy, budget)


def model_or_none(argument: str | None, option: str | None) -> str | None:
    """Return the model as `one_model` does, but None if no model is named."""
    if argument is not None and option is not None:
        raise BadParameter(f"two models are named: {argument} and --model {option}. Name only one.")
    return option if argument is None else argument


def one_model(argument: str | None, option: str | None) -> str:
    """Return the model of a command that takes it as an argument or as `--model`, but not both."""
    if not (found := model_or_none(argument, option)):
        raise BadParameter(
            "Missing argument 'MODEL'. Use nano, smollm2, a folder, a .gguf file or a Hub id."
        )
    return found


def was_given(context: Context, name: str) -> bool:
    """Return whether an option was typed, even with its default value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def say_unused(context: Context, names: Iterable[str], why: str) -> None:
    """Report which of some options were typed but have no effect. `why` ends the sentence."""
    typed = [f"--{name.replace('_', '-')}" for name in names if was_given(context, name)]
    if typed:
        *first, last = typed
        listed = f"{', '.join(first)} and {last}" if first else last
        say(f"{listed} {'have' if first else 'has'} no effect: {why}")


def numbers(option: str, text: str, least: int = 0) -> list[int]:
    """Parse the value of an option: comma-separated whole numbers, each at least `least`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise BadParameter(
            f"{option} must be whole numbers of at least {least}, separated by commas, got {text!r}"
        )
    return [int(word) for word in words]
