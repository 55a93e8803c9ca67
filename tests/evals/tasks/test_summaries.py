"""`summary`: ROUGE and Self-BLEU, by hand and by their packages, on XSum's and CNN's files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from reference.answers import plain_answer
from reference.subjects import quiet, stranger

import weir
from weir.errors import WeirError
from weir.evals.answers import GeneratedAnswer
from weir.evals.tasks.summary import Summary

pytest.importorskip("rouge_score", reason='rouge-score is not installed: ".[eval]"')
pytest.importorskip("sacrebleu", reason='sacrebleu is not installed: ".[eval]"')

from weir.evals.scores import rouge_scores, self_bleu

DATA = Path(__file__).parents[2] / "data" / "evals"
XSUM = DATA / "xsum.jsonl"
ROWS = [json.loads(line) for line in XSUM.read_text().splitlines()]


def test_rouge_by_hand() -> None:
    # The answer's pairs of words are "the cat" and "cat sat". The reference has "the cat", "cat
    # slept" and "slept here".
    found = rouge_scores(["the cat sat"], ["the cat slept here"])
    one, two, longest = 2 * 2 / 7, 2 * 1 / 5, 2 * 2 / 7
    assert found == pytest.approx(
        {
            "rouge1": one,
            "rouge2": two,
            "rougeL": longest,
            "rouge": (one * two * longest) ** (1 / 3),
        }
    )
    both = rouge_scores(["the cat sat", "dogs"], ["the cat slept here", "dog"])
    assert both["rouge1"] == pytest.approx((one + 1) / 2)  # the stem of dogs is dog
    assert both["rouge"] == pytest.approx(
        math.prod(both[kind] for kind in ("rouge1", "rouge2", "rougeL")) ** (1 / 3)
    )


def test_self_bleu_by_hand() -> None:
    texts = ["a b c d e", "a b c d f", "a b c d e"]
    # Two texts are equal and get 1. In the other text, 4 of 5 words, 3 of 4 pairs of words, 2 of 3
    # triples and 1 of 2 quadruples are also in the first two.
    other = (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4)
    assert self_bleu(texts) == pytest.approx((1 + other + 1) / 3)
    assert self_bleu(["a b", "", " "]) is None
    # For equal texts, sacrebleu gives 100.00000000000004.
    assert self_bleu(3 * ["It was a bright morning, and they walked on to the mill."]) == 1.0


def test_the_figures_are_those_of_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [row["summary"] for row in ROWS]
    told = iter(f" {text} " for text in [*said[:2], "Nothing of that sort"])
    answers = (GeneratedAnswer(text, kv_bytes=8, held=5.0, seen=20) for text in told)
    monkeypatch.setattr("weir.evals.answers.ask", lambda *args: next(answers))
    found = Summary(file=str(XSUM)).run(stranger(), quiet)
    assert found["rouge1"] == pytest.approx(2 / 3) and found["share"] == 0.25
    assert found["answers"] == [*said[:2], "Nothing of that sort"]
    assert found["self_bleu"] == self_bleu(found["answers"])


@pytest.mark.slow
def test_dense_answers_as_a_plain_loop() -> None:
    one = stranger()
    prompts = [
        f"Article: {row['document']}\n\nSummarize the article above in one sentence.\nSummary:"
        for row in ROWS
    ]
    plain = [plain_answer(one.model, one.tokenizer, p, 20, stop="\n").strip() for p in prompts]
    found = Summary(file=str(XSUM), most=20).run(one, quiet)
    assert found["answers"] == plain and len(set(plain)) == 3
    assert found["rouge1"] == rouge_scores(plain, [row["summary"] for row in ROWS])["rouge1"]
    small = replace(one, policy=weir.policy("streaming_llm(budget=16)"), chunk=8)
    assert Summary(file=str(XSUM), most=20).run(small, quiet)["answers"] != plain


def test_both_data_sets_are_read_and_others_named(tmp_path: Path) -> None:
    found = Summary(file=str(DATA / "cnn.jsonl"), most=4).run(stranger(), quiet)
    assert found["asked"] == 1
    path = tmp_path / "news.jsonl"
    for row, said in [
        ({"text": "x", "summary": "y"}, "line 2: there is no field 'document' or 'article'"),
        ({"document": "x", "summary": " "}, "line 2: the field 'summary' is empty"),
        ({"article": "", "highlights": "x"}, "line 2: the field 'article' is empty"),
        ({"article": "x"}, "line 2: the field 'highlights' is missing"),
    ]:
        path.write_text(f"{json.dumps(ROWS[0])}\n{json.dumps(row)}\n")
        with pytest.raises(WeirError, match=said):
            Summary(file=str(path), most=4).run(stranger(), quiet)
    with pytest.raises(WeirError):
        Summary(file=str(path), most=0)
