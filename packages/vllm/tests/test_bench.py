"""How `weir_vllm.bench` compares the figures of two sides."""

import json

from weir_vllm.bench import compare


def test_ratios_are_medians_of_the_ratios_of_pairs(capsys):
    """A pair that was slow on both sides counts like any other."""

    def pair(stock, ours):
        both = {"stock": stock, "plug-in": ours}
        return {side: {"sequences": 4, "step_ms": ms, "blocks": 9} for side, ms in both.items()}

    compare(
        {"warm-up": [pair(1, 100)], "4 sequences": [pair(10, 11), pair(1000, 1200), pair(20, 26)]},
        "stock",
    )
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["group"] == "4 sequences"
    assert line["pairs"] == 3
    assert line["stock"] == {"step_ms": 20, "blocks": 9}
    assert line["plug-in"] == {"step_ms": 26, "blocks": 9}
    assert line["plug-in / stock"] == {"step_ms": {"median": 1.2, "least": 1.1, "most": 1.3}}
