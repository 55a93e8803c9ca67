"""The form of a decoder whose steps can be native: what each of its layers computes, and with which
weights.

A form is read from the names and classes of modules. Names prove nothing, so `proof` compares the
form with the modules themselves before a step relies on it. Everything that a form does not cover
is refused with a message that names it: a hook, a replaced forward, a wrapped or parametrized
module, or a module or parameter that has no place in the form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from weir.models import has_class_forward, has_hooks
from weir.native import dispatch
from weir.native.block_formats import PANEL
from weir.native.block_weights import BlockEmbedding, BlockLinear
from weir.native.linear_kernels import is_plain
from weir.native.module_trials import (
    activation_of,
    copy_module,
    is_rounding,
    trial_rows,
)
from weir.native.quantized_weights import Int8Linear

PARTS = ("embed_tokens", "layers", "norm")
"""Parts of a decoder, besides its rotary embedding."""

_LINEARS: dict[type, Any] = {nn.Linear: nn.Linear.forward}
_LINEARS |= {kind: kind.forward for kind in (Int8Linear, BlockLinear)}
"""Classes of linear layers that a table supports, and their forwards."""
_EMBEDDINGS: dict[type, Any] = {nn.Embedding: nn.Embedding.forward}
_EMBEDDINGS[BlockEmbedding] = BlockEmbedding.forward
"""Classes of embeddings that a table supports, and their forwards."""
_TOGETHER = 2**14
"""Number of outputs of a 16-bit weight that are converted to float32 at a time."""


class NotNative(Exception):
    """A decoder or slots do not support native steps; the message says why."""


class Weight(NamedTuple):
    """A linear layer's weight, in the form that a table needs.

    Attributes:
        numbers: [outputs, inputs], float32, bfloat16 or int8; or the codes of `Blocks`.
        scale: the scale of each output, float32, for int8; the scales of `Blocks`; otherwise None.
        bias: float32 or bfloat16; None for none.
        outputs, inputs: sizes.
        function: for `Blocks`, the address of the function that multiplies with them
            (`dispatch.block_function`), otherwise 0.
    """

    numbers: Tensor
    scale: Tensor | None
    bias: Tensor | None
    outputs: int
    inputs: int
    function: int = 0


class Projection(NamedTuple):
    """A linear layer, or some outputs of a layer that several projections share.

    Attributes:
        name: the name of the module within the decoder, or "the head".
        module: the linear layer.
        start, stop: the range of the module's outputs that are the projection.
    """

    name: str
    module: Any
    start: int
    stop: int

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return self.stop - self.start

    def weight(self) -> Weight:
        """Return the weight of these outputs, which shares memory with the layer's weight."""
        module, some = self.module, slice(self.start, self.stop)
        bias = None if module.bias is None else module.bias[some]
        sizes = self.outputs, module.in_features
        if isinstance(module, BlockLinear):
            panels = slice(self.start // PANEL, -(-self.stop // PANEL))
            function = dispatch.block_function(module.kind, module.codes.device)
            return Weight(module.codes[panels], module.scales[panels], bias, *sizes, function)
        if isinstance(module, Int8Linear):
            numbers, scales = (cast(Tensor, t)[some] for t in (module.numbers, module.scales))
            return Weight(numbers, scales.float().contiguous(), bias, *sizes)
        return Weight(module.weight[some], None, bias, *sizes)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply float32 numbers [rows, inputs] as the module does, without rounding to 16 bits.

        Inputs of weights in blocks are rounded to 8 bits wherever the module rounds them.
        """
        module = self.module
        if type(module) is nn.Linear:
            weight = self.weight()
            parts = [F.linear(x, some.float()) for some in weight.numbers.split(_TOGETHER)]
            out = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
            return out if weight.bias is None else out + weight.bias.float()
        whole: Tensor = _LINEARS[type(module)](module, x)
        return whole[:, self.start : self.stop]


class Norm(NamedTuple):
    """A norm: `x / sqrt(mean(x^2) + epsilon) * (weight + offset) + bias`.

    Attributes:
        name: of the module.
        module: the norm.
        epsilon, offset: see the formula.
        centered: whether the mean is subtracted first.
    """

    name: str
    module: Any
    epsilon: float
    offset: float
    centered: bool

    @property
    def width(self) -> int:
        """How many numbers are normalized together."""
        return len(self.module.weight)

    def fields(self) -> dict[str, Any]:
        """Return the fields of an operation with this norm."""
        weight, bias = self.module.weight, getattr(self.module, "bias", None)
        found = {"weight": weight, "weight_bits": 8 * weight.itemsize, "epsilon": self.epsilon}
        if self.centered:
            found |= {"centered": 1, "bias": bias}
            found |= {} if bias is None else {"bias_bits": 8 * bias.itemsize}
        return found | {"offset": self.offset}

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize numbers [..., width], in their dtype."""
        bias = getattr(self.module, "bias", None)
        if self.centered:
            x = x - x.mean(dim=-1, keepdim=True)
        scaled = x / (x.square().mean(dim=-1, keepdim=True) + self.epsilon).sqrt()
        scaled = scaled * (self.module.weight.to(x.dtype) + self.offset)
        return scaled if bias is None else scaled + bias.to(x.dtype)


@dataclass(frozen=True, eq=False)
class LayerForm:
    """The computation of a decoder's layer.

        x += factor * after_attention(o(attention(q(y), k(y), v(y)))), y = before_attention(x)
        x += factor * after_mlp(down(activation(gate(y)) * up(y))),    y = before_mlp(x)

    Norms that are None are skipped. `q_norm` and `k_norm` normalize queries and keys before they
    are rotated: each head separately, or all heads together.
    """

    q: Projection
    k: Projection
    v: Projection
    o: Projection
    gate: Projection
    up: Projection
    down: Projection
    activation: str
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None
    factor: float

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All projections."""
        return self.q, self.k, self.v, self.o, self.gate, self.up, self.down

    @property
    def norms(self) -> list[Norm]:
        """All norms."""
        norms = self.before_attention, self.after_attention, self.before_mlp, self.after_mlp
        return [norm for norm in (*norms, self.q_norm, self.k_norm) if norm is not None]

    @property
    def heads_together(self) -> bool:
        """Whether queries and keys of all heads are normalized together."""
        return self.q_norm is not None and self.q_norm.width == self.q.outputs


@dataclass(frozen=True, eq=False)
class DecoderForm:
    """The computation of a decoder: embeddings times a factor, layers, and a norm.

    Attributes:
        layers: the form of each layer.
        norm: the last norm.
        factor: the factor by which embeddings are multiplied before the first layer.
    """

    layers: list[LayerForm]
    norm: Norm
    factor: float


@dataclass(frozen=True, eq=False)
class ModelForm:
    """The computation of a causal language model around its decoder.

    Logits are the product of the head with the decoder's hidden state, and nothing else.

    Attributes:
        embedding: the module that looks up the decoder's inputs.
        head: the projection.
    """

    embedding: Any
    head: Projection


def read_model(model: Any, decoder: Any, form: DecoderForm) -> ModelForm:
    """Read the form of a model around a decoder with native steps.

    Args:
        model: the causal language model.
        decoder: its decoder.
        form: of the decoder.

    Raises:
        NotNative: whole steps do not support its form. The decoder's steps can still be native.
    """
    head = model.get_output_embeddings()
    embedding = decoder.embed_tokens
    named = ("the model", model), ("its decoder", decoder), ("its head", head)
    for name, module in (*named, ("embed_tokens", embedding)):
        if module is None:
            raise NotNative("it has no head")
        refuse_changed(name, module)
        if module.training:
            raise NotNative(f"{name} is in training mode")
    kind = type(embedding)
    if kind not in _EMBEDDINGS or kind.forward is not _EMBEDDINGS[kind]:
        raise NotNative(
            f"embed_tokens is {_what(embedding)}, from which native steps cannot look up rows"
        )
    if getattr(embedding, "max_norm", None) or hasattr(embedding, "embed_scale"):
        raise NotNative("embed_tokens scales its rows")
    if kind is nn.Embedding and not is_plain(embedding.weight):
        raise NotNative(_not_plain("embed_tokens", embedding.weight))
    if kind is BlockEmbedding and dispatch.block_reader(embedding.codes.device) is None:
        raise NotNative("embed_tokens is in blocks, which this processor has no kernel for")
    projection, dtype = _projection("the head", head), form.norm.module.weight.dtype
    if type(head) is nn.Linear and head.weight.dtype != dtype:
        raise NotNative("its head has another dtype than its last norm")
    if head.in_features != form.norm.width or embedding.embedding_dim != form.norm.width:
        raise NotNative("its head or its embeddings have another width than its last norm")
    return ModelForm(embedding, projection)


def read_decoder(decoder: Any, attentions: Sequence[nn.Module]) -> DecoderForm:
    """Read the form of a decoder.

    Args:
        decoder: the module that takes token ids.
        attentions: the attention module of each layer.

    Raises:
        NotNative: native steps do not support its form.
    """
    for name in PARTS:
        if not hasattr(decoder, name):
            raise NotNative(f"its decoder is {_what(decoder)}, which has no {name}")
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        raise NotNative("a forward hook is registered for all modules")
    if not has_class_forward(decoder, patched=True):
        raise NotNative("the forward of its decoder was replaced")
    for name, module in decoder.named_children():
        if name not in (*PARTS, "rotary_emb") and any(_held(part) for part in module.modules()):
            raise NotNative(f"its decoder has {name}, which native steps do not know")
        if name in ("norm", "rotary_emb"):
            refuse_changed(name, module)
    for index, attention in enumerate(attentions):
        number = getattr(attention, "layer_idx", index)
        if number != index:  # its keys and values are in the slots of another layer
            raise NotNative(f"layers.{index} has the number {number} (layer_idx)")
    layers = [
        read_layer(f"layers.{index}", layer, attention)
        for index, (layer, attention) in enumerate(zip(decoder.layers, attentions, strict=True))
    ]
    factor = _factor(decoder, "embedding_multiplier", "its decoder")
    return DecoderForm(layers, _norm("norm", decoder.norm), factor)


def read_layer(name: str, layer: Any, attention: Any) -> LayerForm:
    """Read the form of a decoder's layer; NotNative if native steps do not support it."""
    for below, module in layer.named_modules():
        refuse_changed(f"{name}.{below}" if below else name, module)
    mlp = getattr(layer, "mlp", None)
    if mlp is None:
        raise NotNative(f"{name} has no mlp")
    norms = _norms(name, layer)
    q, k, v, o = _attention_projections(name, attention)
    gate, up, down = _mlp_projections(name, mlp)
    activation = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    if not callable(activation):
        raise NotNative(f"{name}.mlp has no act_fn")
    of_heads: list[Norm | None] = [None, None]
    for at, short in enumerate("qk"):
        module = getattr(attention, f"{short}_norm", None)
        if module is not None:
            of_heads[at] = norm = _norm(f"{name}.self_attn.{short}_norm", module)
            if norm.centered:
                raise NotNative(f"{norm.name} subtracts a mean, which no native norm of heads does")
    q_norm, k_norm = of_heads
    if (q_norm is None) != (k_norm is None):
        raise NotNative(f"{name}.self_attn normalizes only one of queries and keys")
    factor = _factor(layer, "residual_multiplier", name)
    known = activation_of(activation)
    if known is None:
        what = _what(activation) if isinstance(activation, nn.Module) else repr(activation)
        raise NotNative(f"native steps do not support the activation of {name}.mlp, {what}")
    more = q_norm, k_norm, factor
    form = LayerForm(q, k, v, o, gate, up, down, known, *norms, *more)
    _refuse_others(name, layer, form, activation)
    return form


def _attention_projections(name: str, attention: Any) -> Iterator[Projection]:
    """Read q, k, v and o."""
    path = f"{name}.self_attn"
    together = getattr(attention, "qkv_proj", None)
    if together is None:
        for short in "qkv":
            yield _projection(f"{path}.{short}_proj", getattr(attention, f"{short}_proj", None))
        yield _projection(f"{path}.o_proj", getattr(attention, "o_proj", None))
        return
    whole = _projection(f"{path}.qkv_proj", together)
    o = _projection(f"{path}.o_proj", getattr(attention, "o_proj", None))
    asked = o.module.in_features
    own = (whole.stop - asked) // 2
    for start, stop in ((0, asked), (asked, asked + own), (asked + own, whole.stop)):
        yield _some_of(whole, start, stop)
    yield o


def _mlp_projections(name: str, mlp: Any) -> Iterator[Projection]:
    """Read gate, up and down."""
    together = getattr(mlp, "gate_up_proj", None)
    if isinstance(together, nn.Module):
        whole = _projection(f"{name}.mlp.gate_up_proj", together)
        half = whole.stop // 2
        yield _some_of(whole, 0, half)
        yield _some_of(whole, half, whole.stop)
        names: tuple[str, ...] = ("down_proj",)
    else:
        names = ("gate_proj", "up_proj", "down_proj")
    for short in names:
        module = getattr(mlp, short, None)
        if module is None:
            raise NotNative(f"{name}.mlp is {_what(mlp)}, which has no {short}")
        yield _projection(f"{name}.mlp.{short}", module)


def _what(module: nn.Module) -> str:
    """Describe a module by its class, with the full name if that tells who made it."""
    kind = type(module)
    known = kind.__module__.startswith(("transformers.", "torch."))
    name = kind.__name__ if known else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def _projection(name: str, module: Any) -> Projection:
    """Return a linear layer as a projection, or refuse it (NotNative).

    To support another kind of weight, add a branch here and in `Projection.weight`.
    """
    if module is None:
        raise NotNative(f"{name} does not exist")
    if type(module) not in _LINEARS:
        raise NotNative(f"{name} is {_what(module)}, which native steps do not know")
    if type(module).forward is not _LINEARS[type(module)]:
        raise NotNative(f"the forward of {type(module).__name__} was replaced")
    if isinstance(module, BlockLinear):
        if not dispatch.block_function(module.kind, module.codes.device):
            raise NotNative(f"{name} is in blocks, which this processor has no kernel for")
    elif isinstance(module, Int8Linear):
        numbers, scales = module.numbers, module.scales
        if numbers is None or scales is None or not (numbers.is_cpu and numbers.is_contiguous()):
            raise NotNative(f"{name} has quantized weights of a kind that native steps do not know")
    elif not is_plain(module.weight):
        raise NotNative(_not_plain(name, module.weight))
    if module.bias is not None and not is_plain(module.bias):
        raise NotNative(_not_plain(f"{name}.bias", module.bias))
    return Projection(name, module, 0, module.out_features)


def _some_of(whole: Projection, start: int, stop: int) -> Projection:
    if isinstance(whole.module, BlockLinear) and start % PANEL:
        raise NotNative(
            f"{whole.name} has weights in blocks, but one of its parts begins at an output that is "
            f"not a multiple of {PANEL}"
        )
    return whole._replace(start=start, stop=stop)


def _not_plain(name: str, weight: Tensor) -> str:
    kind = str(weight.dtype).removeprefix("torch.")
    where = "" if weight.is_contiguous() else ", not contiguous"
    return (
        f"{name} has weights in {kind} on {weight.device.type}{where}; native steps read float32, "
        "bfloat16, int8 and blocks in the memory of a CPU"
    )


def _norms(name: str, layer: Any) -> tuple[Norm | None, Norm | None, Norm | None, Norm | None]:
    """Read the norms before and after attention, and before and after the MLP."""
    before, after, inner, last = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    if hasattr(layer, last):  # Gemma 2 and 3 have all four, OLMo 2 the second and the fourth
        order = (before, after, inner, last)
        if hasattr(layer, before) != hasattr(layer, inner):
            raise NotNative(f"{name} has norms in an order that native steps do not know")
    else:
        order = (before, "", after, "")
    found: list[Norm | None] = []
    for short in order:
        module = getattr(layer, short, None) if short else None
        found.append(None if module is None else _norm(f"{name}.{short}", module))
    if all(norm is None for norm in found):
        raise NotNative(f"{name} has no norms that native steps know")
    first, second, third, fourth = found
    return first, second, third, fourth


def _norm(name: str, module: Any) -> Norm:
    """Find out which norm a module computes, by trying it on several rows."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    held = {**module._parameters, **module._buffers}
    weight = held.get("weight")
    if epsilon is None or weight is None or {*held, *_held(module)} - {"weight", "bias"}:
        raise NotNative(f"{name} is {_what(module)}, which native steps do not know")
    for each in held.values():
        if each is not None and not is_plain(each):
            raise NotNative(_not_plain(name, each))
        if each is not None and each.ndim != 1:
            raise NotNative(
                f"{name} has weights of the shape {tuple(each.shape)}; native steps know norms "
                "with one weight for each number"
            )
    x = trial_rows(len(weight), float(epsilon))
    with torch.no_grad():
        answer = copy_module(module)(x).double()
    for centered in (False, True):
        for offset in (0.0, 1.0):
            norm = Norm(name, module, float(epsilon), offset, centered)
            fits = centered or held.get("bias") is None
            if fits and is_rounding(answer, norm(x.double()), len(weight)):
                return norm
    raise NotNative(f"{name}, {_what(module)}, computes no norm that native steps know")


def _factor(module: Any, attribute: str, name: str) -> float:
    found = getattr(module, attribute, 1.0)
    if type(found) not in (int, float):
        raise NotNative(f"{attribute} of {name} is not a plain number")
    return float(found)


def _refuse_others(name: str, layer: nn.Module, form: LayerForm, activation: Any) -> None:
    """Refuse modules with tensors that have no place in a form, and modules in training mode, which
    may use dropout.
    """
    known = {id(part.module) for part in form.projections} | {id(activation)}
    known |= {id(norm.module) for norm in form.norms}
    for below, module in layer.named_modules():
        where = f"{name}.{below}" if below else name
        if id(module) not in known and (held := _held(module)):
            raise NotNative(f"{where} has {held[0]}, which native steps do not know")
        if module.training and (module._modules or getattr(module, "p", 0)):
            raise NotNative(f"{where} is in training mode")


def _held(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters, buffers and other tensors."""
    held = {**module._parameters, **module._buffers, **vars(module)}
    return [name for name, tensor in held.items() if isinstance(tensor, Tensor)]


def refuse_changed(name: str, module: nn.Module) -> None:
    """Refuse a module that has hooks, is compiled, or has another forward than its class
    (NotNative).
    """
    if has_hooks(module._forward_hooks, module._forward_pre_hooks):
        raise NotNative(f"{name} has a forward hook")
    if getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules:
        raise NotNative(f"{name} was compiled by torch.compile")
    if not has_class_forward(module, patched=True):
        raise NotNative(f"the forward of {name} was replaced")
