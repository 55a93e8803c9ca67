"""The grid of an evaluation: models, policies, budgets, tasks, seeds, and the papers' protocols."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.cache import Positions, Prefill, check_origin, depends_on_weights
from weir.errors import WeirError, suggest
from weir.evals.fitting import Counted, bytes_of, check_fixed, check_slots, fit_to_memory
from weir.evals.notation import read_policies, read_tasks, takes_budget, with_budget
from weir.evals.results import read_results
from weir.evals.task import Task
from weir.evals.tasks import TASKS
from weir.loading import is_gguf, load, skeleton
from weir.native import compile_steps, has_block_weights
from weir.policies import NAMED, Layered, Pipe, is_file, parse_call, parse_policy, with_slots

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
"""A model and its tokenizer."""


@dataclass(frozen=True)
class PaperProtocol:
    """The way a paper's experiments read a prompt, with fields as in `Subject`.

    `about` describes it in a sentence. If `chunk` or `rate` is None, the user chooses it.
    """

    about: str
    chunk: int | None = None
    positions: Positions = "rolling"
    prefill: Prefill = "chunked"
    rate: float | None = None
    keeps_answers: bool = False


PROTOCOLS: dict[str, PaperProtocol] = {
    "streaming_llm": PaperProtocol(
        "evict after every token, positions inside the cache (section 3.2)", chunk=1
    ),
    "reservoir": PaperProtocol(
        "the same as streaming_llm, because the paper adds its sample to StreamingLLM's cache "
        "(section 3)",
        chunk=1,
    ),
    "subgen": PaperProtocol(
        "the prompt is read whole and compressed once to half, the largest reduction of Table 1; "
        "positions in the stream, and everything after the prompt is kept (section 3.2)",
        positions="original",
        prefill="full",
        rate=0.5,
        keeps_answers=True,
    ),
    "balancekv": PaperProtocol(
        "the prompt is read whole and compressed once to a quarter; positions in the stream, and "
        "everything after the prompt is kept (section 4.2, appendix B)",
        positions="original",
        prefill="full",
        rate=0.25,
        keeps_answers=True,
    ),
    "buzz": PaperProtocol(
        "the prompt is read whole and then thinned, and after it eviction goes on token by token; "
        "positions inside the cache (section 3, Remark 2)",
        chunk=1,
        prefill="full",
    ),
}
"""The papers' protocols, by name."""


def protocol(name: str) -> PaperProtocol:
    """Look up a protocol by name; WeirError if there is none."""
    if name not in PROTOCOLS:
        raise WeirError(
            f"unknown protocol {name!r}{suggest(name, PROTOCOLS)}. Use one of "
            f"{', '.join(PROTOCOLS)}."
        )
    return PROTOCOLS[name]


Equal = Literal["slots", "bytes", "kv"]
"""All policies of a grid get equally many slots, bytes of the whole cache, or bytes of keys and
values.
"""
YARDSTICK = "streaming_llm"
"""If bytes must be equal and only budgets are given, all policies get the bytes of this policy with
each budget.
"""
NOT_IN_EVERY = {"recompute", "kvzip", "pinned", "pyramid", "quantized"}
"""Named policies that `all` leaves out: those that do not stream, and those that take another
policy.
"""


@dataclass(frozen=True)
class Cell:
    """One measurement: everything that its figures depend on.

    Attributes:
        model, task: name of the model, as given, and the task with all its parameters.
        policy, budget: the policy with its budget inserted, and the budget if it was inserted.
        seed, chunk, positions: as for `Stream`; a protocol has its own positions.
        protocol: the paper's protocol, if the cell follows one.
        memory: bytes from which the budget was computed; None if it was not computed from bytes.
        equal: "kv" if `memory` counts only bytes of keys and values; None otherwise.
        loading: how the model is loaded, as pairs of an argument of `weir.load` and its value.
        compiled: whether decode steps are compiled; always false for a model given as an object.
        pools: the pools that the policy's name stands for, which can change between versions of
            weir; None for a policy that is written as pools.
    """

    model: str
    policy: str
    budget: int | None
    task: str
    seed: int
    protocol: str | None = None
    chunk: int = 64
    positions: Positions = "rolling"
    memory: int | None = None
    loading: tuple[tuple[str, Any], ...] = ()
    compiled: bool = False
    pools: str | None = None
    equal: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields; the last five only if they are set."""
        facts = {**asdict(self), "loading": dict(self.loading)}
        seldom = ("memory", "loading", "compiled", "pools", "equal")
        return {k: v for k, v in facts.items() if v or k not in seldom}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Cell:
        """Make a cell from the fields of `as_json`."""
        return cls(**{**facts, "loading": tuple(dict(facts.get("loading", {})).items())})

    def the_task(self) -> Task:
        """The parsed task."""
        task: Task
        (task,) = read_tasks(self.task, TASKS)
        return task


@dataclass(frozen=True)
class Grid:
    """Cells in running order. `make_grid` orders them by model, task, policy, budget and seed."""

    cells: tuple[Cell, ...]

    @property
    def fingerprint(self) -> str:
        """Return a hash that identifies the cells."""
        text = json.dumps([cell.as_json() for cell in self.cells], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """The first line of a results file."""
        cells = [cell.as_json() for cell in self.cells]
        return {"grid": self.fingerprint, "cells": cells}


def make_grid(
    models: Sequence[str] | Mapping[str, Any],
    tasks: str,
    policies: str,
    *,
    budgets: Sequence[int] = (),
    memory: Sequence[int] = (),
    equal: Equal | None = None,
    seeds: Sequence[int] = (0,),
    paper: str | None = None,
    chunk: int | None = None,
    positions: Positions = "rolling",
    slots: str | None = None,
    loading: Mapping[str, Any] = MappingProxyType({}),
    compiled: bool = False,
) -> Grid:
    """Make all cells of models × tasks × policies × budgets × seeds.

    Args:
        models: names, folders or Hub ids; or a mapping of names to (model, tokenizer), which must
            also be passed to `run`.
        tasks: a list of tasks, as `read_tasks` takes it.
        policies: a list of policies and policy files; policies from files are written in full.
            `all` stands for every named policy except those in `NOT_IN_EVERY`.
        budgets: inserted into each policy that takes a budget and was written without one.
        memory: instead of budgets, bytes of one stream's cache. On each model, a policy gets the
            largest budget that fits, within the model's window. Weights are loaded only for the
            policy `weir`, because they decide its slots: 8 bits on models that do not tolerate 4. A
            policy that is written with its own budget has to fit into the largest of these sizes;
            `dense` and others without a limit run unchanged.
        equal: what is equal for all policies: `slots` (the budgets), `bytes` (the whole cache) or
            `kv` (only keys and values of slots). The default is `bytes` with `memory`, otherwise
            `slots`. Without `memory`, `bytes` and `kv` use the sizes of `streaming_llm` at the
            budgets.
        seeds: every cell runs with each seed; deterministic cells run only with the first.
        paper: a protocol's name.
        chunk: tokens between two folds; by default the protocol's, or 64.
        positions: as for `Stream`; a protocol overrides this.
        slots: storage format of every policy's slots, except those of the first and the newest
            tokens (`weir.policies.with_slots`).
        loading: how models are loaded, arguments of `weir.load`.
        compiled: whether to compile decode steps of models that are loaded.

    Raises:
        WeirError: something cannot be parsed, or is unknown, invalid or listed twice; or `compiled`
            is set and models are given as objects.
    """
    for what, found in (("model", models), ("seed", seeds)):
        if not found:
            raise WeirError(f"an evaluation needs at least one {what}")
    for seed, times in Counter(seeds).items():
        if times > 1:
            raise WeirError(f"the seed {seed} is in this grid twice. Leave one out.")
    if compiled and isinstance(models, Mapping):
        raise WeirError(
            "only models loaded by name can be compiled here. For a model object, call "
            "weir.compile_steps(model)."
        )
    rules = PaperProtocol("", positions=positions) if paper is None else protocol(paper)
    if equal == "slots" and memory:
        raise WeirError(
            "equal slots are given as budgets, not as memory. Use budgets, or compare at equal "
            "bytes or kv."
        )
    if equal is not None and not (memory or budgets or rules.rate):
        raise WeirError(f"equal {equal} needs sizes. Use budgets or memory.")
    if equal is not None and memory and budgets:
        raise WeirError(
            f"equal {equal} takes either budgets (the bytes are then those of {YARDSTICK} with "
            "each budget) or memory, got both. Leave out one of them."
        )
    if rules.rate is not None and equal is not None:
        raise WeirError(
            f"with the protocol {paper}, every budget is {rules.rate:g} of the prompt's length, so "
            "all policies have equally many slots. Leave out equal or the protocol."
        )
    if rules.rate is not None and (budgets or memory):
        raise WeirError(
            f"with the protocol {paper}, every budget is {rules.rate:g} of the prompt's length. "
            f"Leave out the {'budgets' if budgets else 'memory'} or the protocol."
        )
    folds = (rules.chunk or 64) if chunk is None else chunk

    @cache
    def shape_of(name: str) -> PreTrainedModel:
        """Return the given model, or one without weights."""
        if isinstance(models, Mapping):
            given: PreTrainedModel = models[name][0]
            return given
        return skeleton(name, **loading)

    def how(name: str) -> tuple[tuple[str, Any], ...]:
        """Return the arguments that a model is loaded with, as its cells record them.

        What `load` chooses for a GGUF file depends on the machine, so it is recorded, too. A run
        that is resumed on another machine then measures again, and does not mix two kinds of
        weights.
        """
        chosen = dict(loading)
        stored = not isinstance(models, Mapping) and is_gguf(name)
        if stored and loading.get("weights") is None and has_block_weights(shape_of(name)):
            chosen["weights"] = "gguf"
        return tuple(sorted(chosen.items()))

    def sizing(name: str, policy: str) -> PreTrainedModel:
        """Return the model by which a policy is sized, with its weights if they determine the
        slots.
        """
        if isinstance(models, Mapping) or not _by_weights(policy):
            return shape_of(name)
        return load_cached(name, how(name), compiled)[0]

    counted: Counted = "kv" if equal == "kv" else "bytes"
    in_slots = () if equal in ("bytes", "kv") else budgets

    @cache
    def sizes(model: str) -> tuple[int, ...]:
        """Return the bytes at which the policies of a model are compared."""
        if memory or in_slots:
            return tuple(memory)
        each = (with_budget(YARDSTICK, budget) for budget in budgets)
        return tuple(
            bytes_of(shape_of(model), one, folds, rules.positions, counted) for one in each
        )

    def sized(model: str, policy: str) -> list[tuple[str, int | None, int | None]]:
        """Return a policy with each budget inserted, the budget, and the memory from which the
        budget was computed.
        """
        how_sized = folds, model, rules.positions, counted
        if not (budgets or memory) or not takes_budget(policy):
            if rooms := sizes(model):
                check_fixed(sizing(model, policy), policy, max(rooms), *how_sized)
            elif equal == "slots":
                check_slots(policy, max(budgets))
            return [(policy, None, None)]
        found = [(with_budget(policy, budget), budget, None) for budget in in_slots]
        fitting = [
            (*fit_to_memory(sizing(model, policy), policy, room, *how_sized), room)
            for room in sizes(model)
        ]
        return [*found, *fitting]

    for file in filter(is_file, policies.split(",")):
        for name in models:
            check_origin(parse_policy(file), shape_of(name))
    settings = [setting for made in read_tasks(tasks, TASKS) for setting in made.settings()]
    cells = [
        Cell(
            model,
            policy,
            budget,
            str(setting),
            seed,
            paper,
            folds,
            rules.positions,
            room,
            how(model),
            compiled,
            named_pools(policy),
            "kv" if room is not None and counted == "kv" else None,
        )
        for model in models
        for setting in settings
        for written in _each(policies, slots)
        for policy, budget, room in sized(model, written)
        for seed in (seeds if _is_random(setting, policy) else seeds[:1])
    ]
    (twice, times), *_ = Counter(cells).most_common(1)
    if times > 1:
        raise WeirError(
            f"{twice.task} of {twice.model} under {twice.policy} with seed {twice.seed} is in "
            "this grid twice. Leave one out."
        )
    return Grid(tuple(cells))


@lru_cache(maxsize=1)
def load_cached(name: str, loading: tuple[tuple[str, Any], ...], compiled: bool) -> Loaded:
    """Load a model. Only the last model is cached, because cells of one model are adjacent."""
    model, tokenizer = load(name, **dict(loading))
    if compiled:
        compile_steps(model, strict=True)  # otherwise a cell could wrongly claim compiled steps
    return model, tokenizer


def _each(policies: str, slots: str | None) -> list[str]:
    """Expand a list of policies, with `all` replaced, and apply the slot format."""
    every = ", ".join(name for name in NAMED if name not in NOT_IN_EVERY)
    words = [every if word.strip() == "all" else word for word in policies.split(",")]
    found = read_policies(",".join(words))
    return found if slots is None else [str(with_slots(parse_policy(one), slots)) for one in found]


def _by_weights(policy: str) -> bool:
    """Whether a model's weights determine the slots of a policy, which may lack its budget."""
    call = parse_call(policy)
    if call is not None and call.name == "weir":
        return True
    try:
        return depends_on_weights(parse_policy(policy))
    except WeirError:  # it has no budget yet
        return False


def _is_random(setting: Task, policy: str) -> bool:
    """Whether the seed can change a task's figures under a policy."""
    if setting.drawn:
        return True
    try:
        pipes = parse_policy(policy).pipes
    except WeirError:  # it has no budget yet, or no pools
        return True
    return any(pool.is_stochastic for pipe in pipes for pool in pipe.pools)


def named_pools(policy: str) -> str | None:
    """Return the pools that a policy's name now stands for; None for a policy that is written as
    pools, or lacks its budget.
    """
    try:
        found = parse_policy(policy)
    except WeirError:  # it has no budget yet
        return None
    each = found.policies if isinstance(found, Layered) else (found,)
    in_pools = all(isinstance(one, Pipe) and one.called is None for one in each)
    return None if in_pools or found.stands_for == policy else found.stands_for


def extend_grid(path: Path, grid: Grid) -> Grid:
    """Append cells to the grid of a results file, without duplicates, if the file exists.

    Cells in the file keep their numbers, so the file's records stay valid. A policy whose name now
    stands for other pools counts as another policy. Raises WeirError if the file is not a results
    file, if this version of weir cannot read its cells, or if its models contain Python code and
    `grid` does not allow that.
    """
    if not path.exists() or (path.is_file() and not path.stat().st_size):
        return grid
    known = {field.name for field in fields(Cell)}
    there = read_results(path)[0]["cells"]
    if any(set(cell) - known for cell in there):
        raise WeirError(f"{path} was written by another version of weir. Use another file.")
    try:
        old = dict.fromkeys(Cell.of(cell) for cell in there)
    except (TypeError, ValueError):
        raise WeirError(f"{path} has cells with missing fields. Use another file.") from None

    def runs_code(cell: Cell) -> bool:
        """Whether loading a cell's model runs Python code from the model's repository."""
        return bool(dict(cell.loading).get("trust_remote_code"))

    if any(map(runs_code, old)) and not any(map(runs_code, grid.cells)):
        raise WeirError(
            f"{path} has cells whose models contain Python code. To run it, pass "
            "--trust-remote-code. Read the code first."
        )
    return Grid((*old, *(cell for cell in grid.cells if cell not in old)))
