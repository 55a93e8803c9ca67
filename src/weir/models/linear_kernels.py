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
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weir import kernels
from weir.errors import WeirError, quote
from weir.models.memory import move_to_huge_pages
from weir.models.method_patch import MethodPatch

ROWS = (1, 2, 4, 8, 16, 32)
"""Rows of which products are timed; one of another number goes the way of the next larger."""
LOOPED = 4
"""Rows up to which a compiled product is a loop of the compiler's own: as many sums as fit into a
processor's registers, beside those of a second product that is made in the same loop."""
CLEAR = 1.05
"""How much faster weir's kernel has to be to be taken."""
BEYOND_CACHES = 2**26
"""Bytes of weights that a round of a timing reads, where there are as many: more than most
processors keep, since in a decode step every weight comes from memory."""
ROUNDS = range(5, 12)
KERNEL = "kernel 5"
"""Counts on when weir's kernel becomes another, or is timed otherwise; then all is timed anew."""
CALLS = 64
"""How often a round of a timing asks for a product at most, of each weight it reads."""
_COPIED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8}
)
"""Types of weights that are moved; of some others PyTorch cannot make a copy."""
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
        looped: whether it is a loop within a compiled step (`in_a_loop`), and no call.
    """

    dtype: str
    outputs: int
    inputs: int
    bias: bool
    rows: int
    looped: bool = False

    def __str__(self) -> str:
        more = (" + bias" if self.bias else "") + (" in a loop" if self.looped else "")
        return f"{self.dtype} {self.rows} x [{self.outputs}, {self.inputs}]{more}"


def choose_products(
    model: nn.Module, *, on: bool = True, remembered: Path | None = None
) -> dict[str, float]:
    """Let a model's linear layers multiply few rows the way that is faster on this machine.

    For `nn.Linear` on a CPU, in float32 or bfloat16, without gradients; everything else, prompts
    too, goes the usual way. The model's weights are moved into large pages of memory, where Linux
    has them (`models.memory`), and may be changed, moved or loaded afterwards; a view that somebody
    took of one before is none any more. Answers differ by rounding only. Without numba nothing is
    done. In what `torch.compile` makes of a decode step the same products are loops of the
    compiler's own, or calls of weir's kernel.

    Args:
        model: any module.
        on: False to do so no longer.
        remembered: a file of timings; None for weir's own, below `XDG_CACHE_HOME` or `~/.cache`.
            Where it cannot be written, everything is timed anew by the next process.

    Returns:
        By product, PyTorch's time over weir's; weir's way is taken from `CLEAR` on.

    Raises:
        WeirError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise WeirError(
            f"weir.choose_products takes a model, not {quote(model)}; weir.load gives one"
        )
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
    if alike:
        move_to_huge_pages(_movable(model))
    file = remembered or _file()
    known = _remembered(file)
    gains: dict[str, float] = {}
    for shape, modules in alike.items():
        called, looped = [], []
        for rows in ROWS:
            call, loop = (str(Product(*shape, rows, way)) for way in (False, True))
            if not {call, loop} <= known.keys():
                known[call], known[loop] = _gains(modules, rows, kernel)
            called.append(known[call] >= CLEAR)
            gains[call] = known[call]
            if rows <= LOOPED:
                looped.append(known[loop] >= CLEAR)
                gains[loop] = known[loop]
        if any(called) or any(looped):
            for module in modules:
                _Multiplied(module, kernel, _taken(called, looped))
    if gains:
        _remember(file, known)
    return gains


_BITS = 40
"""Of the number that says which way is taken, those for calls; above them are those for loops."""


def _taken(called: Sequence[bool], looped: Sequence[bool]) -> int:
    """For which numbers of rows weir's way is taken, as the bits of one number.

    A number, because the compiler asks before each step whether what it has read of a model is
    still so, and of a list it asks for every element, in every layer.

    Args:
        called: of the rows that were timed, as the model stands.
        looped: of those of a compiled step, as a loop.
    """

    def each(taken: Sequence[bool]) -> int:
        timed = ROWS[: len(taken)]
        some = range(1, timed[-1] + 1)
        return sum(taken[bisect_left(timed, count)] << count for count in some)

    return each(called) | each(looped) << _BITS


class _Multiplied(MethodPatch):
    """A linear layer's forward, of which some numbers of rows go weir's way."""

    def __init__(self, module: nn.Linear, kernel: Callable[..., Tensor], taken: int) -> None:
        self._linear = module
        self._kernel = kernel
        self._taken = taken
        # Not by way of the layer: the compiler would ask before each step whether it is the same.
        self._held = module._parameters
        super().__init__(module, "forward", self._multiply)

    def __call__(self, input: Tensor) -> Tensor:
        """As `nn.Linear` is called.

        The compiler reads this for every layer of a model, and takes a while for each line.
        """
        if torch.compiler.is_compiling():
            weight = self._held.get("weight")
            if type(weight) is nn.Parameter:  # and not quantized, say
                compiled: Tensor = _CHOSEN(input, weight, self._held["bias"], self._taken)
                return compiled
        out: Tensor = super().__call__(input)
        return out

    def _multiply(self, own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        weight, bias = self._linear.weight, self._linear.bias
        if (
            kernels.is_compiling()
            or torch.is_grad_enabled()
            or type(x) is not Tensor
            or not _plain(weight)
            or x.dtype != weight.dtype
            or x.device != weight.device
        ):
            return own(x)
        rows = x.numel() // weight.shape[1]
        if not _among(rows, _called(self._taken)) or torch.is_autocast_enabled("cpu"):
            return own(x)
        return self._kernel(x, weight, bias)


def _chosen(x: Tensor, weight: Tensor, bias: Tensor | None, taken: int) -> Tensor:
    """A linear layer in what is being compiled: a loop, a call of weir's kernel, or PyTorch's.

    Args:
        x, weight, bias: as of `torch.nn.functional.linear`.
        taken: of `_taken`.
    """
    usual = nn.functional.linear
    if (
        not of_a_step(x)
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or weight.device.type != "cpu"
        or weight.dtype not in (torch.float32, torch.bfloat16)
        or x.dtype != weight.dtype
    ):
        return usual(x, weight, bias)
    rows = x.numel() // weight.shape[1]
    if rows <= LOOPED:
        return (in_a_loop if _among(rows, taken >> _BITS) else usual)(x, weight, bias)
    return (_by_kernel if _among(rows, _called(taken)) else usual)(x, weight, bias)


def _called(taken: int) -> int:
    """The bits of `_taken` that are for calls."""
    return taken & (1 << _BITS) - 1


def _among(rows: int, taken: int) -> bool:
    """Whether a number of rows is one of those of which a bit of `taken` is set."""
    return bool(taken >> rows & 1)


def of_a_step(x: Tensor) -> bool:
    """Whether an input [batch, 1, inputs] or [1, inputs] is that of a decode step.

    To ask how many rows another has would bind what is being compiled to their number.
    """
    return x.numel() == x.shape[-1] or (x.ndim == 3 and x.shape[1] == 1)


def in_a_loop(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None
) -> Tensor:
    """A product of few rows, written so that a compiler of loops makes it as fast as memory is.

    One sum for each row over the same line of the weight: PyTorch's compiler makes one loop of them
    all, with the norm, activation or sum that comes before and after in the same program. Nothing
    is called, and of the weight nothing is copied.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs], of any type that becomes float32.
        bias: [outputs], or None.
        scale: of each output [outputs], or None.

    Returns:
        [..., outputs], of the type of `x`.
    """
    rows = x.reshape(-1, x.shape[-1]).float()
    out = kernels.dot_products(rows, weight)
    if scale is not None:
        out = out * scale.float()
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """weir's kernel, as a call in the middle of a compiled program."""
    kernel = kernels.linear(x.device) or nn.functional.linear
    out: Tensor = kernel(x, weight, bias)
    return out


def _like(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What it returns, but for its numbers."""
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_CHOSEN = kernels.register_operator(
    "chosen",
    "(Tensor x, Tensor weight, Tensor? bias, int taken) -> Tensor",
    _chosen,
    lambda x, weight, *_: _like(x, weight, None),
)


# Not `torch.library.custom_op`, whose checks in every call take as long as a small product.
torch.library.define("weir::linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.impl("weir::linear", "CPU", _kernel)
torch.library.register_fake("weir::linear", _like)
_by_kernel: Callable[..., Tensor] = torch.ops.weir.linear.default


def _can(module: nn.Module) -> bool:
    """Whether a module is a linear layer as PyTorch has it, whose forward nobody has changed."""
    return (
        type(module) is nn.Linear
        and own_forward(module)
        and _plain(module.weight)
        and module.weight.numel() > 0
        and (module.bias is None or _plain(module.bias))
    )


def _movable(model: nn.Module) -> list[Tensor]:
    """Parameters that lie on the CPU by themselves: no process uses their memory, nor another one.

    All of them, and not only those that are multiplied with: a file that was mapped into memory is
    let go when the last of its weights is elsewhere.
    """
    held = sorted(
        (each for each in (*model.parameters(), *model.buffers()) if _addressed(each)),
        key=Tensor.data_ptr,
    )
    found: list[Tensor] = []
    before = 0  # the end of all memory so far
    for each, later in zip_longest(held, held[1:]):
        start, end = each.data_ptr(), _end(each)
        alone = before <= start and (later is None or end <= later.data_ptr())
        own = alone and type(each) is nn.Parameter and not each.is_shared()
        if own and each.nbytes and each.is_contiguous() and each.dtype in _COPIED:
            found.append(each)
        before = max(before, end)
    return found


def own_forward(module: nn.Module) -> bool:
    """Whether a module has the forward of its class.

    A copy of a module that had a `MethodPatch` holds that forward among its attributes.
    """
    put = vars(module).get("forward")
    return put is None or getattr(put, "__func__", None) is type(module).forward


def _plain(weight: Tensor) -> bool:
    """Whether a weight can be multiplied with as it is."""
    return _lies(weight) and weight.dtype in (torch.float32, torch.bfloat16)


def _lies(weight: Tensor) -> bool:
    """Whether a weight lies in memory as it is: it is not quantized, shared out or elsewhere."""
    return _strided(weight) and weight.is_contiguous()


def _strided(t: Tensor) -> bool:
    return t.device.type == "cpu" and type(t.data) is Tensor and t.layout is torch.strided


def _addressed(t: Tensor) -> bool:
    """Whether PyTorch can say where a tensor lies, contiguous or not."""
    return not nn.parameter.is_lazy(t) and not t.is_nested and _strided(t)


def _end(t: Tensor) -> int:
    """The address behind the last number of a tensor."""
    steps = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr() + (steps + 1) * t.element_size() * (t.numel() > 0)


@torch.no_grad()
def _gains(
    modules: Sequence[nn.Linear], rows: int, kernel: Callable[..., Tensor]
) -> tuple[float, float]:
    """PyTorch's time for a product over weir's, and over that of weir's without the call.

    They take turns, with a product of next to nothing: what is left of weir's time without it is
    what the same loop takes within a compiled step. Of all rounds the shortest counts: what else
    the machine does makes them longer, and what is found here is kept.
    """
    weight = modules[0].weight
    size = weight.numel() * weight.element_size()
    some = modules[: max(1, BEYOND_CACHES // size)]
    drawn = torch.Generator().manual_seed(0)  # whoever draws from the global one is not disturbed
    shape = (rows, weight.shape[1])
    x = torch.randn(shape, generator=drawn, dtype=weight.dtype, device=weight.device)
    # Of small ones, or the clock is too coarse; the smallest are nothing but calls.
    again = range(min(CALLS, max(1, 2**22 // (size * len(some)))))

    def timed(way: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> float:
        since = time.perf_counter()
        for _ in again:
            for module in some:
                way(x, module.weight, module.bias)
        return time.perf_counter() - since

    def nothing(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return kernel(x, weight[:1], None if bias is None else bias[:1])

    ways = (nn.functional.linear, kernel, nothing)
    for way in ways:
        way(x, weight, modules[0].bias)  # numba compiles
    times: list[tuple[float, ...]] = []
    until = time.perf_counter() + ENOUGH
    while len(times) < ROUNDS.start or (len(times) < ROUNDS.stop and time.perf_counter() < until):
        times.append(tuple(timed(way) for way in ways))
    theirs, ours, call = (min(each) for each in zip(*times, strict=True))
    return round(theirs / ours, 3), round(theirs / max(ours - call, ours / 100), 3)


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
