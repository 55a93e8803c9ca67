"""Proves that a decoder computes what its form says, before a native step relies on it.

Neither a name nor the result for one token is a proof. Each part is tried on several rows of random
numbers of several sizes, with float32 copies of its small parameters, so that a difference is
either rounding or another computation:

- The decoder's own forward runs with stand-ins for its layers, its embeddings and its norm, which
  record their inputs. The first layer must get the embeddings times a factor, each other layer the
  answer of the layer before it, and the norm that of the last layer.
- The model's own forward runs with stand-ins for its decoder and its head, if a whole step goes
  from token ids to logits.
- Each layer's own forward runs with stand-ins for its large weights, and with a cache that records
  queries, keys and values, and answers with random numbers. Rows are at several positions, one of
  them beyond the windows of nearly all models.

With stand-ins for weights, this is as cheap as a few norms, however large the model is. What linear
layers do with their real weights is not tried here, except for a few outputs of PyTorch's
`nn.Linear`. The proof relies on the classes of the layers, and `check` compares the products.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from weir.models import CACHE, MasklessCache, MethodPatch, ModelLayerSpec, ModelSpec
from weir.native.form import (
    DecoderForm,
    LayerForm,
    ModelForm,
    Norm,
    NotNative,
    Projection,
)
from weir.native.module_trials import (
    StandIn,
    activate,
    copy_module,
    is_rounding,
    trial_rows,
)
from weir.slab import AttentionParams, Rotary, rotation_tables

PLACES = (0, 1, 5, 97, 12_345, 2_000_003)
"""Positions of the rows that a layer is tried on; the last is beyond the windows of nearly all
models.
"""


def prove(spec: ModelSpec, form: DecoderForm) -> list[Any]:
    """Prove a form, and return how each layer attends (`AttentionParams`).

    While this runs, the model's configuration must select weir's attention, as during a call.

    Args:
        spec: of the model.
        form: of its decoder.

    Raises:
        NotNative: the decoder computes something else.
    """
    decoder: Any = spec.decoder
    calls = _try_decoder(spec, form)
    found = []
    for index, layer in enumerate(decoder.layers):
        trial = _LayerTrial(f"layers.{index}", layer, form.layers[index], spec.layers[index])
        found.append(trial.run(*calls[index]))
    return found


def _try_decoder(spec: ModelSpec, form: DecoderForm) -> list[tuple[tuple[Any, ...], Any]]:
    """Run a decoder's own forward with stand-ins; returns what each layer is called with."""
    decoder: Any = spec.decoder
    width, dtype = form.norm.width, form.norm.module.weight.dtype
    draw = torch.Generator().manual_seed(width)

    def random() -> Tensor:
        return torch.randn(len(PLACES), 1, width, generator=draw).to(dtype)

    embeddings, last = _Recorder(decoder.embed_tokens, random), _Recorder(decoder.norm, random)
    layers = [_Recorder(layer, random) for layer in decoder.layers]
    parts: dict[int, nn.Module] = {id(decoder.embed_tokens): embeddings, id(decoder.norm): last}
    parts |= {id(layer): part for layer, part in zip(decoder.layers, layers, strict=True)}
    for rotary in spec.rotaries:
        parts[id(rotary)] = _TrialRotary(rotary, spec)
    copy = copy_module(decoder, parts)
    ids = torch.arange(len(PLACES))[:, None]
    known = inspect.signature(type(decoder).forward).parameters
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": None, "use_cache": True}
    given[CACHE] = _TrialCache()
    if "position_ids" in known:
        given["position_ids"] = torch.zeros(1, 1, dtype=torch.int64)
    output = copy.forward(**given)
    numbered = ((layer, f"layer {number}") for number, layer in enumerate(layers))
    named = (embeddings, "embeddings"), (last, "norm"), *numbered
    for stand_in, what in named:
        if len(stand_in.calls) != 1:
            raise NotNative(f"its decoder uses its {what} {len(stand_in.calls)} times")
    if not torch.equal(embeddings.calls[0][0][0], ids):
        raise NotNative("its decoder embeds other tokens than it is given")
    hidden = embeddings.answers[0] * form.factor
    places = ("the first layer", *(f"layer {n}" for n in range(1, len(layers))), "its last norm")
    for layer, where in zip((*layers, last), places, strict=True):
        if not torch.equal(layer.given(), hidden):
            raise NotNative(f"its decoder changes hidden states before {where}")
        hidden = layer.answers[0]
    if not torch.equal(output.last_hidden_state, hidden):
        raise NotNative("its decoder changes hidden states after its last norm")
    return [layer.calls[0] for layer in layers]


def prove_model(model: Any, decoder: nn.Module, form: ModelForm, width: int) -> None:
    """Prove that a model's logits are the product of its head with the decoder's output.

    Args:
        model: the causal language model.
        decoder: its decoder, which has been proved.
        form: of the model.
        width: of hidden states.

    Raises:
        NotNative: the model computes something else.
    """
    hidden, cache = trial_rows(width)[:, None], _TrialCache()
    ids, held = torch.arange(len(hidden))[:, None], dict[str, Any]([(CACHE, cache)])

    def answer() -> Any:
        return BaseModelOutputWithPast(last_hidden_state=hidden.clone(), **held)

    head, inner = StandIn(form.head.module, 0), _Recorder(decoder, answer)
    copy = copy_module(model, {id(decoder): inner, id(form.head.module): head})
    output = copy.forward(input_ids=ids, attention_mask=None, use_cache=True, **held)
    if len(inner.calls) != 1:
        raise NotNative(f"it uses its decoder {len(inner.calls)} times")
    args, kwargs = inner.calls[0]
    given = [args[0] if args else kwargs.get("input_ids"), kwargs.get(CACHE)]
    others = kwargs.get("inputs_embeds"), kwargs.get("attention_mask"), kwargs.get("position_ids")
    if given[0] is not ids or given[1] is not cache or any(t is not None for t in others):
        raise NotNative("it changes the input before it passes it to its decoder")
    if not is_rounding(output.logits[:, 0], head(hidden[:, 0].double()), width):
        raise NotNative("its logits are not the product of its head")
    _try_linear(form.head)


class _Recorder(nn.Module):
    """A stand-in for a module that records its arguments and returns what `answer` returns."""

    def __init__(self, module: nn.Module, answer: Callable[[], Any]) -> None:
        super().__init__()
        plain = (str, int, float, bool, torch.dtype)
        for name, value in vars(module).items():
            if isinstance(value, plain):
                vars(self)[name] = value
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.answers: list[Any] = []
        self.answer = answer
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        self.answers.append(self.answer())
        return self.answers[-1]

    def given(self) -> Tensor:
        """Return the hidden states of the only call."""
        args, kwargs = self.calls[0]
        found: Tensor = args[0] if args else kwargs["hidden_states"]
        return found


class _TrialRotary(nn.Module):
    """A stand-in for a rotary embedding that returns weir's cosines and sines at `PLACES`."""

    def __init__(self, rotary: nn.Module, spec: ModelSpec) -> None:
        super().__init__()
        self._own = vars(rotary).get("forward", rotary.forward)
        while isinstance(self._own, MethodPatch):
            self._own = self._own.own
        self._rotations = spec.rotations

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Some scalings change a model permanently when they see a high position.
        own = self._own(x, torch.zeros_like(position_ids), *args, **kwargs)
        kind = args[0] if args else kwargs.get("layer_type")
        places = torch.tensor(PLACES)[:, None]
        return rotation_tables(self._rotations, kind, places, own[0].shape[-1]) or own


class _TrialCache(MasklessCache):
    """A cache for one call of one layer that records the call and answers with random numbers."""

    def __init__(self, answers: Tensor | None = None) -> None:
        super().__init__()
        self.answers = answers
        self.calls: list[tuple[Tensor, Tensor, Tensor, AttentionParams]] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Pass keys and values on to weir's attention."""
        return (self, None, key_states), value_states

    def attend(
        self, layer: None, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """Record [rows, heads, 1, dim]; returns the answers."""
        self.calls.append((queries, keys, values, params))
        assert self.answers is not None
        return self.answers[:, :, None]


class _LayerTrial:
    """Runs a layer's own forward next to its form."""

    def __init__(self, name: str, layer: Any, form: LayerForm, spec: ModelLayerSpec) -> None:
        self._name, self._layer, self._form, self._spec = name, layer, form, spec
        modules = {id(part.module): part.module for part in form.projections}
        self._stand_ins = {
            at: StandIn(module, seed) for seed, (at, module) in enumerate(modules.items())
        }

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionParams:
        """Compare the layer's forward with its form; returns how the layer attends.

        Args:
            args, kwargs: the arguments with which the decoder calls the layer; hidden states and
                cache are replaced.
        """
        for part in self._form.projections:
            _try_linear(part)
        copy, form = copy_module(self._layer, dict(self._stand_ins)), self._form
        x = trial_rows(form.o.outputs)
        heads = self._spec.heads
        asked = heads.kv_heads * heads.group
        sizes = [asked * heads.key_dim, heads.kv_heads * heads.key_dim]
        sizes.append(heads.kv_heads * heads.value_dim)
        if [part.outputs for part in (form.q, form.k, form.v)] != sizes:
            raise NotNative(f"{self._name} has projections of other sizes than its heads")
        draw = torch.Generator().manual_seed(7)
        answers = torch.randn(len(x), asked, heads.value_dim, generator=draw)
        cache = _TrialCache(answers)
        given = {name: self._replaced(value, cache) for name, value in kwargs.items()}
        more = [self._replaced(value, cache) for value in args]
        if args:
            more[0] = x[:, None].clone()
        else:
            given["hidden_states"] = x[:, None].clone()
        output = copy(*more, **given)
        output = output[0] if isinstance(output, tuple) else output
        if len(cache.calls) != 1:
            raise NotNative(f"{self._name} attends {len(cache.calls)} times")
        queries, keys, values, params = cache.calls[0]
        wanted = self._attended(x.double())
        terms = form.o.outputs
        for what, got, want in zip(
            ("queries", "keys", "values"), (queries, keys, values), wanted, strict=True
        ):
            if not is_rounding(got[:, :, 0], want, terms):
                raise NotNative(f"{self._name} computes other {what} than its modules say")
        if not is_rounding(output[:, 0], self._answered(x.double(), answers.double()), terms):
            raise NotNative(
                f"{self._name}, a {type(self._layer).__name__}, computes something else than its "
                "modules say"
            )
        return params

    def _replaced(self, value: Any, cache: _TrialCache) -> Any:
        return cache if isinstance(value, _TrialCache) else value

    def _project(self, part: Projection, x: Tensor) -> Tensor:
        out: Tensor = self._stand_ins[id(part.module)](x)
        return out[:, part.start : part.stop]

    def _attended(self, x: Tensor) -> list[Tensor]:
        """Compute the queries, keys and values [rows, heads, dim] of hidden states."""
        form, heads = self._form, self._spec.heads
        y = normalized(form.before_attention, x)
        found = []
        parts = (form.q, form.q_norm), (form.k, form.k_norm), (form.v, None)
        for part, norm in parts:
            made = self._project(part, y)
            if norm is not None and form.heads_together:
                made = norm(made)
            dim = heads.value_dim if part is form.v else heads.key_dim
            made = made.unflatten(1, (-1, dim))
            if norm is not None and not form.heads_together:
                made = norm(made)
            rotary = self._spec.positions.rotary
            if rotary is not None and part is not form.v:
                made = rotated(rotary, made, torch.tensor(PLACES))
            found.append(made)
        return found

    def _answered(self, x: Tensor, answers: Tensor) -> Tensor:
        """Compute the layer's output from the answers of attention [rows, heads, dim]."""
        form = self._form
        out = self._project(form.o, answers.flatten(1))
        x = x + form.factor * normalized(form.after_attention, out)
        y = normalized(form.before_mlp, x)
        gate, up = self._project(form.gate, y), self._project(form.up, y)
        out = self._project(form.down, activate(form.activation, gate) * up)
        return x + form.factor * normalized(form.after_mlp, out)


def normalized(norm: Norm | None, x: Tensor) -> Tensor:
    """Normalize, if there is a norm."""
    return x if norm is None else norm(x)


def rotated(rotary: Rotary, x: Tensor, places: Tensor) -> Tensor:
    """Rotate float64 queries or keys [rows, heads, dim] to places [rows]."""
    angles = places.double()[:, None] * rotary.frequencies.double()
    cos, sin = (f(angles)[:, None] * rotary.scaling for f in (torch.cos, torch.sin))
    half = cos.shape[2]
    one, two, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], dim=2)


def _try_linear(part: Projection) -> None:
    """Try PyTorch's linear layer on a few outputs of a projection."""
    module = part.module
    if type(module) is not nn.Linear:
        return  # weir's own class, whose forward has been checked
    some = slice(part.start, part.start + 4)
    copy = object.__new__(nn.Linear)
    vars(copy).update(vars(module))
    vars(copy).pop("forward", None)
    bias = None if module.bias is None else module.bias.detach()[some].float()
    vars(copy)["_parameters"] = {"weight": module.weight.detach()[some].float(), "bias": bias}
    x = trial_rows(module.in_features)
    wanted = x.double() @ module.weight.detach()[some].double().T
    size = x.double().abs() @ module.weight.detach()[some].double().T.abs()
    if bias is not None:
        wanted, size = wanted + bias.double(), size + bias.double().abs()
    off = torch.finfo(torch.float32).eps * (4 + 2 * math.sqrt(module.in_features))
    if not bool(((copy(x).double() - wanted).abs() <= off * size).all()):
        raise NotNative(f"{part.name} does not multiply by its weight")
