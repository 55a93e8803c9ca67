"""What `weir.choose_products` brings: decode steps with products that were chosen by measuring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel

from weir.models import choose_products
from weir_bench.caches import Dynamic
from weir_bench.figure import Row, Setting, Skipped, figure
from weir_bench.figures.rows import POLICY, Rows
from weir_bench.model import bandwidth, model_of, twin_of, weight_bytes
from weir_bench.timing import Contender, Doing, in_turns, middle

ROWS = (1, 4, 16)


@figure("products", "decode steps with chosen matrix products beside PyTorch's", bound="bytes")
def products(setting: Setting) -> Iterator[Row]:
    """`streaming_llm` for 1, 4 and 16 rows; for one also `DynamicCache` and the roofline. Before
    that, what large pages of memory bring by themselves.

    Products are timed anew, and what is kept of this machine is left alone.
    """
    plain, chosen = model_of(setting), twin_of(setting)
    with ExitStack() as ending:
        scratch = Path(ending.enter_context(TemporaryDirectory()))
        setting.say("timing matrix products")
        gains = choose_products(chosen, remembered=scratch / "products.json")
    if not gains:
        raise Skipped("there is no kernel for products here: numba is not installed")
    sizes = setting.sizes
    reading = {"chosen": Doing(partial(_read, chosen)), "usual": Doing(partial(_read, plain))}
    read = middle(in_turns(reading, sizes.steps, warm=3))
    yield Row(
        "all weights read once, moved into large pages ÷ where they were",
        read["chosen"] * 1e3,
        read["usual"] * 1e3,
        "ms",
        read["chosen"] / read["usual"],
        note="a sum of each; where Linux has no large pages both are the same",
    )
    policy = f"{POLICY}(budget={sizes.slots})"
    for rows in ROWS:
        ways: dict[str, Contender] = {
            name: Rows(model, policy, sizes.chunk, [0] * rows, sizes.slots)
            for name, model in {"chosen": chosen, "usual": plain}.items()
        }
        if rows == 1:
            ways["DynamicCache"] = Dynamic(plain, sizes.slots)
        times = middle(in_turns(ways, sizes.steps, warm=3))
        for peer in list(ways)[1:]:
            beside = "with PyTorch's products" if peer == "usual" else f"{peer} of {sizes.slots:,}"
            yield Row(
                f"decode step of {rows} {'rows' if rows > 1 else 'row'}, `{POLICY}` at "
                f"{sizes.slots:,} slots, products chosen ÷ {beside}",
                times["chosen"] * 1e3,
                times[peer] * 1e3,
                "ms",
                times["chosen"] / times[peer],
                None if peer == "usual" else 0.97,
            )
        if rows == 1:
            ours = ways["chosen"]
            assert isinstance(ours, Rows)
            least = (weight_bytes(plain) + ours.read_bytes) / bandwidth(sizes.copied)
            yield Row(
                f"share of the roofline, decode at batch 1, {sizes.slots:,} slots, products chosen",
                times["chosen"] * 1e3,
                least * 1e3,
                "ms",
                least / times["chosen"],
                0.7,
                least=True,
                share=least / times["chosen"],
            )


def _read(model: PreTrainedModel) -> None:
    """Read every weight."""
    for weight in model.parameters():
        weight.sum()
