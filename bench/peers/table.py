"""The tables of docs/limits.md from what the peers found.

.venv/bin/python bench/peers/table.py peers/found.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HALVES = (("window", "near", 128), ("stream", "far", 256))


def main(paths: Sequence[Path]) -> None:
    """Write a table for each size, the best perplexity first; what failed last."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in paths:
        for line in path.read_text("utf-8").splitlines():
            record = json.loads(line)
            found.setdefault((record["peer"], record["what"]), {})[record["task"]] = record
    for prose, facts, slots in HALVES:
        rows = [
            (_shown(*who, slots), tasks.get(prose), tasks.get(facts))
            for who, tasks in found.items()
        ]
        rows = [row for row in rows if row[1] or row[2]]
        rows.sort(key=lambda row: (row[1] or {}).get("ppl", float("inf")))
        lines = ["| | perplexity | recall | kB |", "|---|---:|---:|---:|"]
        for who, read, asked in rows:
            size = _cell(read or asked, "kv_bytes", 1e3, 0)
            lines.append(
                f"| {who} | {_cell(read, 'ppl')} | {_cell(asked, 'recall', 1, 2)} | {size} |"
            )
        sys.stdout.write("\n".join([*lines, "", ""]))


def _shown(peer: str, what: str, slots: int) -> str:
    """Who it is, with the numbers that `with_weir.py` puts into a policy."""
    few = slots // 4
    for name, number in (("slots", slots), ("few", few), ("most", slots - few - 4)):
        what = what.replace(f"{{{name}}}", str(number))
    return (
        f"{peer}: `{what}`".replace("|", "&#124;").replace("`", "<code>", 1).replace("`", "</code>")
    )


def _cell(record: Mapping[str, Any] | None, name: str, unit: float = 1.0, digits: int = 1) -> str:
    """A figure, or why there is none."""
    if record is None:
        return ""
    return "fails" if "error" in record else f"{record[name] / unit:,.{digits}f}"


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
