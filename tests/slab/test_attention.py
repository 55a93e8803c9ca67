"""Attention with two log-weights, in each implementation, against a loop in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from roundings import largest, off, softmax_off
from torch import Tensor

from weir.slab.attention import (
    AttentionParams,
    attention_mass,
    fused_attention,
    observed_attention,
    split_attention,
    split_weights,
    two_weight_attention,
)

pytestmark = pytest.mark.thinned(3, least=2)

LOG_MILLION = 20 * math.log(2)
WEIGHTS = [0.0, 0.0, -math.inf, LOG_MILLION, -3.0]
FUSED = 20 * torch.finfo(torch.float32).eps
"""PyTorch's fused kernels compute exponentials to 20 units in the last place (`exp_u20`)."""
TINY = 1e-30
"""Far above the smallest float32 numbers, which have less precision."""


@dataclass
class Case:
    """Arguments of an attention call."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    a: Tensor
    b: Tensor
    form: AttentionParams
    bias: Tensor | None


@st.composite
def cases(draw, capped: bool = True, apart: bool = True) -> Case:
    """Calls of all small shapes.

    Those with `capped` can have soft-capping, and those with `apart` can have a != b.
    """
    batch, kv_heads, group, length = (draw(st.integers(1, 3)) for _ in range(4))
    slots, key_dim, value_dim = (draw(st.integers(1, 7)) for _ in range(3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def weights() -> Tensor:
        which = torch.randint(len(WEIGHTS), (batch, kv_heads, slots), generator=generator)
        return torch.tensor(WEIGHTS)[which]

    a = weights()
    b = weights() if apart else a.clone()
    if draw(st.booleans()):  # all slots but one are empty
        others = torch.arange(slots) != draw(st.integers(0, slots - 1))
        a, b = a.masked_fill(others, -math.inf), b.masked_fill(others, -math.inf)
    softcap = draw(st.sampled_from([None, 2.0, 30.0])) if capped else None
    sinks = normal(kv_heads, group) * 3 if draw(st.booleans()) else None
    bias = None
    if draw(st.booleans()):
        shape = [batch, kv_heads, group, length, slots]
        shape = [n if draw(st.booleans()) else 1 for n in shape[:-1]] + shape[-1:]
        bias = normal(*shape)
        bias = bias.masked_fill(torch.rand(shape, generator=generator) < 0.3, -math.inf)
    return Case(
        queries=normal(batch, kv_heads, group, length, key_dim) * 2,
        keys=normal(batch, kv_heads, slots, key_dim),
        values=normal(batch, kv_heads, slots, value_dim),
        a=a,
        b=b,
        form=AttentionParams(draw(st.sampled_from([0.25, 1.0])), softcap, sinks),
        bias=bias,
    )


def looped(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the formula in float64, one query and one slot at a time.

    Returns:
        Four tensors. The answers [batch, kv_heads, group, length, value_dim]. Their size, which is
        the answers with the values' magnitudes, because rounding errors are relative to it. The
        attention that each slot receives [batch, kv_heads, slots]. The share of each query's
        attention that the sinks take [batch, kv_heads, group, length].
    """
    batch, kv_heads, group, length, _ = case.queries.shape
    slots, value_dim = case.values.shape[2:]
    out = torch.zeros(batch, kv_heads, group, length, value_dim, dtype=torch.float64)
    size = torch.zeros_like(out)
    mass = torch.zeros(batch, kv_heads, slots, dtype=torch.float64)
    lost = torch.zeros(batch, kv_heads, group, length, dtype=torch.float64)
    bias = torch.zeros(1) if case.bias is None else case.bias
    bias = bias.expand(batch, kv_heads, group, length, slots).tolist()
    for n in range(batch):
        for h in range(kv_heads):
            keys, values = case.keys[n, h].double(), case.values[n, h].double()
            a, b = case.a[n, h].tolist(), case.b[n, h].tolist()
            for g in range(group):
                for t in range(length):
                    above, below = [], []
                    for i in range(slots):
                        logit = float(case.queries[n, h, g, t].double() @ keys[i]) * case.form.scale
                        if case.form.softcap is not None:
                            logit = case.form.softcap * math.tanh(logit / case.form.softcap)
                        logit += bias[n][h][g][t][i]
                        above.append(math.exp(logit + a[i]))
                        below.append(math.exp(logit + b[i]))
                    sink = 0.0 if case.form.sinks is None else math.exp(case.form.sinks[h, g])
                    total = math.fsum(below) + sink
                    if total == 0:
                        continue
                    lost[n, h, g, t] = sink / total
                    for i in range(slots):
                        out[n, h, g, t] += above[i] * values[i] / total
                        size[n, h, g, t] += above[i] * values[i].abs() / total
                        mass[n, h, i] += below[i] / total
    return out, size, mass, lost


def reference(case: Case) -> Tensor:
    """Call `two_weight_attention` with a case."""
    return two_weight_attention(
        case.queries, case.keys, case.values, case.a, case.b, case.form, case.bias
    )


def rounding(case: Case) -> float:
    """Return the relative error of a sum's terms. The sum is off by at most this times its size."""
    _, _, group, length, key_dim = case.queries.shape
    products = case.queries.abs().double() @ case.keys.abs().double()[:, :, None].mT
    exponent = float(products.max()) * case.form.scale + LOG_MILLION
    for other in (case.bias, case.form.sinks):
        exponent += 0.0 if other is None else largest(other)
    # A logit is rounded in its products, scale, cap, bias, weight, and in subtracting the largest.
    return softmax_off(key_dim + 5, exponent) + off(case.keys.shape[2] + group * length + 4)


def assert_within(got: Tensor, wanted: Tensor, bound: Tensor) -> None:
    """Assert that every entry is within its own bound."""
    assert got.shape == wanted.shape
    excess = (got.double() - wanted).abs() - bound
    assert bool((excess <= 0).all()), f"beyond the bound by {float(excess.max())}"


@given(cases())
def test_the_reference_is_the_formula(case):
    wanted, size, _, _ = looped(case)
    assert_within(reference(case), wanted, rounding(case) * size + TINY)


@given(cases())
def test_the_attention_slots_receive_is_the_denominators_share(case):
    _, _, mass, lost = looped(case)
    got = attention_mass(case.queries, case.keys, case.b, case.form, case.bias)
    assert_within(got, mass, rounding(case) * mass + TINY)


@given(cases())
def test_every_query_gives_away_its_whole_attention_less_the_sinks_share(case):
    _, _, mass, lost = looped(case)
    got = attention_mass(case.queries, case.keys, case.b, case.form, case.bias)
    batch, kv_heads, group, length, _ = case.queries.shape
    sinks = lost.sum(dim=(2, 3))
    bound = torch.tensor(rounding(case) * group * length)
    if case.bias is None and bool((case.b > -math.inf).any(dim=2).all()):
        wanted = group * length - sinks
        assert_within(got.double().sum(dim=2), wanted, bound)
    else:
        assert bool((got.double().sum(dim=2) <= group * length - sinks + bound).all())


@given(cases(capped=False, apart=False))
def test_the_fused_call_equals_the_reference_for_one_weight(case):
    weight = case.b[:, :, None, None]
    bias = weight if case.bias is None else case.bias + weight
    got = fused_attention(case.queries, case.keys, case.values, case.form, bias)
    _, size, _, _ = looped(case)
    sees = torch.isfinite(bias.expand(*case.queries.shape[:4], -1)).any(dim=-1)
    # Kernels may return anything for a query that sees nothing, and weir does not use it.
    got = torch.where(sees[..., None], got, 0.0)
    assert_within(got, reference(case).double(), (rounding(case) + FUSED) * size + TINY)


@given(cases(capped=False, apart=False))
def test_observed_attention_is_the_formula_and_the_mass_is_that_of_a_fold_to_the_bit(case):
    if case.form.sinks is not None:
        return
    parts = (case.queries, case.keys, case.values)
    case = replace(case, queries=parts[0].float(), keys=parts[1].float(), values=parts[2].float())
    got = observed_attention(case.queries, case.keys, case.values, case.b, case.form, case.bias)
    wanted, size, mass, _ = looped(case)
    bias = case.b[:, :, None, None] + (0.0 if case.bias is None else case.bias)
    blind = ~torch.isfinite(bias.expand(*case.queries.shape[:4], -1)).any(dim=-1)
    if bool(blind.any()):
        assert got is None
        return
    assert_within(got.answers, wanted, rounding(case) * size + TINY)
    assert_within(got.mass, mass, rounding(case) * mass + TINY)
    assert_within(got.shares.sum(dim=(2, 3)), mass, rounding(case) * mass + TINY)
    fold = attention_mass(case.queries, case.keys, case.b, case.form, case.bias)
    assert torch.equal(got.mass, fold)


def test_observed_attention_is_the_same_where_gradients_flow_and_has_them():
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(1, 2, *shape, generator=generator) for shape in [(3, 4, 8), (9, 8), (9, 8)]
    )
    b, form = torch.zeros(1, 2, 9), AttentionParams(8**-0.5)
    plain = observed_attention(queries, keys, values, b, form, None)
    learned = queries.clone().requires_grad_()
    got = observed_attention(learned, keys, values, b, form, None)
    for mine, its in zip(got, plain, strict=True):
        assert torch.equal(mine, its)
    got.answers.sum().backward()
    formula = queries.clone().requires_grad_()
    two_weight_attention(formula, keys, values, b, b, form).sum().backward()
    torch.testing.assert_close(learned.grad, formula.grad)


def test_a_bias_over_the_last_slots_is_one_that_is_zero_for_the_others():
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 3, 2, 4, 5, generator=generator)
    keys, values = torch.randn(2, 2, 3, 9, 5, generator=generator)
    bias = torch.zeros(1, 1, 1, 4, 9)
    bias[..., 5:].masked_fill_(~torch.ones(4, 4).tril().bool(), -math.inf)
    parts = (queries, keys, values, torch.zeros(2, 3, 9), AttentionParams(0.5))
    some, full = (observed_attention(*parts, its) for its in (bias[..., 5:], bias))
    assert all(map(torch.equal, some, full))
    assert some.shares[:, :, :, 0, 6:].eq(0).all()


def split(case: Case) -> Tensor:
    """Call `split_attention` with a case."""
    weights = split_weights(case.a, case.b)
    return split_attention(case.queries, case.keys, case.values, *weights, case.form, case.bias)


WAYS = {"readable": reference, "split": split}


def bound(case: Case, wanted: Tensor, size: Tensor) -> Tensor:
    """How far a float32 result can be off after rounding it to the dtype of the values."""
    kind = torch.finfo(case.values.dtype)
    last = kind.eps / 2 * (wanted.abs() + kind.smallest_normal)
    return rounding(case) * size + last + torch.finfo(torch.float32).smallest_normal


@given(cases(capped=False))
def test_split_sums_are_the_formula(case):
    wanted, size, _, _ = looped(case)
    assert_within(split(case), wanted, bound(case, wanted, size))


@st.composite
def far_apart(draw) -> Case:
    """Calls with slots in either sum, in both or in none, whose logits are up to 60 apart.

    Queries are -1 to 1 times the largest one. So the largest logits of some queries are in the
    numerator, and those of others in the denominator.
    """
    batch, kv_heads, group, length = (draw(st.integers(1, 3)) for _ in range(4))
    slots, key_dim, value_dim = draw(st.integers(2, 9)), draw(st.integers(1, 3)), 2
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    gap = draw(st.floats(0, 60))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (batch, kv_heads, slots)

    def picked(*options: float) -> Tensor:
        return torch.tensor(options)[torch.randint(len(options), shape, generator=generator)]

    # These are exact in any dtype, and their first numbers give logits from -gap / 2 to gap / 2.
    factors = torch.tensor([-1.0, -0.5, 0.25, 1.0])
    which = torch.randint(4, (batch, kv_heads, group, length, 1), generator=generator)
    queries = torch.zeros(batch, kv_heads, group, length, key_dim)
    queries[..., :1] = factors[which]
    keys = torch.randn(*shape, key_dim, generator=generator)
    keys[..., 0] = picked(-gap / 2, gap / 2, 0.0)
    a, b = picked(0.0, 2.5, -math.inf), picked(0.0, 2.5, -math.inf)
    bias = None
    if draw(st.booleans()):
        bias = torch.randn(batch, 1, 1, length, slots, generator=generator)
        bias = bias.masked_fill(torch.rand(bias.shape, generator=generator) < 0.2, -math.inf)
    values = torch.randn(*shape, value_dim, generator=generator)
    queries, keys, values = (t.to(dtype) for t in (queries, keys, values))
    return Case(queries, keys, values, a, b, AttentionParams(1.0), bias)


def one_of_the_numerator(gap: float, dtype: torch.dtype = torch.float32) -> Case:
    """A slot of the numerator, a slot of the denominator `gap` below it, and a slot of both."""
    keys = torch.tensor([gap / 2, -gap / 2, -gap / 2])[None, None, :, None].to(dtype)
    values = torch.tensor([3.0, 7.0, 2.0])[None, None, :, None].to(dtype)
    a, b = torch.tensor([[[0.0, -math.inf, 0.0]]]), torch.tensor([[[-math.inf, 0.0, 0.0]]])
    return Case(
        torch.ones(1, 1, 1, 1, 1, dtype=dtype), keys, values, a, b, AttentionParams(1.0), None
    )


@pytest.mark.parametrize("way", WAYS)
@given(case=far_apart())
@example(one_of_the_numerator(25.0))
@example(one_of_the_numerator(60.0))
@example(one_of_the_numerator(-60.0))
@example(one_of_the_numerator(60.0, torch.bfloat16))
@pytest.mark.thinned(2)
def test_no_gap_between_logits_costs_more_than_rounding(way, case):
    # If a slot contributed e^-30 to a sum that it does not belong to, gaps of at least 14 would
    # show it. If it contributed e^-60, gaps of at least 44 would.
    wanted, size, _, _ = looped(case)
    beyond = wanted.abs() > torch.finfo(case.values.dtype).max / 2  # more than float16 can hold
    got, fits = WAYS[way](case).double().masked_fill(beyond, 0.0), wanted.masked_fill(beyond, 0.0)
    assert_within(got, fits, bound(case, wanted, size))


@pytest.mark.parametrize("gap", range(-60, 61, 10))
@pytest.mark.parametrize("way", WAYS)
def test_a_slot_of_the_numerator_alone_adds_nothing_to_the_denominator(way, gap):
    # This is (3 e^gap + 2) / (1 + 1), after both sums are divided by the denominator's e^(-gap/2).
    got = WAYS[way](one_of_the_numerator(float(gap))).item()
    # Logits of gap / 2 and their difference are exact, so only an exponential and a few sums round.
    assert got == pytest.approx((3 * math.exp(gap) + 2) / 2, rel=off(8))


def test_the_larger_of_two_weights_is_the_mask_and_the_other_a_factor():
    a = torch.tensor([[[1.0, -math.inf, 2.0, -math.inf, 0.0]]])
    b = torch.tensor([[[3.0, 4.0, -math.inf, -math.inf, 0.0]]])
    mask, numerator, denominator = split_weights(a, b)
    assert mask[0, 0].tolist() == [3.0, 4.0, 2.0, -math.inf, 0.0]
    assert numerator[0, 0].tolist() == pytest.approx([math.exp(-2), 0.0, 1.0, 0.0, 1.0], rel=off(2))
    assert denominator[0, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_slots_of_one_sum_alone_give_the_quotient_of_two_sums():
    # Values from one set of tokens over weights from another: (e^1 * 5) / (e^2 + e^0).
    queries, keys = torch.ones(1, 1, 1, 1, 1), torch.tensor([[[[1.0], [2.0], [0.0]]]])
    values = torch.tensor([[[[5.0], [7.0], [9.0]]]])
    a = torch.tensor([[[0.0, -math.inf, -math.inf]]])
    b = torch.tensor([[[-math.inf, 0.0, 0.0]]])
    wanted = 5 * math.e / (math.e**2 + 1)
    case = Case(queries, keys, values, a, b, AttentionParams(1.0), None)
    for way in WAYS.values():
        assert way(case).item() == pytest.approx(wanted, rel=rounding(case))


@pytest.mark.parametrize("length", [1, 5])
def test_weights_keep_their_precision_beside_half_precision_queries(length):
    # In bfloat16, weights of a million slots would be off by 3%, because log-weights near 14 are
    # 2^-4 apart. Queries, keys and values are exact in bfloat16, so only the kernel rounds: its
    # products, to 2^-8 of the largest value.
    torch.manual_seed(0)
    queries, keys = torch.zeros(1, 1, 2, length, 4), torch.zeros(1, 1, 6, 4)
    values = torch.eye(6)[None, None]
    a = torch.tensor([[[0.0, math.log(3), 5.3, 9.7, 12.9, 13.83]]])
    wanted = two_weight_attention(queries, keys, values, a, a, AttentionParams(1.0))
    got = fused_attention(
        *(t.bfloat16() for t in (queries, keys, values)), AttentionParams(1.0), a[:, :, None, None]
    )
    torch.testing.assert_close(got.float(), wanted, rtol=2**-7, atol=0)


def test_logits_beyond_what_exp_can_hold_do_no_harm():
    # The largest logit is first only in the denominator, then only in the numerator.
    queries, values = torch.ones(1, 1, 1, 1, 1), torch.tensor([[[[2.0], [4.0]]]])
    keys = torch.tensor([[[[500.0], [499.0]]]])
    first, second = torch.tensor([[[0.0, -math.inf]]]), torch.tensor([[[-math.inf, 0.0]]])
    form = AttentionParams(1.0)
    below = two_weight_attention(queries, keys, values, second, first, form)
    above = two_weight_attention(queries, keys, values, first, second, form)
    # The logits and their differences are whole numbers, so only exponentials and sums round.
    assert below.item() == pytest.approx(4 / math.e, rel=off(4))
    assert above.item() == pytest.approx(2 * math.e, rel=off(4))
    sunk = AttentionParams(1.0, sinks=torch.tensor([[501.0]]))
    zeros = torch.zeros(1, 1, 2)
    wanted = (2 + 4 / math.e) / (1 + 1 / math.e + math.e)
    case = Case(queries, keys, values, zeros, zeros, sunk, None)
    for both in (reference(case), split(case), fused_attention(queries, keys, values, sunk)):
        assert both.item() == pytest.approx(wanted, rel=off(8))


@given(cases(capped=False))
def test_a_zero_sink_is_a_slot_more_whose_key_and_value_are_zero(case):
    # StreamingLLM, section 3.3: SoftMax_1 "is equivalent to prepending a token with an all-zero Key
    # and Value features in the attention computation".
    batch, kv_heads, group = case.queries.shape[:3]
    sunk = replace(case, form=AttentionParams(case.form.scale, sinks=torch.zeros(kv_heads, group)))

    def with_a_slot(t: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(t[:, :, :1]), t], dim=2)

    bias = case.bias
    if bias is not None:
        bias = torch.cat([torch.zeros_like(bias[..., :1]), bias], dim=-1)
    longer = replace(
        case,
        keys=with_a_slot(case.keys),
        values=with_a_slot(case.values),
        a=with_a_slot(case.a),
        b=with_a_slot(case.b),
        form=AttentionParams(case.form.scale),
        bias=bias,
    )
    wanted, size, mass, _ = looped(longer)
    for way in WAYS.values():
        assert_within(way(sunk), wanted, rounding(case) * size + TINY)
    got = attention_mass(sunk.queries, sunk.keys, sunk.b, sunk.form, sunk.bias)
    assert_within(got, mass[:, :, 1:], rounding(case) * mass[:, :, 1:] + TINY)
    wanted, size, _, _ = looped(replace(longer, a=longer.b))
    weight = case.b[:, :, None, None]
    bias = weight if case.bias is None else case.bias + weight
    got = fused_attention(case.queries, case.keys, case.values, sunk.form, bias)
    assert_within(got, wanted, rounding(case) * size + TINY)


def test_a_query_that_sees_nothing_gets_zero():
    queries, keys = torch.ones(1, 1, 2, 3, 4), torch.ones(1, 1, 5, 4)
    values = torch.ones_like(keys)
    empty = torch.full((1, 1, 5), -math.inf)
    zeros, blind = torch.zeros(1, 1, 5), torch.full((1, 1, 1, 3, 5), -math.inf)
    for way in WAYS.values():
        assert (
            way(Case(queries, keys, values, empty, empty, AttentionParams(0.5), None)).eq(0).all()
        )
        assert (
            way(Case(queries, keys, values, zeros, zeros, AttentionParams(0.5), blind)).eq(0).all()
        )
        # Values without a denominator.
        assert (
            way(Case(queries, keys, values, zeros, empty, AttentionParams(0.5), None)).eq(0).all()
        )
    assert attention_mass(queries, keys, empty, AttentionParams(0.5)).eq(0).all()
