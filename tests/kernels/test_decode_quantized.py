"""The kernels over quantized slots equal two-weight attention over their dequantized numbers.

Bound: as in `test_gpu_decode`, because all kernels sum in float32. The CPU's exponential is a
polynomial with a relative error below 2^-22. Kernels multiply by the steps of quantization at a
different place, which is one more rounding for each logit and each weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreter import need_triton
from torch import Tensor

from weir.slab.attention import AttentionParams, two_weight_attention
from weir.slab.quantization import FORMATS, quantize
from weir.slab.slots import QuantizedStorage

MODULES = {
    "numba": "weir.kernels.cpu.decode_quantized",
    "triton": "weir.kernels.gpu.decode_quantized",
}
EPS = 2.0**-24


def coded_slots(
    name: str, keys: Tensor, values: Tensor, dtype: torch.dtype = torch.float32
) -> QuantizedStorage:
    """Slots of a format [batch, kv_heads, slots, dim], as a slab holds them."""
    form, buffers = FORMATS[name], {}
    for what, t, code in (("keys", keys, form.keys), ("values", values, form.values)):
        buffers[what], buffers[f"{what}_peaks"] = quantize(t, code)
    return QuantizedStorage(form, buffers, dtype)


def as_rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of 4 bits, rounded to the model's dtype as in the kernel for a GPU."""
    if dtype == torch.bfloat16 and not torch.cuda.is_available():
        return (values.view(torch.int32) & -65536).view(torch.float32)  # the interpreter cuts off
    return values.to(dtype).float()


@pytest.fixture(params=["numba", pytest.param("triton", marks=pytest.mark.slow)])
def library(request: pytest.FixtureRequest) -> str:
    """The library whose kernel is tested; skips if it is not installed."""
    pytest.importorskip(request.param, reason="not installed: pip install '.[fast,gpu]'")
    if request.param == "triton":
        need_triton()
    return str(request.param)


@pytest.fixture
def decode_quantized(library: str) -> Callable[..., Tensor]:
    """The library's kernel, which takes and returns tensors on the CPU, wherever it runs."""
    kernel = import_module(MODULES[library]).decode_quantized
    device = "cuda" if library == "triton" and torch.cuda.is_available() else "cpu"

    def there(it: object) -> object:
        if isinstance(it, tuple):
            return tuple(map(there, it))
        return it.to(device) if isinstance(it, Tensor) else it

    return lambda *given_: kernel(*map(there, given_)).cpu()


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 8]),
    coded=st.integers(1, 70),
    exact=st.integers(0, 40),
    unread=st.integers(0, 69),
    written=st.sampled_from(
        [
            (name, dims)
            for name in ("int8", "fp8")
            for dims in ((8, 8), (64, 64), (40, 24), (48, 80))
        ]
        + [("k8v4", dims) for dims in ((8, 32), (64, 64), (40, 96))]
    ),
    masked=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    lanes=st.sampled_from([8, 16]),
)
def test_it_is_the_formula(
    library,
    decode_quantized,
    seed,
    batch,
    kv_heads,
    group,
    coded,
    exact,
    unread,
    written,
    masked,
    dtype,
    lanes,
):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    name, dims = written
    key_dim, value_dim = dims
    queries = normal(batch, kv_heads, group, 1, key_dim) * 3
    slab = coded_slots(name, *(normal(batch, kv_heads, coded, dim) for dim in dims), dtype)
    keys, values = (normal(batch, kv_heads, exact + 5, dim) for dim in dims)
    mask = torch.zeros(batch, kv_heads, coded + exact)
    if masked:
        mask = torch.randn(mask.shape, generator=draw) * 4
        mask[torch.rand(mask.shape, generator=draw) < 0.3] = -math.inf
    form = AttentionParams(key_dim**-0.5)
    slots = (min(unread, coded - 1), coded + exact)
    given_mask = mask if masked else None
    with pytest.MonkeyPatch.context() as patched:
        if library == "numba":
            patched.setattr("weir.kernels.cpu.decode.lanes", lambda: lanes)
        found = decode_quantized(queries, slab.stored, keys, values, given_mask, form.scale, slots)
    slab.dtype = torch.float32
    read = [slab.keys(0, coded), slab.values(0, coded)]
    if library == "triton" and name == "k8v4":
        read[1] = as_rounded(read[1], dtype)
    whole = [
        torch.cat([t, more[:, :, :exact].float()], dim=2)[:, :, slots[0] :]
        for t, more in zip(read, (keys, values), strict=True)
    ]
    mask = mask[:, :, slots[0] :]
    wanted = two_weight_attention(queries.float(), *whole, mask, mask, form)
    size = queries.float().norm(dim=-1, keepdim=True) * whole[0].norm(dim=-1).amax() * form.scale
    logits_off = (key_dim + 8) * EPS * (size + 30) + 2.0**-22
    off = 2 * (2 * logits_off + (coded + exact + 8) * EPS)
    eps = torch.finfo(dtype).eps / 2
    if library == "triton" and dtype == torch.bfloat16:
        # The kernel holds a weight as two bfloat16 numbers of 8 bits each. Triton's interpreter
        # cuts off bits where a GPU rounds.
        off, eps = off + 2.0**-14, 2 * eps
    bound = off * whole[1].abs().amax() + eps * wanted.abs()
    bound = bound + torch.finfo(dtype).tiny
    assert found.dtype == dtype
    assert ((found.float() - wanted).abs() <= bound).all()


def test_a_query_that_sees_nothing_is_answered_by_zero(decode_quantized):
    coded = coded_slots("int8", *torch.randn(2, 1, 1, 4, 8)).stored
    exact = torch.randn(1, 1, 3, 8)
    mask = torch.full((1, 1, 7), -math.inf)
    query = torch.randn(1, 1, 2, 1, 8)
    found = decode_quantized(query, coded, exact, exact, mask, 1.0, (0, 7))
    assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("exact", [0, 90])
@pytest.mark.slow
def test_parts_of_the_slots_are_brought_together(exact):
    need_triton()
    triton = import_module(MODULES["triton"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator().manual_seed(7)
    coded = coded_slots("k8v4", *torch.randn(2, 2, 2, 150, 32, generator=draw)).stored
    behind = torch.randn(2, 2, exact, 32, generator=draw)
    query = torch.randn(2, 2, 3, 1, 32, generator=draw)
    mask = torch.zeros(2, 2, 150 + exact)
    mask[0, 0, 60:] = -math.inf  # so that whole parts are hidden
    query, behind, mask = (t.to(device) for t in (query, behind, mask))
    coded = tuple((n.to(device), p.to(device), levels) for n, p, levels in coded)

    def answer(splits: int) -> Tensor:
        return triton.decode_quantized(
            query, coded, behind, behind, mask, 0.2, (3, 150 + exact), splits=splits
        )

    one = answer(1)
    for splits in (2, 4):
        assert (answer(splits) - one).abs().max() <= 200 * EPS * 4
