"""BalanceKV on real keys, as in section 4.1 of its paper: attention errors of single layers of the
packaged model.
"""

from __future__ import annotations

from statistics import fmean

import pytest

import weir
from weir.evals.attention_error import RATES, mean_over_layers, measure_error, set_up, size_policies
from weir.stream.text import encode, read_text

UNIFORM, AUTHORS = "uniform", "balancekv(halves=authors)"


@pytest.fixture(scope="module")
def errors():
    """Return a function `errors(names, rates, tokens, seeds)`, which returns the measured rows, and
    the means by name and rate.
    """
    model, tokenizer = weir.load("nano")
    ids = encode(tokenizer, read_text("src/weir/assets/war-and-peace.txt.xz"), 4096)

    def measure(names, rates, tokens, seeds):
        setup = set_up(model, len(ids), tokens, 256, 256)
        rows = measure_error(
            model, ids, size_policies(names, setup, rates)[0], setup, seeds=range(seeds)
        )
        return rows, {
            (mean["name"], mean["rate"]): mean["error"] for mean in mean_over_layers(rows)
        }

    return measure


@pytest.fixture(scope="module")
def pieces():
    """Return a function `pieces(names, rates)`, which returns the mean error over six texts, by
    name, rate and layer.
    """
    model, tokenizer = weir.load("nano")
    book = read_text("src/weir/assets/war-and-peace.txt.xz")
    texts = [encode(tokenizer, book[start:], 512) for start in range(5000, 125_000, 20_000)]

    def measure(names, rates):
        found = {}
        for ids in texts:
            setup = set_up(model, len(ids), 512)
            sized = size_policies(names, setup, rates)[0]
            for row in measure_error(model, ids, sized, setup, seeds=range(3)):
                found.setdefault((row.name, row.rate, row.layer), []).append(row.error)
        return {place: fmean(errors) for place, errors in found.items()}

    return measure


def test_errors_are_below_those_of_uniform_samples(errors):
    rates = RATES[::2]
    rows, means = errors([UNIFORM, "balancekv", AUTHORS], rates, 2048, 10)
    by_place = {(row.name, row.rate, row.layer): row for row in rows}
    for rate in rates:
        assert means["balancekv", rate] < means[UNIFORM, rate]
        # The authors' rule is biased, but hardly moves from seed to seed. Over twelve pieces of the
        # book (docs/methods/samples.md) the two are within 2 %.
        assert means["balancekv", rate] < 1.05 * means[AUTHORS, rate]
        for layer in range(4):
            mine, other = (by_place[n, rate, layer] for n in ("balancekv", UNIFORM))
            spread = (mine.deviation**2 + other.deviation**2) ** 0.5 / 10**0.5
            assert mine.error < other.error + 2 * spread


def test_errors_fall_with_the_size_of_blocks(errors):
    names = [f"balancekv(block={size})" for size in (8, 32, 128)]
    _, means = errors(names, (1 / 4,), 4096, 3)
    small, middle, large = (means[name, 1 / 4] for name in names)
    assert small > middle > large


def test_keeping_what_points_away_lowers_errors_within_the_window(pieces):
    # Texts of 512 tokens, as long as nano's window, as in docs/methods/samples.md.
    away = "balancekv(outliers=0.33)"
    error = pieces([UNIFORM, "balancekv", AUTHORS, away], (1 / 2, 1 / 8))
    for rate in (1 / 2, 1 / 8):
        for layer in range(4):
            assert error["balancekv", rate, layer] < error[UNIFORM, rate, layer]
            assert error[away, rate, layer] < 0.95 * error[UNIFORM, rate, layer]
            assert error[away, rate, layer] < error[AUTHORS, rate, layer]
