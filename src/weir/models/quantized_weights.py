"""Weights of 8 and 4 bits, through torchao: `weir.load(name, weights="int8")`.

Of every linear layer the weight becomes whole numbers with scales, which torchao makes and holds;
embeddings, norms and experts held in one tensor stay as they are. A table that is embedding and
head in one stays the embedding, and the head gets numbers of its own: at batch 1 the head is the
largest thing that a step reads. Knows nothing about caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from weir import kernels
from weir.errors import WeirError, describe_missing, quote
from weir.models.linear_kernels import LOOPED, choose_products, in_a_loop, own_forward
from weir.models.memory import move_to_huge_pages

BITS = ("int8", "int4")
"""What weights may be: one scale for each row of 8 bits, or for each `GROUP` numbers of 4."""
GROUP = 32
"""Numbers of 4 bits that share a scale: the smallest group that torchao has a kernel for."""
LINES = 16
"""Outputs that the kernel of 4 bits computes together."""
FEW = 16
"""Rows of a product up to which a weight of 8 bits is read as it lies."""
LINEAR = ("Linear", "FalconLinear")
"""Classes that do what `nn.Linear` does; of others nobody knows what they do with their weight."""


def check_bits(weights: str | None) -> None:
    """Refuse what weights cannot be.

    Raises:
        WeirError: it is neither of `BITS` nor None.
    """
    if weights is not None and weights not in BITS:
        raise WeirError(
            f"weights must be 'int8' or 'int4', not {quote(weights)}; without it they are as they "
            "were saved"
        )


def check_not_quantized(name: str, config: Any) -> None:
    """Refuse to quantize what was saved in few bits.

    Raises:
        WeirError: the configuration says that the weights are quantized.
    """
    saved = getattr(config, "quantization_config", None)
    if saved is not None:
        how = saved.get("quant_method") if isinstance(saved, dict) else saved.quant_method
        raise WeirError(
            f"{name} is quantized already ({getattr(how, 'value', how)}); load it without weights="
        )


def quantize_weights(model: PreTrainedModel, weights: str) -> None:
    """Put numbers of 8 or 4 bits in the place of the weights of all linear layers, for good.

    The model cannot be trained afterwards, but for adapters beside its weights.

    Args:
        model: any, where it is to stay.
        weights: one of `BITS`.

    Raises:
        WeirError: torchao is not installed, cannot do it on this device, or there is nothing to do.
    """
    bits = _bits(model, weights)
    choose_products(model, on=False)  # which are of the weights that go
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError:
        raise WeirError(describe_missing(f"a model with {weights} weights", "torchao")) from None
    try:
        eight = Int8WeightOnlyConfig(set_inductor_config=False)
        configs = {8: eight, 4: _four_bits(model.device) if 4 in bits.values() else None}
        for many, config in configs.items():
            if config is not None:
                quantize_(model, config, lambda _, name, many=many: bits.get(name) == many)
    except (ImportError, RuntimeError, AssertionError, TypeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise WeirError(
            f"torchao cannot make weights of few bits on {model.device.type}: {reason}; "
            "load the model again without weights="
        ) from None
    numbers: list[Tensor] = []
    for name, many in bits.items():
        module = model.get_submodule(name)
        if own_forward(module):
            vars(module).pop("forward", None)  # in a copy it is that of the class it had
        module.__class__ = Int8Linear if many == 8 else Int4Linear
        if isinstance(module, Int8Linear):
            module.take_apart()
            if module.numbers is not None and module.numbers.device.type == "cpu":
                numbers.append(module.numbers)
    move_to_huge_pages(numbers)
    model.config.tie_word_embeddings = False
    model.requires_grad_(False)
    model.register_load_state_dict_pre_hook(_refuse_others)


def shrink(skeleton: PreTrainedModel, weights: str) -> None:
    """Give a model on the device `meta` tensors as large as `quantize_weights` would.

    Raises:
        WeirError: as there, but for torchao.
    """
    for name, many in _bits(skeleton, weights).items():
        module: Any = skeleton.get_submodule(name)
        rows, columns, dtype = module.out_features, module.in_features, module.weight.dtype
        numbers = torch.empty(rows, columns * many // 8, dtype=torch.uint8, device="meta")
        scales = (rows,) if many == 8 else (columns // GROUP, rows, 2)
        module.weight = nn.Parameter(numbers, requires_grad=False)
        module.register_buffer("scales", torch.empty(scales, dtype=dtype, device="meta"))
        if many == 8:
            module.register_buffer("zeros", torch.empty(rows, dtype=torch.int8, device="meta"))


def _bits(model: PreTrainedModel, weights: str) -> dict[str, int]:
    """How many bits the weight of each linear layer is to have, by its name.

    With "int4" the head has 8, and so have layers whose shape no kernel of 4 bits takes.
    """
    check_bits(weights)
    head = model.get_output_embeddings()
    bits = {}
    for name, module in model.named_modules():
        if type(module).__name__ not in LINEAR or not isinstance(module, nn.Linear):
            continue
        if is_traceable_wrapper_subclass(module.weight):
            raise WeirError(
                "the weights of this model are quantized or shared out already; weights= is for "
                "those that are not"
            )
        fits = not module.in_features % GROUP and not module.out_features % LINES
        bits[name] = 4 if weights == "int4" and fits and module is not head else 8
    if all(model.get_submodule(name) is head for name in bits):
        raise WeirError(
            "no layer of this model but its head is linear, so no weight can have fewer bits"
        )
    return bits


def quantizes_inputs(model: nn.Module) -> bool:
    """Whether layers quantize what they multiply, too: torchao's dynamic or static activations."""
    names = ("act_quant_kwargs", "act_quant_scale")
    return any(
        getattr(weight, name, None) is not None for weight in model.parameters() for name in names
    )


class QuantizedLinear(nn.Linear):
    """A linear layer with a weight of torchao's, which can be moved after it was compiled."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> QuantizedLinear:
        """To another device or type, with a new weight in the place of the old one.

        PyTorch would exchange what two such weights hold, and cannot where a program remembers one.
        """
        weight, self._parameters["weight"] = self.weight, None
        try:
            super()._apply(fn, recurse)
            self._check(weight.dtype, fn(torch.empty(0, dtype=weight.dtype)).dtype)
            with torch.no_grad():
                weight = nn.Parameter(fn(weight), requires_grad=False)
        finally:
            self.weight = weight
        return self

    def _check(self, dtype: torch.dtype, wanted: torch.dtype) -> None:
        """Refuse to go on where the weight cannot have the dtype that is wanted."""


class Int4Linear(QuantizedLinear):
    """A linear layer whose weight is torchao's of 4 bits."""

    def _check(self, dtype: torch.dtype, wanted: torch.dtype) -> None:
        """As there: scales are packed in one dtype, and products want their input in it.

        Raises:
            WeirError: the dtype is to be another one.
        """
        if wanted != dtype:
            raise WeirError(
                f"weights of 4 bits stay in the dtype they were made in ({dtype}): load the model "
                "again with weights= and dtype="
            )


class Int8Linear(QuantizedLinear):
    """A linear layer whose weight is torchao's of 8 bits, read as it lies where few rows ask.

    torchao writes the whole weight out in the dtype of its input, for every product. That pays for
    a prompt; of a decode step on a CPU it would be all the time there is. Nor is the weight taken
    apart in a step: a compiled one would do so for every layer, before it begins.

    Attributes:
        numbers: what the weight holds [out_features, in_features], int8; None of another weight.
        scales: of each output [out_features]; None of another weight.
    """

    numbers: Tensor | None = None
    scales: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """As of `nn.Linear`: [..., in_features] to [..., out_features]."""
        if not torch.compiler.is_compiling() and self._holds() is not self.numbers:
            self.take_apart()  # the weight was put there past `__setattr__`, as hooks do
        numbers, scales = self.numbers, self.scales
        rows = input.numel() // self.in_features
        few = 0 < rows <= FEW and input.device.type == "cpu" and not input.requires_grad
        if numbers is None or scales is None or not few:
            return super().forward(input)
        if torch.compiler.is_compiling():
            if rows <= LOOPED:
                return in_a_loop(input, numbers, self.bias, scales)
            out = _by_kernel(input, numbers, scales)
        else:
            kernel = kernels.linear_int8(input.device)
            if kernel is None or not numbers.is_cpu or kernels.is_compiling():
                return super().forward(input)
            out = kernel(input, numbers, scales)
        return out if self.bias is None else out + self.bias

    def take_apart(self) -> None:
        """Find what the weight holds; again whenever another one may have come."""
        self.numbers = self._holds()
        weight: Any = self.weight
        self.scales = None if self.numbers is None else weight.scale.flatten()

    def _holds(self) -> Tensor | None:
        found: Tensor | None = getattr(self.weight, "qdata", None)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """As of any module; another weight is taken apart."""
        super().__setattr__(name, value)
        if name == "weight":
            self.take_apart()


def _kernel(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """weir's kernel for 8 bits, as a call in the middle of a compiled program."""
    kernel = kernels.linear_int8(x.device)
    if kernel is None:
        return nn.functional.linear(x, numbers.to(x.dtype) * scale.to(x.dtype)[:, None])
    out: Tensor = kernel(x, numbers, scale)
    return out


def _like(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """What it returns, but for its numbers."""
    return x.new_empty(*x.shape[:-1], numbers.shape[0])


# Not `torch.library.custom_op`, whose checks in every call take as long as a small product.
torch.library.define("weir::linear_int8", "(Tensor x, Tensor numbers, Tensor scale) -> Tensor")
torch.library.impl("weir::linear_int8", "CPU", _kernel)
torch.library.register_fake("weir::linear_int8", _like)
_by_kernel: Callable[..., Tensor] = torch.ops.weir.linear_int8.default


def _four_bits(device: torch.device) -> Any:
    """How torchao packs two numbers into a byte on a device."""
    if device.type == "cpu":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    from torchao.quantization import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)


def _refuse_others(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Before weights are loaded into a quantized model: they have to be such weights too."""
    for name, weight in module.named_parameters():
        given = state.get(prefix + name)
        if given is not None and type(given.data) is not type(weight.data):
            raise WeirError(
                f"this model has weights of few bits, and {prefix + name} is to be loaded with "
                "others: load the model anew, from a folder with the new weights"
            )
