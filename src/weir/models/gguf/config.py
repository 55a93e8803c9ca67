"""Configurations of models in GGUF files, built from the header alone.

Every key of the file that changes what the model computes either becomes part of the configuration
or is refused by name; `families` has the tables. transformers' own reader ignores most such keys
silently.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from transformers import AutoConfig, PretrainedConfig

from weir.errors import WeirError
from weir.models.gguf.families import (
    DESCRIBING,
    FAMILIES,
    MIXTRAL,
    NEUTRAL,
    OTHER_FILES,
    SAME,
    Family,
)
from weir.models.gguf.header import GGUFArray, GGUFHeader, TensorInfo, read_header
from weir.models.gguf.special_tokens import SpecialTokens
from weir.models.library_errors import report_as

IGNORED = "WEIR_GGUF_IGNORE"
"""Environment variable with keys, separated by commas, that are ignored instead of refused."""

CONFIG_TENSORS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)
"""Tensors that become part of the configuration."""

_OTHER_KINDS = frozenset(
    "rope.scaling.type attention.sliding_window_pattern use_parallel_residual vocab_size".split()
)
"""Suffixes whose values are not numbers, are checked elsewhere, or are not used."""
_WHOLE = frozenset({"attention.sliding_window", "rope.scaling.original_context_length"})
"""Suffixes whose values are whole numbers, besides those that every model needs."""
_LEAST = {
    "rope.freq_base": 1,
    "rope.freq_base_swa": 1,
    "rope.scaling.original_context_length": 2,
    "rope.scaling.yarn_ext_factor": -1,
}
"""The smallest allowed value of each suffix for which it is not 0."""
_LARGEST = 1 << 31
"""Sizes from here on are refused."""
_F32 = 0
"""Number of ggml's type float32."""


def read_config(path: Path) -> PretrainedConfig:
    """Read a model's configuration from the header of a GGUF file, or of its shards.

    Raises WeirError if the header is damaged, or describes something that weir does not compute.
    """
    return config_of(read_header(path))


def config_of(header: GGUFHeader) -> PretrainedConfig:
    """Build the configuration that a header describes. Raises the same errors as `read_config`."""
    return _Builder(header, family_of(header)).build()


def ignored_keys() -> frozenset[str]:
    """Return the keys that the environment variable `IGNORED` names: they count as absent."""
    return frozenset(key.strip() for key in os.environ.get(IGNORED, "").split(","))


def refuse_key(
    header: GGUFHeader,
    key: str,
    value: Any,
    why: str,
    without: str = "the model could compute something else",
    also: Sequence[str] = (),
) -> NoReturn:
    """Raise the WeirError for a key that weir cannot follow.

    Args:
        header: the header with the key.
        key, value: what the header says.
        why: the reason; it continues a sentence after "which".
        without: what could happen if the key were ignored.
        also: other keys of the header that must be ignored with it, because they mean nothing
            alone.
    """
    shown = f"an array of {len(value)}" if isinstance(value, GGUFArray) else repr(value)
    keys = ",".join([key, *also])
    this, matters = ("these keys", "they do") if also else ("this key", "the key does")
    raise WeirError(
        f"{header.path} says {key} = {shown[:60]}, which {why}. Without {this}, {without}. Load "
        f"the model's folder or Hub id instead, or set {IGNORED}={keys} if {matters} not matter."
    )


def family_of(header: GGUFHeader) -> Family:
    """Return the family of a header's architecture; WeirError if weir cannot read the architecture,
    or the file holds no model.
    """
    kind = header.fields.get("general.type", "model")
    if kind != "model":
        raise WeirError(
            f"{header.path} is not a model: its general.type is {kind!r}. Use the file of the "
            "model."
        )
    name = header.architecture
    if name not in FAMILIES:
        raise WeirError(
            f"{header.path} has a model of the architecture {name!r}, which weir cannot read from "
            f"GGUF files. It can read {', '.join(FAMILIES)}. Load the model's folder or Hub id "
            "instead."
        )
    experts = header.fields.get(f"{name}.expert_count", 0)
    return MIXTRAL if name == "llama" and experts else FAMILIES[name]


class _Builder:
    """Builder of one configuration.

    Attributes:
        header: the header.
        family: the model's family.
        fields: the header's fields without those that `WEIR_GGUF_IGNORE` names.
        names: all tensors, by name.
    """

    def __init__(self, header: GGUFHeader, family: Family) -> None:
        ignored = ignored_keys()
        self.header = header
        self.family = family
        self.fields = {key: value for key, value in header.fields.items() if key not in ignored}
        self.names = {tensor.name: tensor for tensor in header.tensors}

    def build(self) -> PretrainedConfig:
        self.check_keys()
        family, sizes = self.family, self.sizes()
        made = dict(family.attributes)
        made |= {family.names.get(name, name): value for name, value in sizes.items()}
        made.pop("", None)
        for suffix, attribute in family.keys.items():
            value = self.get(suffix)
            if attribute and value is not None:
                made[attribute] = value
        for attribute, tensors in family.biases.items():
            made[attribute] = any(f"blk.0.{tensor}" in self.names for tensor in tensors)
        head = self.head_size(sizes)
        if family.head_size and head * sizes["num_attention_heads"] != sizes["hidden_size"]:
            made["head_dim"] = head
        if family.rotary:
            made["rope_parameters"] = self.rope(head, sizes["max_position_embeddings"])
        made |= self.windows(sizes)
        made["tie_word_embeddings"] = "output.weight" not in self.names
        made |= SpecialTokens.of(self.header).for_config()
        if (special := _SPECIAL.get(family.kind)) is not None:
            made |= special(self, sizes, head)
        kind = made.pop("model_type", family.kind)
        with report_as(f"the keys of {self.header.path} make no valid model of the type {kind}"):
            return AutoConfig.for_model(kind, **made)

    def check_keys(self) -> None:
        """Refuse keys that change what is computed and that weir does not follow."""
        start = f"{self.header.architecture}."
        followed = self.family.followed()
        for key, value in self.fields.items():
            if key.startswith(OTHER_FILES):
                self.refuse(key, value, "weir does not support")
            if not key.startswith(start):
                continue
            suffix = key.removeprefix(start)
            allowed = self.family.values.get(suffix)
            if allowed is not None:
                given = self.get(suffix)
                if given not in allowed:
                    listed = " or ".join(repr(one) for one in allowed)
                    self.refuse(
                        key, given, f"differs from what this family computes with ({listed})"
                    )
            elif suffix in followed:
                self.check_number(suffix)
            elif suffix in DESCRIBING:
                continue
            elif suffix in SAME:
                given, other = self.get(suffix), self.get(SAME[suffix])
                if given != other:
                    self.refuse(key, given, f"differs from {start}{SAME[suffix]} ({other!r})")
            elif suffix not in NEUTRAL or self.get(suffix) not in NEUTRAL[suffix]:
                self.refuse(key, value, "weir does not support")

    def check_number(self, suffix: str) -> None:
        """Refuse a value that is not a number, or one that no model has."""
        if suffix in _OTHER_KINDS:
            return
        value, least = self.get(suffix), _LEAST.get(suffix, 0)
        whole = suffix in _WHOLE
        number = type(value) is int or (type(value) is float and not whole)
        if not number or not math.isfinite(value) or value < least:
            raise WeirError(
                f"{self.header.path} says {self.header.architecture}.{suffix} = "
                f"{repr(value)[:60]}, where a {'whole ' * whole}number of at least {least} is "
                "expected. Use another file of the model."
            )

    def refuse(self, key: str, value: Any, why: str, also: Sequence[str] = ()) -> NoReturn:
        """Raise the WeirError for a key (`refuse_key`)."""
        refuse_key(self.header, key, value, why, also=[one for one in also if one in self.fields])

    def get(self, suffix: str, default: Any = None) -> Any:
        """Return the value of a key of the architecture. If the value is an array, it must have one
        item for each layer, and all items must be the same.
        """
        key = f"{self.header.architecture}.{suffix}"
        value = self.fields.get(key, default)
        if isinstance(value, GGUFArray):
            items = self.header.array(key)
            layers = self.fields.get(f"{self.header.architecture}.block_count")
            if not items or len(items) != layers:
                raise WeirError(
                    f"{self.header.path} says {key} = an array of {len(items)}, where one number, "
                    "or one for each layer, is expected. Use another file of the model."
                )
            if any(item != items[0] for item in items):
                raise WeirError(
                    f"{self.header.path} has different values of {key} for its layers, and weir "
                    "reads only models whose layers have the same value. Load the model's folder "
                    "or Hub id instead."
                )
            value = items[0]
        return _shorten(value) if isinstance(value, float) else value

    def needed(self, suffix: str, default: Any = None) -> Any:
        """Return the value of a key of the architecture, or the default; WeirError if there is
        neither.
        """
        value = self.get(suffix, default)
        if value is None:
            raise WeirError(
                f"{self.header.path} lacks the key {self.header.architecture}.{suffix}, so its "
                "model cannot be built. Use another file of the model."
            )
        return value

    def count(self, suffix: str, default: int | None = None) -> int:
        """Return the value of a key, which must be a whole number of at least 1 and below
        `_LARGEST`.
        """
        value = self.needed(suffix, default)
        key = f"{self.header.architecture}.{suffix}"
        if type(value) is not int or not 1 <= value < _LARGEST:
            raise WeirError(
                f"{self.header.path} says {key} = {value!r}, where a whole number from 1 to "
                f"{_LARGEST - 1:,} is expected. Use another file of the model."
            )
        return value

    def sizes(self) -> dict[str, Any]:
        """Return the sizes that every family has, by the usual names of attributes."""
        header, layers = self.header, self.count("block_count")
        if layers > len(header.tensors):
            raise WeirError(
                f"{header.path} says {header.architecture}.block_count = {layers:,}, but holds "
                f"only {len(header.tensors):,} tensors. Use another file of the model."
            )
        heads = self.count("attention.head_count")
        epsilon = self.needed(self.family.epsilon)
        if type(epsilon) is not float or not 0 < epsilon < 1:
            raise WeirError(
                f"{header.path} says {header.architecture}.{self.family.epsilon} = {epsilon!r}, "
                "where a number between 0 and 1 is expected. Use another file of the model."
            )
        sizes = {
            "hidden_size": self.count("embedding_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.count("attention.head_count_kv", heads),
            "intermediate_size": self.count("feed_forward_length"),
            "max_position_embeddings": self.count("context_length"),
            "rms_norm_eps": epsilon,
            "vocab_size": self.vocabulary(),
        }
        if heads % sizes["num_key_value_heads"]:
            raise WeirError(
                f"{header.path} has {heads} attention heads, which cannot be divided among "
                f"{sizes['num_key_value_heads']} heads of keys and values. Use another file of "
                "the model."
            )
        if self.family.names.get("num_key_value_heads") == "":
            self.expect("attention.head_count_kv", sizes["num_key_value_heads"], heads)
        if "expert_used_count" in self.family.keys:
            experts, used = self.count("expert_count"), self.count("expert_used_count")
            if used > experts:
                raise WeirError(
                    f"{header.path} says {header.architecture}.expert_used_count = {used:,}, but "
                    f"has only {experts:,} experts. Use another file of the model."
                )
        return sizes

    def expect(self, suffix: str, value: Any, wanted: Any) -> None:
        """Refuse a key unless its value is `wanted`, the only one that the family's code computes
        with.
        """
        if value != wanted:
            self.refuse(
                f"{self.header.architecture}.{suffix}",
                value,
                f"differs from what this family computes with ({wanted!r})",
            )

    def vocabulary(self) -> int:
        """Return the number of rows of the embedding, checked against the tokens."""
        embedding = self.names.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise WeirError(
                f"{self.header.path} lacks the tensor token_embd.weight, so its model cannot be "
                "built. Use another file of the model."
            )
        rows, tokens = embedding.shape[1], self.header.fields.get("tokenizer.ggml.tokens")
        if isinstance(tokens, GGUFArray) and len(tokens) > rows:
            raise WeirError(
                f"{self.header.path} has {len(tokens):,} tokens but embeddings for only {rows:,}. "
                "Use another file of the model."
            )
        return rows

    def head_size(self, sizes: dict[str, Any]) -> int:
        """Return the size of a head."""
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        whole = hidden // heads
        size = self.count("attention.key_length", max(1, whole))
        values = self.count("attention.value_length", max(1, whole))
        if values != size:
            self.expect("attention.value_length", values, size)
        if size != whole and not self.family.head_size:
            self.expect("attention.key_length", size, whole)
        if hidden % heads and self.get("attention.key_length") is None:
            raise WeirError(
                f"{self.header.path} has a hidden size of {hidden}, which cannot be divided among "
                f"{heads} attention heads. Use another file of the model."
            )
        return size

    def windows(self, sizes: dict[str, Any]) -> dict[str, Any]:
        """Return the attributes of sliding windows."""
        window = self.get("attention.sliding_window", 0)
        if self.family.windows is None or (self.family.kind == "olmo2" and not window):
            return {}
        if self.family.kind == "gemma2":
            window = self.get("attention.sliding_window", 4096)
        layers = sizes["num_hidden_layers"]
        if self.family.windows == 0:
            return {"sliding_window": window or None}
        slides = self.slides(layers) if window else [False] * layers
        if self.family.kind == "gemma3_text" and not window:
            # transformers' code for Gemma 3 makes a mask for windows even if no layer uses it.
            window = sizes["max_position_embeddings"]
        kinds = ["sliding_attention" if slid else "full_attention" for slid in slides]
        return {"sliding_window": window or None, "layer_types": kinds}

    def slides(self, layers: int) -> list[bool]:
        """Return which layers have a window."""
        key = f"{self.header.architecture}.attention.sliding_window_pattern"
        pattern: Any = self.fields.get(key, self.family.windows)
        if isinstance(pattern, GGUFArray):
            items = self.header.array(key)
            if len(items) != layers:
                self.refuse(key, pattern, f"does not have one item for each of {layers} layers")
            return [bool(item) for item in items]
        if type(pattern) is not int or pattern < 0:
            self.refuse(key, pattern, "is not a number of layers")
        return [pattern == 0 or layer % pattern < pattern - 1 for layer in range(layers)]

    def rope(self, head: int, context: int) -> dict[str, Any]:
        """Return the parameters of rotary embeddings, as transformers has them."""
        rotated = self.count("rope.dimension_count", head)
        if rotated > head or rotated % 2:
            raise WeirError(
                f"{self.header.path} says {self.header.architecture}.rope.dimension_count = "
                f"{rotated}, where an even number up to {head}, the size of a head, is expected. "
                "Use another file of the model."
            )
        theta = float(self.get("rope.freq_base", 10000.0))
        base: dict[str, Any] = {"rope_theta": theta}
        if self.family.partial:
            base["partial_rotary_factor"] = _share(rotated, head)
        else:
            self.expect("rope.dimension_count", rotated, head)
        full = base | self.scaling(rotated, theta, context)
        if self.family.swa_base == 0 or not self.get("attention.sliding_window", 0):
            return full if self.family.kind != "gemma3_text" else _twice(full, theta)
        slid = self.get("rope.freq_base_swa", self.family.swa_base or theta)
        return _twice(full, float(slid))

    def scaling(self, rotated: int, theta: float, context: int) -> dict[str, Any]:
        """Return the scaling of the frequencies, as transformers' rope parameters."""
        kind = self.get("rope.scaling.type")
        factor = self.get("rope.scaling.factor") or self.get("rope.scale_linear") or 1.0
        original = self.get("rope.scaling.original_context_length") or context
        factors = self.factors("rope_freqs.weight", rotated)
        attention = self.get("rope.scaling.attn_factor") or 1.0
        long = self.factors("rope_factors_long.weight", rotated)
        short = self.factors("rope_factors_short.weight", rotated)
        start = f"{self.header.architecture}.rope.scaling."
        linear = f"{self.header.architecture}.rope.scale_linear"
        if kind not in (None, "none", "linear", "yarn", "longrope"):
            scales = (f"{start}factor", linear)
            self.refuse(f"{start}type", kind, "is a scaling that weir does not know", scales)
        if (long is None) != (short is None) or (kind == "longrope" and long is None):
            raise WeirError(
                f"{self.header.path} needs the tensors rope_factors_long.weight and "
                "rope_factors_short.weight, but does not have both. Use another file of the model."
            )
        if kind == "none":
            factor = 1.0
        if long is not None and short is not None:
            if kind not in (None, "none", "longrope"):
                self.refuse(
                    f"{start}type", kind, "cannot be combined with rope_factors_long.weight"
                )
            if factors is not None:
                raise WeirError(
                    f"{self.header.path} has the tensors rope_freqs.weight and "
                    "rope_factors_long.weight, which are factors of two different scalings. Use "
                    "another file of the model."
                )
            made = {
                "rope_type": "longrope",
                "long_factor": long,
                "short_factor": short,
                "original_max_position_embeddings": original,
                "factor": context / original,
            }
            usual = math.sqrt(1 + max(0.0, math.log(context / original) / math.log(original)))
            if self.get("rope.scaling.attn_factor") and not math.isclose(
                attention, usual, rel_tol=1e-6
            ):
                made["attention_factor"] = attention
            return made
        if factors is not None:
            beside = "cannot be combined with rope_freqs.weight"
            if kind == "yarn":
                self.refuse(f"{start}type", kind, beside)
            if factor != 1:
                own = f"{start}factor" if self.get("rope.scaling.factor") else linear
                self.refuse(own, factor, beside)
            if attention != 1:
                self.refuse(f"{start}attn_factor", attention, beside)
            return _of_factors(factors, rotated, theta, context)
        if kind == "yarn":
            return self.yarn(factor, original, attention)
        if attention != 1:
            self.refuse(
                f"{start}attn_factor",
                attention,
                "weir supports only with the scalings yarn and longrope",
            )
        if factor == 1:
            return {"rope_type": "default"}
        return {"rope_type": "linear", "factor": factor}

    def yarn(self, factor: float, original: int, attention: float) -> dict[str, Any]:
        """Return YaRN's parameters."""
        start = f"{self.header.architecture}.rope.scaling."
        extrapolation = self.get("rope.scaling.yarn_ext_factor", 1.0)
        if extrapolation not in (1.0, -1.0):  # llama.cpp writes -1 if the value is not set
            self.refuse(f"{start}yarn_ext_factor", extrapolation, "weir supports only if it is 1")
        made: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": self.get("rope.scaling.yarn_beta_fast") or 32.0,
            "beta_slow": self.get("rope.scaling.yarn_beta_slow") or 1.0,
        }
        given = self.get("rope.scaling.yarn_attn_factor")
        if given is not None and attention != 1:
            self.refuse(
                f"{start}attn_factor", attention, "cannot be combined with yarn_attn_factor"
            )
        if log := self.get("rope.scaling.yarn_log_multiplier"):
            if given is not None or attention != 1:
                self.refuse(
                    f"{start}yarn_log_multiplier",
                    log,
                    "cannot be combined with an attention factor",
                )
            made |= {"mscale": 1.0, "mscale_all_dim": log}
        elif given is not None:
            made["attention_factor"] = given
        elif attention != 1:
            made["attention_factor"] = (0.1 * math.log(factor) + 1) * attention
        if self.family.kind == "gpt_oss":
            # gpt-oss was trained without rounding the ends of YaRN's correction range, and no key
            # of the format can say so.
            made["truncate"] = False
        return made

    def factors(self, name: str, rotated: int) -> list[float] | None:
        """Read the numbers in a tensor that divide the frequencies; None if the tensor does not
        exist, or if all numbers of rope_freqs.weight are 1.
        """
        tensor = self.names.get(name)
        if tensor is None:
            return None
        if not self.family.rotary or tensor.type != _F32 or tensor.shape != (rotated // 2,):
            raise WeirError(
                f"{self.header.path} has {name} of the shape {tensor.shape} and type "
                f"{tensor.type}, where {rotated // 2} numbers in float32 are expected. Use "
                "another file of the model."
            )
        numbers = [_shorten(number) for number in read_floats(tensor)]
        if not all(math.isfinite(number) and number > 0 for number in numbers):
            raise WeirError(
                f"{tensor.path} has numbers in {name} that are not positive. Download it again."
            )
        return None if name == "rope_freqs.weight" and set(numbers) == {1.0} else numbers

    def layer(self, name: str) -> bool:
        """Return whether the first layer has a tensor."""
        return f"blk.0.{name}" in self.names


def read_floats(tensor: TensorInfo) -> tuple[float, ...]:
    """Read a small tensor of float32 from its file; WeirError if the file ends within it."""
    n = math.prod(tensor.shape)
    with tensor.path.open("rb") as file:
        file.seek(tensor.at)
        data = file.read(4 * n)
    if len(data) < 4 * n:
        raise WeirError(
            f"{tensor.path} is damaged or cut off: it ends within {tensor.name}. Download it again."
        )
    return struct.unpack(f"<{n}f", data)


def _shorten(value: float) -> float:
    """Return the number with the fewest decimal digits that is the same in float32 as `value`.

    For example, a file has 9.999999747378752e-06 where the model's own configuration has 1e-05.
    """
    if not math.isfinite(value):
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if _to_float32(short) == _to_float32(value):
            return short
    return value


def _to_float32(value: float) -> float:
    """Round to float32; infinity beyond its range."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(rounded)


def _share(part: int, whole: int) -> float:
    """Return a share such that transformers, which truncates the product of share and `whole`, gets
    `part`.
    """
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, 2)


def _twice(full: dict[str, Any], base: float) -> dict[str, Any]:
    """Return rope parameters by the kind of layer; those of layers with a window are not scaled."""
    return {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": base},
    }


def _of_factors(
    factors: Sequence[float], rotated: int, theta: float, context: int
) -> dict[str, Any]:
    """Return rope parameters for numbers that divide the frequencies.

    Those of Llama 3.1 are recognized. Any others become a "longrope" that has the same factors for
    short and long texts.
    """
    largest, periods = max(factors), [theta ** (2 * n / rotated) for n in range(len(factors))]
    # Every factor between 1 and the largest one tells how long the training texts were.
    lengths = [
        2 * math.pi * period * (1 + 3 * (1 / factor - 1 / largest) / (1 - 1 / largest))
        for factor, period in zip(factors, periods, strict=True)
        if 1 < factor < largest
    ]
    for original in dict.fromkeys([*(round(length) for length in lengths[:1]), 8192]):
        expected = [_llama3(period, largest, original) for period in periods]
        if all(
            math.isclose(one, other, rel_tol=1e-5)
            for one, other in zip(factors, expected, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    return {
        "rope_type": "longrope",
        "long_factor": list(factors),
        "short_factor": list(factors),
        "original_max_position_embeddings": context,
        "factor": 1.0,
        "attention_factor": 1.0,
    }


def _llama3(period: float, factor: float, original: int) -> float:
    """Return the number by which Llama 3.1 divides a frequency, given its period in units of 2π
    tokens.
    """
    turns = original / (2 * math.pi * period)
    if turns < 1:
        return factor
    if turns > 4:
        return 1.0
    smooth = (turns - 1) / 3
    return 1 / ((1 - smooth) / factor + smooth)


def _qwen_moe(builder: _Builder, sizes: dict[str, Any], head: int) -> dict[str, Any]:
    """Return the sizes of experts, which older files do not state."""
    used = builder.count("expert_used_count")
    made = {
        "moe_intermediate_size": builder.count(
            "expert_feed_forward_length", sizes["intermediate_size"] // used
        )
    }
    if builder.family.kind == "qwen2_moe":
        made["shared_expert_intermediate_size"] = builder.count(
            "expert_shared_feed_forward_length", sizes["intermediate_size"]
        )
    return made


def _gemma(builder: _Builder, sizes: dict[str, Any], head: int) -> dict[str, Any]:
    """Return the number by whose square root queries are divided, and the size of a head.

    The number is the size of a head. In models of 27 billion parameters, it is the hidden size
    divided by the number of heads instead. No key says so, so these models are recognized by their
    number of layers.
    """
    largest = {"gemma2": 46, "gemma3_text": 62}[builder.family.kind]
    of_27b = sizes["num_hidden_layers"] == largest
    scaled_by = sizes["hidden_size"] // sizes["num_attention_heads"] if of_27b else head
    return {"query_pre_attn_scalar": scaled_by, "head_dim": head}


def _granite(builder: _Builder, sizes: dict[str, Any], head: int) -> dict[str, Any]:
    """Return Granite's multipliers; 0, or no value, stands for the usual ones."""
    named = {attribute: builder.get(suffix) for suffix, attribute in builder.family.keys.items()}
    made = {name: 1.0 for name, value in named.items() if value == 0}
    return made | {"attention_multiplier": named["attention_multiplier"] or head**-0.5}


def _olmo2(builder: _Builder, sizes: dict[str, Any], head: int) -> dict[str, Any]:
    """Return the type of a model with windows: OLMo 3."""
    if builder.get("attention.sliding_window", 0):
        return {"model_type": "olmo3"}
    return {}


def _stablelm(builder: _Builder, sizes: dict[str, Any], head: int) -> dict[str, Any]:
    """Return whether attention and MLP are parallel. If they are, a layer has one norm for both."""
    return {"use_parallel_residual": not builder.layer("ffn_norm.weight")}


def _falcon(builder: _Builder, sizes: dict[str, Any], head: int) -> dict[str, Any]:
    """Return the attributes that say which of Falcon's decoders a file has."""
    heads, shared = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    norms = 2 if builder.layer("attn_norm_2.weight") else 1
    new = norms == 2 or shared not in (1, heads)
    made: dict[str, Any] = {"new_decoder_architecture": new, "multi_query": shared == 1}
    return made | {"num_ln_in_parallel_attn": norms} if new else made


def _mpt(builder: _Builder, sizes: dict[str, Any], head: int) -> dict[str, Any]:
    """Return MPT's attention.

    transformers always uses the same ALiBi bias and the same MLP width, whatever the configuration
    says.
    """
    builder.expect("feed_forward_length", sizes["intermediate_size"], 4 * sizes["hidden_size"])
    builder.expect("attention.max_alibi_bias", builder.get("attention.max_alibi_bias"), 8.0)
    clip = builder.get("attention.clamp_kqv") or None
    attention = {"alibi": True, "alibi_bias_max": 8, "clip_qkv": clip}
    return {"expansion_ratio": 4, "attn_config": attention}


def _bloom(builder: _Builder, sizes: dict[str, Any], head: int) -> dict[str, Any]:
    """Check the width of Bloom's MLP, which is fixed."""
    builder.expect("feed_forward_length", sizes["intermediate_size"], 4 * sizes["hidden_size"])
    return {}


def _olmo(builder: _Builder, sizes: dict[str, Any], head: int) -> dict[str, Any]:
    """Return the value to which queries, keys and values are clipped; 0 means no clipping."""
    return {"clip_qkv": builder.get("attention.clamp_kqv") or None}


def _softcaps(builder: _Builder, sizes: dict[str, Any], head: int) -> dict[str, Any]:
    """Return the same as `_gemma`, and None for each soft cap that is 0."""
    made = _gemma(builder, sizes, head)
    for suffix in builder.family.keys:
        if builder.get(suffix) == 0:
            made[suffix] = None
    return made


def _phi3(builder: _Builder, sizes: dict[str, Any], head: int) -> dict[str, Any]:
    """Return the length of the context before it was extended, and check the scaling."""
    kind, factor = builder.get("rope.scaling.type"), builder.get("rope.scaling.factor", 1)
    if kind in ("linear", "yarn"):
        builder.refuse("phi3.rope.scaling.type", kind, "weir does not support for phi3")
    if factor not in (0, 1):
        builder.refuse("phi3.rope.scaling.factor", factor, "weir does not support for phi3")
    context = sizes["max_position_embeddings"]
    original = builder.get("rope.scaling.original_context_length") or context
    return {"original_max_position_embeddings": original}


_SPECIAL: dict[str, Callable[[_Builder, dict[str, Any], int], dict[str, Any]]] = {
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "gemma2": _softcaps,
    "gemma3_text": _softcaps,
    "granite": _granite,
    "granitemoe": _granite,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "stablelm": _stablelm,
    "falcon": _falcon,
    "mpt": _mpt,
    "bloom": _bloom,
    "phi3": _phi3,
}
"""Functions for attributes that no table can give, by model type."""
