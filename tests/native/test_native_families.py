"""The page on models says which families have native steps, and why others have none."""

from __future__ import annotations

import pytest
from reference.models import CONFIGS, make
from reference.native_families import NATIVE, families

from weir import StreamingCache, compile_steps
from weir.models.model_spec import INTERFACE_FAMILIES, OWN_FAMILIES

pytest.importorskip("numba", reason="not installed: pip install 'weir-kv[fast]'")
pytestmark = pytest.mark.own_kernels
SAID = families()
UNTESTED = {"qwen2_vl_text, qwen2_5_vl_text"}
"""Text parts of models with images, which are not causal language models on their own."""
CASES = [(name, {}) for name in CONFIGS]
CASES.append(("stablelm", {"qk_layernorm": False}))


@pytest.mark.parametrize(("name", "config"), CASES)
def test_the_page_says_how_a_familys_steps_run(
    name: str, config: dict[str, bool], kernel_compiled: None
) -> None:
    model = make(name, **config)
    compile_steps(model, torch_compile=False)
    cache = StreamingCache(model, "sink(2) | recent(30)")
    steps = cache.report()["steps"]
    compile_steps(model, on=False)
    kind = model.config.model_type
    if getattr(model.config, "qk_layernorm", False) and kind == "stablelm":
        kind += " with qk_layernorm"
    assert SAID[kind] == (NATIVE if steps["run"] == "native" else steps["reason"])


def test_the_page_names_every_family() -> None:
    tested = {name.partition(" ")[0] for name in SAID.keys() - UNTESTED} - {"gemma3"}
    known = {kind for names in UNTESTED for kind in names.split(", ")}
    assert tested | known == INTERFACE_FAMILIES | OWN_FAMILIES


def test_those_that_the_issue_names_are_native() -> None:
    """In the past, each of these families was accepted in bfloat16 and computed wrong results, or
    was refused without a reason.
    """
    for kind in ("stablelm", "granite", "phi3", "olmo2", "gemma2", "smollm3"):
        assert SAID[kind] == NATIVE
