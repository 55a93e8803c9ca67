"""The scripts in examples/ run unchanged, and print what they claim."""

from __future__ import annotations

import ast
import io
import json
import re
import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weir.loading.loader import ASSETS
from weir.pools import POOLS

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))

Ran = Callable[..., str]


@pytest.fixture
def ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Ran]:
    """Yield a function that runs a script like `python examples/NAME ARGUMENTS`.

    It returns the output.
    """
    before = dict(POOLS)

    def run(name: str, *arguments: str, said: str = "") -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", [name, *arguments])
        monkeypatch.setattr("sys.stdin", io.StringIO(said))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    yield run
    POOLS.clear()
    POOLS.update(before)


def test_every_example_is_listed_and_every_line_of_the_list_is_there() -> None:
    text = (EXAMPLES / "README.md").read_text("utf-8")
    listed = re.findall(r"^\| \[`([\w.]+)`\]\((.*?)\) \|", text, re.MULTILINE)
    assert all(name == link for name, link in listed)
    assert sorted(name for name, _ in listed) == sorted([*SCRIPTS, "tour.ipynb"])
    for name in re.findall(r"^python examples/(\S+)", text, re.MULTILINE):
        assert name in SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_says_how_it_is_run(name: str) -> None:
    text = (EXAMPLES / name).read_text("utf-8")
    assert len(text.splitlines()) <= 60
    assert f"\n    python examples/{name} [MODEL]" in (ast.get_docstring(ast.parse(text)) or "")
    assert 'sys.argv[1] if len(sys.argv) > 1 else "nano"' in text


def last_number(text: str, pattern: str) -> tuple[int, ...]:
    """Return the numbers in the last match of a pattern."""
    found = re.findall(pattern, text)[-1]
    return tuple(int(n.replace(",", "")) for n in (found if isinstance(found, tuple) else [found]))


@pytest.mark.slow
def test_a_chat_takes_no_more_memory_after_its_second_turn(ran: Ran) -> None:
    said = ran("endless_chat.py", said="It was a fine day.\n\nThe old prince went on.\n")
    turns = re.findall(r"\(([\d,]+) tokens so far, ([\d,]+) bytes\)", said)
    assert len(turns) == 2  # an empty line is not a turn
    assert len({size for _, size in turns}) == 1
    assert said.splitlines()[-1].endswith(f"{turns[-1][0]} tokens in {turns[-1][1]} bytes")


@pytest.mark.slow
def test_what_the_first_page_said_is_known_to_one_of_two_policies(ran: Ran) -> None:
    said = ran("read_a_book.py", str(ASSETS / "nano"))
    able, forgot, knew = re.split("(?=streaming_llm|kcenter)", said)
    answers = r"has (.*); the book said (\d+)"
    assert [a == b for a, b in re.findall(answers, able)] == [True] * 3
    assert [a == b for a, b in re.findall(answers, forgot)] == [False] * 3
    assert [a == b for a, b in re.findall(answers, knew)] == [True] * 3
    assert "1,500 tokens read" in forgot


@pytest.mark.slow
def test_the_odd_lines_of_a_log_are_found_and_held_longer(ran: Ran, tmp_path: Path) -> None:
    said = ran("watch_a_log.py")
    assert re.findall(r"^  line (\d+),", said, re.MULTILINE) == ["31", "51", "71"]
    odd, others = last_number(said, r"still held: (\d+)% of odd lines, (\d+)% of others")
    assert odd > others
    (tmp_path / "log").write_text("one and the same\n" * 30, "utf-8")
    assert ran("watch_a_log.py", "nano", "log").startswith("30 lines, ")


@pytest.mark.slow
def test_an_agent_dials_by_heart_whom_it_has_looked_up(ran: Ran) -> None:
    said = ran("agent_loop.py")
    assert len(re.findall(r"^look_up\(", said, re.MULTILINE)) == 4
    reached, dialed = last_number(said, r"(\d+) of (\d+) reached by heart")
    assert dialed == len(re.findall(r"^dial\(", said, re.MULTILINE)) == 12
    assert reached >= 10


@pytest.mark.slow
def test_rows_of_a_batch_count_their_own_tokens(ran: Ran) -> None:
    said = ran("many_texts.py")
    lines = said.splitlines()
    assert len(lines) == 5 and lines[0].startswith("One day")
    rows = re.findall(r"\d+", lines[-1].partition("[")[2].partition("]")[0])
    assert len(set(rows)) == 4  # the rows have four different lengths


def test_one_prompt_has_four_answers(ran: Ran) -> None:
    said = ran("fork_a_prompt.py").splitlines()
    assert "read once" in said[0]
    assert len({line for line in said[1:] if line.startswith("  … ")}) == len(said) - 1 == 4


@pytest.mark.slow
def test_milestones_stand_at_even_distances(ran: Ran) -> None:
    said = ran("own_pool.py")
    places = [int(n) + 1 for n in re.findall(r"\d+", said.splitlines()[-1])]
    assert len(places) == 16 and all(place % 64 == 0 for place in places)
    plain, mine = (float(n) for n in re.findall(r"perplexity ([\d.]+)", said))
    assert mine < 1.1 * plain


@pytest.mark.slow
def test_two_policies_are_compared_and_the_run_goes_on_where_it_was(
    ran: Ran, tmp_path: Path
) -> None:
    said = ran("compare_policies.py", "nano", "of-two.jsonl")
    assert (
        len(re.findall(r"^(?:ppl|recall) under (?:dense|streaming_llm|kcenter)", said, re.M)) == 6
    )
    results = (tmp_path / "of-two.jsonl").read_text("utf-8")
    assert sum(json.loads(line).get("status") == "done" for line in results.splitlines()) == 6
    # Nothing is left to do: a second run shows what the first one measured.
    assert ran("compare_policies.py", "nano", "of-two.jsonl") == said
    assert (tmp_path / "of-two.jsonl").read_text("utf-8") == results


@pytest.mark.slow
def test_the_tour_runs_in_a_notebook_and_shows_its_pictures(tmp_path: Path) -> None:
    import nbclient
    import nbformat

    shutil.copy(EXAMPLES / "tour.ipynb", tmp_path)
    tour = nbformat.read(tmp_path / "tour.ipynb", as_version=4)
    nbformat.validate(tour)
    code = [cell for cell in tour.cells if cell.cell_type == "code"]
    # The notebook has outputs in the repository. Streams are left out, as their number can differ.
    kept = [{out.output_type for out in cell.outputs} - {"stream"} for cell in code]
    client = nbclient.NotebookClient(
        tour, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = [out for cell in code for out in cell.outputs]
    assert [{out.output_type for out in cell.outputs} - {"stream"} for cell in code] == kept
    assert sum("image/png" in out.get("data", {}) for out in shown) == 3
    right = next(out.data["text/plain"] for out in shown if out.output_type == "execute_result")
    dense, streaming, kcenter = ast.literal_eval(right).values()
    assert dense == streaming == 0 and kcenter >= 2
    assert [path.name for path in tmp_path.iterdir()] == ["tour.ipynb"]
