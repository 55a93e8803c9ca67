"""The page of `weir inspect`: sections one below the other, their pictures inside and beside it.

It needs no network, and grows: what is done is on it while other sections are still computed.
"""

from __future__ import annotations

import base64
import html
import io
from importlib import resources
from pathlib import Path
from string import Template

from weir import __version__
from weir.errors import WeirError
from weir.evals.inspect.section import Picture, Section, Table

DPI = 160


class Page:
    """A page in a folder.

    Args:
        out: the folder, made if need be.
        title: of the page.
        facts: what was looked at, in a sentence.

    Attributes:
        files: what has been written, the page first.
        sections: what is on it.
        left_out: by section that could not be had, why.

    Raises:
        WeirError: the folder cannot be made.
    """

    def __init__(self, out: Path, title: str, facts: str) -> None:
        if out.exists() and not out.is_dir():
            raise WeirError(f"{out} is a file, and --out is the folder of a page; name another")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WeirError(f"cannot make the folder {out}: {error.strerror}") from None
        self.out = out
        self.title = title
        self.facts = facts
        self.files = [out / "index.html"]
        self.sections: list[Section] = []
        self.left_out: dict[str, str] = {}
        self._parts: list[str] = []
        self._links: list[str] = []

    def add(self, section: Section) -> None:
        """Put a section on the page, and write both.

        Raises:
            WeirError: a file cannot be written.
        """
        self.sections.append(section)
        parts = [
            f'<h2 id="{html.escape(section.name)}">{html.escape(section.title)}</h2>',
            f"<p>{html.escape(section.text)}</p>",
        ]
        for picture in section.pictures:
            parts.append(self._picture(picture))
        if section.fragment:
            parts.append(section.fragment)
        if section.table is not None:
            parts.append(_as_html(section.table))
        self._links.append(
            f'<a href="#{html.escape(section.name)}">{html.escape(section.title)}</a>'
        )
        self._parts.append("\n".join(parts))
        self._write()

    def leave_out(self, name: str, why: str) -> None:
        """Say on the page that a section could not be had, and why.

        The page is written if there is something on it.

        Raises:
            WeirError: a file cannot be written.
        """
        self.left_out[name] = why
        self._parts.append(
            f'<h2 id="{html.escape(name)}">{html.escape(name)}</h2>\n'
            f'<p class="out">Left out: {html.escape(why)}.</p>'
        )
        if self.sections:
            self._write()

    def _picture(self, picture: Picture) -> str:
        target = io.BytesIO()
        # Without the name and version of the program, the same figures make the same file.
        picture.figure.savefig(target, format="png", dpi=DPI, metadata={"Software": None})
        self._save(self.out / f"{picture.name}.png", target.getvalue())
        inside = base64.b64encode(target.getvalue()).decode("ascii")
        alt = html.escape(picture.alt)
        return f'<figure><img src="data:image/png;base64,{inside}" alt="{alt}"></figure>'

    def _write(self) -> None:
        page = Template((resources.files("weir.evals.inspect") / "page.html").read_text("utf-8"))
        text = page.substitute(
            title=html.escape(self.title),
            facts=html.escape(self.facts),
            links="".join(self._links),
            style="\n".join(section.style for section in self.sections if section.style),
            body="\n".join(self._parts),
            version=__version__,
        )
        self._save(self.files[0], text.encode("utf-8"))

    def _save(self, path: Path, content: bytes) -> None:
        try:
            path.write_bytes(content)
        except OSError as error:
            raise WeirError(f"cannot write {path}: {error.strerror}") from None
        if path not in self.files:
            self.files.append(path)


def _as_html(table: Table) -> str:
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in table.heads)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="scroll"><table>\n<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )
