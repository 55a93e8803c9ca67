"""All sections, one after the other, of one model and one text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from transformers import PreTrainedModel

from weir.errors import WeirError
from weir.evals.inspect import kept, keys, layers, maps, norms, shares
from weir.evals.inspect.section import Asked, Section

SECTIONS: dict[str, Callable[[Asked], Section]] = {
    "maps": maps.section,
    "shares": shares.section,
    "layers": layers.section,
    "keys": keys.section,
    "norms": norms.section,
    "kept": kept.section,
}
"""In the order of the page."""


def chosen(only: Sequence[str] = ()) -> list[str]:
    """The sections that were asked for, in the order of the page; all if none is named.

    Raises:
        WeirError: there is no such section.
    """
    for name in only:
        if name not in SECTIONS:
            raise WeirError(f"there is no section {name!r}; the sections are {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if not only or name in only]


def look(
    asked: Asked,
    only: Sequence[str] = (),
    on_step: Callable[[str, int, int], None] | None = None,
) -> Iterator[Section | tuple[str, WeirError]]:
    """Each section, or its name and why it cannot be had for this model and text.

    Args:
        asked: what is to be looked at.
        only: the sections; none for all.
        on_step: told the section's name, how many of its steps are done, and of how many.

    Raises:
        WeirError: there is no such section.
    """
    told: dict[str, str] = {}
    for name in chosen(only):
        mine = asked
        if on_step is not None:
            mine = replace(asked, on_step=partial(on_step, name))
        try:
            yield SECTIONS[name](mine)
        except WeirError as error:
            # A long sentence, such as the list of what weir serves, is said once.
            first = told.setdefault(str(error), name)
            yield name, error if first == name else WeirError(f"for the same reason as {first}")


def sizes(model: PreTrainedModel) -> tuple[int, int]:
    """(layers, query heads of each) of any model; 0 heads where it has no attention."""
    config = model.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 0)
    return int(layers), int(getattr(config, "num_attention_heads", 0) or 0)


def check_places(model: PreTrainedModel, layers: Sequence[int], heads: Sequence[int]) -> None:
    """Refuse layers and heads that a model does not have.

    Raises:
        WeirError: naming the first.
    """
    for name, wanted, count in zip(("layer", "head"), (layers, heads), sizes(model), strict=True):
        for number in wanted:
            if not 0 <= number < count:
                raise WeirError(
                    f"{name} {number} does not exist; the model's {name}s are 0 to {count - 1}"
                    if count
                    else f"{name} {number} does not exist; the model has no {name}s"
                )
