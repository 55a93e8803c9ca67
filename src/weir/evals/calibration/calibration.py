"""Which slots of which layer are worth their bytes, measured on a text; and a file that says so.

A policy says how many slots a layer has on average. Here each layer is given those that take away
the most error of its attention for each byte, while all of them together take as many bytes as the
policy does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir import __version__
from weir.cache import DEFAULT, LayerPlan, StreamingCache
from weir.errors import WeirError, quote
from weir.evals.calibration.ladder import ladder
from weir.evals.calibration.measuring import measure
from weir.evals.calibration.sharing import Choice, share_out
from weir.models import fingerprint, window_of
from weir.policies import (
    Layered,
    Pipe,
    Policy,
    Recompute,
    expand_home,
    format_policy_file,
    is_file,
    parse_policy,
)
from weir.stream import read_stream, replace_atomically

PASSAGE = 8
"""A passage is so many times as long as a layer has slots on average, if the window allows it."""
PASSAGES = 8
"""So many are read, unless somebody says how many tokens."""


@dataclass(frozen=True)
class LayerBudget:
    """What was found of one layer.

    Attributes:
        pipe: what it is given.
        nbytes: of its slab, for one stream.
        error: of its attention, relative, with this pipe, and
        before: with the one of the policy.
        tried: every pipe that was tried, as text, with its error; the smallest first.
    """

    pipe: Pipe
    nbytes: int
    error: float
    before: float
    tried: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Calibration:
    """Budgets by layer, and what they were measured on.

    Attributes:
        asked: the policy whose bytes were shared out.
        layers: what was found, from the bottom up; layers that slide over a window of their own are
            not among them.
        nbytes: of all these layers, for one stream, and
        before: as the policy has them.
        chunk: tokens between two folds.
        passages: how many were read, and
        length: how many tokens each has.
        text: the name of the file, and
        digest: SHA-256 of the ids that were read.
        model: the model's fingerprint.
    """

    asked: str
    layers: tuple[LayerBudget, ...]
    nbytes: int
    before: int
    chunk: int
    passages: int
    length: int
    text: str
    digest: str
    model: dict[str, Any]

    @property
    def policy(self) -> Layered:
        """What was found, as a policy."""
        pipes = [layer.pipe for layer in self.layers]
        return Layered(tuple(pipes), f"[{', '.join(pipe.stands_for for pipe in pipes)}]")

    @property
    def errors(self) -> tuple[float, float]:
        """The layers' mean error under the policy that was given, and under what was found."""
        return fmean(it.before for it in self.layers), fmean(it.error for it in self.layers)

    def write(self, path: str | Path) -> None:
        """Write the policy file, whole or not at all.

        Raises:
            WeirError: its name does not end with .toml, or it cannot be written.
        """
        path = check_path(path)
        facts = {
            "weir": __version__,
            "calibrated": self.asked,
            "chunk": self.chunk,
            "bytes": self.nbytes,
            "text": {
                "name": self.text,
                "sha256": self.digest,
                "passages": self.passages,
                "length": self.length,
            },
        }
        layers = [
            {
                "policy": it.pipe.stands_for,
                "slots": it.pipe.slots,
                "bytes": it.nbytes,
                "error": round(it.error, 6),
                "error_before": round(it.before, 6),
                "tried": [[pipe, round(error, 6)] for pipe, error in it.tried],
            }
            for it in self.layers
        ]
        try:
            with replace_atomically(path) as new:
                new.write_text(format_policy_file(facts, self.model, layers), "utf-8")
        except OSError as error:
            raise WeirError(f"cannot write the policy file {path}: {error.strerror}") from None


def check_path(path: str | Path) -> Path:
    """Where a policy file can be written.

    Raises:
        WeirError: its name does not end with .toml, or there is no such folder.
    """
    path = expand_home(path)
    if not is_file(path.name):
        raise WeirError(f"the name of a policy file ends with .toml, which {path.name} does not")
    if not path.parent.is_dir():
        raise WeirError(f"there is no folder {path.parent} to write {path.name} in")
    return path


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    policy: str | Policy = DEFAULT,
    *,
    tokens: int | None = None,
    chunk: int = 64,
    seed: int = 0,
    splits: bool = False,
    on_step: Callable[[float], None] = lambda share: None,
) -> Calibration:
    """Share out the bytes of a policy between a model's layers, by what they are worth on a text.

    The text is read in passages no longer than the model's window, so that there is exact attention
    to compare with. See `measuring` for the error, `ladder` for what is tried and `sharing` for who
    gets the bytes. If that does not lower the mean error, every layer keeps what the policy says.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        text: a file, UTF-8, plain or .xz.
        policy: what a layer holds, one with a limit.
        tokens: so many are read, whole passages of them; by default those of eight passages, or
            what the text has.
        chunk: tokens between two folds.
        seed: of all random draws.
        splits: whether the share of the newest tokens in each layer is measured too.
        on_step: told which share of everything is done.

    Raises:
        WeirError: the text cannot be read or is shorter than a passage, the model cannot be served,
            or the policy has no limit, or slots in one size only, or as many as a passage has
            tokens.
        PolicyError: the policy cannot be read.
    """
    asked = parse_policy(policy)
    plans, sliding = _plans(model, asked, chunk)
    slots = [plan.spec.pipe.slots or 0 for plan in plans.values()]
    length = PASSAGE * round(fmean(slots))
    for limit in (window_of(model.config), None if sliding is None else sliding - chunk):
        length = length if limit is None else min(length, limit)
    if max(slots) + chunk >= length:
        raise WeirError(
            f"{quote(str(asked))} has {max(slots)} slots and a chunk of {chunk}: of {length} "
            "tokens, a passage of what the model reads at once, nothing would have to go, so there "
            "is nothing to measure; take a smaller budget, or less memory"
        )
    ids = read_stream(tokenizer, text, None if tokens is None else tokens + 1).ids
    if tokens is not None and tokens > len(ids):
        raise WeirError(f"the text has {len(ids):,} tokens, so {tokens:,} cannot be read")
    ids = ids[: PASSAGES * length if tokens is None else tokens]
    passages = [each for each in ids.split(length) if len(each) == length]
    if not passages:
        raise WeirError(
            f"{len(ids):,} tokens are too few: a passage has {length:,} here; give a longer text"
        )
    sizes = {
        layer: ladder(plan.spec.pipe, length - chunk, splits=splits)
        for layer, plan in plans.items()
    }
    if all(len(pipes) == 1 for pipes in sizes.values()):
        raise WeirError(f"{quote(str(asked))} comes in one size only, so nothing can be shared out")
    errors = measure(model, passages, sizes, chunk=chunk, seed=seed, on_step=on_step)
    layers, before = _shared_out(plans, sizes, errors)
    return Calibration(
        asked=str(asked),
        layers=layers,
        nbytes=sum(layer.nbytes for layer in layers),
        before=before,
        chunk=chunk,
        passages=len(passages),
        length=length,
        text=Path(text).name.encode("utf-8", "replace").decode(),
        digest=hashlib.sha256(b"".join(it.numpy().tobytes() for it in passages)).hexdigest(),
        model=fingerprint(model),
    )


def _plans(
    model: PreTrainedModel, policy: Policy, chunk: int
) -> tuple[dict[int, LayerPlan], int | None]:
    """The layers that a policy holds, by their place; and the window, if all of them slide."""
    if isinstance(policy, Recompute):
        raise WeirError("recompute caches nothing, so there are no slots to share out")
    if any(pipe.slots is None for pipe in policy.pipes):
        raise WeirError(f"{policy} has no limit, so there is nothing to share out")
    cache = StreamingCache(model, policy, chunk=chunk)
    cache.detach()
    held = {
        layer: plan for layer, plan in enumerate(cache.plans) if plan.spec.positions.window is None
    }
    return held, cache.attachment.facts.sliding


def _shared_out(
    plans: dict[int, LayerPlan], sizes: dict[int, list[Pipe]], errors: dict[int, list[float]]
) -> tuple[tuple[LayerBudget, ...], int]:
    """What each layer gets; and the bytes of what they had."""
    choices, own = [], []
    for layer, plan in plans.items():
        specs = [replace(plan.spec, pipe=pipe) for pipe in sizes[layer]]
        nbytes = [replace(plan, spec=spec).slab.nbytes() for spec in specs]
        choices.append([Choice(*it) for it in zip(nbytes, errors[layer], strict=True)])
        own.append(sizes[layer].index(plan.spec.pipe))
    before = [each[place] for each, place in zip(choices, own, strict=True)]
    total = sum(choice.nbytes for choice in before)
    taken = share_out(choices, total)
    after = [each[place] for each, place in zip(choices, taken, strict=True)]
    if fmean(it.error for it in after) >= fmean(it.error for it in before):
        taken, after = own, before
    found = tuple(
        LayerBudget(
            pipe=sizes[layer][place],
            nbytes=now.nbytes,
            error=now.error,
            before=was.error,
            tried=tuple(
                (pipe.stands_for, error)
                for pipe, error in zip(sizes[layer], errors[layer], strict=True)
            ),
        )
        for layer, place, now, was in zip(plans, taken, after, before, strict=True)
    )
    return found, total
