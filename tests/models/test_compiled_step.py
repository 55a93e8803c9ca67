"""Steps under `torch.compile` return the logits of the usual steps, and leave the cache in the same
state.

weir uses such steps only on a GPU. These tests choose them by hand on a CPU, mostly with
`backend="eager"` (`engines.compiled`).
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from engines import compiled
from reference.models import CONFIGS, OWN_ATTENTION, make, tokens
from roundings import close_runs
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel

import weir
from weir import StreamingCache, WeirError, compile_steps
from weir.models import CompiledStep
from weir.native import switching

CHUNK = 4
PROMPT, STEPS = 30, 22
POLICIES = [
    "window(16)",
    "sink(2) | recent(14)",
    "sink(2) | recent(6) | heavy(6)",
    "sink(2) | recent(6) | hive(8)",
    "snap(16, 2, 5)",
    "recent(8) | reservoir(8, weighted=true)",
    "sink(2) | recent(6) | balance(8, block=4)",
    "sink(2) | recent(6) | subgen(8, 4, 2)",
    "pyramidkv(budget=64, window=8)",
    "[[weir(20), weir(30)], [weir(30), recent(6) | heavy(6)]]",
]
GRAPHS = [POLICIES[0], *POLICIES[4:7:2], POLICIES[8]]
"""One policy for each kind of graph: one log-weight per slot, stored queries, two log-weights per
slot, and layers of different sizes.
"""


def read(model: PreTrainedModel, policy: str, ids: Tensor, **given: Any) -> tuple[Tensor, Any]:
    """Feed a prompt, and then token by token. Return all logits [batch, length, vocabulary] and the
    cache.
    """
    cache = StreamingCache(model, policy, chunk=CHUNK, **given)
    parts = [ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)]
    with torch.no_grad():
        found = [model(input_ids=part, past_key_values=cache).logits for part in parts]
    return torch.cat(found, dim=1), cache


def check_same(
    usual: tuple[Tensor, Any], found: tuple[Tensor, Any], model: PreTrainedModel
) -> None:
    close_runs(found[0], usual[0], model)
    assert found[1].seen == usual[1].seen
    for layer in range(len(usual[1])):
        one, other = usual[1].slots(layer), found[1].slots(layer)
        assert torch.equal(one.position, other.position)
        close_runs(one.b, other.b, model)
        close_runs(one.keys, other.keys, model)


@pytest.mark.parametrize(
    ("policy", "positions"), [*zip(POLICIES, cycle(["rolling", "original"]), strict=False)]
)
@pytest.mark.thinned(6)
def test_steps_are_the_usual_ones(llama, ids, policy: str, positions: Any) -> None:
    text = ids(2, PROMPT + STEPS)
    usual = read(llama, policy, text, positions=positions)
    with compiled(llama) as taken:
        found = read(llama, policy, text, positions=positions)
        assert found[1].steps == {"run": "compiled", "reason": None}
    assert taken == [2] * STEPS
    check_same(usual, found, llama)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow
def test_in_every_family(name: str) -> None:
    model, text = make(name), tokens(2, PROMPT + STEPS)
    usual = read(model, "streaming_llm(16)", text)
    with compiled(model) as taken:
        found = read(model, "streaming_llm(16)", text)
    # Families outside transformers' attention interface (Falcon, MPT, BLOOM) take the usual steps.
    assert taken == ([] if name in OWN_ATTENTION else [2] * STEPS)
    check_same(usual, found, model)


@pytest.mark.slow
def test_as_machine_code(shallow, ids) -> None:
    policy, text = "sink(2) | recent(6) | balance(8, block=4)", ids(1, PROMPT + STEPS)
    usual = read(shallow, policy, text)
    with compiled(shallow, backend="inductor") as taken:
        found = read(shallow, policy, text)
    assert taken == [1] * STEPS
    check_same(usual, found, shallow)


@pytest.mark.parametrize("policy", GRAPHS)
@pytest.mark.thinned(2)
def test_one_program_serves_all_streams_of_a_size_over_their_folds(
    fresh_llama, ids, policy: str
) -> None:
    counter, model = CompileCounter(), fresh_llama()
    with compiled(model, backend=counter) as taken:
        read(model, policy, ids(2, PROMPT + 2))
        made = counter.frame_count
        for _ in range(2):
            read(model, policy, ids(2, PROMPT + STEPS))
        assert len(taken) == 2 + 2 * STEPS
        assert counter.frame_count == made


@pytest.mark.slow
@pytest.mark.parametrize("policy", GRAPHS)
def test_rows_that_stand_apart_share_the_programs_of_rows_in_step(fresh_llama, ids, policy) -> None:
    text, model = ids(3, 44), fresh_llama()
    mask = torch.ones_like(text)
    mask[1, :3] = 0
    mask[2, :9] = 0
    mask[0, 30:33] = 0  # a row that pauses while the others go on

    def apart() -> tuple[Tensor, Any]:
        cache = StreamingCache(model, policy, chunk=CHUNK)
        parts = [
            model(part, attention_mask=its, past_key_values=cache).logits * its[..., None]
            for part, its in zip(
                [text[:, :12], *text[:, 12:].split(1, dim=1)],
                [mask[:, :12], *mask[:, 12:].split(1, dim=1)],
                strict=True,
            )
        ]
        return torch.cat(parts, dim=1), cache

    counter = CompileCounter()
    with torch.no_grad():
        usual = apart()
        with compiled(model, backend=counter) as taken:
            read(model, policy, text[:, : PROMPT + 2])
            made = counter.frame_count
            found = apart()
            assert counter.frame_count == made
    assert taken == [3] * (2 + 32)
    check_same(usual, found, model)


@pytest.mark.slow
def test_generate_and_a_stream_say_the_same(shallow, ids) -> None:
    def say() -> tuple[list[Any], list[int]]:
        cache = StreamingCache(shallow, "streaming_llm(16)", chunk=CHUNK)
        generated = shallow.generate(ids(1, 9), past_key_values=cache, max_new_tokens=30)
        stream = weir.Stream(shallow, "streaming_llm(16)", chunk=CHUNK)
        stream.feed(ids(1, 9))
        return generated.tolist(), list(stream.generate(30))

    usual = say()
    with compiled(shallow) as taken:
        assert say() == usual
    assert len(taken) >= 2 * 29


def test_what_is_not_finite_is_refused_without_trace(fresh_llama, ids) -> None:
    model = fresh_llama()
    weights = model.model.layers[1].self_attn.v_proj.weight
    with compiled(model) as taken, torch.no_grad():
        cache, other = (StreamingCache(model, "sink(2) | recent(6)", chunk=CHUNK) for _ in "ab")
        for one in (cache, other):
            model(ids(1, 13), past_key_values=one)
        kept = weights.clone()
        weights[3] = torch.nan
        with pytest.raises(WeirError, match="layer 1"):
            model(ids(1, 1), past_key_values=cache)
        weights.copy_(kept)
        found = [model(ids(1, 1, seed=2), past_key_values=one).logits for one in (cache, other)]
    assert taken == [1, 1, 1]
    assert torch.equal(*found)


def test_hidden_states_and_gradients_come_the_usual_way(llama, ids) -> None:
    with compiled(llama) as taken:
        cache = StreamingCache(llama, "sink(2) | recent(6)", chunk=CHUNK)
        llama(ids(1, 5), past_key_values=cache)
        llama(ids(1, 1), past_key_values=cache)
        with torch.no_grad():
            output = llama(ids(1, 1), past_key_values=cache, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert not taken


def test_a_model_is_as_before_when_it_is_over(fresh_llama, ids) -> None:
    model = fresh_llama()
    with compiled(model):
        assert "forward" not in vars(model.model)
        cache = StreamingCache(model, "sink(2) | recent(6)")
        assert "forward" in vars(model.model)
        del cache
        gc.collect()
        assert "forward" not in vars(model.model)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no C++ compiler"), OSError(28, "No space left on device")],
    ids=["no compiler", "a full disk"],
)
def test_where_nothing_can_be_compiled_steps_go_the_usual_way_after_one_sentence(
    shallow, ids, notices, error: Exception
) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise error

    usual = read(shallow, "window(8)", ids(1, PROMPT + 3))
    with compiled(shallow, strict=False, backend=backend) as taken:
        found = read(shallow, "window(8)", ids(1, PROMPT + 3))
        assert found[1].steps["run"] == "eager"
        assert str(error) in found[1].steps["reason"]
    assert taken == [0] * 3
    check_same(usual, found, shallow)
    assert sum("cannot be compiled here" in notice for notice in notices) == 1
    assert str(error) in notices[-1]


def test_who_is_strict_hears_why_and_loses_nothing(fresh_llama, ids) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    model = fresh_llama()
    cache = StreamingCache(model, "sink(2) | recent(6)", chunk=CHUNK)
    with torch.no_grad():
        model(ids(1, 13), past_key_values=cache)
        with (
            compiled(model, backend=backend),
            pytest.raises(WeirError, match=r"cannot be compiled here: .*no compiler here"),
        ):
            model(ids(1, 1), past_key_values=cache)
        assert cache.seen == [13]
        model(ids(1, 1), past_key_values=cache)
    assert cache.seen == [14]


def test_code_that_pytorch_cannot_follow_runs_between_programs(fresh_llama, ids) -> None:
    class Odd(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if float(x.sum()) < 1e9 else x

    model = fresh_llama()
    model.model.layers[1].mlp = Odd(model.model.layers[1].mlp)
    usual = read(model, "window(8)", ids(1, PROMPT + 3))
    with compiled(model) as taken:
        found = read(model, "window(8)", ids(1, PROMPT + 3))
    assert taken == [1] * 3
    check_same(usual, found, model)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a weight": lambda layer: setattr(
        layer.mlp.down_proj, "weight", nn.Parameter(-layer.mlp.down_proj.weight)
    ),
    "the memory of a weight": lambda layer: setattr(
        layer.mlp.up_proj.weight, "data", 2 * layer.mlp.up_proj.weight.data
    ),
    "numbers of a weight": lambda layer: layer.mlp.up_proj.weight.data.mul_(2),
    "a number": lambda layer: setattr(layer.post_attention_layernorm, "variance_epsilon", 1.0),
    "a module": lambda layer: setattr(layer.mlp, "act_fn", nn.Tanh()),
    "a forward": lambda layer: setattr(layer.mlp, "forward", lambda x: x),
    "a scale": lambda layer: setattr(layer.self_attn, "scaling", 3.0),
    "a class": lambda layer: setattr(layer.mlp, "__class__", _doubled(type(layer.mlp))),
    "a dtype": lambda layer: layer.mlp.up_proj.to(torch.float64).to(torch.float32),
}


def _doubled(kind: type) -> type:
    """Return a class of modules whose outputs are twice those of modules of class `kind`."""
    return type("Doubled", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.thinned(4)
def test_what_is_replaced_in_a_model_is_noticed(fresh_llama, ids, change: str) -> None:
    model, text = fresh_llama(layers=1), ids(1, PROMPT + 2)
    with compiled(model) as taken:
        read(model, "window(8)", text)
        CHANGES[change](model.model.layers[0])
        found = read(model, "window(8)", text)
    assert taken == [1] * 4
    check_same(read(model, "window(8)", text), found, model)


@pytest.mark.slow
def test_weights_may_be_loaded_trained_and_moved_afterwards(fresh_llama, ids) -> None:
    model, other = fresh_llama(layers=1), fresh_llama(layers=1, seed=1)
    text = ids(1, PROMPT + 2)

    def check() -> None:
        found = read(model, "window(8)", text)
        twin = copy.deepcopy(model)
        check_same(read(twin, "window(8)", text), found, twin)

    with compiled(model) as taken:
        check()
        model.load_state_dict(other.state_dict())
        check()
        model.load_state_dict(copy.deepcopy(fresh_llama(layers=1).state_dict()), assign=True)
        check()
        model.train()
        model(ids(1, 8), labels=ids(1, 8)).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        check()
        model.eval().to(torch.bfloat16)
        check()
    assert taken == [1] * 10


@pytest.mark.parametrize("policy", ["sink(2) | recent(14)", "recent(8) | heavy(8)"])
@pytest.mark.thinned(2)
def test_the_first_of_all_tokens_may_come_alone(shallow, ids, policy: str) -> None:
    def step_by_step() -> Tensor:
        stream = weir.Stream(shallow, policy, chunk=CHUNK)
        return torch.stack([stream.feed(token) for token in ids(1, STEPS).split(1, dim=1)])

    usual = step_by_step()
    with compiled(shallow) as taken:
        found = step_by_step()
    close_runs(found, usual, shallow)
    assert taken == [1] * (STEPS - 1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "nonsense"}, "does not accept these options: .*nonsense"),
        ({"color": "red"}, "does not accept these options: .*color"),
        ({"backend": "nobody"}, "does not accept these options: .*nobody"),
    ],
)
def test_options_that_there_are_not_are_refused_at_once(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(WeirError, match=sentence):
        CompiledStep(options)


def test_a_cpu_has_native_steps_and_no_options(fresh_llama) -> None:
    model = fresh_llama()
    sentence = r"mode is for torch\.compile, which weir uses only on a GPU"
    with pytest.raises(WeirError, match=sentence):
        compile_steps(model, mode="default")
    assert compile_steps(model) is False
    compile_steps(model, on=False)


def test_a_gpu_can_be_told_to_stop_compiling(fresh_llama, monkeypatch) -> None:
    monkeypatch.setattr(switching, "input_device", lambda _: torch.device("cuda"))
    model = fresh_llama()
    assert compile_steps(model) is True
    stream = weir.Stream(model, POLICIES[0])
    assert compile_steps(model, torch_compile=False) is False
    stream.feed([1, 2])
    stream.feed([3])
    assert stream.report()["steps"] == {
        "run": "eager",
        "reason": "weir.compile_steps was called with torch_compile=False",
    }


@pytest.mark.parametrize("model", ["nano", nn.Linear(2, 2)])
def test_what_is_no_decoder_is_refused(model: Any) -> None:
    with pytest.raises(WeirError, match="weir works with transformers models, got a"):
        compile_steps(model)
