"""The decode kernel equals two-weight attention, as closely as its arithmetic lets it.

Bound: both compute in float32, and eps = 2^-24 is the relative error of one rounding. A logit is a
sum of d products, so it is off by at most (d + 2) eps |q| |k| scale. Capping, bias, log-weight and
the subtraction of the largest logit each add a few eps of the numbers they are applied to. Two
errors become relative errors of sums of positive terms, which are the denominator and the numerator
with |values|: the error of the exponents, and the n + 8 roundings of a sum over n slots. With
bfloat16 values, weights have two times 8 bits instead of 24. Finally, the answer is rounded to the
dtype of the values. Where a GPU rounds to the nearest bfloat16, Triton's interpreter cuts off bits,
so both errors that come from bfloat16 are counted twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import need_triton
from roundings import close_runs, within
from torch import Tensor

import weir
from weir import kernels
from weir.slab.attention import AttentionParams, two_weight_attention

pytest.importorskip("triton", reason="not installed: pip install '.[gpu]'")

from weir.kernels.gpu.decode import decode

need_triton()
pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOG_MILLION = 20 * math.log(2)
WEIGHTS = [0.0, 0.0, -math.inf, LOG_MILLION, -3.0]
EPS = 2.0**-24


@dataclass
class Case:
    """Arguments of a decode step."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    a: Tensor
    b: Tensor
    form: AttentionParams
    bias: Tensor | None

    def arguments(self) -> tuple:
        """The arguments of `decode`, in order."""
        form, tensors = self.form, (self.queries, self.keys, self.values, self.a, self.b)
        return (*tensors, form.scale, form.softcap, form.sinks, self.bias)

    def answer(self) -> Tensor:
        """The reference's answer to the same numbers as float32, so that it is not rounded."""
        return two_weight_attention(*vars(self.wide()).values())

    def wide(self) -> Case:
        """The same numbers as float32."""
        return replace(
            self,
            queries=self.queries.float(),
            keys=self.keys.float(),
            values=self.values.float(),
        )


@st.composite
def cases(draw) -> Case:
    """Decode steps of all kinds of shapes, over slots from the middle of a longer slab."""
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    group = draw(st.sampled_from([1, 2, 3, 8, 17]))
    slots = draw(st.integers(1, 200))
    key_dim, value_dim = (draw(st.sampled_from([32, 40, 64, 128, 256])) for _ in range(2))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def weights() -> Tensor:
        which = torch.randint(len(WEIGHTS), (batch, kv_heads, slots + 7), generator=generator)
        return torch.tensor(WEIGHTS)[which]

    a = weights()
    b = weights() if draw(st.booleans()) else a.clone()
    if draw(st.booleans()):  # all slots empty but one
        others = torch.arange(slots + 7) != draw(st.integers(0, slots - 1)) + 3
        a, b = a.masked_fill(others, -math.inf), b.masked_fill(others, -math.inf)
    bias = None
    if draw(st.booleans()):  # rows of different length, or a slope for each head
        lengths = torch.randint(0, slots + 1, (batch, 1, 1, 1, 1), generator=generator)
        unseen = torch.arange(slots) >= lengths
        bias = normal(1, *((kv_heads, group) if draw(st.booleans()) else (1, 1)), 1, slots)
        bias = bias.expand(batch, -1, -1, -1, -1).masked_fill(unseen, -math.inf)
    sinks = normal(kv_heads, group) * 3 if draw(st.booleans()) else None
    form = AttentionParams(key_dim**-0.5, draw(st.sampled_from([None, None, 2.0, 30.0])), sinks)
    case = Case(
        queries=(normal(batch, kv_heads, group, 1, key_dim) * 2).to(dtype),
        keys=normal(batch, kv_heads, slots + 7, key_dim).to(dtype)[:, :, 3:-4],
        values=normal(batch, kv_heads, slots + 7, value_dim).to(dtype)[:, :, 3:-4],
        a=a[:, :, 3:-4],
        b=b[:, :, 3:-4],
        form=form,
        bias=bias,
    )
    return on(case, DEVICE)


def on(case: Case, device: str) -> Case:
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(case).items()}
    if case.form.sinks is not None:
        moved["form"] = replace(case.form, sinks=case.form.sinks.to(device))
    return Case(**moved)


def off(case: Case) -> float:
    """The largest relative error of a term of a sum, in the kernel or in the reference."""
    dim, slots = case.queries.shape[-1], case.keys.shape[2]
    length = float(case.queries.float().norm(dim=-1).max() * case.keys.float().norm(dim=-1).max())
    largest = length * case.form.scale + LOG_MILLION + (case.form.softcap or 0.0) + 10.0
    logit = (dim + 2) * EPS * length * case.form.scale + 8 * EPS * largest
    weight = 2.0**-14 if case.values.dtype == torch.bfloat16 else 0.0
    return 2 * logit + (slots + 8) * EPS + weight


def roundoff(dtype: torch.dtype) -> float:
    eps = torch.finfo(dtype).eps
    return eps if dtype == torch.bfloat16 else eps / 2


@settings(max_examples=40)
@given(case=cases(), splits=st.sampled_from([1, 2, 4]))
def test_answers_are_those_of_the_reference(case: Case, splits: int) -> None:
    found = decode(*case.arguments(), splits=splits)
    expected = case.answer()
    size = replace(case, values=case.values.abs()).answer()
    assert found.dtype == case.values.dtype
    assert found.shape == expected.shape
    bound = 4 * off(case) * size + roundoff(found.dtype) * expected.abs() + 1e-30
    if found.dtype == torch.float16:  # half of its smallest number
        bound = bound + 2.0**-25
        near_the_end = expected.abs() > torch.finfo(torch.float16).max / 2
        found, expected = (t.masked_fill(near_the_end, 0.0) for t in (found, expected))
    assert bool(((found.float() - expected).abs() <= bound).all())


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [-60.0, -25.0, 0.0, 14.0, 25.0, 60.0])
def test_a_slot_of_the_numerator_alone_adds_nothing_to_the_denominator(gap, dtype, splits) -> None:
    # Slot 0 is only in the numerator, slot 41 only in the denominator, and slot 42 in both sums.
    # The logit of slot 0 is `gap` above the other two. 40 empty slots are between them, so that the
    # parts of a split hold different sums.
    slots, dim = 43, 32
    keys, values = (torch.zeros(1, 1, slots, dim, device=DEVICE) for _ in range(2))
    a, b = (torch.full((1, 1, slots), -math.inf, device=DEVICE) for _ in range(2))
    for slot, (logit, value, above, below) in {
        0: (gap / 2, 3.0, 0.0, -math.inf),
        41: (-gap / 2, 7.0, -math.inf, 0.0),
        42: (-gap / 2, 2.0, 0.0, 0.0),
    }.items():
        keys[..., slot, 0], values[..., slot, :] = logit, value
        a[..., slot], b[..., slot] = above, below
    queries = torch.zeros(1, 1, 1, 1, dim, device=DEVICE)
    queries[..., 0] = 1.0
    case = Case(
        queries.to(dtype), keys.to(dtype), values.to(dtype), a, b, AttentionParams(1.0), None
    )
    wanted = (3 * math.exp(gap) + 2) / 2
    bound = 4 * off(case) * wanted + roundoff(dtype) * wanted
    assert (decode(*case.arguments(), splits=splits).double() - wanted).abs().max() <= bound


@settings(max_examples=15)
@given(case=cases(), splits=st.sampled_from([1, 2, 4]))
def test_a_zero_sink_is_a_slot_more_whose_key_and_value_are_zero(case: Case, splits: int) -> None:
    sinks = torch.zeros(case.queries.shape[1:3], device=DEVICE)
    sunk = replace(case, form=AttentionParams(case.form.scale, sinks=sinks))
    longer = [
        torch.cat([torch.zeros_like(t[:, :, :1]), t], dim=2)
        for t in (case.keys, case.values, case.a, case.b)
    ]
    bias = case.bias
    if bias is not None:
        bias = torch.cat([torch.zeros_like(bias[..., :1]), bias], dim=-1)
    plain = Case(case.queries, *longer, AttentionParams(case.form.scale), bias)
    found, expected = decode(*sunk.arguments(), splits=splits), plain.answer()
    size = replace(plain, values=plain.values.abs()).answer()
    bound = 4 * off(plain) * size + roundoff(found.dtype) * expected.abs() + 1e-30
    if found.dtype == torch.float16:  # half of its smallest number
        bound = bound + 2.0**-25
        near_the_end = expected.abs() > torch.finfo(torch.float16).max / 2
        found, expected = (t.masked_fill(near_the_end, 0.0) for t in (found, expected))
    assert bool(((found.float() - expected).abs() <= bound).all())


def test_a_query_that_sees_nothing_answers_zero() -> None:
    ones = torch.ones(1, 2, 5, 32, device=DEVICE)
    nothing = torch.full((1, 2, 5), -math.inf, device=DEVICE)
    queries = torch.ones(1, 2, 3, 1, 32, device=DEVICE)
    for splits in (1, 2):
        assert not decode(queries, ones, ones, nothing, nothing, 1.0, splits=splits).any()


def test_tensors_may_lie_in_memory_in_any_way() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(2, 3, 32, n, generator=generator).to(DEVICE).mT for n in (2, 9, 9)
    )
    weights = torch.randn(9, 3, 2, generator=generator).to(DEVICE).permute(2, 1, 0)
    case = Case(
        queries[:, :, :, None], keys, values, weights, weights / 2, AttentionParams(0.2), None
    )
    size = replace(case, values=values.abs()).answer()
    within(decode(*case.arguments()), case.answer(), 4 * off(case) * size)


@pytest.mark.parametrize(
    "policy",
    ["sink(2) | recent(14)", "recent(6) | heavy(6)", "sink(2) | recent(6) | subgen(16, 4, 2)"],
)
def test_a_stream_says_the_same_through_the_kernel(
    llama, ids, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = llama.to(DEVICE), ids(2, 50).to(DEVICE)
    found = []
    for wanted in ("reference", "triton"):
        monkeypatch.setenv(kernels.VARIABLE, wanted)
        stream = weir.Stream(model, policy, chunk=4)
        steps = [stream.feed(text[:, :40])]
        steps += [stream.feed(token) for token in text[:, 40:].split(1, dim=1)]
        found.append(torch.stack(steps))
    close_runs(*found, model)
