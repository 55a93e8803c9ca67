"""Compiled decode steps say what the usual ones say, and leave a cache as those leave it.

Most compile with `backend="eager"`: then all is as it would be compiled, but for the last part,
in which PyTorch turns a graph into machine code. The compiler goes through each layer anew, so
where graphs are counted, and not what is in them, a model has one layer.
"""

from __future__ import annotations

import copy
import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from reference.models import CONFIGS, MIXED, OWN_ATTENTION, UNROTATED, make, tokens
from roundings import close_runs
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from transformers import PreTrainedModel, modeling_rope_utils

import weir
from weir import StreamingCache, WeirError, compile_steps
from weir.models import compiling
from weir.models.compiling import Compiled, Compiling

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
"""One of each kind of graph: one log-weight, queries that wait, two log-weights, unequal layers."""

ROPE_IS_TRACEABLE = "torch.where" in inspect.getsource(modeling_rope_utils.dynamic_rope_update)
"""Not so in an older transformers, which asks in Python whether a text is long."""


@pytest.fixture
def llama(fresh_llama: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    """A model that nothing was asked of: transformers leaves hooks on one that was asked for
    attentions, and `torch.compile` cannot trace them.
    """
    return fresh_llama()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A one for each compiled step, which waits for its compiler; in the end that forgets them."""
    monkeypatch.setattr(Compiling, "wait", True)
    found: list[int] = []
    own = Compiled.__call__

    def call(self: Compiled, *args: Any) -> Any:
        output = own(self, *args)
        found.append(int(output is not None))
        return output

    monkeypatch.setattr(Compiled, "__call__", call)
    torch.compiler.reset()
    yield found
    torch.compiler.reset()


def read(model: PreTrainedModel, policy: str, ids: Tensor, **given: Any) -> tuple[Tensor, Any]:
    """Logits of a prompt and of the steps after it [batch, length, vocabulary], and the cache."""
    cache = StreamingCache(model, policy, chunk=CHUNK, **given)
    parts = [ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)]
    with torch.no_grad():
        found = [model(input_ids=part, past_key_values=cache).logits for part in parts]
    return torch.cat(found, dim=1), cache


def both_ways(model: PreTrainedModel, policy: str, ids: Tensor, **given: Any) -> tuple[Any, Any]:
    usual = read(model, policy, ids, **given)
    compile_steps(model, backend="eager")
    try:
        return usual, read(model, policy, ids, **given)
    finally:
        compile_steps(model, on=False)


def check_same(
    usual: tuple[Tensor, Any], compiled: tuple[Tensor, Any], model: PreTrainedModel
) -> None:
    close_runs(compiled[0], usual[0], model)
    assert compiled[1].seen == usual[1].seen
    for layer in range(len(usual[1])):
        one, other = usual[1].slots(layer), compiled[1].slots(layer)
        assert torch.equal(one.position, other.position)
        close_runs(one.b, other.b, model)
        close_runs(one.keys, other.keys, model)


@pytest.mark.parametrize(
    ("policy", "positions"), [*zip(POLICIES, cycle(["rolling", "original"]), strict=False)]
)
@pytest.mark.thinned(6)
def test_steps_are_the_usual_ones(llama, ids, taken, policy: str, positions: Any) -> None:
    usual, compiled = both_ways(llama, policy, ids(2, PROMPT + STEPS), positions=positions)
    assert taken == [1] * STEPS
    check_same(usual, compiled, llama)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.slow
def test_in_every_family(name: str, taken) -> None:
    # One layer where all layers are alike: the compiler goes through each anew.
    unlike = name in (*MIXED, *UNROTATED, *OWN_ATTENTION)
    model = make(name) if unlike else make(name, num_hidden_layers=1)
    usual, compiled = both_ways(model, "streaming_llm(16)", tokens(2, PROMPT + STEPS))
    # Models with linear biases, and those that leave rotation to weir, go the usual way.
    usually = name in OWN_ATTENTION or (name == "phi3-longrope" and not ROPE_IS_TRACEABLE)
    assert sum(taken) == (0 if usually else STEPS)
    check_same(usual, compiled, model)


@pytest.mark.slow
def test_as_machine_code(shallow, ids, taken) -> None:
    policy, text = "sink(2) | recent(6) | balance(8, block=4)", ids(1, PROMPT + STEPS)
    usual = read(shallow, policy, text)
    compile_steps(shallow, mode="default")  # without an option, steps may be native
    try:
        compiled = read(shallow, policy, text)
    finally:
        compile_steps(shallow, on=False)
    assert taken == [1] * STEPS
    check_same(usual, compiled, shallow)


@pytest.mark.parametrize("policy", GRAPHS[::2])
@pytest.mark.slow
def test_attention_is_loops_of_the_program(fresh_llama, ids, taken, policy: str) -> None:
    made: list[str] = []

    def keep(graph: Any, inputs: Any) -> Any:
        made.append(graph.code)
        return make_boxed_func(graph.forward)

    model = fresh_llama(layers=1)
    compile_steps(model, backend=aot_autograd(fw_compiler=keep))
    read(model, policy, ids(1, PROMPT + 1))
    compile_steps(model, on=False)
    (program,) = made
    assert "aten.exp." in program
    assert "weir." not in program
    assert "scaled_dot_product" not in program
    assert "bmm" not in program


@pytest.mark.parametrize("looked", [True, False])
@pytest.mark.slow
def test_no_garbage_is_looked_for_while_a_step_is_compiled(fresh_llama, ids, looked: bool) -> None:
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(gc.isenabled())
        return graph.forward

    model = fresh_llama(layers=1)
    compile_steps(model, backend=backend)
    try:
        if not looked:
            gc.disable()
        read(model, GRAPHS[0], ids(1, PROMPT + 1))
        assert gc.isenabled() is looked
    finally:
        gc.enable()
    assert seen == [False]


@pytest.mark.parametrize("policy", GRAPHS)
@pytest.mark.slow
def test_rows_that_stand_apart_share_the_graph_of_rows_in_step(llama, ids, taken, policy) -> None:
    text = ids(3, 44)
    mask = torch.ones_like(text)
    mask[1, :3] = 0
    mask[2, :9] = 0
    mask[0, 30:33] = 0  # a row that rests while the others go on
    found = []
    for on in (False, True):
        compile_steps(llama, on=on, backend="eager")
        with torch._dynamo.config.patch(error_on_recompile=False):
            cache = StreamingCache(llama, policy, chunk=CHUNK)
            with torch.no_grad():
                parts = [
                    llama(part, attention_mask=its, past_key_values=cache).logits * its[..., None]
                    for part, its in zip(
                        [text[:, :12], *text[:, 12:].split(1, dim=1)],
                        [mask[:, :12], *mask[:, 12:].split(1, dim=1)],
                        strict=True,
                    )
                ]
        found.append((torch.cat(parts, dim=1), cache))
    compile_steps(llama, on=False)
    assert taken == [1] * 32
    check_same(*found, llama)


@torch._dynamo.config.patch(error_on_recompile=True)
def test_rows_apart_and_in_step_are_one_graph(shallow, ids, taken) -> None:
    text = ids(2, 40)
    compile_steps(shallow, backend="eager")
    with torch.no_grad():
        for lag in (0, 1, 3):
            cache = StreamingCache(shallow, "sink(2) | recent(14)", chunk=CHUNK)
            mask = torch.ones_like(text)
            mask[1, :lag] = 0
            shallow(text[:, :12], attention_mask=mask[:, :12], past_key_values=cache)
            for part in text[:, 12:].split(1, dim=1):
                shallow(part, past_key_values=cache)
    compile_steps(shallow, on=False)
    assert taken == [1] * (3 * 28)


@pytest.mark.slow
def test_generate_and_a_stream_say_the_same(shallow, ids, taken) -> None:
    said = []
    for on in (False, True):
        compile_steps(shallow, on=on, backend="eager")
        cache = StreamingCache(shallow, "streaming_llm(16)", chunk=CHUNK)
        generated = shallow.generate(ids(1, 9), past_key_values=cache, max_new_tokens=30)
        stream = weir.Stream(shallow, "streaming_llm(16)", chunk=CHUNK)
        stream.feed(ids(1, 9))
        said.append((generated.tolist(), list(stream.generate(30))))
    compile_steps(shallow, on=False)
    assert sum(taken) >= 2 * 29
    assert said[0] == said[1]


def test_what_is_not_finite_is_refused_without_trace(fresh_llama, ids, taken) -> None:
    model = fresh_llama()
    compile_steps(model, backend="eager")
    cache = StreamingCache(model, "sink(2) | recent(6)", chunk=CHUNK)
    other = StreamingCache(model, "sink(2) | recent(6)", chunk=CHUNK)
    weights = model.model.layers[1].self_attn.v_proj.weight
    with torch.no_grad():
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


def test_hidden_states_and_gradients_come_the_usual_way(llama, ids, taken) -> None:
    compile_steps(llama, backend="eager")
    cache = StreamingCache(llama, "sink(2) | recent(6)", chunk=CHUNK)
    llama(ids(1, 5), past_key_values=cache)
    llama(ids(1, 1), past_key_values=cache)
    with torch.no_grad():
        output = llama(ids(1, 1), past_key_values=cache, output_hidden_states=True)
    compile_steps(llama, on=False)
    assert len(output.hidden_states) == 3
    assert not taken


def test_a_model_is_as_before_when_it_is_over(fresh_llama, ids) -> None:
    model = fresh_llama()
    compile_steps(model, backend="eager")
    assert "forward" not in vars(model.model)
    cache = StreamingCache(model, "sink(2) | recent(6)")
    assert "forward" in vars(model.model)
    compile_steps(model, on=False)
    compile_steps(model)
    del cache
    gc.collect()
    assert "forward" not in vars(model.model)


@pytest.mark.slow
def test_a_model_that_cannot_be_compiled_says_why_and_loses_nothing(
    fresh_llama, ids, taken
) -> None:
    model = fresh_llama()

    class Odd(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if float(x.sum()) < 1e9 else x

    cache = StreamingCache(model, "sink(2) | recent(6)", chunk=CHUNK)
    with torch.no_grad():
        model(ids(1, 13), past_key_values=cache)
        model.model.layers[1].mlp = Odd(model.model.layers[1].mlp)
        compile_steps(model, strict=True, backend="eager")
        with pytest.raises(WeirError, match="cannot be compiled here"):
            model(ids(1, 1), past_key_values=cache)
        assert cache.seen == [13]
        compile_steps(model, on=False)
        model(ids(1, 1), past_key_values=cache)
    assert cache.seen == [14]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no C++ compiler"), OSError(28, "No space left on device")],
    ids=["no compiler", "a full disk"],
)
def test_where_nothing_can_be_compiled_steps_go_the_usual_way_after_one_sentence(
    shallow, ids, taken, notices, error: Exception
) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise error

    usual = read(shallow, "window(8)", ids(1, PROMPT + 3))
    compile_steps(shallow, backend=backend)
    try:
        found = read(shallow, "window(8)", ids(1, PROMPT + 3))
        read(shallow, "window(9)", ids(1, PROMPT + 1))  # nothing is tried again, of no size
    finally:
        compile_steps(shallow, on=False)
    assert torch.equal(found[0], usual[0])
    assert taken == [0] * 4
    waits, falls = notices
    assert "compiling the decode step" in waits
    assert str(error) in falls
    assert falls.endswith("they go the usual way")


@pytest.mark.parametrize("fails", [False, True])
def test_tokens_come_uncompiled_until_the_program_is_ready(
    shallow, ids, taken, notices, monkeypatch, fails: bool
) -> None:
    monkeypatch.setattr(Compiling, "wait", False)
    ready = threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        ready.wait(60)
        if fails:
            raise RuntimeError("no C++ compiler")
        return graph.forward

    text = ids(1, PROMPT + 6)
    usual = read(shallow, "window(16)", text)
    compile_steps(shallow, backend=backend)
    cache = StreamingCache(shallow, "window(16)", chunk=CHUNK)
    parts = [text[:, :PROMPT], *text[:, PROMPT:].split(1, dim=1)]
    with torch.no_grad():
        found = [shallow(input_ids=part, past_key_values=cache).logits for part in parts[:4]]
        ready.set()
        for thread in threading.enumerate():
            if thread.name == "weir compiles":
                thread.join()
        found += [shallow(input_ids=part, past_key_values=cache).logits for part in parts[4:]]
    compile_steps(shallow, on=False)
    assert taken == [1, 0, 0, *[0 if fails else 1] * 3]
    check_same(usual, (torch.cat(found, dim=1), cache), shallow)
    ends = "no C++ compiler; they go the usual way" if fails else "is compiled, after 0 s"
    assert notices[-1].endswith(ends)


def test_one_model_is_compiled_at_a_time(shallow, fresh_llama, ids, taken, monkeypatch) -> None:
    # PyTorch cannot trace in one thread while it compiles in another, be it for weir or a user.
    monkeypatch.setattr(Compiling, "wait", False)
    begun, ready, text = threading.Event(), threading.Event(), ids(1, PROMPT + 2)

    def backend(graph: Any, inputs: Any) -> Any:
        begun.set()
        ready.wait(60)
        return graph.forward

    def wait() -> None:
        for thread in threading.enumerate():
            if thread.name == "weir compiles":
                thread.join()

    models = shallow, fresh_llama(layers=1)
    for model in models:
        compile_steps(model, backend=backend)
    read(models[0], "window(16)", text)
    assert begun.wait(60)
    assert not convert_frame.compile_lock.acquire(blocking=False)
    read(models[1], "window(16)", text)
    assert taken == [1, 0, 0, 0]
    ready.set()
    wait()
    read(models[1], "window(16)", text)
    wait()
    read(models[1], "window(16)", text)
    for model in models:
        compile_steps(model, on=False)
    assert taken[4] == 1
    assert taken[6:] == [1, 1]


def test_a_report_says_what_runs_while_a_program_is_compiled(fresh_llama, ids, monkeypatch) -> None:
    monkeypatch.setattr(Compiling, "wait", False)
    ready, text = threading.Event(), ids(1, PROMPT + 3)

    def backend(graph: Any, inputs: Any) -> Any:
        ready.wait(60)
        return graph.forward

    model = fresh_llama(layers=1)
    compile_steps(model, backend=backend)
    cache = StreamingCache(model, "window(16)", chunk=CHUNK)
    found = []
    with torch.no_grad():
        for part in (text[:, :PROMPT], *text[:, PROMPT : PROMPT + 2].split(1, dim=1)):
            model(part, past_key_values=cache)
        found.append(cache.report()["steps"])
        ready.set()
        for thread in threading.enumerate():
            if thread.name == "weir compiles":
                thread.join()
        found.append(cache.report()["steps"])
    compile_steps(model, on=False)
    assert [steps["run"] for steps in found] == ["eager", "compiled"]
    assert "torch.compile is still at work" in found[0]["reason"]
    assert found[1]["reason"] == "options for torch.compile were given"


@pytest.mark.slow
def test_each_size_says_once_what_is_waited_for(fresh_llama, ids, taken, notices) -> None:
    model = fresh_llama(layers=1)
    compile_steps(model, backend="eager")
    for policy in ("window(8)", "window(9)", "window(8)", "snap(8, 4, 5)"):
        read(model, policy, ids(1, PROMPT + 2))
        gc.collect()  # the last cache of the model goes, and what weir put on it
    compile_steps(model, on=False)
    assert taken == [1] * 8
    assert sum("compiling the decode step" in notice for notice in notices) == 3


@pytest.mark.slow
def test_one_size_that_cannot_be_compiled_leaves_the_others_their_graphs(
    fresh_llama, ids, taken, notices
) -> None:
    model, made = fresh_llama(layers=1), []

    def backend(graph: Any, inputs: Any) -> Any:
        if made:
            raise RuntimeError("one was enough")
        made.append(graph)
        return graph.forward

    compile_steps(model, backend=backend)
    for policy in ("window(8)", "snap(8, 4, 5)", "window(8)"):
        read(model, policy, ids(1, PROMPT + 2))
    compile_steps(model, on=False)
    assert taken == [1, 1, 0, 0, 1, 1]
    assert "one was enough; those of this size" in notices[-1]


@pytest.mark.slow
def test_weights_may_be_loaded_trained_and_moved_afterwards(fresh_llama, ids, taken) -> None:
    model, other = fresh_llama(layers=1), fresh_llama(layers=1, seed=1)
    text = ids(1, PROMPT + 2)

    def check() -> None:
        compiled = read(model, "window(8)", text)
        twin = copy.deepcopy(model)
        check_same(read(twin, "window(8)", text), compiled, twin)

    compile_steps(model, backend="eager")
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
    compile_steps(model, on=False)
    assert taken == [1] * 10


CHANGES: dict[str, Any] = {
    "nothing": lambda layer: None,
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
    "the class of a weight": lambda layer: setattr(
        layer.mlp.up_proj, "__class__", _doubled(nn.Linear)
    ),
}


def _doubled(kind: type) -> type:
    """A class of modules whose answers are twice those of another one."""
    return type("Doubled", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.thinned(4)
def test_a_bound_layer_notices_changes(fresh_llama, ids, taken, monkeypatch, change: str) -> None:
    model, text = fresh_llama(layers=2), ids(1, PROMPT + 12)
    twin, guarded = copy.deepcopy(model), []
    own = Compiling.run_layer

    def run(self: Compiling, *args: Any) -> Any:
        guarded.append(1)
        return own(self, *args)

    monkeypatch.setattr(Compiling, "run_layer", run)
    compile_steps(model, backend="eager")
    caches = [StreamingCache(each, POLICIES[1], chunk=CHUNK) for each in (model, twin)]
    with torch.no_grad():
        for start, stop in ((0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + 12))):
            if start == PROMPT + 6:
                assert len(guarded) == 4  # a step that is traced, and one that is recorded
                for each in (model, twin):
                    CHANGES[change](each.model.layers[1])
            found, wanted = (
                each(input_ids=text[:, start:stop], past_key_values=cache).logits
                for each, cache in zip((model, twin), caches, strict=True)
            )
            close_runs(found, wanted, model)
    compile_steps(model, on=False)
    assert taken == [1] * 12
    kept = change in ("nothing", "numbers of a weight")
    assert (len(guarded) == 4) == kept


def test_a_bound_layer_serves_every_cache_of_its_sizes(shallow, ids, taken) -> None:
    texts = [ids(1, PROMPT + 8, seed=seed) for seed in (1, 2)]
    wanted = [read(shallow, POLICIES[1], text)[0] for text in texts]
    compile_steps(shallow, backend="eager")
    caches = [StreamingCache(shallow, POLICIES[1], chunk=CHUNK) for _ in texts]
    found: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        for part in zip(*(text.split([PROMPT, *[1] * 8], dim=1) for text in texts), strict=True):
            for row, cache, of in zip(part, caches, found, strict=True):
                of.append(shallow(input_ids=row, past_key_values=cache).logits)
    compile_steps(shallow, on=False)
    for mine, theirs in zip(found, wanted, strict=True):
        close_runs(torch.cat(mine, dim=1), theirs, shallow)


def test_a_bound_layer_is_left_where_a_cache_of_other_sizes_comes(shallow, ids, taken) -> None:
    text, policies = ids(1, PROMPT + 4), ["sink(2) | recent(14)", "sink(2) | recent(15)"]
    usual = [read(shallow, policy, text) for policy in policies]
    compile_steps(shallow, backend="eager")
    found = [read(shallow, policy, text) for policy in policies]  # the first cache stays
    compile_steps(shallow, on=False)
    assert taken == [1] * 8
    for mine, theirs in zip(found, usual, strict=True):
        check_same(theirs, mine, shallow)


@pytest.mark.slow
def test_modules_that_are_replaced_are_noticed(fresh_llama, ids, taken) -> None:
    model, other = fresh_llama(layers=1), fresh_llama(layers=1, seed=1)
    text = ids(1, PROMPT + 2)

    def check() -> None:
        compiled = read(model, "window(8)", text)
        twin = copy.deepcopy(model)
        check_same(read(twin, "window(8)", text), compiled, twin)

    compile_steps(model, backend="eager")
    check()
    model.model.layers[0].mlp = other.model.layers[0].mlp
    check()
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    check()
    compile_steps(model, on=False)
    assert taken == [1] * 6


def test_whoever_chooses_what_is_asked_before_a_step_is_heard(fresh_llama, ids, taken) -> None:
    asked: list[bool] = []

    def all_of_them(guards: Any) -> list[bool]:
        asked.extend(guard.is_global for guard in guards)
        return [True] * len(guards)

    model = fresh_llama(layers=1)
    compile_steps(model, backend="eager", options={"guard_filter_fn": all_of_them})
    read(model, "window(8)", ids(1, PROMPT + 1))
    compile_steps(model, on=False)
    assert any(asked)
    assert taken == [1]


@pytest.mark.parametrize("policy", ["sink(2) | recent(14)", "recent(8) | heavy(8)"])
@pytest.mark.thinned(2)
def test_the_first_of_all_tokens_may_come_alone(shallow, ids, taken, policy: str) -> None:
    def step_by_step() -> Tensor:
        stream = weir.Stream(shallow, policy, chunk=CHUNK)
        return torch.stack([stream.feed(token) for token in ids(1, STEPS).split(1, dim=1)])

    usual = step_by_step()
    compile_steps(shallow, backend="eager")
    compiled = step_by_step()
    compile_steps(shallow, on=False)
    close_runs(compiled, usual, shallow)
    assert taken == [1] * (STEPS - 1)


@torch._dynamo.config.patch(recompile_limit=1)
@pytest.mark.slow
def test_sizes_of_one_model_do_not_count_for_another(shallow, fresh_llama, ids, taken) -> None:
    for model in (shallow, fresh_llama(layers=2)):
        compile_steps(model, backend="eager")
        read(model, "window(8)", ids(1, PROMPT + 3))
        compile_steps(model, on=False)
    assert taken == [1] * 6


def test_options_of_ones_own_come_before_weirs_and_other_compilers_get_none() -> None:
    given = ({}, {"options": {"size_asserts": True}})
    asserts = [Compiling(options)._backend.config["size_asserts"] for options in given]
    assert asserts == [False, True]
    assert Compiling({"backend": "eager"})._backend.kwargs == {}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "nonsense"}, "does not take these options: .*nonsense"),
        ({"color": "red"}, "does not take these options: .*color"),
        ({"backend": "nobody"}, "does not take these options: .*nobody"),
    ],
)
def test_options_that_there_are_not_are_refused_at_once(
    fresh_llama, options: dict[str, Any], sentence: str
) -> None:
    model = fresh_llama()
    with pytest.raises(WeirError, match=sentence):
        compile_steps(model, **options)
    weir.Stream(model, "window(8)").feed([1, 2, 3])


@pytest.mark.parametrize("model", ["nano", nn.Linear(2, 2)])
def test_what_is_no_decoder_is_refused(model: Any) -> None:
    with pytest.raises(WeirError, match="weir serves transformers models, not a"):
        compile_steps(model)


@pytest.mark.slow
def test_more_sizes_than_there_is_room_for_go_the_usual_way(
    shallow, ids, taken, monkeypatch
) -> None:
    monkeypatch.setattr(compiling, "MOST_LAYERS", 2)
    compile_steps(shallow, backend="eager")
    for budget in (8, 9):
        read(shallow, f"window({budget})", ids(1, PROMPT + 3))
    with pytest.warns(UserWarning, match="as many sizes"):
        read(shallow, "window(10)", ids(1, PROMPT + 3))
    read(shallow, "window(9)", ids(1, PROMPT + 3))
    compile_steps(shallow, on=False)
    assert taken == [1] * 6 + [0] * 3 + [1] * 3
