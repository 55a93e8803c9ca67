"""The tables of `weir bench peers`, for its Markdown file and the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from weir.evals.report import TextTable
from weir_bench.peers.engines import COMPILED, ENGINES
from weir_bench.peers.quality import quality_tables
from weir_bench.peers.results import Results
from weir_bench.report import number

NEAREST = (
    (f"weir q8_0{COMPILED}", "llama.cpp Q8_0", 0.5, 0.7),
    (f"weir q4_1{COMPILED}", "llama.cpp Q4_1", 0.5, 0.7),
    (f"weir float32{COMPILED}", "llama.cpp F32", None, None),
    (f"weir q8_0{COMPILED}", "OpenVINO Q8_0", None, None),
    (f"weir float32{COMPILED}", "transformers float32", None, None),
    (f"weir q8_0{COMPILED}", "llama.cpp native Q8_0", 0.7, 0.7),
    (f"weir q4_1{COMPILED}", "llama.cpp native Q4_1", 0.7, 0.7),
    *(
        (f"weir {kind} tinyllama{COMPILED}", f"llama.cpp {built}{kind} tinyllama", target, target)
        for built, target in (("native ", 0.7), ("", None))
        for kind in ("Q4_0", "Q8_0", "Q4_K_M")
    ),
)
"""Pairs of engines whose steps are compared: (ours, peer, target on one thread, target on all)."""
READ = (
    ("weir q4_1", "llama.cpp Q4_1", 0.4),
    ("weir q8_0", "llama.cpp Q8_0", 0.4),
    *(
        (f"weir {kind} tinyllama", f"llama.cpp native {kind} tinyllama", 0.5)
        for kind in ("Q4_0", "Q8_0", "Q4_K_M")
    ),
)
"""Pairs of engines whose prompts are compared: (ours, peer, target of the ratio)."""


def markdown(results: Results) -> str:
    """Return all tables, then the machine and versions, and what was not measured."""
    parts = [table.markdown() for table in _tables(results) if table.rows]
    return "\n\n".join([*parts, _made_on(results)]) + "\n"


def _tables(results: Results) -> Iterator[TextTable]:
    threads = sorted({each["threads"] for each in results.figures if "threads" in each})
    yield TextTable(
        ["ratio of times (lower is better)", *map(_threads, threads), "target"],
        _ratios(results, threads),
        markup=True,
    )
    behind = _values(results, "step", "behind")
    prompts = _values(results, "prompt", "tokens")
    heads = ["steps in ms; prompts in tokens/s"]
    heads += [f"step after {n:,}, {_threads(t)}" for n in behind for t in threads]
    heads += [f"prompt of {n:,}, {_threads(t)}" for n in prompts for t in threads]
    rows = []
    for name in _names():
        cells = [
            _cell(results.find("step", who=name, threads=t, behind=n), "seconds", 1e3)
            for n in behind
            for t in threads
        ]
        for n in prompts:
            for t in threads:
                found = results.find("prompt", who=name, threads=t, tokens=n)
                cells.append(number(n / found["seconds"]) if found else "–")
        rows.append([name, *cells])
    yield _without_gaps(TextTable(heads, rows, markup=True))
    yield _memory(results, threads)
    counts = _values(results, "rows", "rows")
    heads = ["tokens/s of several conversations", *(f"{n}" for n in counts)]
    heads += ["first token, first start", "first token, next start"]
    rows = []
    for name in _names():
        cells = [_cell(results.find("rows", who=name, rows=n), "tokens_per_second") for n in counts]
        for kept in (False, True):
            found = results.find("start", who=name, kept=kept)
            cells.append(f"{found['seconds']:.1f} s" if found else "–")
        rows.append([name, *cells])
    yield _without_gaps(TextTable(heads, rows, markup=True))
    yield _chats(results)
    yield from quality_tables(results)


def _ratios(results: Results, threads: list[int]) -> list[list[str]]:
    """Return the rows of ratios: steps after the shortest context, prompts, threads and chats."""
    rows: list[list[str]] = []

    def add(what: str, values: Sequence[float | None], targets: Sequence[float | None]) -> None:
        if not any(values):
            return
        cells = []
        for value, target in zip(values, targets, strict=True):
            missed = value is not None and target is not None and value > target
            text = "–" if value is None else number(value)
            cells.append(f"**{text}**" if missed else text)
        asked = ", ".join(f"≤ {number(target)}" for target in dict.fromkeys(targets) if target)
        rows.append([what, *cells, asked])

    behind = (_values(results, "step", "behind") or [0])[0]

    def step(who: str, count: int, compiled: bool) -> float | None:
        named = {"who": who, "threads": count, "behind": behind}
        found = results.find("step", **named, compiled=compiled)
        return _seconds(found or results.find("step", **named))

    def prompt(who: str, count: int, tokens: int) -> float | None:
        return _seconds(results.find("prompt", who=who, threads=count, tokens=tokens))

    for who, peer, one, many in NEAREST:
        targets = [one if count == 1 else many for count in threads]
        compiled = who.endswith(COMPILED)  # compare measurements that took turns
        values = [
            _ratio(*(step(name, count, compiled) for name in (who, peer))) for count in threads
        ]
        add(f"step of {who} ÷ {peer}", values, targets)
    for tokens in _values(results, "prompt", "tokens"):
        for who, peer, target in READ:
            values = [
                _ratio(prompt(who, count, tokens), prompt(peer, count, tokens)) for count in threads
            ]
            add(f"prompt of {tokens:,}, time of {who} ÷ {peer}", values, [target] * len(threads))
    none = [None] * (len(threads) - 1)
    for kind in ("float32", "q8_0", "q4_1") if none else ():
        for how in ("", COMPILED):
            who = f"weir {kind}{how}"
            value = _ratio(*(step(who, threads[at], bool(how)) for at in (-1, 0)))
            add(f"step of {who}, {_threads(threads[-1])} ÷ one", [*none, value], [*none, 1 / 1.7])
    chats = {each["who"]: each for each in results.figures if each["part"] == "chat"}
    for who in (who for who in chats if who.startswith("weir")):
        for peer in (who for who in chats if who.endswith("context shift")):
            value = _ratio(chats[who]["first_seconds"], chats[peer]["first_seconds"])
            what = f"endless chat, first token of a turn, {who} ÷ {peer}"
            add(what, [*none, value], [*none, 0.7])
    return rows


def _seconds(found: dict[str, Any] | None) -> float | None:
    return found["seconds"] if found else None


def _memory(results: Results, threads: list[int]) -> TextTable:
    rows = []
    for name in _names():
        found = results.find("memory", who=name, threads=threads[-1]) if threads else None
        if found:
            cells = [_cell(found, what, 1e-6) for what in ("weights", "cache", "peak")]
            rows.append([name, *cells])
    behind = (_values(results, "memory", "behind") or [0])[-1]
    heads = [f"MB after {behind:,} tokens", "weights", "cache", "process at its peak"]
    return TextTable(heads, rows, markup=True)


def _chats(results: Results) -> TextTable:
    heads = [
        "endless chat",
        "first token, last turn",
        "first token, median",
        "tokens read per turn",
        "tokens/s",
        "MB",
        "sane answers",
        "knows its name in the window",
        "past the window",
        "in the last turn",
    ]
    rows = []
    for each in results.figures:
        if each["part"] == "chat":
            name = f"{each['who']}, {each['past']} turns past the window"
            cells = [f"{each['last_first_seconds']:.2f} s", f"{each['first_seconds']:.2f} s"]
            cells += [number(each["read"]), number(each["tokens_per_second"])]
            cells += [number(each["memory"] / 1e6), f"{each['sane']:.0%}"]
            cells += [f"{each[key]:.0%}" for key in ("obeyed_before", "obeyed")]
            cells.append("yes" if each["obeyed_last"] else "no")
            rows.append([name, *cells])
    return TextTable(heads, rows, markup=True)


def _made_on(results: Results) -> str:
    """Say on which machine and versions the figures were measured, and what was not measured."""
    facts = results.facts
    machine, versions = facts["machine"], facts.get("versions", {})
    lines = [
        f"{facts['date']}, {machine['processor']}, {machine['cores']} cores, `{facts['command']}`; "
        + "; ".join(f"{each['version']} ({each['built']})" for each in versions.values())
        + "."
    ]
    lines += [f"- Not measured: {who}: {why}." for who, why in results.missing.items()]
    return "\n".join(lines)


def _names() -> Iterator[str]:
    for each in ENGINES:
        yield each.name
        if each.compiles:
            yield f"{each.name}{COMPILED}"


def _values(results: Results, part: str, name: str) -> list[int]:
    return sorted({each[name] for each in results.figures if each["part"] == part})


def _cell(found: dict[str, Any] | None, name: str, scale: float = 1.0) -> str:
    return number(found[name] * scale) if found and name in found else "–"


def _ratio(ours: float | None, peer: float | None) -> float | None:
    return ours / peer if ours and peer else None


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


def _without_gaps(table: TextTable) -> TextTable:
    """Return the table without rows and columns that have no figures."""
    rows = [row for row in table.rows if any(cell != "–" for cell in row[1:])]
    kept = [at for at in range(len(table.heads)) if at == 0 or any(row[at] != "–" for row in rows)]
    return TextTable(
        [table.heads[at] for at in kept], [[row[at] for at in kept] for row in rows], markup=True
    )
