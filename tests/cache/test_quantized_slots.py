"""Quantized slots in a model: pools decide which tokens stay, and the slab how they are stored.

With a lossless code in place of int8, everything must be as with exact slots: which tokens stay,
how they move, what attention reads. What a real code loses is tested separately.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from engines import compiled
from model_runs import fed
from reference.models import make, tokens
from reference.naive import make_llama
from reference.seeing import THREE_AXES, prompt, seeing
from roundings import close_runs
from torch import Tensor
from transformers import PreTrainedModel

import weir
from weir import StreamingCache, WeirError, kernels
from weir.slab import FORMATS, quantization, slots
from weir.slab.quantization import INT8, PEAK, steps

pytestmark = pytest.mark.thinned(4, least=2)

PIPES = [
    "sink(2) | recent(6) | heavy(6):int8",
    "sink(2) | recent(4) | recent(4):int8 | kcenter(8):int8",
    "sink(2) | recent(3) | recent(5):int8",
    "recent(8):int8",
    "sink(2) | recent(6) | hive(10):int8",
    "sink(2) | recent(4) | recent(4):int8 | snap(8, 4, 5):int8",
    "sink(1) | recent(4) | reservoir(3) | reservoir(5, weighted=true):int8",
    "sink(2) | recent(6) | balance(8, block=4):int8",
    "sink(2) | recent(3) | recent(3):int8 | subgen(8, 4, 2):int8",
    "snap(16, 4, 5):int8",
]
INT4 = "sink(2) | recent(4) | recent(4):int4 | kcenter(8):int4"
CHUNK = 4


def exact(pipe: str) -> str:
    return pipe.replace(":int8", "").replace(":int4", "")


@pytest.fixture
def lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace int8 by a code that keeps every number as it is, and switch off its kernels."""
    wide = replace(INT8, dtype=torch.float32)
    monkeypatch.setitem(FORMATS, "int8", replace(FORMATS["int8"], keys=wide, values=wide))  # type: ignore[arg-type]

    def quantize(x: Tensor, code: object) -> tuple[Tensor, Tensor]:
        return x.float(), torch.ones(*x.shape[:-1], 1, dtype=PEAK, device=x.device)

    def dequantize(numbers: Tensor, peaks: Tensor, code: object, dtype: torch.dtype) -> Tensor:
        return numbers.to(dtype)

    monkeypatch.setattr(quantization, "quantize", quantize)
    for module in (quantization, slots):
        monkeypatch.setattr(module, "dequantize", dequantize)
    monkeypatch.setattr(quantization, "are_levels", lambda numbers, code: True)
    monkeypatch.setattr(kernels, "decode_quantized", lambda device: None)


def check_same(one: StreamingCache, other: StreamingCache, model: PreTrainedModel) -> None:
    """Check that both hold the same tokens in the same pools, with equal keys, values, weights."""
    assert one.seen == other.seen
    for layer in range(len(one.stack)):
        mine, theirs = one.slots(layer), other.slots(layer)
        for row, head in torch.cartesian_prod(
            *(torch.arange(n) for n in mine.position.shape[:2])
        ).tolist():
            its = [_of_head(it, row, head) for it in (mine, theirs)]
            assert torch.equal(its[0]["position"], its[1]["position"])
            assert torch.equal(its[0]["pool"], its[1]["pool"])
            for name in ("keys", "values", "a", "b"):
                close_runs(its[0][name], its[1][name], model)


def _of_head(held: Any, row: int, head: int) -> dict[str, Tensor]:
    """What a head holds, in the order of the stream. Slots of one token are ordered by pool."""
    place, pool = held.position[row, head], held.pool[row, head]
    order = (place * 100 + pool).argsort(stable=True)
    order = order[place[order] >= 0]
    names = ("position", "pool", "keys", "values", "a", "b")
    return {name: getattr(held, name)[row, head, order] for name in names}


# --- without a loss, nothing differs


@pytest.mark.parametrize(
    ("pipe", "positions"), list(zip(PIPES, cycle(["rolling", "rolling", "original"]), strict=False))
)
def test_slots_lie_elsewhere_and_nothing_else_differs(llama, ids, lossless, pipe, positions):
    text, sizes = ids(2, 90), [1, 37, *[1] * 12, 40]
    caches = [
        StreamingCache(llama, it, chunk=CHUNK, positions=positions) for it in (pipe, exact(pipe))
    ]
    found = [fed(llama, cache, text, sizes) for cache in caches]
    close_runs(*found, llama)
    check_same(*caches, llama)


@pytest.mark.parametrize("pipe", PIPES[1::2])
def test_rows_that_stand_apart(llama, ids, lossless, pipe):
    text = ids(3, 50)
    mask = torch.ones_like(text)
    mask[1, :13], mask[2, :38] = 0, 0
    caches = [StreamingCache(llama, it, chunk=CHUNK) for it in (pipe, exact(pipe))]
    found = [fed(llama, cache, text, [40, *[1] * 10], mask) for cache in caches]
    for row, pads in enumerate([0, 13, 38]):
        close_runs(found[0][row, pads:], found[1][row, pads:], llama)
    check_same(*caches, llama)


@pytest.mark.parametrize("pipe", [*PIPES[:2], *PIPES[5:8]])
def test_a_whole_prompt(llama, ids, lossless, pipe):
    text = ids(2, 60)
    caches = [StreamingCache(llama, it, chunk=CHUNK, prefill="full") for it in (pipe, exact(pipe))]
    close_runs(*(fed(llama, cache, text, [50, *[1] * 10]) for cache in caches), llama)
    check_same(*caches, llama)


@pytest.mark.parametrize("name", ["bloom", "falcon-alibi", "gemma2", "gpt-oss", "phi3", "mpt"])
def test_every_kind_of_position_and_sink(lossless, name):
    try:
        model = make(name)
    except KeyError:
        pytest.skip(f"there is no {name} here")
    text, pipe = tokens(2, 70), "sink(2) | recent(3) | recent(5):int8 | heavy(6):int8"
    caches = [StreamingCache(model, it, chunk=CHUNK) for it in (pipe, exact(pipe))]
    close_runs(*(fed(model, cache, text, [50, *[1] * 20]) for cache in caches), model)
    check_same(*caches, model)


@pytest.mark.parametrize("name", THREE_AXES)
@pytest.mark.parametrize("pipe", [PIPES[0], PIPES[1], "snap(16, 4, 5):int8"])
def test_images_on_three_axes(lossless, name, pipe):
    model, asked = seeing(name), prompt(name, [9, 0, 3, 0, 0, 11, 0, 4])
    found, caches = [], [StreamingCache(model, it, chunk=CHUNK) for it in (pipe, exact(pipe))]
    for cache in caches:
        with torch.no_grad():
            read = model(**asked.given, past_key_values=cache).logits
        found.append(torch.cat([read, fed(model, cache, torch.arange(3, 33)[None], [1] * 30)], 1))
    close_runs(*found, model)
    check_same(*caches, model)


@pytest.mark.parametrize("pipe", PIPES[5:8:2])
@pytest.mark.slow
def test_compiled_steps(llama, ids, lossless, pipe):
    text = ids(2, 60)
    usual, other = (StreamingCache(llama, pipe, chunk=CHUNK) for _ in range(2))
    wanted = fed(llama, usual, text, [40, *[1] * 20])
    with compiled(llama) as taken:
        close_runs(fed(llama, other, text, [40, *[1] * 20]), wanted, llama)
    assert len(taken) == 20
    check_same(usual, other, llama)


# --- what is lost, and when


@pytest.mark.parametrize("policy", ["kcenter(24)", "sink(4) | recent(20) | heavy(8):int8"])
def test_until_a_token_enters_the_middle_nothing_is_lost(llama, ids, policy):
    text = ids(2, 24)
    slots = None if ":" in policy else "int8"
    quantized = StreamingCache(llama, policy, chunk=CHUNK, slots=slots)
    plain = StreamingCache(llama, exact(policy), chunk=CHUNK)
    until = 12 if slots == "int8" else 24
    got, wanted = (fed(llama, it, text[:, :until], [7, until - 7]) for it in (quantized, plain))
    assert torch.equal(got, wanted)
    assert not torch.equal(*(fed(llama, it, ids(2, 20)) for it in (quantized, plain)))


@pytest.mark.slow
def test_a_survivor_of_a_thousand_folds_is_off_by_no_more_than_after_one(shallow, ids):
    # In the only layer, keys and values depend on the token alone, so an exact cache holds what was
    # quantized. Each number of a master copy is off by half a step at most. A pair of numbers is
    # then off by half a diagonal, step / √2, which rotation can bring into one of them. The rotated
    # key is quantized again, and is off by another half of its own step.
    policy, text = "recent(8) | reservoir(8)", ids(1, 1200)
    quantized = StreamingCache(shallow, policy, chunk=1, slots="int8")
    plain = StreamingCache(shallow, policy, chunk=1)
    masters, checked = {}, 0
    for segment in text.split(100, dim=1):
        fed(shallow, quantized, segment)
        fed(shallow, plain, segment)
        slab, other = quantized.stack[0].state.slab, plain.stack[0].state.slab
        buffers = slab.quantized.buffers
        step = steps(buffers["masters_peaks"], INT8), steps(buffers["keys_peaks"], INT8)
        mine, theirs = slab.front(0, 8), other.front(0, 8)
        assert torch.equal(mine.position, theirs.position)
        for head in range(mine.position.shape[1]):
            for slot, place in enumerate(mine.position[0, head].tolist()):
                at = (0, head, slot)
                code = buffers["masters"][at]
                assert torch.equal(masters.setdefault((head, place), code.clone()), code)
                checked += 1
                rounding = 1e-5 * float(theirs.keys[at].abs().max())
                assert (mine.keys[at] - theirs.keys[at]).abs().max() <= step[0][at] / 2 + rounding
                read = slab.read(0, 8)[0][at] - other.keys[at]
                bound = step[0][at] / 2**0.5 + step[1][at] / 2
                assert read.abs().max() <= bound + rounding
                value = steps(buffers["values_peaks"], INT8)[at] / 2 + rounding
                assert (mine.values[at] - theirs.values[at]).abs().max() <= value
    assert checked > len(masters) + 50  # many were there in earlier segments


@pytest.mark.parametrize("pipe", [PIPES[1], PIPES[5], PIPES[7]])
def test_cuts_and_company_change_no_more_than_roundings_do(shallow, ids, pipe):
    # A rounding can tip a number to a neighboring level, so keys and values may differ by steps and
    # by roundings. With a single layer, nothing else differs.
    text = ids(2, 80)
    whole, cut, alone = (StreamingCache(shallow, pipe, chunk=CHUNK) for _ in range(3))
    fed(shallow, whole, text)
    fed(shallow, cut, text, [3, 50, *[1] * 20, 7])
    fed(shallow, alone, text[1:], [80])
    for other, row in ((cut, 0), (cut, 1), (alone, 0)):
        one = whole.slots(0), other.slots(0)
        rows = (row if other is cut else 1), row
        for head in range(one[0].position.shape[1]):
            mine, theirs = (_of_head(it, r, head) for it, r in zip(one, rows, strict=True))
            assert torch.equal(mine["position"], theirs["position"])
            for name in ("keys", "values"):
                step = mine[name].abs().amax(dim=1, keepdim=True) / 127
                assert ((mine[name] - theirs[name]).abs() <= 2.01 * step).all()


def test_int4_is_quantized_once_and_never_again(shallow, ids):
    """A token's value is read the same for as long as the token stays in a pool."""
    text, cache = ids(1, 90), StreamingCache(shallow, INT4, chunk=CHUNK)
    seen: dict[tuple[int, int, int], Tensor] = {}
    for step in range(0, 90, 5):
        fed(shallow, cache, text[:, step : step + 5])
        held = cache.slots(0)
        for head in range(held.position.shape[1]):
            its = _of_head(held, 0, head)
            for at in range(len(its["position"])):
                if int(its["pool"][at]) < 2:  # a sink, or still exact
                    continue
                name = head, int(its["position"][at]), int(its["pool"][at])
                assert torch.equal(seen.setdefault(name, its["values"][at]), its["values"][at])
    assert len(seen) > 100


# --- bytes, rows and files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pipe", [*PIPES[1::2], INT4])
def test_bytes_are_those_that_were_said(ids, pipe, dtype):
    model = make_llama().to(dtype)
    cache = StreamingCache(model, pipe, chunk=CHUNK)
    fed(model, cache, ids(2, 50))
    assert cache.nbytes == sum(plan.slab.nbytes(2) for plan in cache.plans)
    assert cache.nbytes < StreamingCache(model, exact(pipe), chunk=CHUNK, batch=2).nbytes
    size = weir.cache.size_of(model, pipe, chunk=CHUNK)
    assert 2 * size.stream == cache.nbytes
    fed(model, cache, ids(2, 70, seed=1))
    assert cache.nbytes == 2 * size.stream


@pytest.mark.parametrize("pipe", [*PIPES[::2], INT4])
def test_saved_and_restored_bit_for_bit(llama, ids, tmp_path, pipe):
    stream = weir.Stream(llama, pipe, chunk=CHUNK, seed=3)
    stream.feed(ids(1, 61))
    stream.save(tmp_path / "it")
    again = weir.Stream.restore(llama, tmp_path / "it")
    twin = copy.deepcopy(stream)
    more = ids(1, 30, seed=5)
    wanted = stream.feed(more, all_logits=True)
    assert torch.equal(again.feed(more, all_logits=True), wanted)
    assert torch.equal(twin.feed(more, all_logits=True), wanted)


def test_a_file_of_other_slots_is_refused(llama, ids, tmp_path):
    stream = weir.Stream(llama, "kcenter(16)", chunk=CHUNK, slots="int8")
    stream.feed(ids(1, 40))
    stream.save(tmp_path / "it")
    with pytest.raises(WeirError, match=r"quantized\(kcenter\(16\), slots=int8\)"):
        weir.Stream.restore(llama, tmp_path / "it", "kcenter(16)")
    row = stream.cache.take_row(0)
    with pytest.raises(WeirError, match="this row is of a cache with policy 'quantized"):
        StreamingCache(llama, "kcenter(16)", chunk=CHUNK).put_row(0, row)


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("0.coded.keys", -128, "coded.keys has numbers that are not valid levels"),
        (
            "1.coded.values_peaks",
            float("nan"),
            "coded.values_peaks has numbers that are not valid peaks",
        ),
        ("0.coded.masters_peaks", -1.0, "coded.masters_peaks has numbers that are not valid peaks"),
        ("0.position", 10**6, "position has places"),
    ],
)
def test_a_row_with_numbers_that_no_slab_has_is_refused(llama, ids, name, number, said):
    cache = StreamingCache(llama, "kcenter(16)", chunk=CHUNK, slots="int8")
    fed(llama, cache, ids(1, 40))
    row = cache.take_row(0)
    row.tensors[name][0, 0, 0] = number
    with pytest.raises(WeirError, match=said):
        cache.put_row(0, row)


def test_rows_come_go_and_are_reordered(llama, ids):
    cache = StreamingCache(llama, PIPES[1], chunk=CHUNK, batch=3)
    alone = StreamingCache(llama, PIPES[1], chunk=CHUNK)
    fed(llama, cache, ids(3, 30))
    with cache.only(1, 2):
        fed(llama, cache, ids(1, 9, seed=2))
    state = cache.take_row(1)
    cache.reset_row(0)
    cache.put_row(2, state)
    alone.put_row(0, state)
    with cache.only(2, 3):
        one = fed(llama, cache, ids(1, 20, seed=4))
    assert torch.equal(one, fed(llama, alone, ids(1, 20, seed=4)))
    with cache.only(0, 1):
        anew = fed(llama, cache, ids(1, 40, seed=6))
    fresh = StreamingCache(llama, PIPES[1], chunk=CHUNK)
    close_runs(anew, fed(llama, fresh, ids(1, 40, seed=6)), llama)


def test_beams_go_their_own_ways(llama, ids):
    cache = StreamingCache(llama, "kcenter(16)", chunk=CHUNK, slots="int8")
    found = llama.generate(
        ids(1, 30), past_key_values=cache, max_new_tokens=20, num_beams=3, do_sample=False
    )
    assert found.shape[1] == 50 and cache.seen == [49] * 3


@pytest.mark.parametrize("pipe", [PIPES[1], PIPES[2], PIPES[6]])
def test_steps_by_a_kernel_are_those_without(shallow, ids, monkeypatch, pipe):
    pytest.importorskip("numba")
    text = ids(3, 60)
    mask = torch.ones_like(text)
    mask[1, :9], mask[2, :30] = 0, 0
    found = []
    for library in ("numba", "reference"):
        monkeypatch.setenv("WEIR_KERNELS", library)
        cache = StreamingCache(shallow, pipe, chunk=CHUNK)
        found.append(fed(shallow, cache, text, [40, *[1] * 20], mask))
    for row, pads in enumerate([0, 9, 30]):
        close_runs(found[0][row, pads:], found[1][row, pads:], shallow)
    assert not torch.equal(*found)
