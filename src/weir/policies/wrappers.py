"""Policies around another one: `pinned`, `pyramid` and `quantized`.

`pinned` puts a pool of the stream's beginning in front of a layer's pools. After those that pass
tokens on in order it puts two more: one for the header of the running turn, and one for tokens that
are to be kept, in the slots that the beginning leaves free (`weir.pools.Marks`). `quantized`
leaves the first and the newest tokens, and those that marks name, as the model computes them.

PyramidKV (Cai et al. 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
Funneling", arXiv:2406.02069), section 4.2: lower layers attend far and wide and upper ones to few
tokens, so slots go to the lower layers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, Self

from weir.errors import WeirError
from weir.policies.library import KVzip, Recompute, kcenter, streaming_llm
from weir.policies.pipe import Origin, Pipe, Policy, check_format
from weir.policies.registry import NAMED, PolicyCall, named
from weir.pools import Beginning, Frame, Header, Kept, Pool, Snap

EXACT = "exact"
SAME = "same"
"""Slots for a beginning in the format of a policy's other slots."""
"""The name of slots that are as the model computes."""
SHARE = 4
"""One slot for the beginning for so many of the policy, where no number is given."""


class PolicyWrapper(Policy):
    """A policy that rewrites the pipe that another one has in each layer.

    A subclass is a dataclass whose first field is the other policy; `verb` is its name in text.
    """

    policy: Policy
    verb: ClassVar[str]

    @abstractmethod
    def rewrite(self, pipe: Pipe) -> Pipe:
        """Return the pipe that replaces one of the other policy."""

    @property
    @abstractmethod
    def options(self) -> str:
        """Its own arguments as text: `n=64, header=16`."""

    def around(self, policy: Policy) -> Self:
        """The same wrapper around another policy."""
        same: Self = replace(self, policy=policy, text="")  # type: ignore[type-var]
        return same

    def _write(self) -> None:
        """Set the text, if there is none."""
        if not self.text:
            object.__setattr__(self, "text", f"{self.verb}({self.policy}, {self.options})")

    @property
    def stands_for(self) -> str:
        """Its pools, or the wrapper around the other's where that is no pipe."""
        if isinstance(self.policy, Pipe):
            return self.pipes[0].stands_for
        return f"{self.verb}({self.policy.stands_for}, {self.options})"

    @property
    def brief(self) -> str:
        """The text, with the summary of the other policy where that has one."""
        if self.policy.brief == self.policy.text:
            return self.text
        return f"{self.policy.brief}, {self.verb} with {self.options}"

    @property
    def pipes(self) -> tuple[Pipe, ...]:
        """The other policy's pipes, rewritten."""
        return tuple(map(self.rewrite, self.policy.pipes))

    @property
    def origin(self) -> Origin | None:
        """The provenance of the other policy."""
        return self.policy.origin

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Return the other policy's pipe of a layer, rewritten."""
        return self.rewrite(self.policy.for_layer(layer, layers))

    def for_heads(self, layer: int, layers: int, heads: int) -> tuple[Pipe, ...]:
        """Return the other policy's pipes of a layer's KV heads, rewritten."""
        return tuple(map(self.rewrite, self.policy.for_heads(layer, layers, heads)))


@dataclass(frozen=True, repr=False)
class Pinned(PolicyWrapper):
    """A policy with more slots in each layer, for the stream's beginning and its turn's header.

    Attributes:
        policy: the policy that holds everything else.
        n: slots of each layer for the beginning, and for tokens that are to be kept.
        header: slots of each layer for the header.
        format: the format of the slots for the beginning, by the names of `slab.FORMATS`; "same"
            for that of the policy's quantized slots, or int8 if it has none.
    """

    verb = "pinned"

    policy: Policy
    n: int = 64
    header: int = 16
    format: str = EXACT
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.format not in (EXACT, SAME):
            check_format(self.format)
        self.pipes  # noqa: B018  (raises where a pipe has no room for both pools)
        self._write()

    @property
    def options(self) -> str:
        """Both numbers of slots, and the format if it is not exact."""
        form = "" if self.format == EXACT else f", format={self.format}"
        return f"n={self.n}, header={self.header}{form}"

    def rewrite(self, pipe: Pipe) -> Pipe:
        """Add the pools; refuse a pipe that has such pools, or no limit."""
        if pipe.needs_marks:
            raise WeirError(f"{self.policy} keeps a stream's beginning already")
        if pipe.slots is None:
            raise WeirError(f"{self.policy} has no limit, so a beginning need not be pinned")
        pools = pipe.pools
        # As late as possible: behind the header tokens are out of order, and pools have to sort.
        place = next((at for at, pool in enumerate(pools) if not pool.in_order), len(pools))
        marked = Header(self.header), Kept(self.n)
        with_all = (Beginning(self.n), *pools[:place], *marked, *pools[place:])
        given = pipe.formats or ("",) * len(pools)
        first = "" if self.format == EXACT else self.format
        if self.format == SAME:
            first = next(filter(None, given), "int8")
        formats = (first, *given[:place], "", first, *given[place:])
        return Pipe(with_all, formats=formats)


@named("any policy, and what a conversation must not lose beside it")
def pinned(
    policy: Policy | None = None, n: int = 64, header: int = 16, format: str = EXACT
) -> Policy:
    """A policy, and beside it the beginning of the stream and the header of the running turn.

    `n` slots are for the beginning and `header` for the control tokens in front of an answer, in
    addition to those of the policy. How many of them a row uses, its marks say; a row without marks
    has `n` more sinks. Slots that the beginning leaves free are for other tokens that the marks
    name.

    Args:
        policy: the policy that holds everything else; none for StreamingLLM.
        n: slots for the beginning of the stream.
        header: slots for the control tokens in front of an answer.
        format: the format of the slots for the beginning: exact, int8, int4, k8v4 or fp8, or
            same for that of the policy's other slots.
    """
    return Pinned(streaming_llm() if policy is None else policy, n, header, format)


def budgets(mean: int, layers: int, beta: float) -> list[int]:
    """Compute the slots of each layer, bottom up: an arithmetic sequence, in whole numbers.

    The top layer has mean / beta, the bottom one 2 * mean - mean / beta; what rounding down leaves
    over goes to the lowest layers, one slot each. All together have exactly `layers * mean`.
    """
    top = mean / Fraction(beta)
    bottom = 2 * mean - top
    steps = max(1, layers - 1)
    exact = [bottom - (bottom - top) * layer / steps for layer in range(layers)]
    whole = [int(slots) for slots in exact] if layers > 1 else [mean]
    left = layers * mean - sum(whole)
    return [slots + (layer < left) for layer, slots in enumerate(whole)]


def of_layer(pools: tuple[Pool, ...], layer: int, layers: int, beta: float) -> tuple[Pool, ...]:
    """Resize the pools of a pipe with a limit for one layer of a pyramid.

    The first and the newest tokens that pools keep for those behind them, and the slots that a pool
    calls fixed, are the same in every layer, as the paper's last tokens are. The other slots follow
    `budgets`, shared out in the proportions that the pools have.
    """
    sizes = [pool.slots() or 0 for pool in pools]
    last = len(pools) - 1
    fixed = [
        size if pool.in_order and place < last else pool.fixed(pools[:place])
        for place, (pool, size) in enumerate(zip(pools, sizes, strict=True))
    ]
    free = [size - always for size, always in zip(sizes, fixed, strict=True)]
    slots = budgets(sum(free), layers, beta)[layer]
    which = {0: "lowest", layers - 1: "top"}
    name = f"{which[layer]} layer" if layer in which else f"layer {layer} of {layers}"
    where = f"the {name} of this pyramid would have {slots} slots to share out"
    if slots < sum(n > 0 for n in free):
        raise WeirError(
            f"{where}, and each of its pools needs one; take a larger budget or a smaller beta"
        )
    try:
        return tuple(
            pool if share == average else pool.resized(always + share)
            for pool, share, average, always in zip(
                pools, share_slots(slots, free), free, fixed, strict=True
            )
        )
    except WeirError as error:
        raise WeirError(f"{where}: {error}") from None


def share_slots(slots: int, free: list[int]) -> list[int]:
    """Share out slots in the proportions of `free`, at least one where it is not 0."""
    one = [int(n > 0) for n in free]
    parts = [n - at_least for n, at_least in zip(free, one, strict=True)]
    parts = parts if any(parts) else one
    rest, whole = slots - sum(one), sum(parts)
    given = [at_least + rest * part // whole for at_least, part in zip(one, parts, strict=True)]
    # What rounding down left over goes to the largest remainders, the first of equal ones.
    order = sorted(range(len(free)), key=lambda place: -(rest * parts[place] % whole))
    for place in order[: slots - sum(given)]:
        given[place] += 1
    return given


@dataclass(frozen=True, repr=False)
class Pyramid(Policy):
    """A pipe with PyramidKV's budgets: more slots in the lower layers.

    Attributes:
        pipe: what a layer holds on average.
        beta: the average number of slots over that of the top layer; 1 is no pyramid.
    """

    is_pipe = True

    pipe: Pipe
    beta: float = 20.0
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.pipe.slots is None:
            raise WeirError(f"{self.pipe} has no limit, so a pyramid has nothing to share out")
        if not 1 <= self.beta < math.inf:
            raise WeirError(f"beta of a pyramid is a number from 1 on, not {self.beta}")
        for layer in range(2):  # the top layer of any model has as few slots as that of two
            self.for_layer(layer, 2)
        if not self.text:
            object.__setattr__(self, "text", f"pyramid({self.pipe}, beta={self.beta})")

    @property
    def stands_for(self) -> str:
        """The pyramid around its pools, the way it is written."""
        return f"pyramid({self.pipe.stands_for}, beta={self.beta})"

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Return the pipe with the slots of its layer."""
        pools = of_layer(self.pipe.pools, layer, layers, self.beta)
        return Pipe(pools, formats=self.pipe.formats)


@named("Cai et al. 2024, PyramidKV, its budgets around any pipe")
def pyramid(pipe: Policy | None = None, beta: float = 20.0) -> Policy:
    """A pipe with more slots in the lower layers and fewer in the upper ones, the same in all.

    The pipe is what a layer holds on average. First and newest tokens that it keeps in front of
    other pools are the same in every layer; the rest is `beta` times smaller than the average in
    the top layer, and from there rises evenly to the bottom one. Without a pipe, it is PyramidKV.

    Args:
        pipe: what a layer holds on average; none for PyramidKV's.
        beta: how many times fewer slots than the average the top layer has.
    """
    if pipe is None:
        return pyramidkv(beta=beta)
    if not isinstance(pipe, Pipe):
        raise WeirError(f"a pyramid shares out the slots of a pipe, and {pipe} is none")
    return Pyramid(pipe, beta)


@named(
    "Cai et al. 2024, PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information "
    "Funneling"
)
def pyramidkv(
    budget: int = 256,
    window: int = 8,
    kernel: int = 7,
    average: bool = False,
    beta: float = 20.0,
    frame: Frame = "read",
) -> Policy:
    """Keep what SnapKV keeps, with more slots in the lower layers and fewer in the upper ones.

    Args:
        budget: slots of each KV head, in a layer on average.
        beta: how many times fewer slots than the average the top layer has.
    """
    return Pyramid(Pipe((Snap(budget, window, kernel, average, frame),)), beta)


@dataclass(frozen=True, repr=False)
class Quantized(PolicyWrapper):
    """A policy with quantized slots.

    Attributes:
        policy: the policy that holds the tokens.
        slots: the format of its slots, by the names of `slab.FORMATS`.
        newest: how many of the newest tokens stay exact, of those that pools like `recent` hold;
            None for all of them.
    """

    verb = "quantized"

    policy: Policy
    slots: str = "int8"
    newest: int | None = None
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_format(self.slots)
        if self.newest is not None and self.newest < 0:
            raise WeirError(f"newest tokens that stay exact are 0 or more, not {self.newest}")
        if isinstance(self.policy, Recompute):
            raise WeirError("recompute caches nothing, so there are no slots to quantize")
        if not any(pipe.quantized for pipe in self.pipes):
            if self.newest is not None:
                raise WeirError(
                    f"{self.policy} holds no tokens but the first and the newest {self.newest}, "
                    "which stay exact; take a smaller newest"
                )
            raise WeirError(
                f"all that {self.policy} holds are first and newest tokens, which stay exact; "
                f"quantized({self.policy}, newest=64) quantizes those older than the newest 64"
            )
        self._write()

    @property
    def options(self) -> str:
        """The format, and how many tokens stay exact."""
        newest = "" if self.newest is None else f", newest={self.newest}"
        return f"slots={self.slots}{newest}"

    def rewrite(self, pipe: Pipe) -> Pipe:
        """Give each pool its format; a pool of the newest tokens may become two."""
        if pipe.quantized:
            raise _has_own_format(self.policy)
        if pipe.slots is None:
            raise WeirError(f"{self.policy} has no limit, and slots that are quantized have one")
        pools: list[Pool] = []
        formats: list[str] = []
        left = self.newest
        for place, pool in enumerate(pipe.pools):
            if place not in pipe.run:
                exact = pool.in_order or pool.needs_marks or pool.synthetic
                pools.append(pool)
                formats.append("" if exact else self.slots)
                continue
            size = pool.slots() or 0
            newest = size if left is None else min(size, left)
            left = None if left is None else left - newest
            for part, name in ((newest, ""), (size - newest, self.slots)):
                if part:
                    pools.append(pool if part == size else pool.resized(part))
                    formats.append(name)
        return Pipe(tuple(pools), formats=tuple(formats))


@named("any policy, its middle in 8 bits or 4")
def quantized(
    policy: Policy | None = None, slots: str = "int8", newest: int | None = None
) -> Policy:
    """A policy whose slots are quantized, but for first and newest tokens.

    Args:
        policy: the policy that holds the tokens; none for kcenter.
        slots: the format of the slots: int8, k8v4 or fp8.
        newest: how many of the newest tokens stay exact; none for all that the policy keeps as
            such.
    """
    return Quantized(kcenter() if policy is None else policy, slots, newest)


def with_pin(policy: Policy, slots: int | None = None, format: str = EXACT) -> Policy:
    """Pin a policy for serving conversations, with `slots` for the beginning in each layer.

    0 leaves the policy as it is. None is a quarter of its slots in a layer on average, unless it
    keeps beginnings by itself, or everything.
    """
    if slots is None:
        pipes = policy.pipes
        mean = sum(pipe.slots or 0 for pipe in pipes) // len(pipes)
        kept = any(pipe.needs_marks or pipe.slots is None for pipe in pipes)
        slots = 0 if kept else mean // SHARE
    return Pinned(policy, slots, format=format) if slots else policy


def pinned_slots(pools: Iterable[Pool]) -> int | None:
    """Return how many tokens of a beginning some pools hold; None if they hold no beginnings."""
    return max((pool.n for pool in pools if isinstance(pool, Beginning)), default=None)


def with_slots(policy: Policy, slots: str | None) -> Policy:
    """Give a policy slots of a format; None leaves it as it is.

    A named policy that has a parameter for the format, as `weir` has, is given it there.

    Raises:
        WeirError: there is no such format, no slots that could be quantized, or another format.
    """
    if slots is None or (isinstance(policy, Quantized) and policy.slots == slots):
        return policy
    called = policy.called
    if called is not None and called.given.get("slots") == slots:
        return policy
    # `quantized` has the parameter too, but no word for exact slots.
    around = isinstance(policy, Quantized) and slots == EXACT
    if called is not None and called.takes_slots and not around:
        given = {**called.given, "slots": slots}
        made: Policy = NAMED[called.name].make(**given)
        call = PolicyCall.by_name(called.name, given)
        return made.as_written(str(call), call)
    if slots != EXACT:
        return Quantized(policy, slots)
    if not isinstance(policy, Recompute | KVzip) and any(pipe.quantized for pipe in policy.pipes):
        raise _has_own_format(policy)
    return policy


def _has_own_format(policy: Policy) -> WeirError:
    return WeirError(
        f"{policy} says by itself how its slots are quantized; write another policy, or leave out "
        "slots= (--slots)"
    )
