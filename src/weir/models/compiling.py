"""A decode step as one compiled graph: `weir.compile_steps(model)`.

At batch 1 a third of a decode step is Python and small operations; `torch.compile` makes one
program of all of it. Prompts, folds and steps without constant shapes run uncompiled, and so does
everything where compilation fails. This module knows nothing about caches: in a compiled step a
stand-in replaces the cache, and its `sizes` identify the graph.
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
"""Notice written before compiling."""


class CompiledStep(Protocol):
    """The cache's stand-in in a compiled step."""

    @property
    def sizes(self) -> Hashable:
        """Sizes that identify the compiled graph."""


class Compiling:
    """Compilation of one model's steps, from its first cache to its last.

    `torch.compile` keeps and counts graphs by the code object of a function. All models of a class
    share the code of their forward, so the sizes of one would use up the limit of the others.
    Therefore the compiler gets a wrapper function with a code object of this model's own.

    Attributes:
        strict: raise where a step cannot be compiled, and write no notices.
        failed: why steps run uncompiled; None while they can be compiled.
        known: sizes that have a graph; graphs outlive the caches they were made with.
        refused: sizes whose steps run uncompiled.

    Args:
        options: for `torch.compile`.
        strict: see the attribute.

    Raises:
        WeirError: `torch.compile` does not take these options.
    """

    def __init__(self, options: Mapping[str, Any], strict: bool = False) -> None:
        self._options = dict(options)
        self.strict = strict
        self.failed: str | None = None
        self.known: set[Hashable] = set()
        self.refused: set[Hashable] = set()
        # A graph stays valid as long as the objects it called exist, so the same patches go back
        # onto the model's rotary embeddings whenever it has a cache.
        self.rotaries: list[MethodPatch] = []
        self._code = _around(lambda: None).__code__.replace()
        try:
            self.of(lambda: None)
        except (TypeError, RuntimeError, exc.TorchDynamoException) as error:
            reason = str(error).strip().splitlines()[0]
            raise WeirError(f"torch.compile does not take these options: {reason}") from None

    def give_up(self, reason: str) -> None:
        """Run all steps uncompiled from now on, and write a notice.

        Raises:
            WeirError: `strict` is set.
        """
        self.failed = f"the steps of this model cannot be compiled here: {reason}"
        if self.strict:
            raise WeirError(self.failed)
        _say(f"{self.failed}; they go the usual way")

    def of(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a forward; the result takes its arguments by name."""
        closure = _around(forward).__closure__
        step = FunctionType(self._code, globals(), "step", None, closure)
        return torch.compile(step, fullgraph=True, dynamic=False, **self._given())

    def _given(self) -> dict[str, Any]:
        """Return the options for one compilation; `torch.compile` modifies what it is given.

        Before each step PyTorch checks guards: that everything it read while compiling is
        unchanged. Half of that time goes to functions and classes of libraries. Those guards are
        skipped, since a program that replaces such a function has to call `compile_steps` again;
        guards on the model and its weights stay. With a `mode` nothing is skipped, because PyTorch
        takes no other options beside it. Size assertions are dropped (`_lean`), since the guards
        have checked the sizes of all inputs.
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
    """Return inductor's options, as far as this PyTorch has them.

    Programs do not repeat size checks that guards have made, and a product and a sum become one
    instruction, rounded once.
    """
    wanted = {"size_asserts": False, "cpp.enable_floating_point_contract_flag": "fast"}
    known = torch._inductor.list_options()
    return {name: value for name, value in wanted.items() if name in known}


def _around(forward: Callable[..., Any]) -> FunctionType:
    """Wrap a forward as a call of the class's function with the module.

    The bound method itself dies with the cache that asked for it, and PyTorch before 2.10 then
    discards the program.
    """
    bound: tuple[Any, ...] = ()
    function = forward
    if isinstance(forward, MethodType):
        function, bound = forward.__func__, (forward.__self__,)

    def step(**given: Any) -> Any:
        return function(*bound, **given)

    return cast(FunctionType, step)


class Compiled:
    """Compiled forward of a decoder, for steps with caches of weir."""

    def __init__(self, own: Callable[..., Any], compiling: Compiling) -> None:
        self._graph = compiling.of(own)
        self._compiling = compiling

    def __call__(self, step: CompiledStep, given: dict[str, Any]) -> Any:
        """Return the decoder's output for one token; None where the step must run uncompiled.

        Args:
            step: the cache's stand-in.
            given: the decoder's arguments by name.

        Raises:
            WeirError: the model cannot be compiled here and `strict` is set; it says why.
        """
        how = self._compiling
        sizes = step.sizes  # read once: computing it walks through all layers
        if how.failed is not None or sizes in how.refused:
            return None
        made = sizes in how.known
        if not made and not how.strict:
            _say(WAITING)
        try:
            with nullcontext() if made else _without_garbage_collection():
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
            failure = f"the steps of this model cannot be compiled here: {_reason(error)}"
            if how.strict:
                raise WeirError(failure) from error
            how.refused.add(sizes)
            if how.known:
                _say(f"{failure}; those of this size of batch and cache go the usual way")
            else:  # other sizes would fail too, each after a long wait
                how.failed = failure
                _say(f"{failure}; they go the usual way")
            return None
        if not made:
            how.known.add(sizes)
        return output


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause garbage collection.

    Compiling makes millions of objects that live until it is done, and walking through them again
    and again took a seventh of the time or more.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _say(sentence: str) -> None:
    """Write a notice to standard error."""
    sys.stderr.write(f"weir: {sentence}\n")
    sys.stderr.flush()


def _reason(error: Exception) -> str:
    """Return the reason in one line; a backend's error has its name in the line before."""
    first, *others = str(error).strip().splitlines()
    return others[0] if others and first.endswith("raised:") else first
