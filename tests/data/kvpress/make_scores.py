"""Write scores.json: which tokens of given tensors NVIDIA's kvpress keeps.

Tests create the same tensors. kvpress is not among weir's dependencies, and 0.5.5 needs an older
transformers than weir. Run this in a separate environment:

    python -m venv kvpress-venv
    kvpress-venv/bin/pip install torch==2.13.0 kvpress==0.5.5
    PYTHONPATH=tests kvpress-venv/bin/python tests/data/kvpress/make_scores.py

The file has only facts: indices of tokens, and the versions of the packages.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from kvpress import (
    ChunkKVPress,
    CriticalKVPress,
    CURPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    LagKVPress,
    QFilterPress,
    SnapKVPress,
    TOVAPress,
)
from reference.numbers import numbers

TOKENS, HEADS, GROUP, DIM, KEPT, HIDDEN = 96, 2, 2, 8, 40, 24
FREQUENCIES = [1.0, 0.3, 0.1, 0.03]


def rotation(place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [1, places, DIM], half-split."""
    angles = place[0, :, None].double() * torch.tensor(FREQUENCIES, dtype=torch.float64)
    angles = torch.cat([angles, angles], dim=-1)[None]
    return angles.cos().float(), angles.sin().float()


def module(heads: int) -> Any:
    """A stand-in for an attention module, with the attributes that presses read.

    Its queries are the hidden states.
    """
    return SimpleNamespace(
        config=SimpleNamespace(
            num_attention_heads=heads * GROUP,
            num_key_value_heads=heads,
            head_dim=DIM,
            hidden_size=HIDDEN,
        ),
        o_proj=SimpleNamespace(weight=numbers(5, HIDDEN, heads * GROUP * DIM)),
        head_dim=DIM,
        num_key_value_groups=GROUP,
        layer_idx=0,
        q_proj=lambda hidden: hidden,
        rotary_emb=lambda like, place: rotation(place),
    )


def kept(press: Any, heads: int = HEADS, rotated: bool = False) -> list[list[int]]:
    """The tokens of the tests' tensors that a press keeps, for each KV head."""
    queries = 1.5 * numbers(1, TOKENS, heads, GROUP, DIM)
    keys = 1.5 * numbers(2, 1, heads, TOKENS, DIM)
    marks = torch.arange(TOKENS, dtype=torch.float32)[None, None, :, None].expand(1, heads, -1, DIM)
    place = torch.arange(TOKENS)[None]
    still = (torch.ones(1, TOKENS, DIM), torch.zeros(1, TOKENS, DIM))
    given = {"position_embeddings": rotation(place) if rotated else still}
    values = numbers(3, 1, heads, TOKENS, DIM)
    hidden = queries.reshape(1, TOKENS, -1)
    press.compression_ratio = 1 - (KEPT + 0.5) / TOKENS
    if isinstance(press, ChunkKVPress):
        # ChunkKVPress returns keys, not indices. So it is given keys that hold the tokens' indices,
        # while its scores are computed from the real keys.
        scored = press.press.score
        press.press.score = lambda *_: scored(module(heads), hidden, keys, values, None, given)
        left, _ = press.compress(module(heads), hidden, marks, values, None, given)
        return left[0, :, :, 0].long().sort(dim=-1).values.tolist()
    if isinstance(press, CriticalKVPress):
        press.press.score = lambda *_: attention(queries, keys)
    score = press.score(module(heads), hidden, keys, values, None, given)
    return score[0].topk(KEPT, dim=-1).indices.sort(dim=-1).values.tolist()


def attention(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The mean attention of the last 32 queries [1, HEADS, TOKENS], which presses are given."""
    logits = torch.einsum("thgd,hnd->hgtn", queries, keys[0]) * DIM**-0.5
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)[:, :, -32:].mean(dim=(1, 2))[None]


def filters() -> torch.Tensor:
    return numbers(4, 1, HEADS, DIM)


def main() -> None:
    direction = QFilterPress()
    direction.q_filters = filters()
    found = {
        "versions": {name: version(name) for name in ("kvpress", "transformers", "torch")},
        "tokens": TOKENS,
        "kept": KEPT,
        "frequencies": FREQUENCIES,
        "knorm": kept(KnormPress()),
        "keydiff": kept(KeyDiffPress()),
        "lagkv": kept(LagKVPress(n_sink=0, lag_size=16, cross_scoring=True)),
        "tova": kept(TOVAPress()),
        "snap": kept(SnapKVPress(window_size=8, kernel_size=5)),
        "curdkv": kept(CURPress(num_sinks=0, local_window_size=16)),
        "curdkv whole": kept(CURPress(num_sinks=0, use_local_approximation=False)),
        "qfilters": kept(direction),
        "expected": kept(ExpectedAttentionPress(n_future_positions=16, n_sink=0), rotated=True),
        "expected mean": kept(
            ExpectedAttentionPress(
                n_future_positions=64, n_sink=0, use_covariance=False, epsilon=0.02
            ),
            rotated=True,
        ),
        "critical": kept(CriticalKVPress(KnormPress())),
        "chunks knorm": kept(ChunkKVPress(KnormPress(), chunk_length=8), heads=1),
    }
    path = Path(__file__).parent / "scores.json"
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
