"""Matrix products of decode steps, each computed the way that is faster here.

PyTorch hands products to a BLAS, and how near that comes to the bandwidth of memory with the few
rows of a decode step differs from machine to machine: on one it reaches the limit, on another a
fifth of it. So both ways are timed on the model's own weights, and what was found is kept for the
next start. Knows nothing about caches.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from weir import kernels
from weir.models.methods import Around

ROWS = (1, 2, 4, 8, 16, 32)
"""Rows of which products are timed; one of another number goes the way of the next larger."""
CLEAR = 1.05
"""How much faster weir's kernel has to be to be taken."""
BEYOND_CACHES = 2**26
"""Bytes of weights that a round of a timing reads, where there are as many: more than most
processors keep, since in a decode step every weight comes from memory."""
ROUNDS = range(3, 10)
KERNEL = "kernel 1"
"""Counts on when weir's kernel becomes another; what was timed before is timed anew."""
ENOUGH = 0.05
"""Seconds after which a timing ends, when it has had its fewest rounds."""


@dataclass(frozen=True, order=True)
class Product:
    """A product that a decode step makes.

    Attributes:
        dtype: "float32" or "bfloat16".
        outputs, inputs: of the weight.
        bias: whether something is added.
        rows: at once.
    """

    dtype: str
    outputs: int
    inputs: int
    bias: bool
    rows: int

    def __str__(self) -> str:
        added = " + bias" if self.bias else ""
        return f"{self.dtype} {self.rows} x [{self.outputs}, {self.inputs}]{added}"


def choose_products(
    model: nn.Module, *, on: bool = True, remembered: Path | None = None
) -> dict[str, float]:
    """Let a model's linear layers multiply few rows the way that is faster on this machine.

    For `nn.Linear` on a CPU, in float32 or bfloat16, without gradients; everything else, prompts
    and compiled steps too, goes the usual way. Weights may be changed, moved or loaded afterwards:
    nothing is copied. Answers differ by rounding only. Without numba nothing is done.

    Args:
        model: any module.
        on: False to do so no longer.
        remembered: a file of timings; None for weir's own, below `XDG_CACHE_HOME` or `~/.cache`.
            Where it cannot be written, everything is timed anew by the next process.

    Returns:
        By product, PyTorch's time over weir's; weir's way is taken from `CLEAR` on.
    """
    for module in model.modules():
        put = vars(module).get("forward")
        if isinstance(put, _Multiplied):
            put.remove()
    kernel = kernels.linear(torch.device("cpu"))
    if not on or kernel is None:
        return {}
    alike: dict[tuple[str, int, int, bool], list[nn.Linear]] = defaultdict(list)
    for module in model.modules():
        if _can(module):
            assert isinstance(module, nn.Linear)
            name = str(module.weight.dtype).removeprefix("torch.")
            shape = (name, *module.weight.shape, module.bias is not None)
            alike[shape].append(module)
    file = remembered or _file()
    known = _remembered(file)
    gains: dict[str, float] = {}
    for shape, modules in alike.items():
        taken = []
        for rows in _rows(shape[0]):
            name = str(Product(*shape, rows))
            if name not in known:
                known[name] = _gain(modules, rows, kernel)
            gains[name] = known[name]
            taken.append(known[name] >= CLEAR)
        if any(taken):
            for module in modules:
                _Multiplied(module, kernel, _rows(shape[0]), taken)
    if gains:
        _remember(file, known)
    return gains


class _Multiplied(Around):
    """A linear layer's forward, of which some numbers of rows go weir's way."""

    def __init__(
        self,
        module: nn.Linear,
        kernel: Callable[..., Tensor],
        rows: Sequence[int],
        taken: Sequence[bool],
    ) -> None:
        self._linear = module
        self._kernel = kernel
        self._most = rows[-1]
        self._taken = [taken[bisect_left(rows, count)] for count in range(1, self._most + 1)]
        super().__init__(module, "forward", self._multiply)

    def _multiply(self, own: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        x = input  # as `nn.Linear` calls it, for those who give it by name
        weight = self._linear.weight
        if (
            torch.compiler.is_compiling()
            or torch.jit.is_tracing()  # type: ignore[attr-defined]
            or torch.is_grad_enabled()
            or type(x) is not Tensor
            or not _plain(weight)
            or x.dtype != weight.dtype
            or x.device != weight.device
        ):
            return own(x)
        rows = x.numel() // weight.shape[1]
        if (
            not 0 < rows <= self._most
            or not self._taken[rows - 1]
            or torch.is_autocast_enabled("cpu")
        ):
            return own(x)
        return self._kernel(x, weight, self._linear.bias)


def _can(module: nn.Module) -> bool:
    """Whether a module is a linear layer as PyTorch has it, whose forward nobody has changed."""
    return (
        type(module) is nn.Linear
        and own_forward(module)
        and _plain(module.weight)
        and module.weight.numel() > 0
        and (module.bias is None or _plain(module.bias))
    )


def own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is that of its class; a copy of one that `Around` was put on has
    it among its attributes.
    """
    put = vars(module).get("forward")
    return put is None or getattr(put, "__func__", None) is type(module).forward


def _plain(weight: Tensor) -> bool:
    """Whether a weight lies in memory as it is: it is not quantised, shared out or elsewhere."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and type(weight.data) is Tensor
        and weight.is_contiguous()
    )


def _rows(dtype: str) -> tuple[int, ...]:
    """Of how many rows weir's kernel may be the faster: processors multiply bfloat16 themselves."""
    return ROWS if dtype == "float32" else ROWS[:3]


@torch.no_grad()
def _gain(modules: Sequence[nn.Linear], rows: int, kernel: Callable[..., Tensor]) -> float:
    """PyTorch's time for a product over weir's: medians of rounds in which they take turns."""
    weight = modules[0].weight
    size = weight.numel() * weight.element_size()
    some = modules[: max(1, BEYOND_CACHES // size)]
    drawn = torch.Generator().manual_seed(0)  # whoever draws from the global one is not disturbed
    shape = (rows, weight.shape[1])
    x = torch.randn(shape, generator=drawn, dtype=weight.dtype, device=weight.device)
    again = range(max(1, 2**22 // (size * len(some))))  # of small ones, or the clock is too coarse

    def timed(way: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> float:
        since = time.perf_counter()
        for _ in again:
            for module in some:
                way(x, module.weight, module.bias)
        return time.perf_counter() - since

    ways = (nn.functional.linear, kernel)
    for way in ways:
        way(x, weight, modules[0].bias)  # numba compiles
    times: list[tuple[float, ...]] = []
    until = time.perf_counter() + ENOUGH
    while len(times) < ROUNDS.start or (len(times) < ROUNDS.stop and time.perf_counter() < until):
        times.append(tuple(timed(way) for way in ways))
    theirs, ours = (median(each) for each in zip(*times, strict=True))
    return round(theirs / ours, 3)


def _file() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        caches = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:  # a user whom the system does not know
        caches = Path(tempfile.gettempdir())
    return caches / "weir" / "products.json"


def _machine() -> str:
    """What a timing is true of."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return f"{processor}, {capability}, {threads} threads, PyTorch {torch.__version__}, {KERNEL}"


def _remembered(file: Path) -> dict[str, float]:
    """Timings of this machine; none where there is no such file, or it holds something else."""
    return dict(_read(file).get(_machine(), {}))


def _read(file: Path) -> dict[str, dict[str, float]]:
    try:
        found: Any = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        machine: {str(name): float(gain) for name, gain in gains.items() if _number(gain)}
        for machine, gains in found.items()
        if isinstance(gains, dict)
    }


def _number(gain: Any) -> bool:
    return isinstance(gain, int | float) and not isinstance(gain, bool) and 0 < gain < 1e9


def _remember(file: Path, known: dict[str, float]) -> None:
    """Keep timings for the next process; whole, or not at all."""
    machines = _read(file)
    if machines.get(_machine()) == known:
        return
    machines[_machine()] = known
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            made = Path(scratch) / file.name
            made.write_text(json.dumps(machines, indent=1, sort_keys=True), "utf-8")
            made.replace(file)
