"""Native decode steps return the logits of the model's own modules, and leave the cache in the same
state.

Whole runs are compared: prompts, steps over many folds, and what the cache holds in the end. The
model's own modules are the reference. If native steps were never used, all comparisons would pass,
so each test also counts the native steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
import transformers
from reference.blocks import blocks_of, random_lines, unit_of
from reference.models import CONFIGS, make, tokens
from reference.native_families import NATIVE, families
from roundings import close_runs
from torch import Tensor, nn
from transformers import PreTrainedModel

import weir
from weir import StreamingCache, WeirError, compile_steps
from weir.models import CACHE, interception
from weir.native import engine as native_step
from weir.native.block_formats import BLOCK_TYPES
from weir.native.block_weights import Blocks, put
from weir.native.program import StepProgram

pytest.importorskip("numba", reason="not installed: pip install '.[fast]'")
from weir.native.kernels import mlp_blocks

pytestmark = pytest.mark.own_kernels
needs_block_kernels = pytest.mark.skipif(
    not mlp_blocks.SUPPORTED, reason="blocks are multiplied with VNNI or AVX2 only"
)
CHUNK, PROMPT, STEPS = 4, 30, 26
POLICIES = [
    "window(16)",
    "sink(2) | recent(6) | heavy(6)",
    "sink(2) | recent(6) | balance(8, block=4)",
    "sink(2) | recent(6) | subgen(8, 4, 2)",
    "pyramidkv(budget=64, window=8)",
]
"""Policies with one or two log-weights per slot, with queries or attention that steps must record,
and with layers of different sizes.
"""
FAMILIES = [
    name
    for name, (kind, _) in CONFIGS.items()
    if name != "stablelm" and families().get(getattr(transformers, kind).model_type) == NATIVE
]
WIDE = {"head_dim": 64, "intermediate_size": 112}
"""Heads that fill whole vectors, and weights that cannot be divided into whole tiles."""
ZERO_SINK = {"weir_sink": {"kind": "zero"}, "attn_implementation": "weir_zero_sink"}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, kernel_compiled: None) -> list[int]:
    """A list that gets a 1 for each native step, and for each that only runs to be compared with
    the model's own step.
    """
    found: list[int] = []
    own, check = (StepProgram.run, StepProgram.run_whole), native_step.check_program

    def counted(own: Callable[..., Any], *given: Any, **more: Any) -> Any:
        answer = own(*given, **more)
        found.append(1)
        return answer

    for run in own:
        monkeypatch.setattr(StepProgram, run.__name__, partialmethod(partial(counted, run)))
    monkeypatch.setattr(native_step, "check_program", partial(counted, check))
    return found


def read(model: PreTrainedModel, policy: str, ids: Tensor, mask: Tensor | None = None) -> Any:
    """Feed a prompt, and then token by token. Return all logits and the cache."""
    cache = StreamingCache(model, policy, chunk=CHUNK)
    parts = [ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)]
    found, done = [], 0
    with torch.no_grad():
        for part in parts:
            given, done = slice(done, done + part.shape[1]), done + part.shape[1]
            more = {} if mask is None else {"attention_mask": mask[:, given]}
            logits = model(input_ids=part, past_key_values=cache, **more).logits
            found.append(logits if mask is None else logits * mask[:, given, None])
    return torch.cat(found, dim=1), cache


def check(model: PreTrainedModel, policy: str, taken: list[int], rows: int = 1, **given: Any):
    ids = tokens(rows, PROMPT + STEPS)
    usual = read(model, policy, ids, **given)
    assert not taken
    compile_steps(model)
    try:
        native = read(model, policy, ids, **given)
    finally:
        compile_steps(model, on=False)
    assert len(taken) == STEPS
    close_runs(native[0], usual[0], model)
    assert native[1].seen == usual[1].seen
    for layer in range(len(usual[1])):
        one, other = usual[1].slots(layer), native[1].slots(layer)
        assert torch.equal(one.position, other.position)
        close_runs(one.b, other.b, model)
        close_runs(one.keys, other.keys, model)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.thinned(2)
def test_steps_are_the_models_own(policy: str, rows: int, taken) -> None:
    check(make("llama", **WIDE), policy, taken, rows)


def test_torch_compile_can_be_left_out(taken) -> None:
    ids = tokens(2, PROMPT + STEPS)
    for name, steps in (("llama", STEPS), ("gpt-neox", 0)):
        model = make(name)
        compile_steps(model, torch_compile=False)
        read(model, POLICIES[0], ids)
        assert len(taken) == steps
        taken.clear()
    with pytest.raises(WeirError, match=r"torch_compile=False .* backend is for torch.compile"):
        compile_steps(model, torch_compile=False, backend="eager")


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_slots_of_few_bits(bits: str, threads: int, taken) -> None:
    """Both models begin each step with the same state. Otherwise, a number between two levels could
    be rounded to different ones, and later steps would differ more and more.
    """
    policy, ids = f"sink(2) | recent(6) | recent(20):{bits}", tokens(2, PROMPT + STEPS)
    model, twin = (make("llama", **WIDE, **_THREE) for _ in range(2))
    cache, other = (StreamingCache(m, policy, chunk=CHUNK) for m in (model, twin))
    compile_steps(twin)
    with torch.no_grad():
        for m, held in ((model, cache), (twin, other)):
            m(ids[:, :PROMPT], past_key_values=held)
        for step in ids[:, PROMPT:].split(1, dim=1):
            for row, state in enumerate(cache.take_rows()):
                other.put_row(row, state)
            found = [
                m(step, past_key_values=held).logits for m, held in ((model, cache), (twin, other))
            ]
            close_runs(found[1], found[0], model)
    assert len(taken) == STEPS


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_that_the_page_calls_native_is(name: str, dtype, taken) -> None:
    check(make(name, dtype), POLICIES[0], taken, 2)


@pytest.mark.parametrize(
    ("policy", "sink"), [(POLICIES[1], {}), (POLICIES[3], {}), (POLICIES[1], ZERO_SINK)]
)
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_threads_share_a_step(policy: str, sink: dict[str, Any], threads: int, taken) -> None:
    """The slots of each of three heads are divided into two stretches. A sink must count in only
    one of them.
    """
    check(make("llama", **{**WIDE, **_THREE, **sink}), policy, taken)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_half_precision(name: str, taken) -> None:
    check(make(name, **WIDE).to(torch.bfloat16), POLICIES[1], taken, 2)


def test_bfloat16_is_rounded_as_pytorch_rounds_it() -> None:
    from weir.native.kernels.step import _compiled_copy

    tie = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    ends = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38])
    x = torch.cat([tie, -tie, ends, torch.randn(500)])
    out = torch.empty(len(x), dtype=torch.bfloat16)
    _compiled_copy(x.data_ptr(), len(x), out.data_ptr(), 16)
    assert torch.equal(out.isnan(), x.isnan())  # NaN has many bit patterns
    finite = ~x.isnan()
    assert torch.equal(out[finite].view(torch.int16), x[finite].bfloat16().view(torch.int16))


def test_windows_of_sliding_layers(taken) -> None:
    check(make("mistral", sliding_window=9), "window(5)", taken)


def test_a_sliding_layer_beside_others_sees_its_window_alone(taken) -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    model = make("qwen2", **sliding)
    assert {*model.config.layer_types} == {"full_attention", "sliding_attention"}
    check(model, "sink(2) | recent(30)", taken)


def test_rows_apart_and_rows_that_rest(taken) -> None:
    mask = torch.ones(3, PROMPT + STEPS, dtype=torch.long)
    mask[1, :3] = mask[2, :9] = mask[0, PROMPT + 4 : PROMPT + 7] = 0
    check(make("llama", **WIDE), POLICIES[1], taken, 3, mask=mask)


def test_a_row_that_rests_in_the_first_step_has_no_say_in_its_proof(taken) -> None:
    mask = torch.ones(3, PROMPT + STEPS, dtype=torch.long)
    mask[1, PROMPT : PROMPT + 2] = 0
    check(make("llama", **WIDE), POLICIES[1], taken, 3, mask=mask)


def test_rows_that_change_places_and_steps_of_some_of_them(taken) -> None:
    """The engine looks up where slots are stored only after a change. Every operation here is such
    a change. A fold is one too, and could hide that an operation goes unnoticed, but only one of
    the steps before the operations folds.
    """
    model, ids = make("llama", **WIDE), tokens(3, 7 * CHUNK + 8)
    mask = torch.ones(3, 7 * CHUNK)
    mask[1, :3] = mask[2, :4] = 0
    found = []
    for on in (False, True):
        cache = StreamingCache(model, "sink(2) | recent(9)", chunk=CHUNK)
        compile_steps(model, on=on)

        def read(ids: Tensor, cache: Any = cache, **more: Any) -> None:
            with torch.no_grad():
                found.append(model(ids, past_key_values=cache, **more).logits[:, -1])

        read(ids[:, : 7 * CHUNK], attention_mask=mask)
        steps = iter(ids[:, 7 * CHUNK :].split(1, dim=1))
        read(next(steps))
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        read(next(steps))
        with cache.only(0, 2):
            read(next(steps)[:2])
        read(next(steps))
        cache.batch_select_indices(torch.tensor([1]))
        read(next(steps)[:1])
        cache.batch_repeat_interleave(2)
        read(next(steps)[:2])
        cache.reset()
        read(next(steps))
        read(next(steps))
    compile_steps(model, on=False)
    assert len(taken) == 7
    for native, usual in zip(found[9:], found[:9], strict=True):
        close_runs(native, usual, model)


def test_steps_of_some_rows_have_one_program_while_nothing_is_replaced(taken, monkeypatch) -> None:
    """A server with rows for eight clients makes all steps like this while it has only one client.
    Making a program takes longer than a step, so it must not be repeated.
    """
    made: list[object] = []
    own = StepProgram.__init__
    monkeypatch.setattr(StepProgram, "__init__", lambda *given: made.append(1) or own(*given))
    model, ids = make("llama", **WIDE), tokens(3, PROMPT + STEPS)
    compile_steps(model)
    cache, alone = (StreamingCache(model, POLICIES[0], chunk=CHUNK) for _ in range(2))
    with torch.no_grad():
        model(ids[:, :PROMPT], past_key_values=cache)
        model(ids[1:2, :PROMPT], past_key_values=alone)
        for step in ids[1:2, PROMPT:].split(1, dim=1):
            with cache.only(1, 2):
                found = model(step, past_key_values=cache).logits
            close_runs(found, model(step, past_key_values=alone).logits, model)
    assert len(taken) == 2 * STEPS
    assert len(made) <= 4  # two that are proved, and two that are kept


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_a_program_serves_in_and_outside_inference_mode(first: Any, taken) -> None:
    model, ids = make("llama", **WIDE), tokens(1, PROMPT + 4)
    compile_steps(model)
    cache = StreamingCache(model, POLICIES[0], chunk=CHUNK)
    with first():
        model(ids[:, :PROMPT], past_key_values=cache)
        for step in ids[:, PROMPT : PROMPT + 2].split(1, dim=1):
            model(step, past_key_values=cache)
    for mode, step in zip((torch.no_grad, torch.inference_mode), (-2, -1), strict=True):
        with mode():
            model(ids[:, step, None], past_key_values=cache)
    assert len(taken) == 4


def test_a_long_stream_and_one_that_is_restored(taken, tmp_path) -> None:
    model, ids = make("llama", **WIDE), tokens(1, 600)
    usual = weir.Stream(model, POLICIES[0], chunk=CHUNK)
    usual.feed(ids[:, :5])
    wanted = [usual.feed(one) for one in ids[:, 5:].split(1, dim=1)]
    compile_steps(model)
    stream = weir.Stream(model, POLICIES[0], chunk=CHUNK)
    stream.feed(ids[:, :5])
    for one in ids[:, 5:300].split(1, dim=1):
        stream.feed(one)
    stream.save(tmp_path / "stream")
    other = weir.Stream.restore(model, tmp_path / "stream")
    both = [(stream.feed(one), other.feed(one)) for one in ids[:, 300:].split(1, dim=1)]
    compile_steps(model, on=False)
    assert len(taken) == 295 + 2 * 300 - 1  # the restored stream's first step is the model's own
    for found in zip(*both, strict=True):
        close_runs(torch.cat(found, 1), torch.cat(wanted[295:], 1), model)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.mlp.up_proj, "weight", nn.Parameter(_half(layer))),
        lambda layer: setattr(layer.mlp.up_proj.weight, "data", _half(layer)),
        lambda layer: layer.mlp.up_proj.weight.mul_(0.5),
        lambda layer: setattr(layer.mlp, "up_proj", _halved(layer)),
        lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.5),
        lambda layer: setattr(layer.mlp, "act_fn", nn.GELU("tanh")),
        lambda layer: layer.mlp.register_forward_hook(lambda *given: given[2] * 0.5),
        lambda layer: setattr(layer.mlp.up_proj, "forward", lambda x: x @ _half(layer).T),
    ],
)
@torch.no_grad()
def test_changes_of_a_layer_are_noticed(change: Callable[[Any], Any], taken, monkeypatch) -> None:
    found = []
    for on in (False, True):
        model, ids = make("llama", **WIDE), tokens(1, PROMPT + 3)
        cache = StreamingCache(model, POLICIES[0], chunk=CHUNK)
        compile_steps(model, on=on)
        model(ids[:, :PROMPT], past_key_values=cache)
        for step in range(PROMPT, PROMPT + 2):
            model(ids[:, step : step + 1], past_key_values=cache)
        change(model.model.layers[1])
        found.append(model(ids[:, -1:], past_key_values=cache).logits)
    assert len(taken) >= 2
    close_runs(found[1], found[0], make("llama", **WIDE))


@pytest.mark.parametrize(
    ("module", "name", "activation"),
    [
        (nn.functional, "silu", nn.SiLU()),
        (nn.functional, "gelu", nn.GELU("tanh")),
        (nn.functional, "linear", nn.SiLU()),
        (torch, "rsqrt", nn.SiLU()),
    ],
)
@torch.no_grad()
def test_a_function_of_pytorch_that_is_replaced_is_noticed(
    module: Any, name: str, activation: nn.Module, taken, monkeypatch
) -> None:
    own, found = getattr(module, name), []
    for on in (False, True):
        model, ids = make("llama", **WIDE), tokens(1, PROMPT + 5)
        for layer in model.model.layers:
            layer.mlp.act_fn = activation
        cache = StreamingCache(model, POLICIES[0], chunk=CHUNK)
        compile_steps(model, on=on, torch_compile=False)
        model(ids[:, :PROMPT], past_key_values=cache)
        for step in range(PROMPT, PROMPT + 5):
            found.append(model(ids[:, step : step + 1], past_key_values=cache).logits)
            if step == PROMPT + 1:
                monkeypatch.setattr(module, name, lambda *given, **more: own(*given, **more) * 0.9)
            if step == PROMPT + 3:
                monkeypatch.setattr(module, name, own)
    assert len(taken) >= 3  # two before it is replaced, and one after it is put back
    close_runs(torch.cat(found[5:]), torch.cat(found[:5]), model)


@torch.no_grad()
def test_layers_that_change_places_keep_their_slots(taken, monkeypatch) -> None:
    found = []
    for on in (False, True):
        model, ids = make("llama", **WIDE), tokens(1, PROMPT + 4)
        cache = StreamingCache(model, POLICIES[0], chunk=CHUNK)
        compile_steps(model, on=on)
        model(ids[:, :PROMPT], past_key_values=cache)
        for step in range(PROMPT, PROMPT + 4):
            found.append(model(ids[:, step : step + 1], past_key_values=cache).logits)
            if step == PROMPT + 1:
                assert not on or taken == [1, 1]
                model.model.layers = nn.ModuleList(reversed(model.model.layers))
    assert taken == [1, 1]
    assert "has the number" in str(cache.report()["steps"]["reason"])
    close_runs(torch.cat(found[4:]), torch.cat(found[:4]), model)


def test_a_hook_of_the_users_is_not_called_while_modules_are_read() -> None:
    called: list[object] = []
    model = make("gemma3", **WIDE)
    model.model.norm.register_forward_hook(lambda *given: called.append(1))
    compile_steps(model, torch_compile=False)
    cache = StreamingCache(model, POLICIES[0], chunk=CHUNK)
    assert len(cache) == len(model.model.layers)
    assert not called


@pytest.mark.parametrize("again", [False, True])
@torch.no_grad()
def test_of_an_attention_that_was_replaced_the_new_one_is_read(again: bool, taken) -> None:
    found = []
    for on in (False, True):
        model, ids = make("llama", **WIDE), tokens(1, PROMPT + 4)
        cache = StreamingCache(model, POLICIES[0], chunk=CHUNK)
        compile_steps(model, on=on)
        model(ids[:, :PROMPT], past_key_values=cache)
        for step in range(PROMPT, PROMPT + 4):
            found.append(model(ids[:, step : step + 1], past_key_values=cache).logits)
            if step == PROMPT:
                layer = model.model.layers[1]
                held = layer.self_attn.state_dict()
                layer.self_attn = type(layer.self_attn)(model.config, 1).eval()
                layer.self_attn.load_state_dict(held)
                if again:
                    compile_steps(model, on=on)
            if step == PROMPT + 1:
                model.model.layers[1].self_attn.v_proj.weight.mul_(-1)
    assert len(taken) >= 4
    close_runs(torch.cat(found[4:]), torch.cat(found[:4]), make("llama", **WIDE))


def test_what_is_not_finite_is_refused_without_trace(taken) -> None:
    model, ids = make("llama", **WIDE), tokens(1, 16)
    compile_steps(model)
    caches = [StreamingCache(model, "sink(2) | recent(6)", chunk=CHUNK) for _ in range(3)]
    weights = model.model.layers[1].self_attn.v_proj.weight
    with torch.no_grad():
        for cache in reversed(caches):  # the very first step is the model's own
            model(ids[:, :13], past_key_values=cache)
            model(ids[:, 13:14], past_key_values=cache)
        kept = weights.clone()
        weights[3] = torch.nan
        with pytest.raises(WeirError, match="layer 1"):
            model(ids[:, 14:15], past_key_values=caches[0])
        weights.copy_(kept)
        found = [model(ids[:, 15:], past_key_values=cache).logits for cache in caches[:2]]
    assert len(taken) == 6
    assert torch.equal(*found)


def test_tokens_come_uncompiled_until_the_kernel_is_there(taken, monkeypatch, notices) -> None:
    ready = threading.Event()
    monkeypatch.setattr(native_step.NativeStep, "wait", False)
    monkeypatch.setattr(native_step, "PATIENCE", 0.0)
    monkeypatch.setattr("weir.native.kernels.step.StepTable.compile", ready.wait)
    model, ids = make("llama"), tokens(1, PROMPT + 4)
    cache = StreamingCache(model, POLICIES[0], chunk=CHUNK)
    compile_steps(model)
    with torch.no_grad():
        model(ids[:, :PROMPT], past_key_values=cache)
        assert cache.report()["steps"] == UNFINISHED
        model(ids[:, PROMPT : PROMPT + 1], past_key_values=cache)
        assert not taken and cache.report()["steps"] == cache.steps == UNFINISHED
        ready.set()
        held = cache.attachment.engine
        held._compiling.join()
        assert cache.report()["steps"] == {"run": "native", "reason": None}
        model(ids[:, PROMPT + 1 : PROMPT + 2], past_key_values=cache)
    compile_steps(model, on=False)
    assert len(taken) == 1
    assert notices == [native_step.WAITING]


UNFINISHED = {
    "run": "eager",
    "reason": "the kernel is still being compiled; steps are native when it is ready",
}


def test_the_wait_for_the_kernel_is_announced_once_for_all_models(monkeypatch, notices) -> None:
    ready = threading.Event()
    monkeypatch.setattr(native_step.NativeStep, "wait", False)
    monkeypatch.setattr(native_step, "PATIENCE", 0.0)
    monkeypatch.setattr("weir.native.kernels.step.StepTable.compile", ready.wait)
    for name in ("llama", "qwen3", "llama"):
        model = make(name)
        compile_steps(model, torch_compile=False)
        read(model, POLICIES[0], tokens(1, PROMPT + 2))
    ready.set()
    assert notices == [native_step.WAITING]


def test_no_step_waits_for_a_kernel_that_the_model_cannot_use(monkeypatch, notices) -> None:
    ready = threading.Event()
    monkeypatch.setattr(native_step, "PATIENCE", 0.0)
    monkeypatch.setattr("weir.native.kernels.step.StepTable.compile", ready.wait)
    model = make("mixtral")
    compile_steps(model)
    read(model, POLICIES[0], tokens(1, PROMPT + 2))
    ready.set()
    assert not notices


@pytest.mark.parametrize(("name", "begun"), [("qwen3", 1), ("olmo2", 1), ("mixtral", 0)])
def test_the_kernel_is_made_before_the_first_step_where_one_may_come(
    name: str, begun: int, monkeypatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr("weir.native.kernels.step.StepTable.compile", lambda: made.append(1))
    model = make(name)
    compile_steps(model, torch_compile=False)
    cache = StreamingCache(model, POLICIES[0], chunk=CHUNK)
    held = cache.attachment.engine
    if held._compiling is not None:
        held._compiling.join()
    assert len(made) == begun


def test_the_reference_is_no_kernel(taken, monkeypatch) -> None:
    monkeypatch.setenv("WEIR_KERNELS", "reference")
    model = make("llama")
    compile_steps(model)
    read(model, POLICIES[0], tokens(1, PROMPT + 2))
    compile_steps(model, on=False)
    assert not taken


_THREE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}


def _half(layer: Any) -> Tensor:
    return layer.mlp.up_proj.weight.detach() * 0.5


def _halved(layer: Any) -> nn.Linear:
    module = nn.Linear(32, 112, bias=False)
    module.weight = nn.Parameter(_half(layer))
    return module


KINDS_OF_A_LAYER = {
    "q_proj": "q4_0",
    "k_proj": "q8_0",
    "v_proj": "q4_1",
    "gate_proj": "q4_1",
    "up_proj": "q8_0",
    "down_proj": "q4_0",
}


@needs_block_kernels
@pytest.mark.parametrize("dense", [(), ("k_proj", "o_proj"), ("up_proj",)], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_layer_may_mix_kinds_of_blocks_and_dense_weights(
    dense: tuple[str, ...], rows: int, threads: int, taken
) -> None:
    """Files of type Q4_K_M mix them. Each product is computed by its weight's kind, from the same
    rounded input.
    """
    model = make("llama", hidden_size=64, intermediate_size=96)
    put_kinds(model, KINDS_OF_A_LAYER, dense)
    close_steps(model, rows, taken)


def put_kinds(model: PreTrainedModel, kinds: dict[str, str], dense: tuple[str, ...] = ()) -> None:
    """Convert the linear layers of a model to blocks of these kinds, except those in `dense`."""
    for name, module in list(model.named_modules()):
        own = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and own not in dense:
            put(module, Blocks.quantize(module.weight, kinds.get(own, "q8_0")))


def close_steps(model: PreTrainedModel, rows: int, taken: list[int]) -> None:
    """Compare steps one by one: native ones with those of the model's own modules."""
    found, wanted = [], []
    ids = tokens(rows, PROMPT + STEPS)
    cache, other = (StreamingCache(model, POLICIES[0], chunk=CHUNK) for _ in range(2))
    with torch.no_grad():
        for part in (ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)):
            compile_steps(model, on=False)
            wanted.append(model(part, past_key_values=other).logits[:, -1])
            compile_steps(model)
            found.append(model(part, past_key_values=cache).logits[:, -1])
    compile_steps(model, on=False)
    assert len(taken) == STEPS
    off = (torch.stack(found) - torch.stack(wanted)).norm() / torch.stack(wanted).norm()
    # If an input differs in its last place, it may be rounded to a neighboring one of 127 steps.
    assert float(off) < 2**-8


KINDS_OF_A_FILE = {
    "q_proj": "Q4_K",
    "k_proj": "F16",
    "v_proj": "Q6_K",
    "o_proj": "Q5_K",
    "gate_proj": "IQ4_XS",
    "up_proj": "Q2_K",
    "down_proj": "Q3_K",
    "lm_head": "Q6_K",
}


@needs_block_kernels
@pytest.mark.parametrize("rows", [1, 3])
def test_a_layer_may_mix_types_of_a_file(rows: int, threads: int, taken) -> None:
    """The weights are random codes, with scales that make the numbers as large as a model's."""
    pytest.importorskip("gguf")
    model = make("llama", hidden_size=256, intermediate_size=512)
    for seed, (name, module) in enumerate(list(model.named_modules())):
        if not isinstance(module, nn.Linear):
            continue
        kind = KINDS_OF_A_FILE[name.rpartition(".")[2]]
        outputs, inputs = module.weight.shape
        lines = random_lines(kind, outputs, inputs // unit_of(kind)[0], seed)
        blocks = blocks_of(lines, kind)
        wanted = module.weight.detach()
        heads = blocks.scales[:, :, : BLOCK_TYPES[kind].heads].view(torch.float16)
        heads *= float(wanted.std() / blocks.rows().std())
        put(module, blocks)
    close_steps(model, rows, taken)


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_steps_stay_native_after_a_call_that_asked_for_more(
    fresh_llama, ids, taken, name: str
) -> None:
    model = fresh_llama()
    with torch.no_grad():
        model(ids(1, 4), **{name: True})
    hooks_there = {hook.__module__ for m in model.modules() for hook in m._forward_hooks.values()}
    assert hooks_there == {interception.CAPTURING}  # otherwise transformers has moved the hooks
    compile_steps(model, torch_compile=False)
    stream = weir.Stream(model, "window(16)", chunk=CHUNK)
    stream.feed(ids(1, 9))
    stream.feed(ids(1, 1))
    assert stream.report()["steps"]["run"] == "native"
    compile_steps(model, on=False)


def test_a_configuration_that_asks_for_hidden_states_gets_them(fresh_llama, ids, taken) -> None:
    model = fresh_llama()
    compile_steps(model, torch_compile=False)
    cache = StreamingCache(model, "window(16)", chunk=CHUNK)
    with torch.no_grad():
        for part in (ids(1, 9), ids(1, 1), ids(1, 1)):
            model(part, **{CACHE: cache})
        model.config.output_hidden_states = True
        told = model(ids(1, 1), **{CACHE: cache})
    assert len(told.hidden_states) == 1 + model.config.num_hidden_layers
    compile_steps(model, on=False)
