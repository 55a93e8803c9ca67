"""Tasks of lm-evaluation-harness give with weir what they give with the harness's own model."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from roundings import nll_off

import weir
from weir.cli.lm_eval import main
from weir.errors import WeirError

pytest.importorskip("lm_eval", reason='lm-evaluation-harness is not installed: ".[eval]"')
# Slow: the harness takes as long to be imported as thirty other tests.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from weir.evals.harness import WeirLM  # noqa: E402
from weir.models import fingerprint, set_sink  # noqa: E402
from weir.policies import format_policy_file  # noqa: E402

DATA = Path(__file__).parents[1] / "data" / "harness" / "rows.json"
BASE = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": str(DATA)},
    "test_split": "train",
}
TASKS: list[dict[str, Any]] = [
    {
        **BASE,
        "task": "choosing",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    {
        **BASE,
        "task": "reading",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    {
        **BASE,
        "task": "writing",
        "output_type": "generate_until",
        "doc_to_text": "{{text}} {{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
]


@pytest.fixture(scope="module")
def nano() -> tuple[Any, Any]:
    """nano, with an end token: the harness's own model cannot do without one."""
    model, tokenizer = weir.load("nano", device="cpu")
    tokenizer.eos_token = tokenizer.pad_token
    return model, tokenizer


def sum_off(model: Any, tokens: int = 64) -> float:
    """How far the log-likelihood of a text, a sum over its tokens, may differ between two runs."""
    return tokens * nll_off(model, tokens)


def answers(model: Any, tasks: list[dict[str, Any]] = TASKS) -> dict[str, list[Any]]:
    """A model's answers to all requests of each task, in order."""
    # Without the harness's own tasks, whose thousands of files take seconds to list.
    only = TaskManager(include_defaults=False)
    found = simple_evaluate(model=model, tasks=tasks, bootstrap_iters=0, task_manager=only)
    return {
        name: [sample["resps"] for sample in samples] for name, samples in found["samples"].items()
    }


@pytest.mark.slow
def test_dense_answers_as_the_harness_s_own_model(nano: tuple[Any, Any]) -> None:
    pytest.importorskip("peft", reason="the harness's own model needs lm_eval[hf]")
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = nano
    theirs = answers(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1))
    for size in (1, 4):
        mine = answers(WeirLM(model, "dense", tokenizer=tokenizer, batch_size=size))
        assert mine["writing"] == theirs["writing"]
        for name in ("choosing", "reading"):
            assert len(mine[name]) == len(theirs[name]) == 4
            for a, b in zip(_numbers(mine[name]), _numbers(theirs[name]), strict=True):
                assert a == pytest.approx(b, abs=sum_off(model))


@pytest.mark.parametrize(
    "policy",
    [
        "sink(4) | recent(8)",
        pytest.param("recompute(budget=12, sinks=1)", marks=pytest.mark.slow),
    ],
)
def test_a_batch_gives_what_its_rows_give_alone(nano: tuple[Any, Any], policy: str) -> None:
    model, tokenizer = nano
    alone, together = (
        answers(WeirLM(model, policy, tokenizer=tokenizer, chunk=4, batch_size=size))
        for size in (1, 3)
    )
    dense = answers(WeirLM(model, "dense", tokenizer=tokenizer))
    assert alone["writing"] == together["writing"] != dense["writing"]
    for name in ("choosing", "reading"):
        assert _numbers(alone[name]) == pytest.approx(_numbers(together[name]), abs=sum_off(model))
        assert _numbers(alone[name]) != pytest.approx(_numbers(dense[name]), abs=sum_off(model))


def test_all_sampling_options_count_under_a_policy_without_a_cache(
    nano: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = nano
    used: list[dict[str, Any]] = []

    def note(stream: Any, most: int, **sampling: Any) -> Iterator[int]:
        used.append(sampling)
        return iter(())

    monkeypatch.setattr(weir.Stream, "generate", note)
    lm = WeirLM(model, "recompute(budget=12, sinks=1)", tokenizer=tokenizer)
    for way in ({"do_sample": True, "min_p": 0.1}, {"temperature": 0.0, "top_k": 3}):
        lm._generate([[5, 6]], {"until": ["."], "max_gen_toks": 2, **way})
    assert used == [{"temperature": 1.0, "min_p": 0.1}, {"top_k": 3}]
    with pytest.raises(WeirError, match=r"generated with num_beams\. Use temperature"):
        lm._generate([[5, 6]], {"until": ["."], "max_gen_toks": 2, "num_beams": 4})


def test_the_whole_text_is_one_stream(nano: tuple[Any, Any]) -> None:
    """Rolling likelihood under a policy is the streaming score, however long the text."""
    model, tokenizer = nano
    lm = WeirLM(model, "sink(4) | recent(12)", tokenizer=tokenizer, chunk=4)
    said = answers(lm, [TASKS[1]])["reading"]
    for row, one in zip(json.loads(DATA.read_text()), said, strict=True):
        ids = [tokenizer.bos_token_id, *tokenizer(row["text"])["input_ids"]]
        nll = weir.Stream(model, "sink(4) | recent(12)", chunk=4).score(ids)[0, 1:].sum()
        assert _numbers(one) == pytest.approx([-float(nll)], abs=sum_off(model))


def test_a_learned_sink_stands_in_front_and_is_not_asked_for() -> None:
    model, tokenizer = weir.load("nano", device="cpu")
    tokenizer.eos_token = tokenizer.pad_token
    front = [tokenizer.bos_token_id, 7]
    set_sink(model.config, "learnable", front)
    said = answers(WeirLM(model, "dense", tokenizer=tokenizer, batch_size=2))
    rows = json.loads(DATA.read_text())

    def ids(text: str) -> list[int]:
        return [*front, *tokenizer(text)["input_ids"][1:]]

    def likelihood(text: str, given: int) -> float:
        return -float(weir.Stream(model, "dense").score(ids(text))[0, given:].sum())

    for row, one in zip(rows, said["reading"], strict=True):
        wanted = likelihood(row["text"], len(front))
        assert _numbers(one) == pytest.approx([wanted], abs=sum_off(model))
    question, choice = rows[0]["question"], rows[0]["choices"][0]
    wanted = likelihood(question + choice, len(ids(question)))
    assert _numbers(said["choosing"][0])[0] == pytest.approx(wanted, abs=sum_off(model))
    stream = weir.Stream(model, "dense")
    stream.feed(ids(f"{rows[0]['text']} {question}"))
    written = tokenizer.decode(list(stream.generate(24)))
    assert said["writing"][0] == [[written.split(".")[0]]]


def test_the_entry_point_the_harness_looks_for_leads_to_the_model() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    group = "lm_eval.models"
    value = project["entry-points"][group]["weir"]
    assert metadata.EntryPoint("weir", value, group).load() is WeirLM
    assert issubclass(WeirLM, LM)


@pytest.mark.slow
def test_the_command_runs_a_task_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "choosing.yaml").write_text(json.dumps(TASKS[0]))  # JSON is YAML
    policy = "streaming_llm(budget=12, sinks=2)"
    command = f"weir-lm-eval run --model weir --tasks choosing --include_path {tmp_path}"
    given = ["--model_args", f"pretrained=nano,policy={policy},chunk=4", "--device", "cpu"]
    out = ["--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*command.split(), *given, *out])
    main()
    (result,) = (tmp_path / "out").rglob("results_*.json")
    facts = json.loads(result.read_text())
    assert facts["results"]["choosing"]["acc,none"] in (0.25, 0.5, 0.75)
    assert facts["config"]["model_args"]["policy"] == policy
    assert get_model("weir") is WeirLM


def test_what_cannot_be_is_one_clear_line(nano: tuple[Any, Any]) -> None:
    model, tokenizer = nano
    for said, given in [
        ("unknown model argument 'budget'", {"budget": 3}),
        ("batch_size must be a whole number of at least 1, got 'auto'", {"batch_size": "auto"}),
        ("batch_size must be a whole number of at least 1, got '²'", {"batch_size": "²"}),
        ("needs its tokenizer", {"tokenizer": None}),
    ]:
        with pytest.raises(WeirError, match=said):
            WeirLM(model, **{"tokenizer": tokenizer, **given})
    with pytest.raises(WeirError, match=r"no chat template\. Leave out --apply_chat_template"):
        WeirLM(model, tokenizer=tokenizer).apply_chat_template([{"role": "user", "content": "x"}])


def test_how_its_model_is_loaded_may_be_said(monkeypatch, nano: tuple[Any, Any]) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("weir.evals.harness.load", lambda name, **how: given.update(how) or nano)
    WeirLM("some/model", device="cuda:0", device_map="auto", revision="v2", trust_remote_code=True)
    assert given == {
        "dtype": "auto",
        "device": None,  # the harness always gives one; device_map replaces it
        "device_map": "auto",
        "revision": "v2",
        "trust_remote_code": True,
    }


def test_the_command_ends_with_one_line_where_weir_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"policy": "sync(4)"}
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: get_model("weir")(**asked))
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err.startswith("weir: unknown pool or policy 'sync'")


def _numbers(resps: list[Any]) -> list[float]:
    """Every number in nested answers, truth values as 0 and 1."""
    if isinstance(resps, list | tuple):
        return [number for inner in resps for number in _numbers(inner)]
    return [float(resps)]


def test_without_a_chunk_it_is_the_one_that_the_policy_was_measured_with(
    nano: tuple[Any, Any], tmp_path: Path
) -> None:
    model, tokenizer = nano
    layers = [{"policy": "sink(2) | recent(14)"}] * model.config.num_hidden_layers
    path = tmp_path / "budgets.toml"
    path.write_text(format_policy_file({"chunk": 5}, fingerprint(model), layers))
    for given, chunk in (({}, 5), ({"chunk": 3}, 3)):
        cache = WeirLM(model, str(path), tokenizer=tokenizer, **given).stream().cache
        assert cache is not None and cache.chunk == chunk
