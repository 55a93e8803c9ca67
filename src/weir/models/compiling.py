"""A decode step as one compiled graph: `weir.compile_steps(model)`.

At batch 1 a third of a decode step is Python and small operations; `torch.compile` makes one
program of it all. Prompts, folds, and steps without constant shapes go the usual way, and so does
everything where nothing can be compiled. Knows nothing about caches: during a compiled step
something stands for the cache whose `sizes` tell one graph from another.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any, Protocol, cast

import torch
from torch._dynamo import exc

from weir.errors import WeirError
from weir.models.method_patch import MethodPatch

WAITING = (
    "compiling the decode step of this model, which takes from seconds to minutes, and less where "
    "PyTorch has kept it from before"
)
"""What is said before something is compiled."""


class CompiledStep(Protocol):
    """What stands for the cache in a compiled step."""

    @property
    def sizes(self) -> Hashable:
        """What the compiler makes graphs of their own for."""


class Compiling:
    """How the steps of one model are to be compiled, from its first cache to its last.

    `torch.compile` keeps and counts what it has compiled by the code object of a function. All
    models of a class share the code of their forward, so the sizes of one would use up the limit of
    the others: the compiler is given a function around it, with a code object of this model's own.

    Attributes:
        strict: a step that cannot be compiled fails, and nobody is told what is waited for.
        failed: why steps go the usual way; None while they need not.
        known: the sizes that a graph was made for, which outlives the cache that it was made with.
        refused: the sizes of which steps go the usual way.

    Args:
        options: for `torch.compile`.
        strict: see there.

    Raises:
        WeirError: `torch.compile` does not take these options.
    """

    def __init__(self, options: Mapping[str, Any], strict: bool = False) -> None:
        self._options = dict(options)
        self.strict = strict
        self.failed: str | None = None
        self.known: set[Hashable] = set()
        self.refused: set[Hashable] = set()
        # A graph is good for as long as what it called is there: the same objects stand in front of
        # the rotary embeddings of the model whenever it has a cache.
        self.rotaries: list[MethodPatch] = []
        self._code = _around(lambda: None).__code__.replace()
        try:
            self.of(lambda: None)
        except (TypeError, RuntimeError, exc.TorchDynamoException) as error:
            reason = str(error).strip().splitlines()[0]
            raise WeirError(f"torch.compile does not take these options: {reason}") from None

    def give_up(self, reason: str) -> None:
        """Have all steps go the usual way, and say so.

        Raises:
            WeirError: this is strict.
        """
        self.failed = f"the steps of this model cannot be compiled here: {reason}"
        if self.strict:
            raise WeirError(self.failed)
        _say(f"{self.failed}; they go the usual way")

    def of(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward, compiled; it takes its arguments by name."""
        closure = _around(forward).__closure__
        step = FunctionType(self._code, globals(), "step", None, closure)
        return torch.compile(step, fullgraph=True, dynamic=False, **self._given())

    def _given(self) -> dict[str, Any]:
        """The options, as they are this time: `torch.compile` takes some out of what it is given.

        Before each step PyTorch asks whether all is still so that it has read of a model. Half of
        the time it asks about functions and classes of libraries, of which a program that replaces
        some while a model decodes says so (`compile_steps`); about a model and its weights it goes
        on asking. Not with a `mode`, which PyTorch does not take together with other options.
        What is so asked need not be asked again by the program, for each tensor that it is given.
        """
        given = dict(self._options)
        skips = getattr(torch.compiler, "skip_guard_on_globals_unsafe", None)
        options = given.get("options") or {}
        if given.get("mode") is not None or not isinstance(options, Mapping):
            return given
        if given.get("backend", "inductor") == "inductor":
            options = {**_lean(), **options}
        if skips is not None:
            options = {"guard_filter_fn": skips, **options}
        if options:
            given["options"] = options
        return given


def _lean() -> dict[str, Any]:
    """Options of inductor's, those that this PyTorch has: programs do not look at the sizes that
    were asked about before, and a product and a sum are one instruction, rounded once.
    """
    wanted = {"size_asserts": False, "cpp.enable_floating_point_contract_flag": "fast"}
    known = torch._inductor.list_options()
    return {name: value for name, value in wanted.items() if name in known}


def _around(forward: Callable[..., Any]) -> FunctionType:
    """A call of the forward: of the class's function, with the module.

    The object that binds the two goes with the cache that asked for it, and PyTorch before 2.10
    takes a program for lost with it.
    """
    bound: tuple[Any, ...] = ()
    function = forward
    if isinstance(forward, MethodType):
        function, bound = forward.__func__, (forward.__self__,)

    def step(**given: Any) -> Any:
        return function(*bound, **given)

    return cast(FunctionType, step)


class Compiled:
    """A decoder's forward, whose steps with caches of weir are compiled."""

    def __init__(self, own: Callable[..., Any], compiling: Compiling) -> None:
        self._graph = compiling.of(own)
        self._compiling = compiling

    def __call__(self, step: CompiledStep, given: dict[str, Any]) -> Any:
        """The decoder's output for a token; None where it has to go the usual way.

        Args:
            step: what stands for the cache.
            given: the decoder's arguments by name.

        Raises:
            WeirError: the model cannot be compiled here, and why, where this is strict.
        """
        how = self._compiling
        sizes = step.sizes  # of all layers, and every other place that asks would go through them
        if how.failed is not None or sizes in how.refused:
            return None
        made = sizes in how.known
        if not made and not how.strict:
            _say(WAITING)
        try:
            with nullcontext() if made else _uncollected():
                output = self._graph(**{**given, "past_key_values": step})
        except exc.FailOnRecompileLimitHit:
            how.refused.add(sizes)
            warnings.warn(
                "weir: this model was compiled for as many sizes of batch and cache as "
                "torch.compile allows; steps of others go the usual way",
                stacklevel=2,
            )
            return None
        except exc.TorchDynamoException as error:
            told = f"the steps of this model cannot be compiled here: {_reason(error)}"
            if how.strict:
                raise WeirError(told) from error
            how.refused.add(sizes)
            if how.known:
                _say(f"{told}; those of this size of batch and cache go the usual way")
            else:  # nor will others, each of which would be waited for
                how.failed = told
                _say(f"{told}; they go the usual way")
            return None
        if not made:
            how.known.add(sizes)
        return output


@contextmanager
def _uncollected() -> Iterator[None]:
    """Python looks for no garbage meanwhile: compiling makes millions of objects which live until
    it is done, and to walk through them again and again took a seventh of it and more.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _say(sentence: str) -> None:
    """On standard error, from which those who wait learn why."""
    sys.stderr.write(f"weir: {sentence}\n")
    sys.stderr.flush()


def _reason(error: Exception) -> str:
    """What is wrong, in a line; a backend's name comes first, and what it says after it."""
    first, *others = str(error).strip().splitlines()
    return others[0] if others and first.endswith("raised:") else first
