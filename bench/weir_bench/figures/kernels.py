"""Figures of kernels: BalanceKV's walk beside a plain loop, and the decode kernel on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from weir import kernels
from weir.pools.balance import Gram, Halving, Sets, blocks_at_once
from weir_bench.bounds import of_work
from weir_bench.figure import Row, Setting, Skipped, compare, figure
from weir_bench.model import walk_path
from weir_bench.timing import Doing, in_turns, middle

HEADS = 8
DIM = 128
BLOCK = 256
SCALE = DIM**-0.5
BATCH, SLOTS, GROUP = 32, 2048, 4
"""Of the decode kernel: one layer of a Llama of eight billion parameters, with `HEADS` KV heads."""


@figure("halvings", "BalanceKV's walk beside a plain loop over the tokens", by_dtype=False)
def halvings(setting: Setting) -> Iterator[Row]:
    """Two halvings of keys and values [1, 8, 16384, 128] in blocks of 256."""
    tokens = setting.sizes.halved
    generator = torch.Generator().manual_seed(0)
    shape = (HEADS, tokens, DIM)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    u = torch.rand(shape[:2], generator=generator)
    rule = Halving(halves="authors")
    contenders = {
        "ours": Doing(lambda: twice(rule, keys, values, u)),
        "peer": Doing(lambda: plainly(plainly((keys, values), u), u)),
        "bound": Doing(lambda: multiplied(rule, keys, values)),
    }
    times = middle(in_turns(contenders, setting.sizes.slow, warm=1))
    bound = of_work(
        replace(setting, dtype=torch.float32), times["ours"], operations=_products(tokens)
    )
    halved = f"two halvings of [1, {HEADS}, {tokens}, {DIM}] in blocks of {BLOCK}"
    ours, peer, products = times["ours"], times["peer"], times["bound"]
    yield compare(
        f"{halved}: plain loop over tokens ÷ weir",
        ours,
        peer,
        8.0,
        inverse=True,
        least=True,
        note=f"walk: {walk_path()}",
        bound=bound,
    )
    note = f"the plain loop could be {peer / products:.1f} times as slow at most"
    what = f"{halved} ÷ their inner products alone"
    yield compare(what, ours, products, 1.3, note=note, bound=bound)


def _products(tokens: int) -> int:
    """Operations of the inner products of two halvings: of keys and of values, half of a square."""
    return (tokens + tokens // 2) * HEADS * BLOCK // 2 * 2 * 2 * DIM


def twice(rule: Halving, keys: Tensor, values: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Halve keys and values [heads, tokens, dim], and halve what stays."""
    weight = torch.zeros(keys.shape[:2])
    for _ in range(2):
        held = (keys, values, weight, weight, u[:, : keys.shape[1]])
        index, weight, _ = rule.halve(Sets(*(t.unflatten(1, (-1, BLOCK)) for t in held)), SCALE)
        keys, values = (t.gather(1, index[..., None].expand(-1, -1, DIM)) for t in (keys, values))
    return keys, values


def multiplied(rule: Halving, keys: Tensor, values: Tensor) -> None:
    """The inner products of two halvings as weir makes them, and nothing else.

    Keys and values are [heads, tokens, dim]; which half of them is multiplied again takes no time.
    """
    at_once = blocks_at_once(BLOCK, keys.device)
    weight = torch.zeros(at_once, BLOCK)
    for _ in range(2):
        blocks = (t.reshape(-1, BLOCK, DIM).split(at_once) for t in (keys, values))
        for some, theirs in zip(*blocks, strict=True):
            its = weight[: len(some)]
            rate = SCALE * rule.temperature
            Gram.of(some, theirs, its, its, rate, rule.constant, released=True).products()
        keys, values = (t[:, : t.shape[1] // 2] for t in (keys, values))


def plainly(held: tuple[Tensor, Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    """One halving of (keys, values) [heads, tokens, dim] as one would write it down.

    All blocks and heads go side by side. Half of each block stays: the tokens of one side, and
    where they are too few the first of the other.
    """
    keys, values = (t.unflatten(1, (-1, BLOCK)) for t in held)
    signs = walk_plainly(keys, values, u[:, : held[0].shape[1]].unflatten(1, (-1, BLOCK)))
    half = signs.argsort(dim=2, stable=True)[:, :, : BLOCK // 2, None].expand(-1, -1, -1, DIM)
    return keys.gather(2, half).flatten(1, 2), values.gather(2, half).flatten(1, 2)


def walk_plainly(keys: Tensor, values: Tensor, u: Tensor) -> Tensor:
    """The signs of a walk with the authors' constants: a loop over the tokens of a block.

    Args:
        keys, values: [heads, blocks, tokens, dim].
        u: [heads, blocks, tokens].
    """
    keys = keys - keys.mean(dim=2, keepdim=True)
    products = (keys @ keys.mT * (SCALE * 0.1)).exp() * (values @ values.mT + 0.025)
    signs = torch.zeros_like(u)
    for place in range(u.shape[2]):
        total = (products[:, :, place, :] * signs).sum(dim=-1)
        signs[:, :, place] = torch.where(u[:, :, place] < 0.5 - 4.0 * total, 1.0, -1.0)
    return signs


@figure(
    "kernel",
    "the decode kernel's bandwidth beside a copy on the device",
    by_dtype=False,
    bound="bytes",
)
def kernel(setting: Setting) -> Iterator[Row]:
    """One layer's decode step of a Llama of eight billion parameters, bfloat16, on a GPU."""
    if not torch.cuda.is_available():
        raise Skipped("there is no GPU here")
    yield reached(torch.device("cuda"), BATCH, SLOTS, rounds=50)


def reached(device: torch.device, batch: int, slots: int, rounds: int) -> Row:
    """The kernel beside a copy of as many bytes as it has to read.

    Raises:
        Skipped: there is no decode kernel for the device.
    """
    decode = kernels.decode(device)
    if decode is None:
        raise Skipped(f"there is no decode kernel on {device.type} (weir-kv[gpu] brings it)")
    queries = torch.randn(batch, HEADS, GROUP, 1, DIM, device=device).bfloat16()
    keys, values = torch.randn(2, batch, HEADS, slots, DIM, device=device).bfloat16()
    a, b = torch.zeros(2, batch, HEADS, slots, device=device)
    moved = sum(t.nbytes for t in (queries, keys, values, a, b))
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)  # read, and written
    target = torch.empty_like(source)
    both = {
        "ours": Doing(lambda: decode(queries, keys, values, a, b, DIM**-0.5)),
        "copy": Doing(lambda: target.copy_(source)),
    }
    times = middle(in_turns(both, rounds, warm=3))
    share = times["copy"] / times["ours"]
    return Row(
        f"decode kernel at batch {batch}, {slots:,} slots: its bandwidth ÷ a copy's",
        moved / times["ours"] / 1e9,
        moved / times["copy"] / 1e9,
        "GB/s",
        share,
        0.8,
        least=True,
        share=share,
        note=f"decode: {kernels.paths(device)['decode']}; {HEADS} key-value heads, {GROUP} "
        f"queries each, {DIM} dimensions, bfloat16",
    )
