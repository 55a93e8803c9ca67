"""Compiled decode steps: `weir.compile_steps(model)`.

At batch 1 a third of a decode step is Python and small operations; `torch.compile` makes one
program of a layer, which all layers of its kind run. The decoder around them stays Python. Prompts,
folds and steps without constant shapes run uncompiled, and so does everything where compilation
fails, or has not ended yet. This module knows nothing about caches: in a compiled step a stand-in
replaces the cache, and has one for each layer, whose `sizes` identify the program.
"""

from __future__ import annotations

import copy
import gc
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo import exc
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, tracing

from weir.errors import WeirError
from weir.models.bound_layers import BoundLayer, LayerSnapshot, ProgramCall
from weir.models.cache_name import CACHE
from weir.models.interception import MethodPatch
from weir.models.step_engine import MakeEngine

WAITING = (
    "compiling the decode step of this model, which takes from seconds to a minute, and less where "
    "PyTorch has kept it from before; until then tokens come uncompiled"
)
"""Notice written before compiling."""
MOST_LAYERS = 256
"""Most kinds and sizes of layers that are compiled for a model; steps of others run uncompiled."""
SWITCHING = 1e-4
"""Seconds after which threads take turns while a program is compiled in one of them: a step enters
and leaves PyTorch hundreds of times, and waits so long each time."""


class Compiling:
    """Compilation of one model's layers, from its first cache to its last.

    `torch.compile` keeps and counts programs by the code object of a function. All models of a
    class share the code of their forward, so the sizes of one would use up the limit of the others.
    Therefore the compiler gets a function with a code object of its own for each size.

    Attributes:
        native: makes the engine of native steps; None where there is none, or the caller chooses
            options.
        programs: whether `torch.compile` is used, for what cannot be native.
        strict: raise where a step cannot be compiled, and write no notices.
        wait: compile in the step that needs it, and not in a thread meanwhile.
        failed: why steps run uncompiled; None while they can be compiled.
        refused: sizes whose steps run uncompiled.
        known: sizes that have been compiled; programs outlive the caches they were made with.
        under_way: compilations in threads, by sizes.
        calls: where calls of programs are recorded; None for nowhere.
        binds: whether layers are bound to their programs; not for a caller who chooses the guards.

    Args:
        options: for `torch.compile`.
        strict: see the attribute; such steps wait.
        programs: see the attribute.
        native: see the attribute.

    WeirError if `torch.compile` does not take these options.
    """

    wait = False

    def __init__(
        self,
        options: Mapping[str, Any],
        strict: bool = False,
        programs: bool = True,
        native: MakeEngine | None = None,
    ) -> None:
        self.strict = strict
        self.native = None if options else native
        self.programs = programs
        if strict:
            self.wait = True
        self.failed: str | None = None
        self.refused: set[Hashable] = set()
        self.known: set[Hashable] = set()
        self.under_way: dict[Hashable, _Job] = {}
        self._layers: dict[Hashable, Callable[..., Any]] = {}
        self._traced: list[_Program] = []
        self.calls: list[ProgramCall] | None = None
        own = (options.get("options") or {}).get("guard_filter_fn")
        self.binds = own is None
        self._asked = partial(_asked, own or getattr(torch.compiler, _UNASKED, None))
        if not programs:
            return
        try:  # what is given is taken apart
            torch.compile(lambda: None, **copy.deepcopy(dict(options)))
            self._backend = _backend(options)
        except (TypeError, RuntimeError, exc.TorchDynamoException) as error:
            reason = str(error).strip().splitlines()[0]
            raise WeirError(f"torch.compile does not take these options: {reason}") from None

    def give_up(self, reason: str) -> None:
        """Run all steps uncompiled from now on, and write a notice; with `strict` a WeirError."""
        self.failed = f"the steps of this model cannot be compiled here: {reason}"
        if self.strict:
            raise WeirError(self.failed)
        say(f"{self.failed}; they go the usual way")

    def run_layer(self, sizes: Hashable, own: Callable[..., Any], *given: Any) -> Any:
        """Run a layer's program; where there is none yet, trace one, which is not compiled yet.

        Args:
            sizes: of the layer.
            own: the layer's forward, or what another library has put in its place.
            given: its positional arguments, and a dictionary of the others.
        """
        if sizes not in self._layers:
            code = _run_layer.__code__.replace()
            plain: Callable[..., Any] = FunctionType(code, globals(), "layer")
            options: dict[str, Any] = {"guard_filter_fn": self._asked}
            self._layers[sizes] = torch.compile(
                plain, fullgraph=True, dynamic=False, backend=self._trace, options=options
            )
        if isinstance(own, MethodType):
            return self._layers[sizes](own.__func__, (own.__self__,), *given)
        return self._layers[sizes](own, (), *given)

    def _trace(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Take a traced layer from PyTorch; `compile_traced` compiles it."""
        self._traced.append(_Program(graph, inputs, self))
        return self._traced[-1]

    def compile_traced(self, sizes: Hashable) -> None:
        """Compile what was traced in a step of these sizes, in a thread or at once."""
        programs, self._traced = self._traced, []
        if not programs:
            self.known.add(sizes)
            return
        job = _Job(programs, self._backend)
        if self.wait:
            job.run()
            self.known.add(sizes)
        else:
            self.under_way[sizes] = job
            _RUNNING.add(job)
            threading.Thread(target=job.try_to_run, name="weir compiles", daemon=True).start()

    def is_under_way(self, sizes: Hashable) -> bool:
        """Return whether a thread compiles for these sizes; take over what it has compiled, or
        raise what the compiler raised.
        """
        job = self.under_way.get(sizes)
        if job is None:
            return False
        if job.seconds is None:
            return True
        del self.under_way[sizes]
        if job.error is not None:
            raise job.error
        self.known.add(sizes)
        if not sys.stderr.isatty():  # where it would appear within an answer
            say(f"the decode step is compiled, after {job.seconds:.0f} s")
        return False

    def why_not_now(self, sizes: Hashable) -> str | None:
        """Return why a step of these sizes would run uncompiled now; None if a program runs it, or
        it would be the first to be compiled.

        Args:
            sizes: of the cache's last step that was to be compiled; None before it.
        """
        if self.failed is not None:
            return self.failed
        if sizes in self.refused:
            return "torch.compile cannot compile steps of this size of batch and cache"
        job = self.under_way.get(sizes)
        if (job is not None and job.seconds is None) or (_RUNNING and sizes not in self.known):
            return "torch.compile is still at work, and steps run uncompiled until it is done"
        return None

    def refuse(self, sizes: Hashable, error: Exception) -> None:
        """Run steps of these sizes uncompiled from now on, or all steps, and say why; with `strict`
        a WeirError.
        """
        self._traced = []
        failure = f"the steps of this model cannot be compiled here: {_reason(error)}"
        if self.strict:
            raise WeirError(failure) from error
        self.refused.add(sizes)
        if self.known:
            say(f"{failure}; those of this size of batch and cache go the usual way")
        else:  # other sizes would fail too, each after a long wait
            self.failed = failure
            say(f"{failure}; they go the usual way")

    def has_room(self, sizes: Sequence[Hashable]) -> bool:
        """Return whether layers of these sizes may be compiled beside those that are."""
        return len(self._layers.keys() | set(sizes)) <= MOST_LAYERS


_UNASKED = "skip_guard_on_globals_unsafe"


def _asked(own: Callable[..., Any] | None, guards: Sequence[Any]) -> list[bool]:
    """Return which guards PyTorch evaluates before it runs a layer's program.

    Guards say that everything PyTorch read while it traced is unchanged. Those on functions and
    classes of libraries take half of the time and are skipped, since a program that replaces such a
    function has to call `compile_steps` again; guards on the model and its weights stay. What tells
    one layer from the next is skipped too: its number, which goes to the cache only, and the
    patches on its linear layers, each of which reads a weight of its own.
    """
    kept = [True] * len(guards) if own is None else own(guards)
    return [
        keep and "layer_idx" not in guard.name and not isinstance(guard.value, MethodPatch)
        for keep, guard in zip(kept, guards, strict=True)
    ]


def _backend(options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the compiler that `torch.compile` would call, for a graph and examples of its inputs.

    For inductor, as far as this PyTorch has them: programs do not repeat size checks that guards
    have made, and a product and a sum become one instruction, rounded once.
    """
    given = dict(options.get("options") or {})
    given.pop("guard_filter_fn", None)
    backend, mode = options.get("backend", "inductor"), options.get("mode")
    if backend != "inductor":
        return torch._TorchCompileWrapper(backend, mode, given, False)
    lean = {"size_asserts": False, "cpp.enable_floating_point_contract_flag": "fast"}
    known = torch._inductor.list_options()
    lean = {name: value for name, value in lean.items() if name in known}
    return torch._TorchCompileInductorWrapper(mode, {**lean, **given}, False)


def _run_layer(
    function: Callable[..., Any],
    bound: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a layer's function; each size has a copy of this, with a program of its own."""
    return function(*bound, *args, **kwargs)


class _Program:
    """A traced layer: a graph of PyTorch's operations, and a program once it is compiled."""

    def __init__(self, graph: Any, inputs: Sequence[Any], compiling: Compiling) -> None:
        self._traced: tuple[Any, Sequence[Any]] | None = (graph, inputs)
        self._compiling = compiling
        self._context = TracingContext.try_get()
        self._run: Callable[..., Any] = graph.forward

    def __call__(self, *inputs: Any) -> Any:
        outputs = self._run(*inputs)
        if self._compiling.calls is not None:
            self._compiling.calls.append(ProgramCall(self, inputs, outputs))
        return outputs

    def compile(self, backend: Callable[..., Any]) -> None:
        assert self._traced is not None
        with tracing(self._context):
            self._run = backend(*self._traced)
        self._traced = self._context = None


class _Job:
    """Compilation of some layers.

    Attributes:
        seconds: how long it took; None while it has not ended.
        error: what the compiler raised.
    """

    def __init__(self, programs: Sequence[_Program], backend: Callable[..., Any]) -> None:
        self._programs, self._backend = programs, backend
        self._inference = torch.is_inference_mode_enabled()
        self.seconds: float | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        """Compile."""
        with torch.inference_mode(self._inference), torch.no_grad(), _without_garbage_collection():
            for program in self._programs:
                program.compile(self._backend)

    def try_to_run(self) -> None:
        """Compile in a thread, beside other threads' steps."""
        start, before = time.perf_counter(), sys.getswitchinterval()
        sys.setswitchinterval(min(before, SWITCHING))
        try:
            # While PyTorch traces in one thread, it cannot trace or compile in another: both change
            # the same global state, and afterwards neither works in this process.
            with compile_lock:
                self.run()
        except Exception as error:
            self.error = error
        finally:
            _RUNNING.discard(self)
            sys.setswitchinterval(before)
            self.seconds = time.perf_counter() - start


_RUNNING: set[_Job] = set()
"""Compilations in threads, of all models: the next one begins when there is none."""


class Compiled:
    """Decoder whose layers are compiled, for steps with caches of weir.

    Attributes:
        asked: the sizes of the last step.

    Args:
        forward: the decoder's own.
        layers: its layers, which are patched until `remove`.
        compiling: how.
    """

    def __init__(
        self, forward: Callable[..., Any], layers: Sequence[nn.Module], compiling: Compiling
    ) -> None:
        self._forward = forward
        self._compiling = compiling
        self._step: Any = None
        self.asked: Hashable = None
        self._layers = layers
        self._snapshot: LayerSnapshot | None = None
        self._sizes: Hashable = None
        self._known = False
        self._bound: dict[Hashable, BoundLayer] = {}
        self._unbound: set[Hashable] = set()
        self._patches = [
            MethodPatch(layer, "forward", partial(self._run_layer, index))
            for index, layer in enumerate(layers)
        ]

    def remove(self) -> None:
        """Restore the layers."""
        for patch in self._patches:
            patch.remove()

    def __call__(self, step: Any, given: dict[str, Any]) -> Any:
        """Return the decoder's output for one token; None where the step must run uncompiled.

        Args:
            step: the cache's stand-in, `cache.forward.Step`.
            given: the decoder's arguments by name.
        """
        how = self._compiling
        sizes = self.asked = step.sizes  # read once: computing it walks through all layers
        if how.failed is not None or sizes in how.refused:
            return None
        try:
            if how.is_under_way(sizes) or (_RUNNING and sizes not in how.known):
                return None  # also while another model's steps are compiled
            if sizes not in how.known:
                if not how.has_room(sizes):
                    raise exc.FailOnRecompileLimitHit
                if not how.strict:
                    say(WAITING)
            self._step, self._known = step, sizes in how.known
            if not self._holds(sizes):  # a bound layer does not look at a cache's sizes
                self._snapshot = LayerSnapshot(self._layers) if self._known else None
                self._sizes, self._bound, self._unbound = sizes, {}, set()
            output = self._forward(**{**given, CACHE: step})
            how.compile_traced(sizes)
        except exc.FailOnRecompileLimitHit:
            how.refused.add(sizes)
            warnings.warn(
                "weir: this model was compiled for as many sizes of batch and cache as "
                "torch.compile allows; steps of others go the usual way",
                stacklevel=2,
            )
            return None
        except WeirError:
            raise
        except Exception as error:
            how.refuse(sizes, error)
            return None
        finally:
            self._step = None
        return output

    def _holds(self, sizes: Hashable) -> bool:
        """Return whether layers that were bound to their programs still are."""
        return self._snapshot is not None and self._sizes == sizes and self._snapshot.holds()

    def _run_layer(self, index: int, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if step is None:
            return own(*args, **kwargs)
        layer = step.layers[index]
        given = [layer if each is step else each for each in (*args, *kwargs.values())]
        key = index, *kwargs
        bound = self._bound.get(key)
        output = None if bound is None else bound(given)
        if output is not None:
            return output
        args = tuple(given[: len(args)])
        kwargs = dict(zip(kwargs, given[len(args) :], strict=True))
        known = self._known and self._compiling.binds
        if bound is not None or not known or key in self._unbound:
            return self._compiling.run_layer(layer.sizes, own, args, kwargs)
        return self._bind(key, given, layer.sizes, own, args, kwargs)

    def _bind(self, key: Hashable, given: Sequence[Any], *layer: Any) -> Any:
        """Run a layer's program, and keep where its inputs came from, for calls to come."""
        assert self._snapshot is not None
        calls: list[ProgramCall] = []
        self._compiling.calls = calls
        try:
            output = self._compiling.run_layer(*layer)
        finally:
            self._compiling.calls = None
        self._unbound.add(key)
        if len(calls) == 1 and self._snapshot.holds():
            with suppress(ValueError):
                bound = BoundLayer(calls[0], given, output, self._snapshot.tensors)
                self._snapshot.watch(bound.constants)
                self._bound[key] = bound
        return output


def layers_of(decoder: nn.Module, attentions: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the decoder's layers, each with one of its attention modules."""
    names = {module: name for name, module in decoder.named_modules()}
    found = []
    for attention in attentions:
        numbered = re.match(r"(.*?\.\d+)\.", names[attention])
        assert numbered, f"{names[attention]} is not in a list of layers"
        found.append(decoder.get_submodule(numbered[1]))
    return found


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


def say(sentence: str) -> None:
    """Write a notice to standard error."""
    sys.stderr.write(f"weir: {sentence}\n")
    sys.stderr.flush()


_SAID: set[str] = set()
"""Notices that `say_once` has written in this process."""


def say_once(sentence: str) -> None:
    """Write a notice to standard error, unless this process has written it before."""
    if sentence not in _SAID:
        _SAID.add(sentence)
        say(sentence)


def _reason(error: Exception) -> str:
    """Return the reason in one line; a backend's error has its name in the line before."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return others[0] if others and first.endswith("raised:") else first
