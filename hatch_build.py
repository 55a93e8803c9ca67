"""The README as an index of packages can show it, put into what is built.

An index has none of the repository's files, so a picture of them would be a broken one and a link
would lead nowhere: pictures are left out, and of links the words stay. `README.md` is unchanged.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

HERE = r"\((?!\w+:)[^)]*\)"
"""The target of a link or a picture that is a file of the repository."""


class IndexReadme(MetadataHookInterface):
    """What hatchling asks for the readme of a distribution."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the readme into the metadata."""
        text = Path(self.root, "README.md").read_text("utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_an_index(text)}


def for_an_index(text: str) -> str:
    """Markdown without pictures that are files, and without links to files."""
    without = re.sub(rf"^!\[[^\]]*\]{HERE}\n+", "", text, flags=re.MULTILINE)
    return re.sub(rf"\[([^\]]+)\]{HERE}", r"\1", without)
