"""Refuse models with weights that are not finite, which give wrong answers without an error.

weir checks the keys and values of every call, but a NaN in weights after the last layer's keys and
values changes only the logits. A sampler takes the token with the NaN, or fails long after the
model was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from weir.errors import WeirError
from weir.native import BLOCK_TYPES, BlockEmbedding, BlockLinear

CHUNK = 1 << 18
"""How many numbers are checked at a time, so that intermediate results stay in a processor's
cache.
"""

_EXPONENTS = {
    torch.float64: (torch.int64, 0x7FF0000000000000),
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
"""For each dtype, the integer dtype of the same size, and a mask of the exponent's bits.

All bits of the mask are set in numbers that are not finite, and in no others.
"""


def check_finite(name: str, model: nn.Module) -> None:
    """Refuse a model with a weight that contains NaN or infinity."""
    wrong = list(_find_not_finite(model))
    if not wrong:
        return
    others = f", and so do others ({len(wrong)} weights in all)" if len(wrong) > 1 else ""
    raise WeirError(
        f"{name} cannot be used: its weight {wrong[0]} has numbers that are not finite (NaN or "
        f"infinity){others}. Download it again, or get another copy of the model."
    )


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite; True for dtypes that are not checked."""
    known = _EXPONENTS.get(tensor.dtype)
    if known is None or tensor.is_meta or not tensor.numel():
        return True
    whole, exponent = known
    bits = tensor.detach()
    bits = (bits if bits.is_contiguous() else bits.contiguous()).view(whole).flatten()
    without_sign = torch.iinfo(whole).max
    parts = [(part & without_sign).max() for part in bits.split(CHUNK)]
    return bool((torch.stack(parts).max() < exponent).item())


def _find_not_finite(model: nn.Module) -> Iterator[str]:
    """Yield the names of weights that are not finite."""
    for key, tensor in model.named_parameters():
        # Weights that were saved in a quantized format, such as torchao's, have other types and
        # are not checked.
        if type(tensor) is nn.Parameter and not is_finite(tensor):
            yield key
    for key, module in model.named_modules():
        if isinstance(module, BlockLinear | BlockEmbedding) and not is_finite(_numbers_of(module)):
            yield f"{key}.weight"


def _numbers_of(module: BlockLinear | BlockEmbedding) -> Tensor:
    """Return the numbers of a layer's blocks that could be NaN or infinite: the scales, or all
    weights in types without scales, which have 16 bits for each weight.
    """
    form = BLOCK_TYPES[module.kind]
    if form.number:
        return module.codes.view(torch.float16 if form.number == "half" else torch.bfloat16)
    return module.scales[:, :, : form.heads].contiguous().view(torch.float16)
