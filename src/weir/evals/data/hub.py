"""Data sets of the Hugging Face Hub, row by row, where a task would read a file.

`hub:EdinburghNLP/xsum:test` is a data set and its split, `hub:allenai/ai2_arc:ARC-Easy:test` has a
configuration between them. A folder of data files may stand for the id.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from weir.errors import WeirError
from weir.evals.data.extras import needed

HUB = "hub:"


def rows_of(name: str, most: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a data set, the first `most` of them.

    Raises:
        WeirError: the name has another form, the package `datasets` is missing, or the data set
            cannot be had.
    """
    parts = name.removeprefix(HUB).split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise WeirError(
            f"a data set of the Hub is written hub:ID:SPLIT or hub:ID:CONFIGURATION:SPLIT, and not "
            f"{name!r}"
        )
    datasets = needed("datasets", "reading from the Hub")
    try:
        found = datasets.load_dataset(*parts[:-1], split=parts[-1])
    except Exception as error:  # what it raises has no common kind
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeirError(f"the data set {name!r} cannot be had ({reason})") from None
    yield from islice(found, most)
