"""Choice of the faster matrix product for decode steps: PyTorch's or weir's kernel.

PyTorch passes matrix products to a BLAS. With the few rows of a decode step, a BLAS reaches full
memory bandwidth on one machine and a fifth of it on another. So weir times both ways on the model's
own weights, and saves the timings for the next start. This module does not use caches.
"""

from __future__ import annotations

import platform
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weir import kernels
from weir.errors import WeirError, quote
from weir.models import MethodPatch, cache_folder, has_class_forward, read_json, write_json
from weir.native import dispatch
from weir.native.huge_pages import move_to_huge_pages

ROWS = (1, 2, 4, 8, 16, 32)
"""Numbers of rows that are timed. A number between two of them uses the choice for the larger one;
more than the largest always use PyTorch.
"""
CLEAR = 1.05
"""Smallest speedup for which weir's kernel is chosen."""
BEYOND_CACHES = 2**26
"""About how many bytes of weights of one shape a timing round reads, if the model has as many. This
is more than most processors can cache, because in a decode step every weight comes from memory.
"""
ROUNDS = range(5, 12)
"""Smallest and largest number of rounds of a timing (`start` and `stop`)."""
_FORWARD = nn.Linear.forward
"""Forward of the linear layers that a kernel can replace."""
KERNEL = "kernel 6"
"""Version of weir's kernel and of its timing. After a change, everything is timed again."""
CALLS = 64
"""Largest number of calls per weight in a timing round."""
_COPIED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8}
)
"""Dtypes of weights that are moved to huge pages. PyTorch cannot copy some of the others."""
ENOUGH = 0.05
"""Seconds after which a timing ends, but not before the smallest number of `ROUNDS`."""


@dataclass(frozen=True, order=True)
class Product:
    """A matrix product of a decode step.

    Attributes:
        dtype: "float32" or "bfloat16".
        outputs, inputs: the weight's sizes.
        bias: whether a bias is added.
        rows: number of input rows.
    """

    dtype: str
    outputs: int
    inputs: int
    bias: bool
    rows: int

    def __str__(self) -> str:
        more = " + bias" if self.bias else ""
        return f"{self.dtype} {self.rows} x [{self.outputs}, {self.inputs}]{more}"


def choose_products(
    model: nn.Module, *, on: bool = True, remembered: Path | None = None
) -> dict[str, float]:
    """Let a model's linear layers use the faster product for few rows on this machine.

    This affects `nn.Linear` on a CPU, in float32 or bfloat16, without gradients, in calls with at
    most 32 rows. Everything else is unchanged, including prompts of more than 32 tokens. The
    model's weights are moved into large pages of memory, if Linux has them (`native.huge_pages`).
    They can be changed, moved or loaded afterwards, but older views of a weight no longer follow
    it. Outputs differ only by rounding. Does nothing without numba.

    Args:
        model: any module.
        on: False restores PyTorch's products.
        remembered: a file of timings; None for weir's own, below `XDG_CACHE_HOME` or `~/.cache`.
            If the file cannot be written, the next process times everything again.

    Returns:
        PyTorch's time divided by weir's, by product. weir's kernel is used if this is at least
        `CLEAR`.

    Raises:
        WeirError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise WeirError(
            f"weir.choose_products needs a model, got {quote(model)}. weir.load returns one."
        )
    for module in model.modules():
        put = vars(module).get("forward")
        if isinstance(put, _LinearPatch):
            put.remove()
    kernel = dispatch.linear(torch.device("cpu"))
    if not on or kernel is None:
        return {}
    alike: dict[tuple[str, int, int, bool], list[nn.Linear]] = defaultdict(list)
    for module in model.modules():
        if _is_plain_linear(module):
            assert isinstance(module, nn.Linear)
            name = str(module.weight.dtype).removeprefix("torch.")
            shape = (name, *module.weight.shape, module.bias is not None)
            alike[shape].append(module)
    if alike:
        move_to_huge_pages(_movable(model))
    file = remembered or cache_folder() / "products.json"
    mine = _machine()
    before = _read(file).get(mine, {})
    known = dict(before)
    gains: dict[str, float] = {}
    for shape, modules in alike.items():
        faster = []
        for rows in ROWS:
            product = str(Product(*shape, rows))
            if product not in known:
                known[product] = _gain(modules, rows, kernel)
            faster.append(known[product] >= CLEAR)
            gains[product] = known[product]
        if any(faster):
            for module in modules:
                _LinearPatch(module, kernel, _expand(faster))
    if gains and before != known:
        write_json(file, _read(file) | {mine: known})
    return gains


def _expand(faster: Sequence[bool]) -> tuple[int, ...]:
    """Return all numbers of rows for which weir's kernel is faster, based on those in `ROWS`."""
    return tuple(n for n in range(1, ROWS[-1] + 1) if faster[bisect_left(ROWS, n)])


class _LinearPatch(MethodPatch):
    """Patch of a linear layer's forward that uses weir's kernel for some numbers of rows."""

    def __init__(
        self, module: nn.Linear, kernel: Callable[..., Tensor], faster: tuple[int, ...]
    ) -> None:
        self._linear = module
        self._kernel, self._faster = kernel, faster
        super().__init__(module, "forward", self._multiply)

    def __call__(self, input: Tensor) -> Tensor:
        """Multiply like `nn.Linear`; PyTorch's compiler sees the layer's own product."""
        if torch.compiler.is_compiling():
            function: Any = type(self._linear).forward
            followed: Tensor = function(self._linear, input)
            return followed
        out: Tensor = super().__call__(input)
        return out

    def _multiply(self, own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        weight, bias = self._linear.weight, self._linear.bias
        if (
            type(self._linear).forward is not _FORWARD
            or kernels.is_compiling()
            or torch.is_grad_enabled()
            or type(x) is not Tensor
            or not is_plain(weight)
            or x.dtype != weight.dtype
            or x.device != weight.device
        ):
            return own(x)
        rows = x.numel() // weight.shape[1]
        if rows not in self._faster or torch.is_autocast_enabled("cpu"):
            return own(x)
        return self._kernel(x, weight, bias)


def _is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module is PyTorch's own linear layer with its own forward."""
    return (
        type(module) is nn.Linear
        and has_class_forward(module)
        and is_plain(module.weight)
        and module.weight.numel() > 0
        and (module.bias is None or is_plain(module.bias))
    )


def _movable(model: nn.Module) -> list[Tensor]:
    """Return the CPU parameters that share memory with no other tensor or process.

    These include parameters that no linear layer uses, because a memory-mapped file is released
    only after all its weights have moved.
    """
    held = sorted(
        (t for t in (*model.parameters(), *model.buffers()) if _has_address(t)),
        key=Tensor.data_ptr,
    )
    found: list[Tensor] = []
    before = 0  # the end of all memory so far
    for t, later in zip_longest(held, held[1:]):
        start, end = t.data_ptr(), _end(t)
        alone = before <= start and (later is None or end <= later.data_ptr())
        own = alone and type(t) is nn.Parameter and not t.is_shared()
        if own and t.nbytes and t.is_contiguous() and t.dtype in _COPIED:
            found.append(t)
        before = max(before, end)
    return found


def runs_as_linear(module: nn.Module) -> bool:
    """Return whether a linear layer has its own forward, or one with weir's kernel."""
    return isinstance(vars(module).get("forward"), _LinearPatch) or has_class_forward(module)


def is_plain(weight: Tensor) -> bool:
    """Return whether weir's kernel can read a weight as it is."""
    return _is_contiguous(weight) and weight.dtype in (torch.float32, torch.bfloat16)


def _is_contiguous(weight: Tensor) -> bool:
    """Return whether a weight is contiguous, and not quantized, sharded or offloaded."""
    return _is_strided(weight) and weight.is_contiguous()


def _is_strided(t: Tensor) -> bool:
    return t.device.type == "cpu" and type(t.data) is Tensor and t.layout is torch.strided


def _has_address(t: Tensor) -> bool:
    """Return whether a tensor has one memory address, contiguous or not."""
    return not nn.parameter.is_lazy(t) and not t.is_nested and _is_strided(t)


def _end(t: Tensor) -> int:
    """Return the address after a tensor's last number."""
    steps = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr() + (steps + 1) * t.element_size() * (t.numel() > 0)


@torch.no_grad()
def _gain(modules: Sequence[nn.Linear], rows: int, kernel: Callable[..., Tensor]) -> float:
    """Time a product, and return PyTorch's time divided by weir's.

    Rounds of PyTorch's product and of weir's alternate. The shortest of each counts: other work on
    the machine can only make a round longer, and must not affect the result, which is saved.
    """
    weight = modules[0].weight
    size = weight.numel() * weight.element_size()
    some = modules[: max(1, BEYOND_CACHES // size)]
    drawn = torch.Generator().manual_seed(0)  # does not use the global generator
    shape = (rows, weight.shape[1])
    x = torch.randn(shape, generator=drawn, dtype=weight.dtype, device=weight.device)
    # Small products are repeated, because the clock is coarse. `CALLS` repetitions are enough even
    # for the smallest ones, whose time is mostly the overhead of a call.
    again = range(min(CALLS, max(1, 2**22 // (size * len(some)))))

    def timed(way: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> float:
        since = time.perf_counter()
        for _ in again:
            for module in some:
                way(x, module.weight, module.bias)
        return time.perf_counter() - since

    ways = (nn.functional.linear, kernel)
    for way in ways:
        way(x, weight, modules[0].bias)  # so that numba compiles
    times: list[tuple[float, ...]] = []
    until = time.perf_counter() + ENOUGH
    while len(times) < ROUNDS.start or (len(times) < ROUNDS.stop and time.perf_counter() < until):
        times.append(tuple(timed(way) for way in ways))
    theirs, ours = (min(rounds) for rounds in zip(*times, strict=True))
    return round(theirs / ours, 3)


def _machine() -> str:
    """Describe the processor, threads and versions that a timing is valid for."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return f"{processor}, {capability}, {threads} threads, PyTorch {torch.__version__}, {KERNEL}"


def _read(file: Path) -> dict[str, dict[str, float]]:
    """Read the timings of every machine."""
    return {
        machine: {name: float(gain) for name, gain in gains.items() if _number(gain)}
        for machine, gains in read_json(file).items()
        if isinstance(gains, dict)
    }


def _number(gain: Any) -> bool:
    return isinstance(gain, int | float) and not isinstance(gain, bool) and 0 < gain < 1e9
