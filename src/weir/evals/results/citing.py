"""Finds the papers of the policies that ran, for the citations of a report and BibTeX.

The docstring of each pool's module names its paper as `Authors YEAR, "Title", arXiv:NUMBER`. The
module of your own pool can do the same, and so can the decorator `@named` of a policy, in its
argument `paper`. A field that this text lacks is left out of the BibTeX entry.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from weir import __version__
from weir.errors import WeirError

if TYPE_CHECKING:
    from weir.policies import Policy

ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
BEFORE = re.compile(r'(?:([A-Z][^()".:;]*?(?: et al\.)?) )?(20\d\d), (?:"([^"]+)", )?$')
"""Authors, year and title in front of an arXiv number."""
METHOD = re.compile(r"([A-Z][\w-]*(?: [A-Z]\w*)*) \([^()]*$")
"""A method's name in front of the parenthesis with its paper."""


@dataclass(frozen=True)
class Paper:
    """A paper on arXiv.

    Attributes:
        number: the arXiv number.
        authors: as a docstring names them; empty if it does not.
        title: as a docstring names it, otherwise the name of the method; empty if it has neither.
    """

    number: str
    authors: str = ""
    title: str = ""

    @property
    def year(self) -> str:
        """The year of the arXiv number."""
        return f"20{self.number[:2]}"

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.authors, self.title, f"arXiv:{self.number}")))

    def bibtex(self) -> str:
        """The BibTeX entry."""
        names = self.authors.replace(" et al.", " and others").replace(", ", " and ")
        fields = {
            "author": names,
            "title": f"{{{self.title}}}" if self.title else "",
            "year": self.year,
            "eprint": self.number,
            "archiveprefix": "arXiv",
        }
        return _entry("misc", f"arxiv{self.number}", fields)


def papers_in(text: str) -> list[Paper]:
    """Find the papers that a docstring names."""
    text = " ".join(text.split()).replace("- ", "-")
    found: dict[str, Paper] = {}
    for match in ARXIV.finditer(text):
        before = text[: match.start()]
        said, name = BEFORE.search(before), METHOD.search(before)
        authors, title = (said[1] or "", said[3] or "") if said else ("", "")
        title = title or (name[1] if name else "")
        found.setdefault(match[1], Paper(match[1], authors, title))
    return list(found.values())


def papers_of(policy: str) -> list[Paper]:
    """Find the papers of a policy's name and pools; none if the policy evicts nothing or cannot be
    parsed.
    """
    # These imports load PyTorch, so they are made only when a policy's papers are looked up.
    from weir.policies import NAMED, KVzip, Recompute, parse_call
    from weir.pools import POOLS

    if (read := _read(policy)) is None:
        return []
    kinds: list[Any] = []
    if isinstance(read, Recompute):
        kinds = [POOLS["sink"]]
    elif not isinstance(read, KVzip):  # its pools only hold what it has chosen
        pipes = [pipe for pipe in read.pipes if pipe.slots is not None]
        kinds = [type(pool) for pipe in pipes for pool in pipe.pools]
    call = parse_call(policy)
    texts: list[str | None] = []
    if call is not None and call.name in NAMED:
        texts = [NAMED[call.name].make.__doc__, NAMED[call.name].paper]
    modules = dict.fromkeys(kind.__module__ for kind in kinds)
    texts += [sys.modules[name].__doc__ for name in modules]
    return [paper for text in texts for paper in papers_in(text or "")]


def unread(policies: Iterable[str]) -> list[str]:
    """Return the policies that cannot be parsed here, whose papers are therefore not known."""
    return [policy for policy in policies if _read(policy) is None]


def _read(policy: str) -> Policy | None:
    """Parse a policy; None if it cannot be parsed here."""
    from weir.policies import saved_policy

    try:
        return saved_policy(policy)
    except WeirError:
        return None


def cited(policies: Iterable[str]) -> dict[Paper, list[str]]:
    """Return the papers of some policies, each with the policies that it is cited for."""
    users: dict[str, dict[str, None]] = {}
    for policy in policies:
        for paper in papers_of(policy):
            users.setdefault(paper.number, {})[policy] = None
    best = _known_papers() if users else {}
    return {best[number]: list(users[number]) for number in sorted(users)}


def _known_papers() -> dict[str, Paper]:
    """Return the papers of all pools and named policies, by number. Several texts can name one
    paper, and not all give its authors and title, so the longest description is used.
    """
    from weir.policies import NAMED
    from weir.pools import POOLS

    texts = [sys.modules[kind.__module__].__doc__ for kind in POOLS.values()]
    texts += [text for one in NAMED.values() for text in (one.make.__doc__, one.paper)]
    found: dict[str, Paper] = {}
    for paper in chain.from_iterable(papers_in(text or "") for text in texts):
        found[paper.number] = max(found.get(paper.number, paper), paper, key=lambda p: len(str(p)))
    return found


def as_bibtex(papers: Sequence[Paper]) -> str:
    """Write BibTeX entries for weir and some papers."""
    own = {
        "author": "{The weir authors}",
        "title": "{weir: Hugging Face decoders on endless token streams, in a KV cache of "
        "fixed size}",
        "version": __version__,
    }
    return "\n".join([_entry("software", "weir", own), *(paper.bibtex() for paper in papers)])


def _entry(kind: str, key: str, fields: dict[str, str]) -> str:
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
    return "\n".join([f"@{kind}{{{key},", *lines, "}", ""])
