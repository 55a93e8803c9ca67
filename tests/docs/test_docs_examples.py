"""The examples of the documentation are run, and print what the pages show."""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from roundings import close, close_runs
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import stopping_criteria

import weir
from weir.cli import main
from weir.loading.loader import ASSETS
from weir.policies import NAMED
from weir.pools import POOLS, Fold, Pool, SizedPool, pool
from weir.pools.observed_attention import ObservedAttention
from weir.slab import Slots

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(<!-- not run: [^\n]*-->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

needs_nano = pytest.mark.skipif(
    not (ASSETS / "nano" / "model.safetensors").exists(), reason="nano is not packaged here"
)


def blocks(page: str, language: str, *, all_of_them: bool = False) -> list[str]:
    """The code blocks of a page; those marked as not run only with `all_of_them`."""
    text = (ROOT / page).read_text("utf-8")
    return [
        code
        for skip, kind, code in BLOCK.findall(text)
        if kind == language and (all_of_them or not skip)
    ]


def skipped(page: str) -> list[str]:
    """The Python blocks of a page that are marked as not run."""
    text = (ROOT / page).read_text("utf-8")
    return [code for skip, kind, code in BLOCK.findall(text) if kind == "python" and skip]


def pages() -> list[str]:
    """Every page that may hold examples."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in paths]


SHOWN = re.compile(r"\)  # ([<{\[\"'\d].*|[A-Z]\w+\(.*)$")
"""A comment after a `print` that shows what is printed; other comments explain."""


def pattern(shown: str) -> re.Pattern[str]:
    """A regular expression for output as shown, in which `…` is any text."""
    return re.compile(".*".join(map(re.escape, shown.split("…"))), re.DOTALL)


def run(code: str, page: str, space: dict[str, Any]) -> None:
    """Run a block as a separate module, and compare what it prints with the comments."""
    lines = code.splitlines()
    for statement in ast.parse(code, page).body:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            part = ast.Module([statement], [])
            exec(compile(part, page, "exec", dont_inherit=True), space)
        if shown := SHOWN.search(lines[(statement.end_lineno or 0) - 1]):
            assert pattern(shown[1]).fullmatch(printed.getvalue().rstrip("\n"))


@pytest.fixture
def registries_as_before() -> Iterator[None]:
    """Take away the pools and policies that a test registers."""
    registries: list[dict[str, Any]] = [POOLS, NAMED]
    before = [dict(each) for each in registries]
    yield
    for each, old in zip(registries, before, strict=True):
        each.clear()
        each.update(old)


@pytest.fixture
def loud(registries_as_before: None) -> type[Pool]:
    """The pool of `writing-a-pool.md`."""
    space: dict[str, Any] = {"__name__": "example"}
    run(blocks("docs/writing-a-pool.md", "python")[0], "writing-a-pool.md", space)
    kind: type[Pool] = space["Loud"]
    return kind


@pytest.mark.parametrize("page", pages())
def test_every_python_example_is_python(page: str) -> None:
    for code in blocks(page, "python", all_of_them=True):
        ast.parse(code, page)


QUICK = ("docs/images.md",)
"""Pages whose examples load no model; the others are slow."""


@needs_nano
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page in QUICK else pytest.mark.slow)
        for page in pages()
        if blocks(page, "python")
    ],
)
def test_the_examples_of_a_page_run_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registries_as_before: None
) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "example"}
    warned: list[str] = []
    for logger in (stopping_criteria.logger, transformers.generation.utils.logger):
        monkeypatch.setattr(logger, "warning_once", lambda text, *more: warned.append(text))
    for code in blocks(page, "python"):
        run(code, page, space)
    assert not warned  # for example, that a text is longer than the model's window


@needs_nano
@pytest.mark.slow
def test_a_model_of_the_hub_is_loaded_as_shown() -> None:
    (code,) = (code for code in skipped("docs/quickstart.md") if "from_pretrained" in code)
    folder, name = str(ASSETS / "nano"), "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert code.count(name) == 2
    space: dict[str, Any] = {"__name__": "example", "weir": weir}
    run(code.replace(name, folder), "quickstart.md", space)
    inputs = space["tokenizer"]("The road", return_tensors="pt")
    space["model"].generate(**inputs, past_key_values=space["cache"], max_new_tokens=3)
    assert space["cache"].seen == [inputs.input_ids.shape[1] + 2]


def test_the_fragments_about_a_fold_run_in_a_fold(llama: Any, registries_as_before: None) -> None:
    fragments = skipped("docs/writing-a-pool.md")
    assert len(fragments) == 2
    drawn: list[Tensor] = []

    @pool("fragments")
    @dataclass(frozen=True)
    class Fragments(SizedPool):
        n: int = 8

        def state(self, like: Slots) -> dict[str, Tensor]:
            return {"came": torch.zeros(like.position.shape[:2], dtype=torch.int64)}

        def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
            space = {"fold": fold, "new": new}
            for code in fragments:
                exec(code, space)
            drawn.append(cast(Tensor, space["u"]))
            assert drawn[-1].shape == new.position.shape
            both = held.join(new)
            order = both.position.argsort(dim=2, descending=True)
            return both.take(order[:, :, : self.n]), both.take(order[:, :, self.n :])

    stream = weir.Stream(llama, "fragments(8)", chunk=8)
    stream.feed(list(range(41)))
    assert all(bool(((u >= 0) & (u < 1)).all()) for u in drawn) and len(drawn) > 3
    assert drawn[0].unique().numel() > 4


def test_what_a_policy_answers_and_refuses_is_as_shown() -> None:
    for code in blocks("docs/policies.md", "pycon"):
        example = doctest.DocTestParser().get_doctest(code, {}, "policies.md", None, None)
        assert example.examples
        told: list[str] = []
        doctest.DocTestRunner(verbose=False).run(example, out=told.append)
        assert not told, "".join(told)


@needs_nano
def test_what_weir_size_says_is_as_shown(monkeypatch, capsys) -> None:
    (shown,) = blocks("docs/speed.md", "console")
    command, answer = shown.split("\n", 1)
    monkeypatch.setattr("sys.argv", shlex.split(command.removeprefix("$ ")))
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out == answer


def test_the_new_pool_takes_fewer_than_thirty_lines() -> None:
    assert len(blocks("docs/writing-a-pool.md", "python")[0].splitlines()) < 30


def test_a_new_scorer_is_a_whole_file_of_thirty_lines() -> None:
    code = blocks("docs/writing-a-pool.md", "python")[2]
    assert len(code.splitlines()) <= 30
    tree = ast.parse(code)
    assert ast.get_docstring(tree)
    kind = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    assert [node.name for node in kind.body if isinstance(node, ast.FunctionDef)] == ["score"]


def test_the_new_scorer_keeps_the_shortest_keys_of_all_that_left_the_window(
    registries_as_before: None, llama: PreTrainedModel, ids: Callable[..., Tensor]
) -> None:
    run(blocks("docs/writing-a-pool.md", "python")[2], "writing-a-pool.md", {"__name__": "example"})
    text = ids(2, 203)
    stream = weir.Stream(llama, "sink(2) | recent(16) | knorm(8)", chunk=5)
    stream.feed(text)
    everything = weir.Stream(llama, "dense")
    everything.feed(text)
    held, dense = stream.slots(layer=0), everything.slots(layer=0)
    # The first layer's keys depend on nothing but the tokens, and rotation does not change lengths.
    middle = dense.keys[:, :, 2 : 203 - 203 % 5 - 16].norm(dim=-1)
    away = held.pool != held.pools.index("knorm")
    kept = held.keys.norm(dim=-1).masked_fill(away, torch.inf)
    wanted = middle.topk(8, largest=False).values
    # A length is a sum of 16 squares of numbers that were rotated, which is five roundings more.
    close(kept.topk(8, largest=False).values, wanted, terms=16 + 5)


def test_the_new_pool_keeps_the_loudest_of_all_that_left_the_window(
    loud: type[Pool], llama: PreTrainedModel, ids: Callable[..., Tensor]
) -> None:
    text = ids(2, 203)
    stream = weir.Stream(llama, "sink(2) | recent(16) | loud(8)", chunk=5)
    stream.feed(text)
    everything = weir.Stream(llama, "dense")
    everything.feed(text)
    held, dense = stream.slots(layer=0), everything.slots(layer=0)
    # The first layer's values depend on nothing but the tokens, so both streams have the same ones;
    # equal tokens are equally loud, so it is lengths that are compared.
    middle = dense.values[:, :, 2 : 203 - 203 % 5 - 16].norm(dim=-1)
    kept = held.values.norm(dim=-1).masked_fill(held.pool != held.pools.index("loud"), -1.0)
    close(kept.topk(8).values, middle.topk(8).values, terms=16 + 5)


def test_what_a_fold_is_said_to_have_is_there() -> None:
    page = (ROOT / "docs" / "writing-a-pool.md").read_text("utf-8")
    table = page.split("| in `fold.read` |")[1].split("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    named = {name for cell in cells for name in re.findall(r"`([a-z_]+)", cell)}
    assert len(named) > 14
    assert not [name for name in named if not hasattr(ObservedAttention, name)]


def test_below_its_budget_the_new_pool_changes_nothing(
    loud: type[Pool], llama: PreTrainedModel, ids: Callable[..., Tensor]
) -> None:
    text = ids(1, 60)
    with torch.no_grad():
        exact = llama(text).logits
    streamed = weir.Stream(llama, "sink(2) | recent(8) | loud(50)", chunk=3)
    close_runs(streamed.feed(text, all_logits=True), exact, llama)


def test_the_new_pool_is_refused_like_any_other(loud: type[Pool]) -> None:
    with pytest.raises(weir.PolicyError, match="loud must keep at least 1 token") as error:
        weir.policy("sink(4) | loud(0)")
    assert error.value.at == 10
