"""Valid and invalid requests, which schemathesis makes from the server's OpenAPI description.

`WEIR_FUZZ=500` makes 500 of each kind for each route.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import positive_data_acceptance
from servers import Server, make_client, serving

from weir.serve import Limits

EXAMPLES = int(os.environ.get("WEIR_FUZZ", "8"))
LIMITS = Limits(prompt=400, answer=10)
QUICK = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
load_all_checks()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(make_client(rows=2, limits=LIMITS)) as server:
        yield server


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.slow
def test_whatever_is_asked_is_answered_as_described(server: Server, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    asked = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        json = [body for body in operation.body if body.media_type == "application/json"]
        if mode is GenerationMode.NEGATIVE and not json:
            continue  # any name in a path is valid, and so are any bytes of a file

        @QUICK
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case) -> None:
            nonlocal asked
            asked += 1
            if (
                mode is GenerationMode.POSITIVE
                and isinstance(case.body, dict)
                and ("model" in case.body)
            ):
                case.body["model"] = "small"
            # A request of the right form can be refused for its content, such as an empty prompt.
            case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=60)

        ask()
    assert asked >= 2 * EXAMPLES
    server.settled()
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_the_description_is_whole(server: Server) -> None:
    described = httpx.get(f"{server.url}/openapi.json").json()
    assert "HTTPValidationError" not in str(described)
    assert "$defs" not in str(described)
    known = described["components"]["schemas"]
    assert {"ChatMessage", "StreamOptions", "ErrorBody"} <= set(known)
    for path in described["paths"].values():
        for operation in path.values():
            assert "default" in operation["responses"]
