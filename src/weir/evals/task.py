"""Base class of tasks, which measure a model under a policy, and the registry of tasks.

A task is a dataclass of its parameters, written like a pool: `ppl(tokens=20000)`. `notation` reads
lists of tasks, `grid` runs them. The descriptions of tasks often leave out these parameters:

- `file`: a file of JSON lines, plain, `.gz` or `.xz`; or a data set of the Hub, `hub:...`. Only the
  file of `babi` has another format.
- `samples`: in a task with a `file`, how many records are used, from the first on. If the default
  is None, all records are used.
- `chat`: whether prompts are put into the model's chat template.
- `text`: a file of books, UTF-8, plain or `.xz`, that replaces the packaged one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.cache import Positions, Prefill
from weir.errors import WeirError
from weir.evals.notation import with_budget
from weir.policies import KVzip, Policy, parse_policy
from weir.pools import check_arguments
from weir.stream import Stream

Better = Literal["higher", "lower"]
Progress = Callable[[float], None]
"""Function called with the share of a task that is done, from 0 to 1."""


@dataclass(frozen=True)
class Subject:
    """A model under a policy, with the settings of its streams.

    Attributes:
        name: name of the model, as given.
        model: the model.
        tokenizer: its tokenizer.
        policy: the policy; without a budget if `rate` is given.
        seed: seed of all random draws, including the task's own.
        chunk: tokens between two folds.
        positions: as for `Stream`.
        prefill: as for `Stream`; "full" reads a prompt whole and compresses it once.
        rate: sets the budget to this share of the prompt; None uses the policy as it is.
        keeps_answers: whether all tokens that follow a prompt are kept.
        loading: how the model was loaded, pairs of an argument of `weir.load` and its value.
        ran: by policy, the pools of the last stream that was made under it. They can differ from
            those that the policy's name stands for without a model, because the pools of the policy
            `weir` depend on the weights.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    policy: Policy
    seed: int = 0
    chunk: int = 64
    positions: Positions = "rolling"
    prefill: Prefill = "chunked"
    rate: float | None = None
    keeps_answers: bool = False
    loading: tuple[tuple[str, Any], ...] = ()
    ran: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    def stream(self, prompt: int | None = None, answer: int = 0) -> Stream:
        """Make a new stream.

        Args:
            prompt: number of tokens of the prompt; None for a stream without a separate prompt.
            answer: maximum number of tokens that follow the prompt.

        Raises:
            WeirError: the model is not supported; `rate` is given, but there is no prompt, or the
                policy takes no budget or already has one; or there is no prompt for `kvzip` to
                read.
        """
        policy, chunk = self.policy, self.chunk
        if prompt is None and isinstance(policy, KVzip):
            raise WeirError(
                "kvzip chooses once, after it has read the whole text, but this task goes on "
                "reading. Use a task with a prompt, such as needle, lines, docqa, ruler or "
                "agreement."
            )
        if self.rate is not None:
            if prompt is None:
                raise WeirError(
                    f"a rate of {self.rate} needs a prompt, and this task streams without one. "
                    "Give a budget, and leave out the protocol."
                )
            policy = parse_policy(with_budget(str(policy), max(1, round(prompt * self.rate))))
        if self.keeps_answers and prompt is not None:
            # The tail folds when it is full, so it gets space for the whole answer and one more
            # token.
            chunk = max(chunk, answer + 1)
        made = Stream(
            self.model,
            policy,
            chunk=chunk,
            seed=self.seed,
            positions=self.positions,
            prefill=self.prefill,
            tokenizer=self.tokenizer,
        )
        self.ran[str(self.policy)] = made.policy.stands_for
        return made


class Task(ABC):
    """A measurement. Subclasses are frozen dataclasses of their parameters.

    Attributes:
        name: name of the task.
        metrics: figures of `run` that are compared, most important first, and whether higher or
            lower is better.
        drawn: whether the questions depend on the seed. If neither they nor the policy do, one seed
            is enough.
    """

    name: ClassVar[str]
    drawn: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, Better]]

    def settings(self) -> Sequence[Task]:
        """Return the tasks to run and record one by one: this task, or one task for each value of
        a parameter that has several.

        Raises:
            WeirError: the parameters contradict each other.
        """
        return (self,)

    @abstractmethod
    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Measure.

        Args:
            subject: the model and policy to measure.
            progress: called from time to time with the share that is done.

        Returns:
            Figures by name, as JSON holds them: those of `metrics` (None where nothing was
            measured), "kv_bytes" (the cache of one stream at its largest; None or left out if the
            task reads no stream), and whatever else a report can use: counts, lists by position,
            the cells of a heat map.

        Raises:
            WeirError: the measurement is impossible; the message is recorded as the reason.
        """

    def __str__(self) -> str:
        """The task in its notation, with every parameter."""
        values = vars(self).items()
        inner = ", ".join(f"{name}={_format_value(value)}" for name, value in values)
        return f"{self.name}({inner})" if inner else self.name


TASKS: dict[str, type[Task]] = {}
"""Every task, by name."""

AnyTask = TypeVar("AnyTask", bound=type[Task])


def task(name: str) -> Callable[[AnyTask], AnyTask]:
    """Register a class of tasks under a name. The class then refuses values that its annotations do
    not allow.
    """

    def register(kind: AnyTask) -> AnyTask:
        kind.name = name
        TASKS[name] = check_arguments(kind, name)
        return kind

    return register


def _format_value(value: Any) -> str:
    """Format a value; strings that need quotes get them."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return str(value)
    if value.isidentifier() and value.lower() not in ("true", "false", "none"):
        return value
    return f"'{value}'" if '"' in value else f'"{value}"'
