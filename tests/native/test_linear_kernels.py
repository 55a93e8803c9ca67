"""Linear layers use weir's kernel only for the numbers of rows at which timings show a gain."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import weir
from weir import kernels
from weir.native import dispatch, linear_kernels
from weir.native.linear_kernels import ROWS, choose_products


@dataclass
class Heard:
    """A kernel that notes how many rows it was given."""

    rows: list[int] = field(default_factory=list)

    def __call__(self, x, weight, bias):
        self.rows.append(x.numel() // weight.shape[1])
        return nn.functional.linear(x, weight, bias) + 1


@pytest.fixture
def kernel(monkeypatch):
    heard = Heard()
    monkeypatch.setattr(dispatch, "linear", lambda device: heard)
    return heard


@pytest.fixture
def gains(monkeypatch):
    """The gains that timings return, by number of rows, and the number of timings as "timed"."""
    found = {**dict.fromkeys(ROWS, 2.0), "timed": 0}

    def timed(modules, rows, kernel):
        found["timed"] += 1
        return found[rows]

    monkeypatch.setattr(linear_kernels, "_gain", timed)
    return found


@pytest.fixture
def file(tmp_path):
    return tmp_path / "kept" / "products.json"


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return nn.Linear(8, 6)


@torch.no_grad()
def through(layer, kernel, rows, dtype=torch.float32):
    """Return whether a product of so many rows uses weir's kernel."""
    before = len(kernel.rows)
    layer(torch.randn(rows, 8, dtype=dtype))
    return len(kernel.rows) > before


def test_rows_go_the_way_of_the_next_larger_number_that_was_timed(layer, kernel, gains, file):
    gains.update({1: 2.0, 2: 1.0, 4: 1.06, 8: 1.04, 16: 1.0, 32: 1.5})
    told = choose_products(layer, remembered=file)
    assert told["float32 4 x [6, 8] + bias"] == 1.06
    assert len(told) == len(ROWS)
    there = [rows for rows in (*range(1, 40), 100) if through(layer, kernel, rows)]
    assert there == [1, 3, 4, *range(17, 33)]
    assert not through(layer, kernel, 0)


def test_all_else_goes_the_usual_way(layer, kernel, gains, file):
    choose_products(layer, remembered=file)
    assert through(layer, kernel, 1)
    layer(torch.randn(1, 8))  # with gradients
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(1, 8))
    with torch.no_grad():
        layer(torch.randn(1, 8, device="cpu").as_subclass(nn.Parameter))
    step = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        step(torch.randn(1, 8))
    assert len(kernel.rows) == 1
    with pytest.raises(RuntimeError, match="dtype"):
        through(layer, kernel, 1, torch.bfloat16)


def test_weights_may_change_move_and_turn_into_others(layer, kernel, gains, file):
    choose_products(layer, remembered=file)
    with torch.no_grad():
        layer.weight.fill_(2)
        layer.bias.zero_()
        assert torch.equal(layer(torch.ones(1, 8)), torch.full((1, 6), 17.0))
        layer.load_state_dict({"weight": torch.ones(6, 8), "bias": torch.ones(6)}, assign=True)
        assert torch.equal(layer(torch.ones(1, 8)), torch.full((1, 6), 10.0))
    assert len(kernel.rows) == 2
    layer.half()
    assert not through(layer, kernel, 1, torch.float16)
    layer.bfloat16()
    assert through(layer, kernel, 1, torch.bfloat16)
    layer.to("meta")
    with torch.no_grad():
        assert layer(torch.randn(1, 8, device="meta")).shape == (1, 6)


class Shifted(nn.Linear):
    def forward(self, input):
        return nn.functional.linear(input, self.weight) + 5


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", ["class", "forward of the class"])
@torch.no_grad()
def test_a_layer_that_becomes_another_one_is_followed(
    layer, kernel, gains, file, change, compiled, monkeypatch
):
    x = torch.ones(1, 8)
    choose_products(layer, remembered=file)
    call = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
    call(x)
    if change == "class":
        layer.__class__ = Shifted
    else:
        monkeypatch.setattr(nn.Linear, "forward", Shifted.forward)
    assert torch.equal(call(x), x @ layer.weight.T + 5)
    assert not through(layer, kernel, 1)


def test_it_can_be_undone_and_copies_are_plain(layer, kernel, gains, file):
    choose_products(layer, remembered=file)
    choose_products(layer, remembered=file)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not through(twin, kernel, 1)
    assert through(layer, kernel, 1)
    assert choose_products(layer, on=False, remembered=file) == {}
    assert not through(layer, kernel, 1)
    assert "forward" not in vars(layer)


def test_copies_can_be_given_products_of_their_own(layer, kernel, gains, file):
    choose_products(layer, remembered=file)
    twin = copy.deepcopy(layer)
    assert choose_products(twin, remembered=file)
    assert through(twin, kernel, 1)


def test_it_is_called_and_traced_like_any_linear_layer(layer, kernel, gains, file):
    choose_products(layer, remembered=file)
    with torch.no_grad():
        assert torch.equal(layer(input=torch.ones(1, 8)), layer(torch.ones(1, 8)))
        assert len(kernel.rows) == 2
        torch.jit.trace(layer, torch.ones(1, 8), check_trace=False)
    assert len(kernel.rows) == 2


@torch.no_grad()
def test_what_pytorch_follows_goes_the_usual_way(layer, kernel, gains, file):
    x = torch.randn(3, 8)
    wanted = layer(x)
    choose_products(layer, remembered=file)
    assert torch.equal(torch.vmap(layer)(x), wanted)
    assert torch.equal(torch.func.jvp(layer, (x,), (x,))[1], x @ layer.weight.T)
    assert torch.equal(make_fx(layer)(x)(2 * x), nn.functional.linear(2 * x, *layer.parameters()))
    with FlopCounterMode(display=False) as counted:
        layer(x)
    assert counted.get_total_flops() == 2 * 3 * 8 * 6
    assert not kernel.rows


def test_defaults_of_dtype_and_device_are_no_matter(layer, gains, file, monkeypatch):
    pytest.importorskip("numba")
    choose_products(layer, remembered=file)
    x = torch.ones(1, 8)
    with torch.no_grad():
        wanted = layer(x)
        with torch.device("meta"):
            assert torch.equal(layer(x), wanted)
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert torch.equal(layer(x), wanted)
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_timing_draws_nothing_from_the_global_generator():
    modules = [nn.Linear(8, 6)]
    before = torch.get_rng_state()
    with torch.no_grad():
        linear_kernels._gain(modules, 1, nn.functional.linear)
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_of_others_are_left_as_they_are(kernel, gains, file):
    class Another(nn.Linear):
        pass

    changed, tied = nn.Linear(8, 8), nn.Linear(8, 8)
    changed.forward = lambda x: x
    double = nn.Linear(8, 8).double()
    turned = nn.Linear(8, 8)
    turned.weight = nn.Parameter(torch.randn(8, 8).T)
    model = nn.Sequential(
        Another(8, 8), changed, double, turned, nn.Conv1d(1, 1, 1), nn.Linear(0, 4), tied
    )
    assert len(choose_products(model, remembered=file)) == len(ROWS)  # those of `tied`
    for each in (model[0], changed, turned):
        assert not through(each, kernel, 1)
    assert through(tied, kernel, 1)


def test_nothing_is_put_on_where_nothing_is_gained(layer, kernel, gains, file):
    gains.update({**dict.fromkeys(ROWS, 1.0), "loop": 1.0})
    assert choose_products(layer, remembered=file)
    assert "forward" not in vars(layer)


def test_without_a_kernel_nothing_is_done(layer, gains, file, monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "reference")
    assert choose_products(layer, remembered=file) == {}
    assert gains["timed"] == 0
    assert not file.exists()


def test_what_was_timed_is_kept_for_this_machine(layer, kernel, gains, file, monkeypatch):
    choose_products(layer, remembered=file)
    assert gains["timed"] == len(ROWS)
    gains[1] = 0.5
    assert choose_products(nn.Linear(8, 6), remembered=file)["float32 1 x [6, 8] + bias"] == 2.0
    assert gains["timed"] == len(ROWS)
    choose_products(nn.Linear(8, 6, bias=False), remembered=file)
    assert gains["timed"] == 2 * len(ROWS)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert choose_products(nn.Linear(8, 6), remembered=file)["float32 1 x [6, 8] + bias"] == 0.5
    assert len(json.loads(file.read_text())) == 2
    assert [each.name for each in file.parent.iterdir()] == ["products.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[" * 100_000,
        "[]",
        "null",
        '{"x": 3}',
        "\x00",
        '{"%s": {"float32 1 x [6, 8] + bias": "a"}}',
        '{"%s": {"float32 1 x [6, 8] + bias": 1' + "0" * 400 + "}}",
    ],
    ids=range(9),
)
def test_a_file_that_is_something_else_is_timed_over(text, layer, kernel, gains, file):
    file.parent.mkdir()
    file.write_text(text.replace("%s", linear_kernels._machine()))
    choose_products(layer, remembered=file)
    assert gains["timed"] == len(ROWS)
    assert (
        json.loads(file.read_text())[linear_kernels._machine()]["float32 1 x [6, 8] + bias"] == 2.0
    )


def test_where_nothing_can_be_kept_it_works_all_the_same(layer, kernel, gains, tmp_path):
    (tmp_path / "file").write_text("")
    assert choose_products(layer, remembered=tmp_path / "file" / "products.json")
    assert through(layer, kernel, 1)


def test_the_smallest_weights_take_no_longer_to_time_than_others(monkeypatch):
    calls = 0

    def counted(x, weight, bias):
        nonlocal calls
        calls += 1

    monkeypatch.setattr(nn.functional, "linear", counted)
    linear_kernels._gain([nn.Linear(3, 3)], 1, counted)
    assert calls <= 2 * (1 + linear_kernels.CALLS * linear_kernels.ROUNDS.stop)


def test_what_is_no_model_is_refused():
    with pytest.raises(weir.WeirError, match="needs a model, got 'nano'"):
        choose_products("nano")


def test_of_a_timing_the_shortest_rounds_count(monkeypatch):
    clock, calls = 0.0, 0

    def way(takes):
        def multiply(x, weight, bias):
            nonlocal clock, calls
            calls += 1
            disturbed = 10 if (calls - 1) // 2 % 2 else 1  # every other round
            clock += disturbed * takes(weight.numel() / modules[0].weight.numel())

        return multiply

    modules = [nn.Linear(2048, 1024)]  # so large that a round reads it once
    monkeypatch.setattr(linear_kernels, "time", SimpleNamespace(perf_counter=lambda: clock))
    monkeypatch.setattr(nn.functional, "linear", way(lambda part: 4.0))
    assert linear_kernels._gain(modules, 2, way(lambda part: 1.0 + part)) == 4.0 / 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stream_says_the_same_to_rounding(llama, dtype, gains, file, ids, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    own = dispatch.linear(torch.device("cpu"))
    taken = []
    monkeypatch.setattr(dispatch, "linear", lambda device: lambda *of: taken.append(1) or own(*of))
    model = copy.deepcopy(llama).to(dtype)
    given = ids(3, 40)

    def logits():
        cache = weir.StreamingCache(model, "streaming_llm(budget=16)", chunk=4, batch=3)
        with torch.no_grad():
            steps = given.split([20, *[1] * 20], dim=1)
            return torch.cat([model(each, past_key_values=cache).logits for each in steps], dim=1)

    plain = logits().double()
    assert choose_products(model, remembered=file)
    chosen = logits().double()
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert len(taken) == 20 * linears
    # The sums of two layers are each off by a few roundings. A wrong weight would change all logits
    # by much more.
    assert (chosen - plain).abs().max() < 100 * torch.finfo(dtype).eps * plain.abs().max()
    choose_products(model, on=False)
    assert torch.equal(logits().double(), plain)


def test_what_else_a_machine_does_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], itertools.count()

    def usual(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        clock[0] += 2.0
        return x

    def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if weight.shape[0] > 1:
            clock[0] += 1.0 if next(calls) % 4 == 0 else 50.0  # mostly interrupted
        return x

    monkeypatch.setattr(nn.functional, "linear", usual)
    monkeypatch.setattr(linear_kernels.time, "perf_counter", lambda: clock[0])
    layer = nn.Linear(2048, 1024, bias=False)  # large enough for one call a round
    assert linear_kernels._gain([layer], 1, ours) == 2.0
