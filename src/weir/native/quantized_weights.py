"""Quantizes the weights of linear layers to 8 or 4 bits: `weir.load(name, weights=...)`.

With "int8" and "int4", torchao makes and stores the integers and their scales. With "q8_0", "q4_0"
and "q4_1", weir makes blocks as in GGUF files (`block_weights`). Norms, experts that are stored in
one tensor, and an embedding with a separate table are unchanged. If embedding and head share one
table, both use the same blocks. With torchao, the embedding keeps the table, and the head gets a
quantized copy, because at batch 1 the head is the largest weight that a step reads. This module
does not use caches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from weir import kernels
from weir.errors import WeirError, describe_missing, first_line, quote
from weir.models import has_class_forward
from weir.models.gguf import plan_fillings, read_header
from weir.native import dispatch
from weir.native.block_mlp import run_mlps_whole
from weir.native.block_weights import (
    AS_STORED,
    BLOCK_FORMATS,
    LINEAR,
    BlockEmbedding,
    BlockLinear,
    check_stored,
    fits_blocks,
    put_blocks,
    warn_without_kernel,
)
from weir.native.huge_pages import move_to_huge_pages
from weir.native.linear_kernels import choose_products
from weir.native.stored_blocks import shrink_to_stored

BITS = ("int8", "int4")
"""Kinds of weights that torchao makes: 8 bits with a scale for each row, and 4 bits with a scale
for each `GROUP` numbers.
"""
GROUP = 32
"""Numbers of 4 bits that share a scale: the smallest group that torchao has a kernel for."""
LINES = 16
"""Outputs that the 4-bit kernel computes together."""
FEW = 16
"""Largest number of rows for which an 8-bit weight is read without dequantizing it."""


def check_bits(weights: str | None) -> None:
    """Refuse unknown kinds of weights (WeirError)."""
    known = *BITS, *BLOCK_FORMATS, AS_STORED
    if weights is not None and weights not in known:
        raise WeirError(
            f"weights must be one of {', '.join(known)}, got {quote(weights)}. Leave it out to "
            "keep them as they were saved."
        )


def check_not_quantized(name: str, config: Any) -> None:
    """Refuse to quantize a model whose configuration says that it is quantized (WeirError)."""
    saved = getattr(config, "quantization_config", None)
    if saved is not None:
        how = saved.get("quant_method") if isinstance(saved, dict) else saved.quant_method
        raise WeirError(
            f"{name} is already quantized ({getattr(how, 'value', how)}). Load it without weights=."
        )


def quantize_weights(model: PreTrainedModel, weights: str) -> None:
    """Quantize the weights of linear layers to 8 or 4 bits, permanently.

    The model cannot be trained afterwards, except for adapters.

    Args:
        model: any model, on its final device.
        weights: one of `BITS` or `BLOCK_FORMATS`.

    Raises WeirError if `weights` has another value, if torchao is needed but not installed or
    cannot quantize on this device, if the weights are already quantized or distributed, or if no
    layer except the head can be quantized.
    """
    if weights == AS_STORED:
        raise WeirError(
            f'weights="{AS_STORED}" keeps the blocks of a file while a model is loaded, but this '
            "model is already loaded. Use weir.load(file, weights=...), or one of "
            f"{', '.join((*BLOCK_FORMATS, *BITS))}."
        )
    bits = _bits(model, weights)
    choose_products(model, on=False)  # remove patches that use the old weights
    if weights not in BITS:
        put_blocks(model, list(bits), weights)
        move_to_huge_pages([t for t in model.buffers() if t.is_cpu and t.is_contiguous()])
        run_blocks(model)
    else:
        _quantize_by_torchao(model, bits)
    finish_quantized(model)


def run_blocks(model: PreTrainedModel) -> None:
    """Let kernels run whole MLPs of a model whose weights are in blocks, and warn if no kernel can
    multiply blocks.
    """
    run_mlps_whole(model)
    warn_without_kernel(model)


def finish_quantized(model: PreTrainedModel) -> None:
    """Finish a model whose weights have few bits: disable training, and loading of weights into
    it.
    """
    model.register_load_state_dict_pre_hook(_refuse_plain_weights)
    model.config.tie_word_embeddings = False
    model.requires_grad_(False)
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.ndim == 1:
            # Norms and biases from a folder are views of a mapped file, and would keep all of it in
            # memory.
            parameter.data = parameter.data.clone()


def _quantize_by_torchao(model: PreTrainedModel, bits: dict[str, int]) -> None:
    """Quantize layers; `bits` has the number of bits for each layer's name. Raises the WeirErrors
    about torchao that `quantize_weights` describes.
    """
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError:
        raise WeirError(describe_missing("a model with int8 or int4 weights", "torchao")) from None
    try:
        eight = Int8WeightOnlyConfig(set_inductor_config=False)
        configs = {8: eight, 4: _four_bits(model.device) if 4 in bits.values() else None}
        for many, config in configs.items():
            if config is not None:
                quantize_(model, config, lambda _, name, many=many: bits.get(name) == many)
    except (ImportError, RuntimeError, AssertionError, TypeError, ValueError) as error:
        reason = first_line(error).rstrip(".")
        raise WeirError(
            f"torchao cannot make weights of few bits on {model.device.type}: {reason}. Load the "
            "model again without weights=."
        ) from None
    numbers: list[Tensor] = []
    for name, many in bits.items():
        module = model.get_submodule(name)
        if has_class_forward(module):
            vars(module).pop("forward", None)  # a copy may hold its old class's forward
        module.__class__ = Int8Linear if many == 8 else Int4Linear
        if isinstance(module, Int8Linear):
            module.take_apart()
            if module.numbers is not None and module.numbers.device.type == "cpu":
                numbers.append(module.numbers)
    move_to_huge_pages(numbers)


def shrink(skeleton: PreTrainedModel, weights: str, path: Path | None = None) -> None:
    """Resize the weights of a model on the device `meta` as loading with `weights=` would.

    Does not need torchao. Raises a WeirError if no layer except the head can be quantized, or if
    "gguf" is given without a GGUF file.

    Args:
        skeleton: the model, without numbers.
        weights: a value of `weights=`.
        path: the model's GGUF file, which "gguf" needs.
    """
    bits = _bits(skeleton, weights)
    if weights == AS_STORED:
        file = check_stored(path, str(skeleton.config.name_or_path))
        shrink_to_stored(skeleton, plan_fillings(skeleton, read_header(file)))
    elif weights not in BITS:
        put_blocks(skeleton, list(bits), weights)
    for name, many in bits.items() if weights in BITS else ():
        module: Any = skeleton.get_submodule(name)
        rows, columns, dtype = module.out_features, module.in_features, module.weight.dtype
        numbers = torch.empty(rows, columns * many // 8, dtype=torch.uint8, device="meta")
        scales = (rows,) if many == 8 else (columns // GROUP, rows, 2)
        module.weight = nn.Parameter(numbers, requires_grad=False)
        module.register_buffer("scales", torch.empty(scales, dtype=dtype, device="meta"))
        if many == 8:
            module.register_buffer("zeros", torch.empty(rows, dtype=torch.int8, device="meta"))


def _bits(model: PreTrainedModel, weights: str) -> dict[str, int]:
    """Return the bits for each linear layer's weight, by the layer's name.

    With "int4", the head gets 8 bits, and so do layers whose shape the 4-bit kernel does not
    support. For weights in blocks, only the names matter, and every number is 0.
    """
    check_bits(weights)
    head = model.get_output_embeddings()
    bits = {}
    for name, module in model.named_modules():
        in_blocks = isinstance(module, BlockLinear)
        linear = type(module).__name__ in LINEAR and isinstance(module, nn.Linear)
        if not linear and not in_blocks:
            continue
        if in_blocks or is_traceable_wrapper_subclass(module.weight):
            raise WeirError(
                "the weights of this model are already quantized or distributed. Leave out "
                "weights=."
            )
        if weights not in BITS:
            if fits_blocks(module):
                bits[name] = 0
            continue
        fits = not module.in_features % GROUP and not module.out_features % LINES
        bits[name] = 4 if weights == "int4" and fits and module is not head else 8
    if all(model.get_submodule(name) is head for name in bits):
        raise WeirError(
            "no layer of this model except its head is a linear layer that can be quantized. Leave "
            "out weights=."
        )
    return bits


class QuantizedLinear(nn.Linear):
    """Linear layer with a torchao weight that can be moved after it was compiled."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> QuantizedLinear:
        """Move to another device or dtype, replacing the weight by a new one.

        PyTorch would swap the contents of the old and the new weight, which fails if a compiled
        program holds a reference to the old one.
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
        """Raise if the weight cannot have the wanted dtype."""


class Int4Linear(QuantizedLinear):
    """Linear layer with a torchao weight of 4 bits."""

    def _check(self, dtype: torch.dtype, wanted: torch.dtype) -> None:
        """Refuse another dtype: scales are packed in one dtype, which inputs must have too."""
        if wanted != dtype:
            raise WeirError(
                f"weights of 4 bits cannot leave the dtype in which they were made ({dtype}). Load "
                "the model again with weights= and dtype=."
            )


class Int8Linear(QuantizedLinear):
    """Linear layer with a torchao weight of 8 bits, which is not dequantized for few rows.

    For every product, torchao dequantizes the whole weight to the dtype of its input. That pays off
    for a prompt, but would take most of a decode step on a CPU.

    Attributes:
        numbers: the weight's integers [out_features, in_features], int8; None if torchao did not
            make the weight.
        scales: scale of each output [out_features]; None if torchao did not make the weight.
    """

    numbers: Tensor | None = None
    scales: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Multiply as `nn.Linear` does: [..., in_features] to [..., out_features]."""
        if not torch.compiler.is_compiling() and self._numbers_of_weight() is not self.numbers:
            self.take_apart()  # the weight was replaced without `__setattr__`, as hooks do
        numbers, scales = self.numbers, self.scales
        rows = input.numel() // self.in_features
        few = 0 < rows <= FEW and input.device.type == "cpu" and not input.requires_grad
        if numbers is None or scales is None or not few or kernels.is_compiling():
            return super().forward(input)
        kernel = dispatch.linear_int8(input.device)
        if kernel is None or not numbers.is_cpu:
            return super().forward(input)
        out: Tensor = kernel(input, numbers, scales)
        return out if self.bias is None else out + self.bias

    def dequantized(self) -> Tensor:
        """Return the dequantized weight [out_features, in_features], in the dtype of its scales."""
        weight: Any = self.weight
        found: Tensor = weight.dequantize()
        return found

    def take_apart(self) -> None:
        """Read numbers and scales from the weight. Call it again if the weight may have changed."""
        self.numbers = self._numbers_of_weight()
        weight: Any = self.weight
        self.scales = None if self.numbers is None else weight.scale.flatten()

    def _numbers_of_weight(self) -> Tensor | None:
        found: Tensor | None = getattr(self.weight, "qdata", None)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; read numbers and scales from a new weight."""
        super().__setattr__(name, value)
        if name == "weight":
            self.take_apart()


def _four_bits(device: torch.device) -> Any:
    """Return torchao's configuration for 4-bit weights on a device."""
    if device.type == "cpu":
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    from torchao.quantization import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)


def _refuse_plain_weights(
    module: nn.Module, state: dict[str, Any], prefix: str, *args: Any
) -> None:
    """Refuse to load ordinary weights into a quantized model."""
    for name, part in module.named_modules():
        given = state.get(f"{prefix}{name}.weight")
        if given is None:
            continue
        blocks = isinstance(part, BlockLinear | BlockEmbedding)
        torchao = isinstance(part, QuantizedLinear)
        if blocks or (torchao and type(given.data) is not type(part.weight.data)):
            raise WeirError(
                f"this model has quantized weights, and {prefix}{name}.weight cannot be replaced "
                "by loading. Load the model again from a folder with the new weights."
            )
