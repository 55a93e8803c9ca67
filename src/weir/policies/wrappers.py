"""Policies around another policy: `pinned`, `pyramid` and `quantized`.

`pinned` puts a pool for the stream's beginning before a layer's pools. After the pools that pass
tokens on in order, it puts two more: one for the header of the current turn, and one for tokens
that must be kept, in the slots that the beginning leaves free (`weir.pools.Marks`). `quantized`
keeps the first and the newest tokens, and tokens that marks name, as the model computes them. It
also leaves slots exact that can hold a key that no token had (`Pool.synthetic`).

`pyramid` is from PyramidKV (Cai et al. 2024, "PyramidKV: Dynamic KV Cache Compression based on
Pyramidal Information Funneling", arXiv:2406.02069), section 4.2: lower layers attend to many tokens
and upper layers to few, so lower layers get more slots.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, Self

from weir.errors import WeirError, in_words
from weir.policies.library import KVzip, Recompute, kcenter, streaming_llm
from weir.policies.pipe import Origin, Pipe, Policy, check_format
from weir.policies.registry import NAMED, PolicyCall, named
from weir.pools import Beginning, Frame, Header, Kept, Pool, Snap

EXACT = "exact"
"""The name of unquantized slots."""
SAME = "same"
"""Value that gives a beginning the format of a policy's quantized slots, or int8 without any."""
SHARE = 4
"""By default, the beginning gets one slot for this many of the policy's."""


class PolicyWrapper(Policy):
    """A policy that rewrites the pipe that another policy has in each layer.

    A subclass is a dataclass whose first field is the other policy. `verb` is its name in text.
    """

    policy: Policy
    verb: ClassVar[str]

    @abstractmethod
    def rewrite(self, pipe: Pipe) -> Pipe:
        """Return the pipe that replaces a pipe of the other policy."""

    @property
    @abstractmethod
    def options(self) -> str:
        """Its other arguments as text: `n=64, header=16`."""

    def around(self, policy: Policy) -> Self:
        """Return the same wrapper around another policy."""
        same: Self = replace(self, policy=policy, text="")  # type: ignore[type-var]
        return same

    def _write(self) -> None:
        """Set the text, if there is none."""
        if not self.text:
            object.__setattr__(self, "text", f"{self.verb}({self.policy}, {self.options})")

    @property
    def stands_for(self) -> str:
        """Its pools. If the other policy is not a pipe, the wrapper around that policy's pools."""
        if isinstance(self.policy, Pipe):
            return self.pipes[0].stands_for
        return f"{self.verb}({self.policy.stands_for}, {self.options})"

    @property
    def brief(self) -> str:
        """The text, with the name or the summary of the other policy if it has one."""
        brief = self.policy.brief
        if brief == self.policy.text:
            return self.text
        if brief.endswith(")"):  # a call
            return f"{self.verb}({brief}, {self.options})"
        return f"{brief}, {self.verb} with {self.options}"

    @property
    def pipes(self) -> tuple[Pipe, ...]:
        """The other policy's pipes, rewritten."""
        return tuple(map(self.rewrite, self.policy.pipes))

    @property
    def origin(self) -> Origin | None:
        """The origin of the other policy."""
        return self.policy.origin

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Return the other policy's pipe of a layer, rewritten."""
        return self.rewrite(self.policy.for_layer(layer, layers))

    def for_heads(self, layer: int, layers: int, heads: int) -> tuple[Pipe, ...]:
        """Return the other policy's pipes of a layer's KV heads, rewritten."""
        return tuple(map(self.rewrite, self.policy.for_heads(layer, layers, heads)))


@dataclass(frozen=True, repr=False)
class Pinned(PolicyWrapper):
    """A policy with additional slots in each layer, for the beginning of the stream and the header
    of the current turn.

    Attributes:
        policy: the policy that holds everything else.
        n: slots of each KV head that the beginning and the tokens that must be kept share.
        header: slots of each KV head for the header.
        format: the format of these `n` slots: "exact", a name in `slab.FORMATS`, or "same" for that
            of the policy's quantized slots (int8 if it has none).
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
        self.pipes  # noqa: B018  (raises if a pipe cannot be pinned)
        self._write()

    @property
    def options(self) -> str:
        """Both numbers of slots, and the format if it is not exact."""
        form = "" if self.format == EXACT else f", format={self.format}"
        return f"n={self.n}, header={self.header}{form}"

    def rewrite(self, pipe: Pipe) -> Pipe:
        """Add the pools; refuse a pipe that has such pools, or no limit."""
        if pipe.needs_marks:
            raise WeirError(
                f"{self.policy} already keeps the beginning of a stream or the header of a turn. "
                "Use it without pinned."
            )
        if pipe.slots is None:
            raise WeirError(
                f"{self.policy} has no limit and keeps the beginning anyway. Use it without pinned."
            )
        pools = pipe.pools
        # The header comes as late as possible: after it, tokens are out of order, and pools must
        # sort them.
        place = next((at for at, pool in enumerate(pools) if not pool.in_order), len(pools))
        marked = Header(self.header), Kept(self.n)
        with_all = (Beginning(self.n), *pools[:place], *marked, *pools[place:])
        given = pipe.formats or ("",) * len(pools)
        first = "" if self.format == EXACT else self.format
        if self.format == SAME:
            first = next(filter(None, given), "int8")
        formats = (first, *given[:place], "", first, *given[place:])
        return Pipe(with_all, formats=formats)


@named("any policy, and next to it the tokens that a conversation must not lose")
def pinned(
    policy: Policy | None = None, n: int = 64, header: int = 16, format: str = EXACT
) -> Policy:
    """A policy, and next to it the beginning of the stream and the header of the current turn.

    `n` slots are for the beginning and `header` for the control tokens in front of an answer, in
    addition to those of the policy. The marks of a row say how many of these slots it uses; a row
    without marks has `n` more sinks. Slots that the beginning leaves free are for other tokens that
    the marks name.

    Args:
        policy: the policy for all other tokens; none for StreamingLLM.
        n: slots for the beginning of the stream.
        header: slots for the control tokens before an answer.
        format: the format of the slots for the beginning: exact, int8, int4, k8v4 or fp8, or same
            for that of the policy's quantized slots (int8 if it has none).
    """
    return Pinned(streaming_llm() if policy is None else policy, n, header, format)


def budgets(mean: int, layers: int, beta: float) -> list[int]:
    """Compute the slots per KV head of each layer, from the bottom up: an arithmetic sequence in
    whole numbers.

    The top layer has mean / beta, and the bottom one 2 * mean - mean / beta. Slots that are left
    after rounding down go to the lowest layers, one each. The sum is exactly `layers * mean`.
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

    Pools of the first or the newest tokens, except at the end of the pipe, have the same size in
    every layer. So have the slots that a pool declares as fixed (`Pool.fixed`), such as those of
    the paper's last tokens. All other slots follow `budgets`, divided in the proportions of the
    pools.
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
    where = f"the {name} of this pyramid would have {in_words(slots, 'slot')} to divide"
    if slots < sum(n > 0 for n in free):
        raise WeirError(
            f"{where}, but each of its pools needs at least one. Use a larger budget or a smaller "
            "beta."
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
    """Divide slots in the proportions of `free`, at least one for each that is not 0."""
    one = [int(n > 0) for n in free]
    parts = [n - at_least for n, at_least in zip(free, one, strict=True)]
    parts = parts if any(parts) else one
    rest, whole = slots - sum(one), sum(parts)
    given = [at_least + rest * part // whole for at_least, part in zip(one, parts, strict=True)]
    # Slots left after rounding down go to the largest remainders; among equal ones, to the first.
    order = sorted(range(len(free)), key=lambda place: -(rest * parts[place] % whole))
    for place in order[: slots - sum(given)]:
        given[place] += 1
    return given


@dataclass(frozen=True, repr=False)
class Pyramid(Policy):
    """A pipe with PyramidKV's budgets: more slots in the lower layers.

    Attributes:
        pipe: the average pipe of a layer.
        beta: the average number of slots divided by that of the top layer; 1 means no pyramid.
    """

    is_pipe = True

    pipe: Pipe
    beta: float = 20.0
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.pipe.slots is None:
            raise WeirError(
                f"{self.pipe} has no limit, so a pyramid cannot divide its slots. Use a pipe with "
                "a limit."
            )
        if not 1 <= self.beta < math.inf:
            raise WeirError(
                f"beta of a pyramid must be a finite number of at least 1, got {self.beta}"
            )
        for layer in range(2):  # top layers have equally few slots, however many layers there are
            self.for_layer(layer, 2)
        if not self.text:
            object.__setattr__(self, "text", f"pyramid({self.pipe}, beta={self.beta})")

    @property
    def stands_for(self) -> str:
        """The pyramid around its pools, as it is written in a policy."""
        return f"pyramid({self.pipe.stands_for}, beta={self.beta})"

    def for_layer(self, layer: int, layers: int) -> Pipe:
        """Return the pipe with the slots of its layer."""
        pools = of_layer(self.pipe.pools, layer, layers, self.beta)
        return Pipe(pools, formats=self.pipe.formats)


@named("Cai et al. 2024, PyramidKV, its budgets around any pipe")
def pyramid(pipe: Policy | None = None, beta: float = 20.0) -> Policy:
    """A pipe with more slots in the lower layers and fewer in the upper ones.

    The pipe is the average of a layer. Its pools of first or newest tokens have the same size in
    every layer, unless they are at the end of the pipe. The top layer has `beta` times fewer of the
    other slots than the average, and the number rises evenly down to the bottom layer. Without a
    pipe, it is PyramidKV.

    Args:
        pipe: the average pipe of a layer; none for PyramidKV's.
        beta: how many times fewer slots the top layer has than the average.
    """
    if pipe is None:
        return pyramidkv(beta=beta)
    if not isinstance(pipe, Pipe):
        raise WeirError(
            f"a pyramid needs a pipe, got {pipe}. Use, for example, pyramid(sink(4) | recent(252))."
        )
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
    """Keep the tokens that SnapKV keeps, with more slots in the lower layers and fewer in the
    upper.

    The other parameters are those of the pool `snap`.

    Args:
        budget: average number of slots of a KV head in a layer.
        beta: how many times fewer slots the top layer has than the average.
    """
    return Pyramid(Pipe((Snap(budget, window, kernel, average, frame),)), beta)


@dataclass(frozen=True, repr=False)
class Quantized(PolicyWrapper):
    """A policy with quantized slots.

    Attributes:
        policy: the policy that holds the tokens.
        slots: the format of its slots, by the names of `slab.FORMATS`.
        newest: how many of the newest tokens stay exact, in pools such as `recent`; None for all of
            them.
    """

    verb = "quantized"

    policy: Policy
    slots: str = "int8"
    newest: int | None = None
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_format(self.slots)
        if self.newest is not None and self.newest < 0:
            raise WeirError(f"newest must be at least 0, got {self.newest}")
        if isinstance(self.policy, Recompute):
            raise WeirError(
                "recompute caches nothing, so it has no slots to quantize. Use another policy."
            )
        if not any(pipe.quantized for pipe in self.pipes):
            if self.newest is not None:
                raise WeirError(
                    f"with newest={self.newest}, all slots of {self.policy} stay exact. Use a "
                    "smaller newest."
                )
            most = max(sum(pipe.pools[n].slots() or 0 for n in pipe.run) for pipe in self.pipes)
            newest = 64 if most > 64 else most // 2
            if not newest:
                raise WeirError(
                    f"{self.policy} has no slots that can be quantized: first and newest tokens "
                    "stay exact. Use another policy."
                )
            raise WeirError(
                f"{self.policy} has no slots that can be quantized: first and newest tokens stay "
                f"exact. Use quantized({self.policy}, newest={newest}) to quantize those older "
                f"than the newest {newest}."
            )
        self._write()

    @property
    def options(self) -> str:
        """The format, and how many tokens stay exact."""
        newest = "" if self.newest is None else f", newest={self.newest}"
        return f"slots={self.slots}{newest}"

    def rewrite(self, pipe: Pipe) -> Pipe:
        """Give each pool its format. A pool of the newest tokens may become two pools."""
        if pipe.quantized:
            raise _has_own_format(self.policy)
        if pipe.slots is None:
            raise WeirError(
                f"{self.policy} has no limit, and only slots with a limit can be quantized. Use a "
                "policy with a limit."
            )
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


@named("any policy, with its middle in 8 or 4 bits")
def quantized(
    policy: Policy | None = None, slots: str = "int8", newest: int | None = None
) -> Policy:
    """A policy with quantized slots, except for the first and newest tokens.

    Args:
        policy: the policy that holds the tokens; none for kcenter.
        slots: the format of the slots: int8, int4, k8v4 or fp8.
        newest: how many of the newest tokens stay exact; none for all that the policy keeps as
            newest tokens.
    """
    return Quantized(kcenter() if policy is None else policy, slots, newest)


def with_pin(policy: Policy, slots: int | None = None, format: str = EXACT) -> Policy:
    """Pin a policy for serving conversations, with `slots` for the beginning in each KV head.

    With 0 slots the policy is returned unchanged. None means a quarter of its average slots per KV
    head, or 0 if it already keeps beginnings, or everything.
    """
    if slots is None:
        pipes = policy.pipes
        mean = sum(pipe.slots or 0 for pipe in pipes) // len(pipes)
        kept = any(pipe.needs_marks or pipe.slots is None for pipe in pipes)
        slots = 0 if kept else mean // SHARE
    return Pinned(policy, slots, format=format) if slots else policy


def pinned_slots(pools: Iterable[Pool]) -> int | None:
    """Return how many tokens of a beginning some pools hold. None if they hold no beginnings."""
    return max((pool.n for pool in pools if isinstance(pool, Beginning)), default=None)


def with_slots(policy: Policy, slots: str | None) -> Policy:
    """Give a policy slots of a format. None leaves it unchanged.

    A named policy with a parameter for the format, such as `weir`, gets the format there.

    Raises:
        WeirError: the format does not exist, no slots can be quantized, or the policy has another
            format.
    """
    if slots is None or (isinstance(policy, Quantized) and policy.slots == slots):
        return policy
    called = policy.called
    if called is not None and called.given.get("slots") == slots:
        return policy
    # `quantized` has the parameter too, but no value for exact slots.
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
        f"{policy} already sets the format of its slots. Use another policy, or leave out slots= "
        "(--slots) or the outer quantized."
    )
