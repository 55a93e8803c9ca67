"""The native engine refuses what it does not understand, with a reason that names it. The steps
that it takes are right.

Each case changes one thing in a model, in float32 and in bfloat16, where comparing a single token
would not have noticed the change. Either the engine refuses the model, with a reason that names the
change, or its steps return what the model's own modules return.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference.models import make, tokens
from roundings import close_runs
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from weir import StreamingCache, choose_products, compile_steps
from weir.native import engine as native_step
from weir.native.module_trials import activation_of
from weir.native.program import StepProgram

pytest.importorskip("numba", reason="not installed: pip install 'weir-kv[fast]'")
pytestmark = pytest.mark.own_kernels
PROMPT, STEPS = 21, 5
Change = Callable[[Any], Any]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, kernel_compiled: None) -> list[int]:
    """A list that gets a 1 for each native step that took effect."""
    found: list[int] = []
    own = StepProgram.run
    monkeypatch.setattr(StepProgram, "run", lambda *given: (found.append(1), own(*given))[1])
    return found


def read(model: PreTrainedModel, change: Change | None = None) -> tuple[Tensor, Any]:
    """Return the logits of a prompt and of the steps after it, and the cache. `change` is applied
    after three steps.
    """
    cache = StreamingCache(model, "sink(2) | recent(10)", chunk=4)
    ids = tokens(2, PROMPT + STEPS)
    found = []
    with torch.no_grad():
        for index, part in enumerate([ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)]):
            if index == 4 and change is not None:
                change(model)
            found.append(model(input_ids=part, past_key_values=cache).logits)
    return torch.cat(found, dim=1), cache


def layer_of(model: Any) -> Any:
    """Return the second layer. Most cases change it, so checking only the first is not enough."""
    return model.model.layers[1]


def swap_class(module: nn.Module, **methods: Any) -> None:
    """Give a module a new class, derived from its own, with other methods."""
    kind = type(module)
    module.__class__ = type(f"Other{kind.__name__}", (kind,), methods)


def twice(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that doubles what `own` returns, or the first element if it is a tuple."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = own(self, *args, **kwargs)
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    return forward


class Times(nn.Module):
    """Multiplies its input, or the output of an inner module, by a number."""

    def __init__(self, factor: float, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.factor, self.inner = factor, inner

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.inner is None else self.inner(x)) * self.factor


class LowRank(nn.Linear):
    """A linear layer to which another one of low rank is added, as in adapters."""

    def __init__(self, own: nn.Linear) -> None:
        super().__init__(own.in_features, own.out_features, bias=False, dtype=own.weight.dtype)
        self.weight = own.weight
        draw = torch.Generator().manual_seed(3)
        down = torch.randn(2, own.in_features, generator=draw).to(own.weight.dtype)
        up = torch.randn(own.out_features, 2, generator=draw).to(own.weight.dtype)
        self.down, self.up = nn.Parameter(down * 0.1), nn.Parameter(up * 0.1)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + (input @ self.down.T) @ self.up.T


class BiasedNorm(nn.Module):
    """An RMS norm with a bias."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own, self.weight, self.eps = own, own.weight, own.variance_epsilon
        self.bias = nn.Parameter(torch.full_like(own.weight, 0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + self.bias


class WithAdapter(nn.Module):
    """An MLP with an adapter: a linear layer whose output is added to the MLP's."""

    def __init__(self, own: nn.Module, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.own = own
        self.gate_proj, self.up_proj, self.down_proj = own.gate_proj, own.up_proj, own.down_proj
        self.act_fn = own.act_fn
        self.adapter = nn.Linear(width, width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + self.adapter(x)


def wider_epsilon(self: Any, x: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 30 * self.variance_epsilon)
    return self.weight * wide.to(x.dtype)


def swapped_gate(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def turned_less(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return _rotate(q, k, cos, sin * 0.9, unsqueeze_dim)


_rotate = modeling_llama.apply_rotary_pos_emb


def halved_residual(self: Any, hidden_states: Tensor, **given: Any) -> Tensor:
    out: Tensor = modeling_llama.LlamaDecoderLayer.forward(self, hidden_states, **given)
    return hidden_states + (out - hidden_states) * 0.5


def scaled_embeddings(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **given: Any):
    embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
    return modeling_llama.LlamaModel.forward(self, inputs_embeds=embeds * 1.1, **given)


def scaled_output(self: Any, *args: Any, **given: Any) -> Any:
    out = modeling_llama.LlamaModel.forward(self, *args, **given)
    out.last_hidden_state = out.last_hidden_state * 1.1
    return out


def _untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight * 0.5)


REFUSED: dict[str, tuple[str, Change, str]] = {
    "a norm's bias": (
        "llama",
        lambda m: setattr(layer_of(m), "input_layernorm", BiasedNorm(layer_of(m).input_layernorm)),
        r"layers\.1\.input_layernorm.* computes no norm",
    ),
    "a norm's epsilon": (
        "llama",
        lambda m: swap_class(layer_of(m).post_attention_layernorm, forward=wider_epsilon),
        r"layers\.1\.post_attention_layernorm, .*, computes no norm",
    ),
    "the last norm's epsilon": (
        "llama",
        lambda m: swap_class(m.model.norm, forward=wider_epsilon),
        r"^norm, .*, computes no norm",
    ),
    "a norm of heads that subtracts the mean": (
        "qwen3",
        lambda m: setattr(layer_of(m).self_attn, "q_norm", nn.LayerNorm(16, dtype=m.dtype).eval()),
        r"layers\.1\.self_attn\.q_norm subtracts a mean",
    ),
    "a residual multiplier without a name": (
        "llama",
        lambda m: swap_class(layer_of(m), forward=halved_residual),
        r"layers\.1, .*computes something else than its modules say",
    ),
    "an embedding multiplier without a name": (
        "llama",
        lambda m: swap_class(m.model, forward=scaled_embeddings),
        r"changes hidden states before the first layer",
    ),
    "a multiplier behind the last norm": (
        "llama",
        lambda m: swap_class(m.model, forward=scaled_output),
        r"changes hidden states after its last norm",
    ),
    "an activation": (
        "llama",
        lambda m: setattr(layer_of(m).mlp, "act_fn", nn.GELU()),
        r"the activation of layers\.1\.mlp, a GELU",
    ),
    "an activation that is nearly the same": (
        "llama",
        lambda m: setattr(layer_of(m).mlp, "act_fn", Times(1.0001, nn.SiLU()).eval()),
        r"the activation of layers\.1\.mlp, a .*Times",
    ),
    "gate and up swapped": (
        "llama",
        lambda m: swap_class(layer_of(m).mlp, forward=swapped_gate),
        r"layers\.1, .*computes something else",
    ),
    "a linear layer of another class": (
        "llama",
        lambda m: setattr(layer_of(m).self_attn, "q_proj", LowRank(layer_of(m).self_attn.q_proj)),
        r"layers\.1\.self_attn\.q_proj is a .*LowRank",
    ),
    "a wrapped projection": (
        "llama",
        lambda m: setattr(layer_of(m).mlp, "up_proj", Times(0.5, layer_of(m).mlp.up_proj).eval()),
        r"layers\.1\.mlp\.up_proj is a .*Times",
    ),
    "a parametrized projection": (
        "llama",
        lambda m: parametrize.register_parametrization(
            layer_of(m).mlp.down_proj, "weight", Times(0.5).eval()
        ),
        r"layers\.1\.mlp\.down_proj is a ParametrizedLinear",
    ),
    "a parametrized norm": (
        "llama",
        lambda m: parametrize.register_parametrization(
            layer_of(m).input_layernorm, "weight", Times(0.5).eval()
        ),
        r"layers\.1\.input_layernorm is a ParametrizedLlamaRMSNorm",
    ),
    "a pruned projection": (
        "llama",
        lambda m: prune.l1_unstructured(layer_of(m).mlp.up_proj, "weight", 0.5),
        r"layers\.1\.mlp\.up_proj has a forward hook",
    ),
    "a hook of attention": (
        "llama",
        lambda m: layer_of(m).self_attn.register_forward_hook(
            lambda *given: (given[2][0] * 0.9, None)
        ),
        r"layers\.1\.self_attn has a forward hook",
    ),
    "a hook of the last norm": (
        "llama",
        lambda m: m.model.norm.register_forward_hook(lambda *given: given[2] * 0.9),
        r"^norm has a forward hook",
    ),
    "a hook before a layer": (
        "llama",
        lambda m: layer_of(m).register_forward_pre_hook(lambda _, given: (given[0] * 0.9,)),
        r"layers\.1 has a forward hook",
    ),
    "an attention's forward on the module": (
        "llama",
        lambda m: setattr(
            layer_of(m).self_attn,
            "forward",
            types.MethodType(twice(modeling_llama.LlamaAttention.forward), layer_of(m).self_attn),
        ),
        r"the forward of layers\.1\.self_attn was replaced",
    ),
    "a layer's forward on the module": (
        "llama",
        lambda m: setattr(layer_of(m), "forward", partial(halved_residual, layer_of(m))),
        r"the forward of layers\.1 was replaced",
    ),
    "a decoder's forward on the module": (
        "llama",
        lambda m: setattr(m.model, "forward", partial(scaled_output, m.model)),
        r"the forward of its decoder was replaced",
    ),
    "an MLP compiled by torch.compile": (
        "llama",
        lambda m: layer_of(m).mlp.compile(backend="eager"),
        r"layers\.1\.mlp was compiled by torch\.compile",
    ),
    "an MLP in torch.compile's wrapper": (
        "llama",
        lambda m: setattr(layer_of(m), "mlp", torch.compile(layer_of(m).mlp, backend="eager")),
        r"layers\.1\.mlp was compiled by torch\.compile",
    ),
    "an adapter beside an MLP": (
        "llama",
        lambda m: setattr(layer_of(m), "mlp", WithAdapter(layer_of(m).mlp, 32, m.dtype).eval()),
        r"layers\.1\.mlp\.adapter has weight",
    ),
    "a tensor that nothing says is read": (
        "llama",
        lambda m: setattr(layer_of(m), "scale", torch.tensor(1.0)),
        r"layers\.1 has scale",
    ),
    "fewer layers than there are": (
        "llama",
        lambda m: setattr(m.model.config, "num_hidden_layers", 1),
        r"uses its layer 1 0 times",
    ),
    "a module in training": (
        "llama",
        lambda m: layer_of(m).mlp.train(),
        r"layers\.1\.mlp is in training mode",
    ),
}
TAKEN: dict[str, tuple[str, dict[str, Any], Change]] = {
    "biases of layer norms": ("stablelm", {"qk_layernorm": False}, lambda m: None),
    "a norm's own epsilon": (
        "llama",
        {},
        lambda m: setattr(layer_of(m).input_layernorm, "variance_epsilon", 0.3),
    ),
    "all of Granite's multipliers": (
        "granite",
        {"residual_multiplier": 0.3, "embedding_multiplier": 1.7, "logits_scaling": 3.0},
        lambda m: None,
    ),
    "one layer's multiplier": (
        "granite",
        {"residual_multiplier": 0.3},
        lambda m: setattr(layer_of(m), "residual_multiplier", 2),
    ),
    "an attention's scale": (
        "llama",
        {},
        lambda m: setattr(layer_of(m).self_attn, "scaling", 0.9),
    ),
    "a head of its own": ("llama", {"tie_word_embeddings": True}, _untie),
    "norms of queries and keys exchanged": (
        "qwen3",
        {},
        lambda m: [
            setattr(layer_of(m).self_attn, "other", layer_of(m).self_attn.q_norm),
            setattr(layer_of(m).self_attn, "q_norm", layer_of(m).self_attn.k_norm),
            setattr(layer_of(m).self_attn, "k_norm", layer_of(m).self_attn.other),
        ],
    ),
    "GELU by tanh": (
        "llama",
        {},
        lambda m: setattr(layer_of(m).mlp, "act_fn", nn.GELU("tanh")),
    ),
    "an activation that is a function": (
        "llama",
        {},
        lambda m: (delattr(layer_of(m).mlp, "act_fn"), setattr(layer_of(m).mlp, "act_fn", F.silu)),
    ),
    "biases of all projections": (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        lambda m: None,
    ),
    "a hook of the embeddings": (
        "llama",
        {},
        lambda m: m.model.embed_tokens.register_forward_hook(lambda *given: given[2] * 1.3),
    ),
    "a hook of the decoder": (
        "llama",
        {},
        lambda m: m.model.register_forward_pre_hook(lambda *given: None),
    ),
    "weights that share memory": (
        "llama",
        {},
        lambda m: setattr(layer_of(m).mlp.up_proj, "weight", layer_of(m).mlp.gate_proj.weight),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name(name: str, dtype: torch.dtype, taken) -> None:
    family, change, reason = REFUSED[name]
    model = make(family, dtype)
    change(model)
    choose_products(model)  # as compiling does
    usual, cache = read(model)
    assert cache.report()["steps"]["run"] == "eager"
    compile_steps(model, torch_compile=False)
    found, cache = read(model)
    steps = cache.report()["steps"]
    compile_steps(model, on=False)
    assert not taken
    assert torch.equal(found, usual)
    assert steps["run"] == "eager"
    assert re.search(reason, steps["reason"]), steps["reason"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TAKEN)
def test_what_is_understood_is_right(name: str, dtype: torch.dtype, taken) -> None:
    family, config, change = TAKEN[name]
    model = make(family, dtype, **config)
    change(model)
    usual, _ = read(model)
    compile_steps(model, torch_compile=False)
    found, cache = read(model)
    assert cache.report()["steps"] == {"run": "native", "reason": None}
    compile_steps(model, on=False)
    assert len(taken) == STEPS - 1
    close_runs(found, usual, model)


def read_with_replaced(
    put: tuple[Any, str, Any], late: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Read with an attribute replaced, with native steps and without, and check that the logits
    agree.

    The attribute is replaced before the first step or, if `late`, in the middle of the stream.
    Returns the report of how the last steps ran.
    """
    found = []
    for on in (False, True):
        model = make("llama", dtype)
        compile_steps(model, on=on, torch_compile=False)
        with monkeypatch.context() as patch:
            if not late:
                patch.setattr(*put)
            at_last = (lambda _, patch=patch: patch.setattr(*put)) if late else None
            found.append(read(model, at_last))
            steps = found[-1][1].report()["steps"]
        compile_steps(model, on=False)
    close_runs(found[1][0], found[0][0], model)
    return steps


CLASSES: dict[str, tuple[type, Callable[..., Any], str]] = {
    "a layer's": (modeling_llama.LlamaDecoderLayer, halved_residual, "computes something else"),
    "an MLP's": (modeling_llama.LlamaMLP, swapped_gate, "computes something else"),
    "an attention's": (
        modeling_llama.LlamaAttention,
        twice(modeling_llama.LlamaAttention.forward),
        "computes something else",
    ),
    "a norm's": (modeling_llama.LlamaRMSNorm, wider_epsilon, "computes no norm"),
    "a linear layer's": (nn.Linear, twice(nn.Linear.forward), r"the forward of .* was replaced"),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_whose_forward_was_replaced(
    name: str, late: bool, taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward is replaced before the first step, or in the middle of the stream."""
    kind, forward, reason = CLASSES[name]
    if kind is modeling_llama.LlamaDecoderLayer:
        own = kind.forward

        def forward(self: Any, hidden_states: Tensor, **given: Any) -> Tensor:
            return hidden_states + (own(self, hidden_states, **given) - hidden_states) * 0.5

    put = kind, "forward", forward
    steps = read_with_replaced(put, late, torch.bfloat16, monkeypatch)
    assert len(taken) == (2 if late else 0)
    assert re.search(reason, steps["reason"])


@pytest.mark.parametrize("late", [False, True])
def test_a_rotation_that_was_replaced_in_its_file(
    late: bool, taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = modeling_llama, "apply_rotary_pos_emb", turned_less
    steps = read_with_replaced(put, late, torch.float32, monkeypatch)
    assert len(taken) == (2 if late else 0)
    assert "layers.0 computes other queries than its modules say" in steps["reason"]


LATE: dict[str, tuple[str, Change]] = {
    "an attention's scale": ("llama", lambda m: setattr(layer_of(m).self_attn, "scaling", 0.9)),
    "a residual multiplier": ("granite", lambda m: setattr(layer_of(m), "residual_multiplier", 2)),
    "an embedding multiplier": (
        "granite",
        lambda m: setattr(m.model, "embedding_multiplier", 1.5),
    ),
    "a norm's epsilon": (
        "llama",
        lambda m: setattr(layer_of(m).input_layernorm, "variance_epsilon", 0.5),
    ),
    "the last norm": ("llama", lambda m: setattr(m.model, "norm", nn.LayerNorm(32).eval())),
    "a hook of the last norm": (
        "llama",
        lambda m: m.model.norm.register_forward_hook(lambda *given: given[2] * 0.9),
    ),
    "a hook of all modules": (
        "llama",
        lambda m: _HANDLES.append(
            nn.modules.module.register_module_forward_hook(
                lambda part, _, out: out * 0.9 if part is layer_of(m).mlp else None
            )
        ),
    ),
    "a class": ("llama", lambda m: swap_class(layer_of(m).mlp, forward=swapped_gate)),
    "a parametrization": (
        "llama",
        lambda m: parametrize.register_parametrization(
            layer_of(m).mlp.down_proj, "weight", Times(0.5).eval()
        ),
    ),
    "embeddings": (
        "llama",
        lambda m: setattr(m.model.embed_tokens, "weight", nn.Parameter(m.lm_head.weight * 0.5)),
    ),
    "a head": ("llama", _untie),
    "a layer": ("llama", lambda m: m.model.layers.__setitem__(0, m.model.layers[1])),
    "a fused projection": (
        "phi3",
        lambda m: setattr(
            layer_of(m).self_attn.qkv_proj,
            "weight",
            nn.Parameter(layer_of(m).self_attn.qkv_proj.weight * 0.5),
        ),
    ),
    "a norm's bias": (
        "stablelm-plain",
        lambda m: setattr(layer_of(m).input_layernorm, "bias", nn.Parameter(torch.ones(64))),
    ),
}
_HANDLES: list[Any] = []


@pytest.mark.parametrize("name", LATE)
def test_what_is_replaced_in_the_middle_of_a_stream_is_noticed(name: str, taken) -> None:
    family, change = LATE[name]
    found = []
    for on in (False, True):
        plain = family == "stablelm-plain"
        model = make("stablelm", qk_layernorm=False) if plain else make(family)
        compile_steps(model, on=on, torch_compile=False)
        try:
            found.append(read(model, change)[0])
        finally:
            while _HANDLES:
                _HANDLES.pop().remove()
        compile_steps(model, on=False)
    assert len(taken) >= 2
    close_runs(found[1], found[0], make("llama"))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.requires_grad_(False),
        lambda m: m.eval(),
        lambda m: m.to(torch.float32),
        lambda m: m.generation_config.update(temperature=0.5),
    ],
)
def test_what_changes_nothing_costs_nothing(change: Change, taken, monkeypatch) -> None:
    proved: list[int] = []
    own = native_step.prove
    monkeypatch.setattr(native_step, "prove", lambda *given: (proved.append(1), own(*given))[1])
    model = make("llama")
    compile_steps(model, torch_compile=False)
    read(model, change)
    compile_steps(model, on=False)
    assert len(proved) == 1
    assert len(taken) == STEPS - 1


def test_a_hook_of_a_users_is_never_called_to_find_out() -> None:
    called: list[object] = []
    model = make("llama")
    for module in (model.model.embed_tokens, layer_of(model).mlp, model.model.norm):
        module.register_forward_hook(lambda *given: called.append(given))
    compile_steps(model, torch_compile=False)
    cache = StreamingCache(model, "window(16)", chunk=4)
    assert "has a forward hook" in cache.report()["steps"]["reason"]
    compile_steps(model, on=False)
    assert not called


def test_activations_are_told_apart() -> None:
    assert activation_of(F.silu) == activation_of(nn.SiLU()) == "silu"
    assert activation_of(nn.GELU("tanh")) == "gelu"
    for other in (F.gelu, F.relu, F.mish, torch.tanh, lambda x: F.silu(x) + 1e-4):
        assert activation_of(other) is None


def test_the_private_names_that_are_read_exist() -> None:
    from torch.nn.modules import module
    from torch.utils.hooks import RemovableHandle

    assert isinstance(module._global_forward_hooks, dict)
    assert isinstance(module._global_forward_pre_hooks, dict)
    assert isinstance(RemovableHandle.next_id, int)
    linear = nn.Linear(1, 1)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_modules", "_parameters", "_buffers"):
        assert isinstance(getattr(linear, name), dict)
    linear.compile(backend="eager")
    assert linear._compiled_call_impl is not None
