"""`weir check`: check that a policy's pools follow the rules for pools."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated

from typer import Argument

from weir.cli import options
from weir.cli.app import command
from weir.cli.common import print_json, print_line, waiting
from weir.cli.loading import Loading, load_model, loads_model


@command()
@loads_model()
def check(
    policy: Annotated[str, Argument(help=f"{options.POLICY_FORMS}.")],
    model_name: options.ModelName = "nano",
    as_json: options.AsJson = False,
    *,
    loading: Loading,
) -> int:
    """Check that a policy's pools follow the rules for pools.

    The policy runs on random tokens. Each line of the output is a rule and whether the policy
    follows it. If it breaks a rule, the exit code is 1.
    """
    from weir.evals.check import check_policy

    model, _ = load_model(model_name, loading)
    with waiting(f"checking {policy}"):
        results = check_policy(policy, model)
    failed = any(result.outcome == "failed" for result in results)
    if as_json:
        rules = [asdict(result) for result in results]
        print_json({"policy": policy, "model": model_name, "failed": failed, "rules": rules})
    else:
        excuses = Counter(result.reason for result in results if result.outcome == "not applicable")
        for result in results:
            reason = f" ({result.reason})" if result.reason else ""
            if result.outcome != "not applicable" or excuses[result.reason] == 1:
                print_line(f"{result.outcome:<14}  {result.rule}{reason}")
        for reason, count in excuses.items():
            if count > 1:
                print_line(f"not applicable  {count} other rules ({reason})")
    return int(failed)
