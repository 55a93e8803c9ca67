"""The name of the cache argument is chosen once, and is never one that transformers deprecates."""

from __future__ import annotations

import ast
import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

import weir
from weir.evals.capture import capture_each
from weir.models import CACHE, cache_of, with_one_name
from weir.native import compile_steps

ROOT = Path(__file__).parents[2]
POLICY = "sink(2) | recent(8)"


def test_it_is_the_name_that_the_installed_release_uses() -> None:
    newer = Version(transformers.__version__) >= Version("5.24")
    assert ("cache" if newer else "past_key_values") == CACHE


def test_either_name_is_read_and_the_one_that_holds_a_cache_is_taken() -> None:
    held = object()
    for given in ({"cache": held}, {"past_key_values": held}, {"cache": held, "other": 1}):
        found = with_one_name({**given, "use_cache": True})
        assert found.pop("use_cache") and found.pop(CACHE) is held
        assert set(found) <= {"other"}
    other = next(name for name in ("cache", "past_key_values") if name != CACHE)
    assert with_one_name({CACHE: None, other: held}) == {CACHE: held}
    assert with_one_name({CACHE: held, other: None}) == {CACHE: held}
    assert with_one_name({"past_key_values": None}) == {CACHE: None}
    assert with_one_name({"use_cache": False}) == {"use_cache": False}


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_a_decoder_takes_either_name_with_every_release(llama, ids, name) -> None:
    # Releases before 5.24 pass an argument `cache` on to the decoder, which would ignore it.
    wanted = llama(ids(1, 20), **{CACHE: weir.StreamingCache(llama, POLICY, chunk=4)}).logits
    cache = weir.StreamingCache(llama, POLICY, chunk=4)
    out = llama(ids(1, 20), **{name: cache})
    assert torch.equal(out.logits, wanted) and cache.seen == [20]
    assert cache_of(out) is cache
    inner = weir.StreamingCache(llama, POLICY, chunk=4)
    assert cache_of(llama.base_model(ids(1, 20), **{name: inner})) is inner
    assert cache_of(object(), default=3) == 3


def quiet(run: Any) -> None:
    """Call `run`, and fail if transformers warns of a deprecated name."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        run()


@torch.no_grad()
def test_no_call_of_weirs_own_uses_a_deprecated_name(fresh_llama, ids, caplog) -> None:
    model = fresh_llama()
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(caplog.handler)

    def stream() -> None:
        made = weir.Stream(model, POLICY, chunk=4)
        made.feed(ids(1, 30)[0])
        made.feed(ids(1, 1)[0])
        for _ in zip(range(3), made.generate(max_new_tokens=3), strict=False):
            pass
        copy.deepcopy(made)

    def second_reading() -> None:
        weir.Stream(model, "kvzip(12, asks=false)", chunk=4).feed(ids(1, 40)[0])

    def compiled() -> None:
        compile_steps(model, torch_compile=False)
        stream()
        compile_steps(model, on=False)

    def generated() -> None:
        asked = {"max_new_tokens": 3, "do_sample": False}
        for name in ("cache", "past_key_values"):
            cache = weir.StreamingCache(model, POLICY)
            model.generate(ids(1, 9), **asked, **{name: cache})
        model.generate(ids(1, 9), custom_generate=weir.generate, policy=POLICY, **asked)
        weir.generate(model, ids(1, 9), policy=POLICY, **asked)

    def captured() -> None:
        capture_each(model, ids(1, 30)[0], lambda inputs: None, None)

    try:
        for run in (stream, second_reading, compiled, generated, captured):
            quiet(run)
    finally:
        logger.removeHandler(caplog.handler)
    assert "deprecated" not in caplog.text


ALLOWED = {
    "src/weir/models/cache_name.py",  # contains both names
    # These run in separate environments with an older transformers:
    "bench/weir_bench/peers/sides/kvpress_side.py",
    "bench/weir_bench/peers/sides/kvpress_reading.py",
    # This one runs transformers without weir:
    "bench/weir_bench/peers/sides/transformers_reading.py",
}


def test_no_file_of_weir_calls_a_model_by_the_old_name() -> None:
    """Search the source code, because no test runs all of it, such as the code for GPUs."""
    found = []
    for folder in ("src/weir", "bench/weir_bench"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            tree = ast.parse(path.read_text("utf-8"))
            for node in ast.walk(tree):
                keyword = isinstance(node, ast.keyword) and node.arg == "past_key_values"
                read = isinstance(node, ast.Attribute) and node.attr == "past_key_values"
                text = isinstance(node, ast.Constant) and node.value == "past_key_values"
                if keyword or read or text:
                    found.append(name)
    assert set(found) <= ALLOWED


@torch.no_grad()
def test_other_caches_pass_by_untouched(llama, ids) -> None:
    weir.StreamingCache(llama, POLICY)  # installs the hooks
    cache = DynamicCache()
    out = llama(ids(1, 9), **{CACHE: cache})
    assert cache_of(out) is cache and cache.get_seq_length() == 9
