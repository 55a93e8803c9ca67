"""Policies by name, and the plugin modules that register more of them.

A named policy such as `streaming_llm(budget=256)` is a function that returns a policy. A package
names its module in the entry-point group `weir.pools`. Users name their own files or modules with
`weir --import`, which passes them on to other processes in `WEIR_IMPORT`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

from weir.errors import WeirError, format_value, quote
from weir.pools import (
    POOLS,
    Make,
    check_arguments,
    check_free,
    check_name,
    is_own,
    name_failed_policy,
)

GROUP = "weir.pools"
"""The entry-point group whose modules are imported."""
VARIABLE = "WEIR_IMPORT"
"""The environment variable with more modules or files to import, separated as in `PATH`."""


@dataclass(frozen=True)
class NamedPolicy:
    """A function registered as a policy (`make`), and where the policy comes from (`paper`)."""

    make: Callable[..., Any]
    paper: str

    @property
    def pipe(self) -> str | None:
        """The default pipe or pyramid, as text. None for other policies."""
        made = self.make()
        return made.text if made.is_pipe else None


NAMED: dict[str, NamedPolicy] = {}
"""Every named policy."""

_loaded: set[str] = set()
"""The values of `WEIR_IMPORT` for which plugins were loaded."""


@dataclass(frozen=True)
class PolicyCall:
    """A call of a named policy: `streaming_llm(64, sinks=8)`.

    Attributes:
        name: the policy's name.
        given: the arguments, by parameter.
        arguments: the text between the parentheses, as it was written.
    """

    name: str
    given: Mapping[str, Any]
    arguments: str

    @classmethod
    def by_name(cls, name: str, given: Mapping[str, Any]) -> PolicyCall:
        """Make a call whose arguments are written with their names."""
        arguments = ", ".join(f"{key}={format_value(value)}" for key, value in given.items())
        return cls(name, dict(given), arguments)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the named policy."""
        return inspect.signature(NAMED[self.name].make).parameters

    @property
    def takes_budget(self) -> bool:
        """Whether the policy has a parameter `budget`, and neither it nor `rate` was given.

        A rate also sets the size.
        """
        return "budget" in self.parameters and not {"budget", "rate"} & self.given.keys()

    @property
    def takes_slots(self) -> bool:
        """Whether it has a parameter `slots` for the format of its slots, and did not get it."""
        usual = self.parameters.get("slots")
        return usual is not None and isinstance(usual.default, str) and "slots" not in self.given

    @property
    def plain(self) -> str:
        """The arguments, each with its name."""
        return PolicyCall.by_name(self.name, self.given).arguments

    def with_arguments(self, **more: Any) -> str:
        """Write the same call with more arguments after its own."""
        both = filter(None, (self.arguments, PolicyCall.by_name(self.name, more).arguments))
        return f"{self.name}({', '.join(both)})"

    def __str__(self) -> str:
        """Write the call with its arguments named: `streaming_llm(budget=64, sinks=8)`."""
        plain = self.plain
        return f"{self.name}({plain})" if plain else self.name


def named(paper: str) -> Callable[[Make], Make]:
    """Register a function as the policy with its name, and the paper that it comes from.

    Reports cite the paper if the text has its arXiv number, as in `Authors YEAR, "Title",
    arXiv:NUMBER`.

    The function may be defined again, for example when a cell of a notebook is run twice. The
    policy that it returns records how it was called (`Policy.called`).

    Raises:
        WeirError: `paper` is not a text, the decorated object is not a function, its name is taken
            or cannot be written in a policy, or it has a parameter that a policy text cannot set,
            or whose values cannot be checked.
    """
    if not isinstance(paper, str):
        raise WeirError(
            '@named needs a text that says where the policy comes from. Write @named("…") above '
            f"{getattr(paper, '__name__', quote(paper))}."
        )

    def register(make: Make) -> Make:
        if not inspect.isfunction(make):
            raise WeirError(
                f"a named policy must be a function that returns a policy, got {quote(make)}"
            )
        name = make.__name__
        check_name(name, "a policy")
        check_free(name, make, {key: known.make for key, known in NAMED.items()}, "a policy")
        check_not_a_pool(make)
        _check_parameters(make)
        signature = inspect.signature(make)

        @functools.wraps(make)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                with name_failed_policy(make):
                    return make(*args, **kwargs)
            except WeirError as error:
                # A list of policies is read before `--budgets` and `--memory` give them a budget.
                given = signature.bind(*args, **kwargs).arguments
                usual = signature.parameters.get("budget")
                if usual is None or usual.default is None or {"budget", "rate"} & given.keys():
                    raise
                default = f"{name} with its default budget={usual.default}"
                raise WeirError(f"{default}: {error}") from error.__cause__

        checked = check_arguments(run, name)

        @functools.wraps(make)
        def makes(*args: Any, **kwargs: Any) -> Any:
            policy = checked(*args, **kwargs)
            # `Policy` cannot be imported here, because the modules that define it import this one.
            if not hasattr(policy, "as_written"):
                raise WeirError(
                    f"the policy function {name} must return a Policy, such as Pipe((Sink(4), "
                    f"Recent(252))), got {quote(policy)}"
                )
            called = PolicyCall.by_name(name, signature.bind(*args, **kwargs).arguments)
            return policy.as_written(policy.text, called)

        NAMED[name] = NamedPolicy(makes, paper)
        return cast(Make, makes)

    return register


def check_not_a_pool(make: Callable[..., Any]) -> None:
    """Refuse the name that a named policy shares with a pool from another package.

    A package may give a policy and a pool of its own the same name, as weir does. `name(64)` on its
    own is then the policy, and inside a pipe it is the pool.
    """
    name = make.__name__
    packages = {made.__module__.partition(".")[0] for made in (make, POOLS.get(name, make))}
    if len(packages) > 1:
        pool = POOLS[name]
        pool_name = f"{pool.__module__}.{pool.__qualname__}"
        if is_own(pool):
            raise WeirError(
                f"a pool called {name} already exists: {pool_name}. Use another name for the "
                "policy."
            )
        raise WeirError(
            f"{name} is both a pool, {pool_name}, and a policy, {make.__module__}."
            f"{make.__qualname__}. Use another name for the pool."
        )


def _check_parameters(make: Callable[..., Any]) -> None:
    """Refuse parameters (WeirError) that a policy text cannot set, or whose values cannot be
    checked.
    """
    for parameter in inspect.signature(make).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise WeirError(
                f"the policy function {make.__name__} has the parameter {parameter}, which a "
                "policy text cannot set. Give every parameter a name."
            )
        if parameter.annotation is parameter.empty:
            raise WeirError(
                f"the parameter {parameter.name} of the policy function {make.__name__} has no "
                f"annotation, so its values cannot be checked. Write, for example, "
                f"{parameter.name}: int."
            )


def load_plugins() -> None:
    """Import every module that an installed package or `WEIR_IMPORT` names, once per process."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted in _loaded:
        return
    _loaded.add(wanted)  # set first, because a plugin may read policies while it is imported
    try:
        for point in entry_points(group=GROUP):
            _load_entry_point(point)
        for name in filter(None, wanted.split(os.pathsep)):
            import_plugin(name)
    except BaseException:
        _loaded.discard(wanted)
        raise


def _load_entry_point(point: Any) -> None:
    try:
        point.load()
    except Exception as error:
        raise WeirError(
            f"the entry point {point.name} = {point.value} of {GROUP} cannot be imported: "
            f"{type(error).__name__}: {error}. Repair or uninstall its package."
        ) from error


def import_plugin(name: str) -> None:
    """Import a module by its name, also from the working folder, or a file that ends with `.py`."""
    path = Path(name)
    try:
        if path.suffix == ".py":
            _import_file(path)
            return
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise WeirError(f"{name} cannot be imported: {error}") from None
        raise WeirError(
            f"there is no module {quote(name)} to import. Use a module that Python finds, or a "
            "file that ends with .py."
        ) from None
    except WeirError as error:
        raise WeirError(f"{name} cannot be imported: {error}") from None
    except Exception as error:
        raise WeirError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> None:
    """Import a file under its own name, as if its folder were on Python's path."""
    if not path.is_file():
        raise WeirError("the file does not exist")
    if path.stem in sys.modules:
        return
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
