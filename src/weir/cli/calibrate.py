"""`weir calibrate`: measure each layer's slots on a text, and write a policy file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from weir.cli import options
from weir.cli.app import command
from weir.cli.common import (
    RemainingTime,
    in_lines,
    in_words,
    print_json,
    print_line,
    print_table,
    show_progress,
    size,
)
from weir.cli.loading import Loading, load_model, loads_model
from weir.errors import WeirError

if TYPE_CHECKING:
    from weir.evals.calibration import Calibration


@command()
@loads_model()
def calibrate(
    text: options.TextPath,
    out: Annotated[
        Path | None,
        Option(
            help="The .toml file to write the policy to [required, except with --gates, which "
            "does not use it]"
        ),
    ] = None,
    model_name: options.ModelName = "nano",
    policy: options.PolicyText = options.DEFAULT,
    budget: options.Budget = None,
    memory: Annotated[
        str | None,
        Option(help="Instead of a budget, memory for the cache of one stream, such as 2GB."),
    ] = None,
    splits: Annotated[
        bool,
        Option("--splits", help="Also measure what share of the slots the newest tokens need."),
    ] = False,
    gates: Annotated[
        bool,
        Option(
            "--gates",
            help="Train and save the gates of the pool 'gated', instead of measuring layers.",
        ),
    ] = False,
    tokens: Annotated[
        int | None,
        Option(
            min=2,
            help="Number of tokens to measure on [default: eight passages, each eight times as "
            "long as the average number of slots, but no longer than the model's window; with "
            "--gates, 16,384]",
        ),
    ] = None,
    chunk: options.Chunk = 64,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    *,
    loading: Loading,
) -> None:
    """Measure how many slots each layer needs, and write them to a policy file.

    All layers together take at most as many bytes as under the given policy. With --gates, train
    the gates of the pool 'gated' instead. They are saved in weir's cache folder under a fingerprint
    of the model's weights. weir finds them there for every model with the same weights.
    """
    from weir.cache import read_bytes
    from weir.evals import calibration
    from weir.evals.fitting import fit_to_memory
    from weir.policies import parse_policy

    if gates:
        _train(text, model_name, tokens, loading, as_json=as_json)
        return
    if out is None:
        raise WeirError("calibrate needs a file to write the policy to. Use --out weir.toml.")
    calibration.check_path(out)
    if budget is not None and memory is not None:
        raise WeirError(
            "--budget and --memory both set the size of the cache. Give only one of them."
        )
    wanted = options.with_given_budget(policy, budget)
    room = None if memory is None else read_bytes(memory)
    parse_policy(wanted)  # refused before a model is loaded
    model, tokenizer = load_model(model_name, loading)
    if room is not None:
        wanted, _ = fit_to_memory(model, policy, room, chunk)
    with show_progress("measuring", 1) as show:
        remaining = RemainingTime("the rest of the measurements")

        def step(share: float) -> None:
            show(completed=share)
            if in_lines() and share > 0:
                remaining.at(share)

        found = calibration.calibrate(
            model,
            tokenizer,
            str(text),
            wanted,
            tokens=tokens,
            chunk=chunk,
            seed=seed,
            splits=splits,
            on_step=step,
        )
    found.write(out)
    if as_json:
        _print_json(model_name, out, found)
    else:
        _print(out, found)


def _train(
    text: Path, model_name: str, tokens: int | None, loading: Loading, *, as_json: bool
) -> None:
    """Train the gates of a model, and save them where caches look for them."""
    from weir.evals.gates import TOKENS, train_gates
    from weir.models import describe, save_gates

    model, tokenizer = load_model(model_name, loading)
    with show_progress("training", 1) as show:
        given = model, tokenizer, str(text)
        most = tokens or TOKENS
        found = train_gates(*given, tokens=most, on_step=lambda share: show(completed=share))
    facts = describe(model)
    path = save_gates(facts.decoder, facts.config, found.gates)
    names = ("layer", "explained", "copying")
    rows = [(layer, share, found.copying[layer]) for layer, share in found.explained.items()]
    if as_json:
        layers = [dict(zip(names, row, strict=True)) for row in rows]
        read = {"model": model_name, "file": str(path), "tokens": found.tokens}
        print_json({**read, "layers": layers})
        return
    from rich.table import Table

    table = Table()
    for head in ("layer", "variance explained", "most copying"):
        table.add_column(head, justify="right")
    for layer, share, copying in rows:
        table.add_row(str(layer), f"{share:.2f}", f"{copying:.2f}")
    print_table(table)
    print_line(
        f"{path}: gates trained on {found.tokens:,} tokens. Most copying is the largest mean score "
        "of a layer's heads, near 1 for a head that copies earlier text."
    )


def _print_json(model_name: str, out: Path, found: Calibration) -> None:
    before, after = found.errors
    print_json(
        {
            "model": model_name,
            "file": str(out),
            "policy": str(found.policy),
            "calibrated": found.asked,
            "bytes": found.nbytes,
            "bytes_before": found.before,
            "error": after,
            "error_before": before,
            "tokens": found.passages * found.length,
            "layers": [
                {
                    "policy": layer.pipe.stands_for,
                    "slots": layer.pipe.slots,
                    "bytes": layer.nbytes,
                    "error": layer.error,
                    "error_before": layer.before,
                    "tried": layer.tried,
                }
                for layer in found.layers
            ],
        }
    )


def _print(out: Path, found: Calibration) -> None:
    from rich.table import Table

    table = Table()
    for head in ("layer", "slots", "cache", "error", "before"):
        table.add_column(head, justify="right")
    table.add_column("policy")
    for layer in found.layers:
        errors = f"{layer.error:.3f}", f"{layer.before:.3f}"
        row = (f"{layer.pipe.slots:,}", size(layer.nbytes), *errors)
        table.add_row(str(layer.index), *row, layer.pipe.stands_for)
    print_table(table)
    before, after = found.errors
    print_line(
        f"{out}: mean error of attention {after:.3f} (before: {before:.3f}, under {found.asked}); "
        f"{size(found.nbytes)} of cache for one stream (before: {size(found.before)}); measured "
        f"on {in_words(found.passages, 'passage')} of {found.length:,} tokens"
    )
