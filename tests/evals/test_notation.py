"""Lists of tasks and policies are parsed, or refused with the place and the nearest known name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from weir.errors import WeirError, suggest
from weir.evals.notation import read_policies, read_tasks, takes_budget, with_budget
from weir.evals.task import Better, Task
from weir.evals.tasks import TASKS
from weir.policies.grammar import policy


@dataclass(frozen=True)
class Any1(Task):
    """A task for these tests, with fields of several types."""

    n: int | None = 3
    x: float = 0.5
    file: str | None = None
    flag: bool = False

    name: ClassVar[str] = "any-1"
    metrics: ClassVar[dict[str, Better]] = {"n": "higher"}

    def run(self, subject: Any, progress: Any) -> dict[str, Any]:
        return {"n": self.n, "kv_bytes": 0}


KNOWN = {"any-1": Any1}


def test_tasks_are_calls_with_commas_between_them():
    found = read_tasks("any-1(n=5, x=2), any-1 , any-1(flag=true, n=none, x=1_000.5)", KNOWN)
    assert found == [Any1(5, 2.0), Any1(), Any1(None, 1000.5, flag=True)]
    assert isinstance(found[0].x, float)


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("any-1(file=../a-b/c_d.txt.xz)", "../a-b/c_d.txt.xz"),
        ("any-1(file='a b, (c).txt', n=3)", "a b, (c).txt"),
        ('any-1(file="it\'s")', "it's"),
        ("any-1(file='a \"b\"')", 'a "b"'),
        ('any-1(file="none")', "none"),
        ('any-1(file="12")', "12"),
    ],
)
def test_a_text_may_be_a_path_and_stands_in_quotes_where_it_must(written, path):
    (found,) = read_tasks(written, KNOWN)
    assert found.file == path
    # The text of a task is parsed as the same task.
    assert read_tasks(str(found), KNOWN) == [found]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("any1", "no task is called 'any1'; did you mean 'any-1'? (character 1: »any1)"),
        ("any-1(m=3)", "any-1 has no parameter 'm'"),
        ("any-1(n=3.5)", "none, got 3.5 (character 9: any-1(n=»3.5))"),
        ("any-1(n=3", "expected ',' or ')'"),
        ("any-1(n=)", "expected a value"),
        (
            f"any-1(n={'9' * 5000})",
            ("this number is too large. Numbers can be at most 2**53 (character 9: "),
        ),
        ("any-1 any-1", "expected ',' or the end"),
        ("any-1,", "expected a task"),
        ("", "expected a task"),
    ],
)
def test_what_cannot_be_read_is_refused_where_it_stands(written, problem):
    with pytest.raises(WeirError) as error:
        read_tasks(written, KNOWN)
    assert problem in str(error.value)


def test_every_task_is_written_as_it_is_read():
    for name, kind in TASKS.items():
        takes = inspect.signature(kind).parameters.values()
        files = [it.name for it in takes if it.name == "file" or it.default is it.empty]
        given = ", ".join(f"{file}='a, b.jsonl'" for file in files)
        (made,) = read_tasks(f"{name}({given})" if files else name, TASKS)
        assert type(made) is kind
        assert read_tasks(str(made), TASKS) == [made]


def test_policies_are_parted_at_the_commas_between_them_only():
    text = "dense, sink(4) | recent(3) ,streaming_llm(8, sinks=1), pyramid(recent(3) | heavy(9), 3)"
    assert read_policies(text) == [
        "dense",
        "sink(4) | recent(3)",
        "streaming_llm(8, sinks=1)",
        "pyramid(recent(3) | heavy(9), 3)",
    ]
    with pytest.raises(WeirError, match="did you mean 'dense'"):
        read_policies("dens")
    with pytest.raises(WeirError, match=r"expected .\|., .,. or the end"):
        read_policies("dense dense")


@pytest.mark.parametrize(
    ("written", "sized"),
    [
        ("streaming_llm", "streaming_llm(budget=128)"),
        ("h2o()", "h2o(budget=128)"),
        ("buzz(stride=3, )", None),
        ("streaming_llm(sinks=1)", "streaming_llm(sinks=1, budget=128)"),
        ("reservoir(weighted=true)", "reservoir(weighted=true, budget=128)"),
    ],
)
def test_a_budget_goes_into_policies_that_take_one(written, sized):
    if sized is None:
        with pytest.raises(WeirError):
            takes_budget(written)
        return
    assert takes_budget(written)
    assert with_budget(written, 128) == sized
    assert policy(sized).for_layer(0, 1).slots == 128


@pytest.mark.parametrize(
    "written",
    [
        "dense",
        "streaming_llm(300)",
        "h2o(budget=64)",
        "uniform(rate=0.5)",
        "sink(4) | recent(12)",
        "reservoir(n=12)",  # the pool of that name
    ],
)
def test_a_policy_that_has_its_size_or_none_is_left_alone(written):
    assert not takes_budget(written)
    with pytest.raises(WeirError, match="cannot get a budget here"):
        with_budget(written, 128)


def test_a_budget_that_makes_no_sense_is_refused_when_it_is_put_in():
    with pytest.raises(WeirError, match="a budget of 4 leaves no slots"):
        with_budget("streaming_llm", 4)


def test_the_nearest_word_is_named_and_none_is_if_none_is_near():
    assert suggest("buz", ["buzz", "dense"]) == ", did you mean 'buzz'?"
    assert suggest("XSum", ["xsum", "qasper"]) == ", did you mean 'xsum'?"
    assert suggest("xyz", ["buzz", "dense"]) == ""
