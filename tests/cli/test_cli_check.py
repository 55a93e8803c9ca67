"""`weir check`: a line for each rule, and the exit code 1 if a rule is broken."""

from __future__ import annotations

import json

import pytest
from terminal import run

from weir.evals import check
from weir.evals.check import RuleResult
from weir.loading.loader import ASSETS

pytestmark = pytest.mark.skipif(not (ASSETS / "nano").exists(), reason="nano is not packaged here")
RESULTS = [
    RuleResult("It runs.", "passed"),
    RuleResult("It is whole.", "not applicable", "nothing is kept"),
]
BROKEN = RuleResult("It is right.", "failed", "the pool p is wrong")


@pytest.mark.parametrize(("results", "code"), [(RESULTS, 0), ([*RESULTS, BROKEN], 1)])
def test_each_rule_is_a_line_and_a_broken_rule_is_exit_code_1(capsys, monkeypatch, results, code):
    monkeypatch.setattr(check, "check_policy", lambda policy, model: results)
    ended = run(capsys, "check", "sink(4) | recent(60)")
    assert ended.code == code
    assert (
        ended.out.splitlines()
        == [
            "passed          It runs.",
            "not applicable  It is whole. (nothing is kept)",
            "failed          It is right. (the pool p is wrong)",
        ][: len(results)]
    )
    found = json.loads(run(capsys, "check", "sink(4) | recent(60)", "--json").out)
    assert found["failed"] is bool(code)
    assert [rule["outcome"] for rule in found["rules"]] == [it.outcome for it in results]


def test_rules_that_do_not_apply_for_the_same_reason_are_one_line(capsys, monkeypatch):
    stopped = [RuleResult(rule, "not applicable", "it stopped") for rule in ("It ran.", "It sat.")]
    results = [BROKEN, *stopped, *RESULTS]
    monkeypatch.setattr(check, "check_policy", lambda policy, model: results)
    ended = run(capsys, "check", "sink(4) | recent(60)")
    assert ended.out.splitlines() == [
        "failed          It is right. (the pool p is wrong)",
        "passed          It runs.",
        "not applicable  It is whole. (nothing is kept)",
        "not applicable  2 other rules (it stopped)",
    ]
    assert len(json.loads(run(capsys, "check", "sink(4) | recent(60)", "--json").out)["rules"]) == 5
