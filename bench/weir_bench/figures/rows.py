"""Figures of several rows in a batch: in step and ragged, matrix products, and rows one by one.

Rows in step fold in the same call. Ragged rows have begun at different times, so that they fold in
different calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from weir.errors import WeirError
from weir.loading import load
from weir.native import choose_products, compile_steps
from weir.serve import Engine, SampledToken, Sampler, SamplingParams, SessionStore, TokenSequence
from weir.stream import Sampling
from weir_bench.caches import Dynamic, Weir
from weir_bench.figure import Row, Setting, Skipped, compare, figure
from weir_bench.figures.decode import roofline
from weir_bench.model import bandwidth, model_of, twin_of, weight_bytes
from weir_bench.timing import Contender, in_turns, middle

POLICY = "streaming_llm"
ROWS = 16
ASKED = 1.5
"""Most milliseconds that a compiled step of nano should take."""
BATCHES = (2, 4, 8, 16, 32, 64)
SLOTS = 256
"""Slots of a row. With more slots, 64 rows in step and 64 ragged rows need many gigabytes."""
FEW = (1, 4, 16)
"""Numbers of rows in the figures `products` and `deterministic`."""
MOST = 1 << 20
"""The length limit of an answer in tokens, which no measurement reaches."""


class RaggedRows(Weir):
    """A step of a batch in which each row is past its budget.

    Args:
        later: how many tokens later each row begins than the first.

    Attributes:
        folding: whether each step so far has folded.
    """

    def __init__(
        self, model: PreTrainedModel, policy: str, chunk: int, later: list[int], slots: int
    ) -> None:
        super().__init__(model, policy, chunk, rows=len(later))
        self.folding: list[bool] = []
        length = slots + 2 * chunk
        generator = torch.Generator().manual_seed(0)
        shape = (len(later), length)
        ids = torch.randint(model.config.vocab_size, shape, generator=generator)
        self.feed_masked(ids, torch.arange(length) >= torch.tensor(later)[:, None])
        self.folds.clear()

    def step(self) -> None:
        """Decode one token of each row, and record whether the step folded."""
        before = len(self.folds)
        super().step()
        self.folding.append(len(self.folds) > before)


class QuietRows(Weir):
    """A step of rows past their budget. None of the rows folds in the next steps."""

    def __init__(
        self, model: PreTrainedModel, slots: int, chunk: int, rows: int, *, ragged: bool = False
    ) -> None:
        super().__init__(model, f"{POLICY}(budget={slots})", chunk)
        self.fill(slots + chunk)
        self.start_afresh()
        # All rows are copies of one, because reading a prompt for each would take minutes and the
        # time of a step does not depend on the contents.
        self.cache.batch_repeat_interleave(rows)
        self.token = torch.ones(rows, 1, dtype=torch.int64)
        most = chunk // 2
        if ragged and most > 1:
            count = torch.arange(rows) * 5 % most
            real = torch.arange(most) >= most - count[:, None]
            self.feed_masked(self.token.expand(rows, most), real)


@figure("rows")
def rows(setting: Setting) -> Iterator[Row]:
    """Time steps of 16 rows on the bench's model and on nano, without and with compiled steps."""
    sizes = setting.sizes
    models: dict[str, tuple[list[PreTrainedModel], int]] = {
        "": ([model_of(setting), twin_of(setting)], sizes.slots)
    }
    if sizes.nano:
        packaged = [load("nano", dtype=setting.dtype)[0] for _ in range(2)]
        models[" of `nano`"] = packaged, min(SLOTS, sizes.slots)
    for whose, ((plain, twin), slots) in models.items():
        where = f"{whose}, {slots:,} slots"
        yield from _sixteen(plain, where, slots, setting)
        compile_steps(twin, strict=True)
        setting.say(f"compiling steps of {ROWS} rows")
        try:
            found = list(_sixteen(twin, f"{where}, compiled", slots, setting))
            yield from found
            if whose:
                what = f"decode step of one row{where}, compiled ÷ {ASKED:g} ms"
                yield compare(what, found[-1].peer / 1e3, ASKED / 1e3, 1.0)
        except WeirError as error:
            setting.say(str(error))


def _sixteen(model: PreTrainedModel, where: str, slots: int, setting: Setting) -> Iterator[Row]:
    policy, chunk = f"{POLICY}(budget={slots})", setting.sizes.chunk
    # The offsets are multiples of a number coprime to the chunk, so that all rows fold at
    # different steps.
    later = [row * 37 % chunk for row in range(ROWS)]
    contenders = {
        "one": RaggedRows(model, policy, chunk, [0], slots),
        "in step": RaggedRows(model, policy, chunk, [0] * ROWS, slots),
        "ragged": RaggedRows(model, policy, chunk, later, slots),
    }
    # A multiple of the chunk, so that every tail is timed at each of its lengths.
    rounds = max(2, setting.sizes.steps // chunk) * chunk
    times = in_turns(contenders, rounds, warm=3)
    plain = _without_folds(times, contenders, warm=3)
    one, many, ragged = (plain[name] for name in contenders)
    yield compare(
        f"decode call of {ROWS} ragged rows ÷ of {ROWS} rows in step{where}",
        ragged,
        many,
        1.05,
        note="medians of the calls in which none of the caches folds",
    )
    what = f"tokens per second of {ROWS} rows in step ÷ of one row{where}"
    yield _pace(what, many, one, ROWS, 8.0, note="the same calls")


def _pace(
    what: str, many: float, one: float, rows: int, target: float | None = None, note: str = ""
) -> Row:
    """Return a row for the tokens per second of `rows` rows ÷ those of one row.

    Args:
        what: the comparison, in words.
        many: seconds of a call with `rows` rows.
        one: seconds of a call with one row.
        rows: the number of rows.
        target: the lower limit of the ratio.
        note: a remark.
    """
    ratio = rows * one / many
    return Row(
        what, many * 1e3 / rows, one * 1e3, "ms a token", ratio, target, least=True, note=note
    )


def _without_folds(
    times: Mapping[str, list[float]], contenders: Mapping[str, RaggedRows], warm: int
) -> dict[str, float]:
    """Return the median of each contender's steps over the rounds in which no cache folded."""
    folding = zip(*(contender.folding[warm:] for contender in contenders.values()), strict=True)
    quiet = [not any(turn) for turn in folding]
    kept = {
        name: [took for took, free in zip(taken, quiet, strict=True) if free]
        for name, taken in times.items()
    }
    # With very short tails, every round has a fold. Then all rounds are used.
    return {name: median(kept[name] or times[name]) for name in times}


@figure("batches")
def batches(setting: Setting) -> Iterator[Row]:
    """Compare the tokens per second of several rows with those of one row."""
    model, slots = model_of(setting), min(SLOTS, setting.sizes.slots)
    chunk = setting.sizes.chunk
    for rows in BATCHES:
        setting.say(f"{rows} rows")
        ways = {
            "alone": QuietRows(model, slots, chunk, 1),
            "in step": QuietRows(model, slots, chunk, rows),
            "ragged": QuietRows(model, slots, chunk, rows, ragged=True),
        }
        times = middle(in_turns(ways, min(8, setting.sizes.steps), warm=2))
        for name in ("in step", "ragged"):
            what = f"tokens per second of {rows} rows {name} ÷ of one row, {slots:,} slots"
            note = f"{rows / times[name]:,.0f} tokens a second"
            yield _pace(what, times[name], times["alone"], rows, note=note)


@figure("products")
def products(setting: Setting) -> Iterator[Row]:
    """Compare steps of 1, 4 and 16 rows with and without `weir.choose_products`.

    A first row shows the effect of large memory pages alone. One row is also compared with
    `DynamicCache` and with the roofline. Products are timed again for this figure, and the choices
    that are saved for this machine are not changed.
    """
    plain, chosen = model_of(setting), twin_of(setting)
    with ExitStack() as ending:
        scratch = Path(ending.enter_context(TemporaryDirectory()))
        setting.say("timing matrix products")
        gains = choose_products(chosen, remembered=scratch / "products.json")
    if not gains:
        raise Skipped("there is no kernel for products here: numba is not installed")
    sizes = setting.sizes
    reading = {"chosen": partial(_read, chosen), "usual": partial(_read, plain)}
    read = middle(in_turns(reading, sizes.steps, warm=3))
    yield compare(
        "all weights read once, after moving them into large memory pages ÷ before",
        read["chosen"],
        read["usual"],
        note="reading is summing; without large pages in Linux, both are the same",
    )
    policy = f"{POLICY}(budget={sizes.slots})"
    for rows in FEW:
        ours, usual = (
            RaggedRows(model, policy, sizes.chunk, [0] * rows, sizes.slots)
            for model in (chosen, plain)
        )
        ways: dict[str, Contender] = {"chosen": ours, "usual": usual}
        if rows == 1:
            ways["DynamicCache"] = Dynamic(plain, sizes.slots)
        times = middle(in_turns(ways, sizes.steps, warm=3))
        for peer in list(ways)[1:]:
            beside = "with PyTorch's products" if peer == "usual" else f"{peer} of {sizes.slots:,}"
            yield compare(
                f"decode step of {rows} {'rows' if rows > 1 else 'row'}, `{POLICY}` at "
                f"{sizes.slots:,} slots, products chosen ÷ {beside}",
                times["chosen"],
                times[peer],
                None if peer == "usual" else 0.97,
            )
        if rows == 1:
            least = (weight_bytes(plain) + ours.read_bytes) / bandwidth(sizes.copied)
            yield roofline(f"{sizes.slots:,} slots, products chosen", times["chosen"], least, 0.7)


def _read(model: PreTrainedModel) -> None:
    """Read every weight of a model once."""
    for weight in model.parameters():
        weight.sum()


@figure(
    "deterministic",
    asked=True,
)
def deterministic(setting: Setting) -> Iterator[Row]:
    """Measure the cost of `weir serve --deterministic` on the bench's model and on nano."""
    sizes = setting.sizes
    models = {"": model_of(setting), " of `nano`": load("nano", dtype=setting.dtype)[0]}
    for whose, model in models.items():
        policy = f"{POLICY}(budget={min(SLOTS, sizes.slots)})"
        for rows in FEW:
            setting.say(f"{rows} answers{whose}")
            contenders = {
                name: Answering(model, policy, sizes.chunk, rows, apart=apart)
                for name, apart in (("apart", True), ("together", False))
            }
            took = middle(in_turns(contenders, min(sizes.steps, 24), warm=2))
            what = f"a step of {rows} answers, each row by itself ÷ all together{whose}"
            yield compare(what, took["apart"], took["together"])


class Answering(Contender):
    """A step of the server's engine in which every row answers.

    `apart` decodes each row by itself, as `weir serve --deterministic` does.
    """

    def __init__(
        self, model: PreTrainedModel, policy: str, chunk: int, rows: int, *, apart: bool
    ) -> None:
        self._engine = Engine(model, policy, rows, SessionStore(), chunk=chunk, deterministic=apart)
        generator = torch.Generator().manual_seed(0)
        for row in range(rows):
            ids = torch.randint(model.config.vocab_size, (32 + row,), generator=generator)
            chooser = Sampler(SamplingParams(Sampling(temperature=0)))
            turn = TokenSequence(
                str(row), None, ids.tolist(), MOST, frozenset(), chooser, NoListener()
            )
            self._engine.submit(turn)
        for _ in range(rows):  # each step reads at least one prompt
            self._engine.step()

    def step(self) -> None:
        """Decode one token of each answer."""
        self._engine.step()


class NoListener:
    """A listener that ignores every answer."""

    def on_token(self, token: SampledToken) -> str | None:
        """Let the answer continue."""
        return None

    def on_finish(self, reason: str) -> None:
        """Ignore the end."""

    def on_failure(self, error: Exception) -> None:
        """Raise the error, because a failed answer must not be timed."""
        raise error
