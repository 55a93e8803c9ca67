"""The page of `weir inspect`: its text, which is escaped, and the files next to it."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from weir.errors import WeirError
from weir.evals.inspect import InspectionPage, Picture, Section
from weir.evals.inspect.section import drawing
from weir.evals.report import TextTable


def a_picture(name: str = "one") -> Picture:
    with drawing(2) as figure:
        figure.subplots().plot([1, 2])
    return Picture(name, figure, 'a line < "two"')


def a_section(**more: object) -> Section:
    given = {"name": "first", "title": "A < B", "text": "x & y", "pictures": (a_picture(),), **more}
    return Section(**given)


def test_a_page_holds_its_pictures_and_they_lie_beside_it(tmp_path: Path) -> None:
    page = InspectionPage(tmp_path / "out", "A look", "Facts.")
    page.add(a_section())
    text = (tmp_path / "out" / "index.html").read_text("utf-8")
    beside = (tmp_path / "out" / "one.png").read_bytes()
    (inside,) = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert beside.startswith(b"\x89PNG") and base64.b64decode(inside) == beside
    assert page.files == [tmp_path / "out" / "index.html", tmp_path / "out" / "one.png"]
    assert not re.search(r'(src|href)="(?!data:|#)', text), "the page needs a network"


def test_all_text_is_escaped_but_for_fragments(tmp_path: Path) -> None:
    page = InspectionPage(tmp_path, "A <look>", "<i>")
    table = TextTable(("<h>",), (("<cell>",),))
    page.add(a_section(table=table, fragment="<em>it</em>", style="em { color: var(--ink); }"))
    page.leave_out("<name>", "a < b")
    text = (tmp_path / "index.html").read_text("utf-8")
    for escaped in ("A &lt;look&gt;", "&lt;i&gt;", "A &lt; B", "x &amp; y", "&lt;h&gt;"):
        assert escaped in text
    for escaped in ("&lt;cell&gt;", "&lt; &#34;two&#34;", "&lt;name&gt;", "a &lt; b"):
        assert escaped in text
    assert "<em>it</em>" in text
    assert "em { color: var(--ink); }" in text.partition("</style>")[0]


def test_a_page_grows_and_says_what_is_left_out(tmp_path: Path) -> None:
    page = InspectionPage(tmp_path, "A look", "Facts.")
    page.leave_out("early", "too short")
    assert not page.files[0].exists()
    page.add(a_section())
    assert "Left out: too short." in page.files[0].read_text("utf-8")
    page.add(a_section(name="second", pictures=(a_picture("two"),)))
    text = page.files[0].read_text("utf-8")
    assert text.index('id="first"') < text.index('id="second"')
    assert [path.name for path in page.files] == ["index.html", "one.png", "two.png"]
    assert page.left_out == {"early": "too short"}


def test_the_same_figures_make_the_same_files(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        InspectionPage(tmp_path / folder, "A look", "Facts.").add(a_section())
    one, other = ((tmp_path / folder / "index.html").read_bytes() for folder in "ab")
    assert one == other


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeirError, match="is a file, and --out must be a folder"):
        InspectionPage(tmp_path / "file", "A look", "Facts.")
