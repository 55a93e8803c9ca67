"""Small random models of every family whose images weir streams, and prompts with random images.

Vision towers have one layer and a few patches. Each image is a handful of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from reference.models import VOCABULARY, randomized

IMAGE = VOCABULARY - 1
"""The token id that stands for a piece of an image."""
VIDEO, BEGIN, END = VOCABULARY - 2, VOCABULARY - 3, VOCABULARY - 4

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def _text(kind: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **_TEXT, **more}


_THREE_AXES = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
    }
}
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}

CONFIGS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llava": (
        "LlavaConfig",
        {
            "text_config": _text("llama"),
            "vision_config": {"model_type": "clip_vision_model", **_VISION},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
        16,
    ),
    "llava-next": (
        "LlavaNextConfig",
        {
            "text_config": _text("llama"),
            "vision_config": {"model_type": "clip_vision_model", **_VISION},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "image_grid_pinpoints": [[16, 16]],
        },
        36,
    ),
    "pixtral": (
        "LlavaConfig",
        {
            "text_config": _text("mistral", head_dim=8, sliding_window=None),
            "vision_config": {"model_type": "pixtral", "head_dim": 8, **_VISION},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        16,
    ),
    "internvl": (
        "InternVLConfig",
        {
            "text_config": _text("qwen2"),
            "vision_config": {
                **_VISION,
                "image_size": [16, 16],
                "patch_size": [4, 4],
                "model_type": "internvl_vision",
            },
            "image_token_id": IMAGE,
            "downsample_ratio": 0.5,
        },
        4,
    ),
    "idefics3": (
        "Idefics3Config",
        {
            "text_config": _text("llama"),
            "vision_config": {"model_type": "idefics3_vision", **_VISION},
            "image_token_id": IMAGE,
            "scale_factor": 2,
            "pad_token_id": 0,
        },
        4,
    ),
    "smolvlm": (
        "SmolVLMConfig",
        {
            "text_config": _text("llama"),
            "vision_config": {"model_type": "smolvlm_vision", **_VISION},
            "image_token_id": IMAGE,
            "scale_factor": 2,
            "pad_token_id": 0,
        },
        4,
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": _text("mistral", head_dim=8, sliding_window=None),
            "vision_config": {"model_type": "pixtral", "head_dim": 8, **_VISION},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "spatial_merge_size": 2,
        },
        4,
    ),
    "qwen2-vl": (
        "Qwen2VLConfig",
        {
            "text_config": _text("qwen2_vl_text", **_THREE_AXES),
            "vision_config": {
                "depth": 1,
                "embed_dim": 16,
                "hidden_size": 32,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 2,
                "spatial_merge_size": 2,
                "temporal_patch_size": 1,
            },
            **_QWEN_TOKENS,
        },
        8,
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        {
            "text_config": _text("qwen2_5_vl_text", **_THREE_AXES),
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "out_hidden_size": 32,
                "intermediate_size": 24,
                "num_heads": 2,
                "patch_size": 2,
                "spatial_merge_size": 2,
                "temporal_patch_size": 1,
                "window_size": 8,
                "fullatt_block_indexes": [0],
            },
            **_QWEN_TOKENS,
        },
        8,
    ),
}
"""For each name, as pytest shows it: a configuration class, its values, and the number of tokens of
an image.
"""

THREE_AXES = ["qwen2-vl", "qwen2.5-vl"]
"""Families whose image tokens have places in time, height and width. Two further tokens enclose an
image.
"""
CAUSAL = [name for name in CONFIGS if name not in THREE_AXES]
"""Families whose image tokens have places like those of words."""

PATCHES = (1, 4, 6)
"""The patches of an image in time, height and width, for families with three axes. Two by two
patches are a token.
"""


def make_seeing(name: str, **changes: Any) -> PreTrainedModel:
    """A new model of the family, in evaluation mode; `changes` go into its configuration."""
    kind, values, _ = CONFIGS[name]
    config = getattr(transformers, kind)(**{**values, **changes})
    return randomized(AutoModelForImageTextToText.from_config(config, dtype=torch.float32))


@cache
def seeing(name: str) -> PreTrainedModel:
    """One model of the family for all tests, which must not change it."""
    return make_seeing(name)


@dataclass
class Prompt:
    """Rows of ids with images between them.

    Attributes:
        ids: [batch, length], each image a run of image tokens.
        pictures: the decoder's arguments that bring the pixels; none without an image.
    """

    ids: Tensor
    pictures: dict[str, Tensor]

    @property
    def given(self) -> dict[str, Tensor]:
        """All arguments."""
        given = {"input_ids": self.ids, **self.pictures}
        if "image_grid_thw" in self.pictures or "video_grid_thw" in self.pictures:
            kinds = (self.ids == IMAGE).int() + 2 * (self.ids == VIDEO).int()
            given["mm_token_type_ids"] = kinds
        return given


def prompt(name: str, *rows: list[int], seed: int = 0) -> Prompt:
    """Make a batch of rows from numbers: n above 0 stands for n random words, and 0 for an image.

    Args:
        name: the family.
        rows: the numbers of each row. Shorter rows are padded on the left with id 0.
        seed: the seed of words and pixels.
    """
    draw = torch.Generator().manual_seed(seed)
    each, made, images = CONFIGS[name][2], [], []
    for row in rows:
        ids: list[int] = []
        for part in row:
            if part:
                ids += torch.randint(1, END, (part,), generator=draw).tolist()
            else:
                inside = [IMAGE] * (each - 2)
                ids += [BEGIN, *inside, END] if name in THREE_AXES else [IMAGE] * each
                images.append(torch.randn(3, 16, 16, generator=draw))
        made.append(ids)
    length = max(map(len, made))
    padded = torch.tensor([[0] * (length - len(ids)) + ids for ids in made])
    return Prompt(padded, _pictures(name, images, [row.count(0) for row in rows]))


def _pictures(name: str, images: list[Tensor], counts: list[int]) -> dict[str, Tensor]:
    if not images:
        return {}
    if name in ("idefics3", "smolvlm"):
        # The images of each row. Rows with fewer images are padded with black ones.
        most, left = max(counts), list(images)
        black = torch.zeros(3, 16, 16)
        rows = [torch.stack([left.pop(0) for _ in range(n)] + [black] * (most - n)) for n in counts]
        return {"pixel_values": torch.stack(rows)}
    if name in THREE_AXES:
        patches = torch.cat([t.flatten()[: 24 * 12].view(24, 12) for t in images])
        sizes = torch.tensor([PATCHES] * len(images))
        return {"pixel_values": patches, "image_grid_thw": sizes}
    pictures = {"pixel_values": torch.stack(images)}
    if name == "llava-next":  # the whole image, and the only part that it is cut into
        pictures["pixel_values"] = torch.stack([torch.stack([t, t / 2]) for t in images])
    if name in ("llava-next", "pixtral", "mistral3"):
        pictures["image_sizes"] = torch.tensor([[16, 16]] * len(images))
    return pictures
