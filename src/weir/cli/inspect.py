"""`weir inspect`: draw figures about a model's attention, most of them as in papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from weir.cli import options
from weir.cli.app import command
from weir.cli.common import in_words, print_json, print_line, say, show_progress
from weir.cli.loading import Loading, load_model, loads_model
from weir.errors import WeirError


@command()
@loads_model()
def inspect(
    text: Annotated[
        Path | None,
        Option(
            help="The text: UTF-8, plain or .xz; - for standard input [default: the beginning of "
            "War and Peace, 26,500 words]"
        ),
    ] = None,
    model_name: options.ModelName = "nano",
    out: Annotated[Path, Option(help="Folder for index.html and the pictures.")] = Path("inspect"),
    only: Annotated[
        str, Option(help="Comma-separated sections to draw, such as maps,kept [default: all]")
    ] = "",
    layers: Annotated[
        str,
        Option(help="Comma-separated layers to show, such as 0,5 [default: set by each section]"),
    ] = "",
    heads: Annotated[
        str,
        Option(
            help="Comma-separated query heads to show, such as 0,1 [default: set by each section]"
        ),
    ] = "",
    policy: Annotated[
        str | None,
        Option(
            help="Policy to show in the section 'kept': a named policy or a pipe of pools "
            "[default: sink(4) | recent(60) | heavy(64), or weir if you give --budget]"
        ),
    ] = None,
    budget: options.Budget = None,
    sequences: Annotated[
        int, Option(min=1, help="Number of short sequences to average maps over.")
    ] = 256,
    length: Annotated[int, Option(min=1, help="Tokens of each short sequence.")] = 16,
    tokens: Annotated[
        int | None,
        Option(min=2, help="The most tokens to read of a long text [default: set by each section]"),
    ] = None,
    at: Annotated[
        str,
        Option(
            help="Numbers of tokens after which to show what is kept, such as 100,500 [default: "
            "after each quarter of the text]"
        ),
    ] = "",
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    *,
    loading: Loading,
) -> None:
    """Show a model's attention maps, sinks, keys and norms, and what a policy keeps, on one page.

    The sections are maps, shares, layers, keys, norms and kept. Most of them reproduce figures of
    the papers on StreamingLLM, SubGen and BalanceKV. The page docs/inspect.md describes each.
    """
    from weir.evals.inspect import (
        Inspection,
        InspectionPage,
        check_places,
        look,
        select_sections,
        sizes,
    )
    from weir.policies import parse_policy
    from weir.stream import BOOK, read_books

    names = [name.strip() for name in only.split(",") if name.strip()]
    select_sections(names)
    if policy is not None or budget is not None:
        policy = options.with_given_budget(policy or options.DEFAULT, budget)
        parse_policy(policy)
    which = options.numbers("--layers", layers), options.numbers("--heads", heads)
    words = "\n\n".join(read_books(BOOK if text is None else text))
    model, tokenizer = load_model(model_name, loading, encoders=True)
    check_places(model, *which)
    inspection = Inspection(
        model,
        tokenizer,
        model_name,
        words,
        layers=tuple(dict.fromkeys(which[0])) or None,
        heads=tuple(dict.fromkeys(which[1])) or None,
        policy=policy,
        sequences=sequences,
        length=length,
        tokens=tokens,
        moments=tuple(options.numbers("--at", at)) or None,
        seed=seed,
    )
    title = "the beginning of War and Peace" if text is None else text.name
    layer_count, head_count = sizes(model)
    kind = model.config.model_type
    heads = in_words(head_count, "query head")
    about = f"{model_name} ({kind}): {in_words(layer_count, 'layer')}, {heads} in each."
    page = InspectionPage(out, f"A look into {model_name}", f"{about} The text is {title}.")
    with show_progress("") as show:

        def step(name: str, done: int, of: int) -> None:
            show(description=name, completed=done, total=of)

        for found in look(inspection, names, step):
            if isinstance(found, tuple):
                page.leave_out(found[0], str(found[1]))
            else:
                page.add(found)
    if not page.sections:
        raise WeirError(next(iter(page.left_out.values())))
    for name, why in page.left_out.items():
        say(f"weir: {name} is left out: {why}")
    if as_json:
        print_json(
            {
                "model": model_name,
                "text": None if text is None else str(text),
                "seed": seed,
                "sections": {section.name: section.facts for section in page.sections},
                "left_out": page.left_out,
                "files": [str(path) for path in page.files],
            }
        )
        return
    for path in page.files:
        print_line(path)
