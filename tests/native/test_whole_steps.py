"""A whole step, from tokens to logits in one native call, computes what the model does.

Streams use whole steps. If the model computes more around its decoder than the product with its
head, or has a hook, the model is called as before. Each test also checks which steps were whole, so
none passes only because no step was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference.models import VOCABULARY, make, tokens
from roundings import close_runs
from torch import Tensor, nn
from transformers import PreTrainedModel

import weir
from weir import StreamingCache, WeirError, compile_steps
from weir.errors import NotFiniteError
from weir.native import engine as native_step
from weir.native import quantize_weights
from weir.native.program import StepProgram

pytestmark = pytest.mark.own_kernels
pytest.importorskip("numba", reason="not installed: pip install '.[fast]'")
blocks = pytest.importorskip("weir.native.kernels.linear_blocks")
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
POLICY, CHUNK, PROMPT, STEPS = "sink(2) | recent(6) | heavy(6)", 4, 13, 9


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch, kernel_compiled: None) -> list[int]:
    """A list that gets a 1 for each whole step, and a 2 for each step that is native only in the
    decoder.
    """
    found: list[int] = []
    for number, name in ((1, "run_whole"), (2, "run")):
        own = getattr(StepProgram, name)

        def run(*given: Any, own: Any = own, number: int = number) -> Any:
            answer = own(*given)
            found.append(number)
            return answer

        monkeypatch.setattr(StepProgram, name, run)
    return found


def model_of(kind: str, family: str = "llama") -> PreTrainedModel:
    """Make a model with weights of some kind. If they are in blocks, the head uses the embedding's
    table.
    """
    if kind in ("float32", "bfloat16"):
        return make(family, getattr(torch, kind))
    if not blocks.SUPPORTED:
        pytest.skip("needs VNNI or AVX2")
    model = make("llama", **WIDE, tie_word_embeddings=True)
    quantize_weights(model, kind)
    return model


def run(model: PreTrainedModel, change: Callable[[Any], Any] | None = None) -> Tensor:
    """Return the logits of a stream after a prompt and after each step. `change` is applied after
    three steps.
    """
    stream, ids = weir.Stream(model, POLICY, chunk=CHUNK), tokens(1, PROMPT + STEPS)
    found = [stream.feed(ids[:, :PROMPT])]
    for index, step in enumerate(ids[:, PROMPT:].split(1, dim=1)):
        if index == 3 and change is not None:
            change(model)
        found.append(stream.feed(step))
    assert stream.last == ids[0, -1:].tolist()
    assert stream.seen == PROMPT + STEPS
    return torch.cat(found)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "olmo2", "phi3"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_streams_steps_are_the_models_own(kind: str, family: str, whole) -> None:
    model = model_of(kind, family)
    usual = run(model)
    compile_steps(model)
    native = run(model)
    compile_steps(model, on=False)
    assert whole == [1] * (STEPS - 1)  # the first is the model's own; then whole steps are proved
    assert native.dtype == usual.dtype
    close_runs(native[None], usual[None], model)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_steps_of_weights_in_blocks(kind: str, whole) -> None:
    """Embeddings are looked up in the head's table, which is in blocks too."""
    model = model_of(kind)
    usual = run(model)
    compile_steps(model)
    native = run(model)
    compile_steps(model, on=False)
    assert whole == [1] * (STEPS - 1)
    # If an input differs in its last place, it may be rounded to a neighboring one of 127 steps.
    assert float((native - usual).norm() / usual.norm()) < 2**-8


def test_rows_of_a_cache(threads: int, whole) -> None:
    model, ids, found = make("llama", **WIDE), tokens(3, PROMPT + STEPS), []
    for on in (False, True):
        compile_steps(model, on=on)
        cache = StreamingCache(model, POLICY, chunk=CHUNK)
        with torch.no_grad():
            model(ids[:, :PROMPT], past_key_values=cache)
            for step in ids[:, PROMPT:].split(1, dim=1):
                logits = cache.run_step(step[:, 0].tolist())
                if logits is None:
                    logits = model(step, past_key_values=cache).logits[:, 0]
                found.append(logits)
        assert cache.seen == [PROMPT + STEPS] * 3
    compile_steps(model, on=False)
    assert whole == [1] * (STEPS - 1)
    close_runs(torch.stack(found[STEPS:], 1), torch.stack(found[:STEPS], 1), model)


def test_what_is_generated_is_what_the_model_generates(whole) -> None:
    model, found = make("llama", **WIDE), []
    for on in (False, True):
        compile_steps(model, on=on)
        stream = weir.Stream(model, POLICY, chunk=CHUNK, seed=3)
        stream.feed(tokens(1, PROMPT))
        found.append(list(stream.generate(20, stop=[])))
        found.append(list(stream.generate(20, stop=[], temperature=0.7, repetition_penalty=1.2)))
    compile_steps(model, on=False)
    assert whole == [1] * 39
    assert found[2:] == found[:2]


class _Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


def _swap_class(module: nn.Module, **methods: Any) -> None:
    kind = type(module)
    module.__class__ = type(f"Other{kind.__name__}", (kind,), methods)


def _half_of(model: Any, **given: Any) -> Any:
    output = super(type(model), model).forward(**given)
    output.logits = output.logits * 0.5
    return output


def _embed(module: Any, ids: Tensor) -> Tensor:
    return nn.Embedding.forward(module, ids) * 0.5


def _put_head(model: Any, head: nn.Linear) -> None:
    head.weight = model.lm_head.weight
    model.lm_head = head.eval()


def _hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *given: None)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a model that halves its logits": lambda m: _swap_class(m, forward=_half_of),
    "a forward put on the model": lambda m: setattr(
        m, "forward", lambda **given: _half_of_forward(m, given)
    ),
    "a head of another class": lambda m: _put_head(m, _Scaled(64, VOCABULARY, bias=False)),
    "another head": lambda m: setattr(m, "lm_head", nn.Linear(64, VOCABULARY).eval()),
    "a head's forward": lambda m: setattr(
        m.lm_head, "forward", lambda x: nn.Linear.forward(m.lm_head, x) * 0.5
    ),
    "a head's weight": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data * 0.5),
    "a head's weight in place": lambda m: m.lm_head.weight.data.mul_(0.5),
    "a head's hook": lambda m: m.lm_head.register_forward_hook(lambda *given: given[2] * 0.5),
    "the model's hook": lambda m: m.register_forward_hook(
        lambda *given: given[2].__class__(logits=given[2].logits * 0.5)
    ),
    "the decoder's hook": lambda m: m.model.register_forward_hook(_halve_hidden),
    "embeddings of another class": lambda m: _swap_class(m.model.embed_tokens, forward=_embed),
    "the embeddings' hook": lambda m: m.model.embed_tokens.register_forward_hook(
        lambda *given: given[2] * 0.5
    ),
    "the embeddings' weight": lambda m: setattr(
        m.model.embed_tokens, "weight", nn.Parameter(m.model.embed_tokens.weight.data * 0.5)
    ),
    "other embeddings": lambda m: m.set_input_embeddings(_other_embeddings(m)),
    "a norm of embeddings": lambda m: setattr(m.model.embed_tokens, "max_norm", 0.5),
}
"""Changes that a user can make to the parts of a model around its layers."""


def _half_of_forward(model: Any, given: dict[str, Any]) -> Any:
    output = type(model).forward(model, **given)
    output.logits = output.logits * 0.5
    return output


def _halve_hidden(module: Any, given: Any, output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state * 0.5
    return output


def _other_embeddings(model: Any) -> nn.Embedding:
    made = nn.Embedding(VOCABULARY, 64).eval()
    made.weight = nn.Parameter(model.model.embed_tokens.weight.data.flip(0))
    return made


@pytest.mark.parametrize("at", ["before", "in mid-stream"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_around_the_layers_counts_from_the_next_step(name: str, at: str, whole) -> None:
    found = []
    for on in (False, True):
        torch.manual_seed(5)
        model = make("llama", **WIDE)
        if at == "before":
            CHANGES[name](model)
        compile_steps(model, on=on)
        found.append(run(model, None if at == "before" else CHANGES[name]))
        compile_steps(model, on=False)
    if at != "before":
        assert 1 in whole
    close_runs(found[1][None], found[0][None], model)


@pytest.mark.parametrize("hooked", ["", "model", "lm_head", "model.embed_tokens"])
def test_a_users_hook_is_called_at_every_step(hooked: str, whole) -> None:
    """This also holds for a hook that changes nothing, such as one that counts calls."""
    model, called = make("llama", **WIDE), []
    compile_steps(model)
    run(model, lambda m: m.get_submodule(hooked).register_forward_hook(lambda *_: called.append(1)))
    compile_steps(model, on=False)
    assert len(called) >= STEPS - 3
    assert 1 in whole


def test_a_model_with_more_than_a_product_has_native_steps_in_its_decoder(whole) -> None:
    """Granite divides its logits, and Gemma 2 caps them."""
    for family, config in (("granite", {"logits_scaling": 4.0}), ("gemma2", {})):
        model = make(family, **config)
        usual = run(model)
        compile_steps(model)
        native = run(model)
        compile_steps(model, on=False)
        assert whole == [2] * (STEPS - 1)
        close_runs(native[None], usual[None], model)
        whole.clear()


def test_a_setting_that_changes_logits_counts_from_the_next_step(whole) -> None:
    found = []
    for on in (False, True):
        model = make("granite", logits_scaling=1.0)
        compile_steps(model, on=on)
        found.append(run(model, lambda m: setattr(m.config, "logits_scaling", 4.0)))
        compile_steps(model, on=False)
    assert {*whole} == {1, 2}
    close_runs(found[1][None], found[0][None], model)


STEP = pytest.importorskip("weir.native.kernels.step")


def _of_kind(operations: Any, kind: int) -> Any:
    return operations[[i for i, op in enumerate(operations) if op["kind"] == kind][-1]]


def _head(program: StepProgram) -> Any:
    return _of_kind(program.table.operations, STEP.PRODUCTS)


def _look_up(program: StepProgram) -> Any:
    return _of_kind(program.table.operations, STEP.LOOK_UP)


def _other_row(program: StepProgram) -> None:
    form = program.whole.form
    _look_up(program)["weight"] -= form.embedding.weight[0].nbytes


def _blocks_of_other_rows(program: StepProgram) -> None:
    import ctypes

    import numpy as np

    memory = (ctypes.c_int64 * 11).from_address(int(_look_up(program)["lookup"]))
    numbers = np.frombuffer(memory, np.int64)
    numbers[6] += 32  # scales of the next outputs


FAULTS: dict[str, Callable[[StepProgram], None]] = {
    "a factor of embeddings": lambda p: _look_up(p).__setitem__("factor", 1.001),
    "embeddings of the next token": _other_row,
    "fewer embeddings": lambda p: _look_up(p).__setitem__("tokens", VOCABULARY - 1),
    "a head without the norm": lambda p: _head(p).__setitem__("x", p.hidden.data_ptr()),
    "a head of half its inputs": lambda p: _head(p).__setitem__("inputs", _head(p)["inputs"] // 2),
    "a last norm to elsewhere": lambda p: setattr(p, "_normed_at", p.hidden.data_ptr()),
}


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_table_is_not_whole(
    name: str, kind: str, whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case breaks one field of the whole step's table. The decoder's table stays right."""
    check(
        FAULTS[name], model_of(kind) if kind == "bfloat16" else make("llama", **WIDE), monkeypatch
    )
    assert whole
    assert 1 not in whole


@pytest.mark.parametrize("kind", ["q8_0"])
def test_a_wrong_table_of_blocks_is_not_whole(kind: str, whole, monkeypatch) -> None:
    check(_blocks_of_other_rows, model_of(kind), monkeypatch)
    assert whole == [2] * (STEPS - 1)


def check(
    fault: Callable[[StepProgram], None], model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run steps with a fault in the tables of whole steps."""
    own = native_step.check_program

    def check_program(program: StepProgram, *given: Any) -> None:
        if program.whole is not None:
            fault(program)
        own(program, *given)

    monkeypatch.setattr(native_step, "check_program", check_program)
    compile_steps(model)
    run(model)
    compile_steps(model, on=False)


def test_errors_are_those_of_the_model_and_nothing_is_fed(whole) -> None:
    model = make("llama", **WIDE)
    compile_steps(model)
    first, stream, twin = (weir.Stream(model, POLICY, chunk=CHUNK) for _ in range(3))
    ids = tokens(1, PROMPT + 4)
    for each in (first, stream, twin):  # the very first step is the model's own
        each.feed(ids[:, :PROMPT])
        each.feed(ids[:, PROMPT : PROMPT + 1])
        each.feed(ids[:, PROMPT + 1 : PROMPT + 2])
    with pytest.raises(WeirError, match=str(VOCABULARY)):
        stream.feed([VOCABULARY])
    weight = model.model.layers[1].self_attn.v_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[3] = torch.nan
    with pytest.raises(NotFiniteError, match="layer 1"):
        stream.feed(ids[:, PROMPT + 2 : PROMPT + 3])
    assert stream.seen == twin.seen
    with torch.no_grad():
        weight.copy_(kept)
    assert torch.equal(*(each.feed(ids[:, PROMPT + 2 : PROMPT + 3]) for each in (stream, twin)))
    compile_steps(model, on=False)
    assert 1 in whole


def test_logits_of_a_step_are_the_callers_own(whole) -> None:
    model = make("llama", **WIDE)
    compile_steps(model)
    stream, ids = weir.Stream(model, POLICY, chunk=CHUNK), tokens(1, PROMPT + 3)
    stream.feed(ids[:, :PROMPT])
    found = [stream.feed(step) for step in ids[:, PROMPT:].split(1, dim=1)]
    kept = [logits.clone() for logits in found]
    found[-1].zero_()
    (token,) = stream.generate(1, stop=[])
    compile_steps(model, on=False)
    assert token == int(kept[-1].argmax())
    assert torch.equal(found[1], kept[1])
    assert whole == [1, 1, 1]


def test_gradients_that_are_on_change_nothing(whole) -> None:
    model = make("llama", **WIDE)
    compile_steps(model)
    with torch.enable_grad():
        found = run(model)
    compile_steps(model, on=False)
    assert 1 in whole
    assert not found.requires_grad
