"""Runs the sections of `weir inspect` and writes them as one page.

The page needs no network and grows while the remaining sections are computed.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from weir import __version__
from weir.errors import WeirError
from weir.evals.inspect import kept, keys, layers, maps, norms
from weir.evals.inspect.section import Inspection, Section
from weir.evals.report import html_page, render

SECTIONS: dict[str, Callable[[Inspection], Section]] = {
    "maps": maps.section,
    "shares": maps.shares_section,
    "layers": layers.section,
    "keys": keys.section,
    "norms": norms.section,
    "kept": kept.section,
}
"""The sections, in the order of the page."""


def select_sections(only: Sequence[str] = ()) -> list[str]:
    """Select sections by name, in the order of the page; all if none is named."""
    for name in only:
        if name not in SECTIONS:
            raise WeirError(f"unknown section {name!r}. Use one of {', '.join(SECTIONS)}.")
    return [name for name in SECTIONS if not only or name in only]


def look(
    asked: Inspection,
    only: Sequence[str] = (),
    on_step: Callable[[str, int, int], None] | None = None,
) -> Iterator[Section | tuple[str, WeirError]]:
    """Yield each section, or the name of a section that is impossible for this input, with the
    reason.

    Args:
        asked: the model, text and choices.
        only: names of sections; empty for all. A WeirError if there is no such section.
        on_step: called with the section's name, the steps done and the steps in all.
    """
    reasons: dict[str, str] = {}
    for name in select_sections(only):
        mine = asked if on_step is None else replace(asked, on_step=partial(on_step, name))
        try:
            yield SECTIONS[name](mine)
        except WeirError as error:
            # A long reason, such as the list of supported models, appears once.
            first = reasons.setdefault(str(error), name)
            yield name, error if first == name else WeirError(f"for the same reason as {first}")


def sizes(model: PreTrainedModel) -> tuple[int, int]:
    """Return the number of layers of any model, and of query heads in each; 0 heads if it has no
    attention.
    """
    config = model.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 0)
    return int(layers), int(getattr(config, "num_attention_heads", 0) or 0)


def check_places(model: PreTrainedModel, layers: Sequence[int], heads: Sequence[int]) -> None:
    """Refuse layers and heads that a model does not have."""
    for name, wanted, count in zip(("layer", "head"), (layers, heads), sizes(model), strict=True):
        for number in wanted:
            if not 0 <= number < count:
                known = f"'s {name}s are 0 to {count - 1}" if count else f" has no {name}s"
                raise WeirError(f"{name} {number} does not exist. The model{known}")


DPI = 160


class InspectionPage:
    """A page in a folder.

    Args:
        out: the folder, created if missing; WeirError if that fails.
        title, facts: title of the page, and one sentence about the model and the text.

    Attributes:
        files: files written so far, the page first.
        sections: sections on the page.
        left_out: the reason for each section that was left out, by the section's name.
    """

    def __init__(self, out: Path, title: str, facts: str) -> None:
        if out.exists() and not out.is_dir():
            raise WeirError(f"{out} is a file, and --out must be a folder. Use another name.")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WeirError(f"cannot make the folder {out}: {error.strerror}") from None
        self.out, self.title, self.facts = out, title, facts
        self.files = [out / "index.html"]
        self.sections: list[Section] = []
        self.left_out: dict[str, str] = {}
        self._parts: list[Section | str] = []
        self._images: dict[str, str] = {}

    def add(self, section: Section) -> None:
        """Put a section on the page. Write its pictures and the page; WeirError if that fails."""
        self.sections.append(section)
        self._parts.append(section)
        for picture in section.pictures:
            target = io.BytesIO()
            # Without the program's name and version, the same figures produce the same file.
            picture.figure.savefig(target, format="png", dpi=DPI, metadata={"Software": None})
            self._save(self.out / f"{picture.name}.png", target.getvalue())
            self._images[picture.name] = base64.b64encode(target.getvalue()).decode("ascii")
        self._write()

    def leave_out(self, name: str, why: str) -> None:
        """Note on the page that a section is left out, and why. A page is written only if it has a
        section.
        """
        self.left_out[name] = why
        self._parts.append(name)
        if self.sections:
            self._write()

    def _write(self) -> None:
        body = render("inspect/page.html", page=self, parts=self._parts, images=self._images)
        footer = (
            f"Made by <code>weir inspect</code>, weir {__version__}. Every picture is a file next "
            "to this page."
        )
        style = "figure { margin: 1rem 0; }\n" + "\n".join(s.style for s in self.sections)
        page = html_page(self.title, body, footer, style=style)
        self._save(self.files[0], page.encode("utf-8"))

    def _save(self, path: Path, content: bytes) -> None:
        try:
            path.write_bytes(content)
        except OSError as error:
            raise WeirError(f"cannot write {path}: {error.strerror}") from None
        if path not in self.files:
            self.files.append(path)
