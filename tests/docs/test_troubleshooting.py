"""The page of errors quotes weir's messages, and all that AGENTS.md and llms.txt name exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import weir
import weir.errors
from weir.cli.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
QUOTED = re.findall(r"\*\*`([^`]+)`\*\*", PAGE)
MESSAGES = [text for text in QUOTED if not hasattr(weir.errors, text)]


@cache
def said() -> list[str]:
    """All strings of the source except docstrings.

    In f-strings, each inserted value becomes a NUL, and a count becomes a NUL and a plural noun.
    """
    found = []
    for path in sorted((ROOT / "src" / "weir").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr):  # a docstring
                node.value = ast.Constant(None)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(map(placed, node.values)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def placed(part: ast.expr) -> str:
    """The text of one part of an f-string, as `said` has it."""
    match part:
        case ast.Constant(value=text):
            return str(text)
        case ast.FormattedValue(
            value=ast.Call(func=ast.Name(id="in_words"), args=[_, ast.Constant(value=noun)])
        ):
            return f"\0 {noun}s"
    return "\0"


def pattern(quoted: str) -> re.Pattern[str]:
    """A regular expression for a message as the page quotes it, in which … is any text."""
    return re.compile(".*".join(map(re.escape, quoted.split("…"))), re.DOTALL)


@pytest.mark.slow
def test_what_the_page_quotes_is_what_weir_says() -> None:
    assert all(len(quoted.replace("…", "").split()) >= 3 for quoted in MESSAGES)
    texts = sorted(set(said()))
    stale = [q for q in MESSAGES if not any(pattern(q).fullmatch(text) for text in texts)]
    assert not stale


def test_nothing_is_quoted_twice_and_every_quotation_has_an_answer() -> None:
    assert len(QUOTED) == len(set(QUOTED)) > 40
    paragraphs = PAGE.split("\n\n")
    for this, following in zip(paragraphs, [*paragraphs[1:], ""], strict=True):
        if this.startswith("**"):
            assert not following.startswith(("**", "#")) and following.strip(), this


# --- AGENTS.md and llms.txt

FOR_PROGRAMS = ("AGENTS.md", "llms.txt")


def anchors(page: Path) -> set[str]:
    """What a link may point to in a page: its headings, as GitHub and mkdocs name them."""
    text = page.read_text("utf-8")
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    return named | set(re.findall(r'<a id="([\w-]+)">', text))


@pytest.mark.parametrize("name", FOR_PROGRAMS)
def test_every_path_that_programs_are_told_of_is_there(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) >= 8
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).is_file(), link
        assert not anchor or anchor in anchors(ROOT / path), link
    paths = re.findall(r"`([\w.-]+(?:/[\w.-]+)*(?:/|\.py|\.toml|\.md))`", text)
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("name", FOR_PROGRAMS)
def test_every_command_and_every_name_that_programs_are_told_of_is_there(name: str) -> None:
    import typer.main

    from weir.cli.app import app

    text = (ROOT / name).read_text("utf-8")
    group = typer.main.get_command(app)
    told = re.findall(r"`weir ([\w-]+)(?: (--[\w-]+))?`", text)
    assert told
    for command, option in told:
        assert command in group.commands, command
        params = group.get_command(None, command).params
        options = {opt for param in params for opt in param.opts}
        assert not option or option in options, f"{command} {option}"
    if name == "AGENTS.md":
        assert {command for command, _ in told} == set(group.commands)
    for attribute in set(re.findall(r"weir\.([A-Za-z]\w*)", text)):
        assert hasattr(weir, attribute), attribute
    targets = set(re.findall(r"`make ([\w-]+)", text))
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_policies_that_programs_are_told_of_are_policies() -> None:
    text = (ROOT / "llms.txt").read_text("utf-8")
    named = re.search(r"have names: (.*?)\.", text)
    assert named
    for name in re.findall(r"`(\w+)`", named[1]):
        weir.policy(name)
    weir.policy("sink(4) | recent(252)")
    assert callable(main)
