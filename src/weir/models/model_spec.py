"""Description of a model: positions and windows of its layers, and whether weir supports it.

All supported families keep keys and values of every token and attend to them by softmax, and their
rotary embeddings, if they have any, are half-split: they rotate a number of the first half together
with its counterpart in the second half. Any other model is refused with a WeirError.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from weir.errors import WeirError
from weir.models.attention_sinks import ModelSink, sink_at_work, sink_of
from weir.models.images import BOTH_WAYS, CAUSAL, TEXT_ONLY, Images, images_of
from weir.models.interception import forward_lock_of
from weir.slab import Alibi, Heads, LayerPositions, Rotary

INTERFACE_FAMILIES = frozenset(
    """llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi3 olmo2 smollm3 gpt_neox gpt_oss
    apertus arcee exaone4 granite granitemoe ministral mixtral nemotron olmo olmo3 olmoe persimmon
    phi qwen2_moe qwen2_vl_text qwen2_5_vl_text qwen3_moe seed_oss stablelm starcoder2""".split()
)
"""Model types whose attention goes through transformers' attention interface."""

OWN_FAMILIES = frozenset({"falcon", "mpt", "bloom"})
"""Model types with their own attention code, supported by `legacy_attention`."""

SUNK = frozenset({"gpt_oss"})
"""Model types with learned sink logits, one for each head."""

MULTIMODAL = CAUSAL | TEXT_ONLY
"""Multimodal model types around a decoder. For some of them, weir streams only the text
(`images`).
"""

DROPPING = frozenset({"phi3"})
"""Model types whose `generate` drops a truthy cache once the text reaches the original window.
Their RoPE frequencies change there, but weir's do not, so weir's caches for these models are falsy.
"""


ABSOLUTE = frozenset({"wpe", "embed_positions", "position_embeddings"})
"""Names of modules that make a vector for each position: of GPT-2, OPT and BERT, for example."""

WINDOW_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length")
"""Names of a model's window in configurations: of most models, of MPT, and of some Bloom models."""


@dataclass(frozen=True)
class ModelLayerSpec:
    """Description of one layer.

    Attributes:
        positions: the layer's positional encoding, without the rolling frame: tokens keep their
            positions.
        heads: how many heads the layer has, and the sizes of their keys and values. If heads are
            split over processes (`tp_plan`), only those of this process count.
        first_head: index of the first KV head of this process.
        shares: number of processes that the heads are split over.
    """

    positions: LayerPositions
    heads: Heads
    first_head: int = 0
    shares: int = 1


@dataclass(frozen=True)
class ModelSpec:
    """Description of one model.

    Attributes:
        kind: the model type of its configuration.
        decoder: the module that takes token ids and a cache; weir's hooks are on it.
        layers: each layer's description.
        attentions: each layer's attention module.
        rotaries: modules that make cosines and sines.
        rotations: rotary embeddings by layer type; the type is None in a model with one type.
        config: the configuration that selects the attention implementation.
        vocabulary: token ids run from 0 to this, exclusive.
        sink: the attention sink the model was trained with.
        images: description of the model's images; None for a text model.
    """

    kind: str
    decoder: nn.Module
    layers: tuple[ModelLayerSpec, ...]
    attentions: tuple[nn.Module, ...]
    rotaries: tuple[nn.Module, ...]
    rotations: dict[str | None, Rotary]
    config: Any
    vocabulary: int
    sink: ModelSink
    images: Images | None = None

    @property
    def sliding(self) -> int | None:
        """Smallest sliding window if every layer has one; None if any layer sees all tokens."""
        windows = [layer.positions.window for layer in self.layers]
        return None if None in windows else min(w for w in windows if w is not None)


@dataclass(frozen=True)
class StopTokens:
    """Stop tokens of `generate`, and the padding token that finished rows are fed."""

    stops: tuple[int, ...]
    pad: int | None

    @classmethod
    def of(cls, config: Any) -> StopTokens:
        """Read a generation configuration; None, as for base models, means no stop tokens."""
        if config is None:
            return cls((), None)
        stops = config.eos_token_id
        stops = (stops,) if isinstance(stops, int) else tuple(stops or ())
        # Without a padding token, generate() uses the first stop token.
        pad = next((p for p in (config.pad_token_id, *stops) if p is not None), None)
        return cls(stops, pad)


def describe(model: PreTrainedModel, reach: int | None = None) -> ModelSpec:
    """Describe a causal language model. Raises WeirError if weir does not support it.

    `reach` is the highest position that attention will use, if known; some RoPE scalings depend on
    it.
    """
    model = transformers_model(model)
    config = model.config.get_text_config(decoder=True)
    with forward_lock_of(config):  # during another thread's call the attention is set to weir
        return _describe(model, config, reach)


def _describe(model: PreTrainedModel, config: Any, reach: int | None) -> ModelSpec:
    _refuse(model, config)
    decoder = model.get_decoder()
    modules = attention_modules(decoder)
    _refuse_numbers(modules)
    _refuse_closed(config.model_type, modules)
    # transformers' MPT ignores `attn_config.alibi` and always adds its biases.
    biased = config.model_type in ("bloom", "mpt") or bool(getattr(config, "alibi", False))
    alibi = read_alibi(config, decoder) if biased else None
    rotary_module = getattr(decoder, "rotary_emb", None)
    layers = []
    placed = config.model_type not in OWN_FAMILIES
    types = getattr(config, "layer_types", None) or [None] * len(modules)
    known: dict[str | None, Rotary] = {}  # layers of a type share one, with its cached results
    for kind, module in zip(types[: len(modules)], modules, strict=True):
        rotary = None
        if rotary_module is not None and _rotates(config, module):
            if kind not in known:
                known[kind] = read_rotary(rotary_module, kind, reach)
            rotary = known[kind]
        window = None
        if kind in (None, "sliding_attention"):
            window = getattr(config, "sliding_window", None)
        window = None if window is None else int(window)
        positions = LayerPositions(rotary, alibi, window, rolling=False, placed=placed)
        layers.append(ModelLayerSpec(positions, *_heads(config, module, model.dtype)))
    return ModelSpec(
        kind=config.model_type,
        # In a multimodal model, masks are made by a module around the text decoder. The hooks must
        # be on that module.
        decoder=model.base_model,
        layers=tuple(layers),
        attentions=tuple(modules),
        rotaries=() if rotary_module is None else (rotary_module,),
        rotations=known,
        config=config,
        vocabulary=config.vocab_size,
        sink=_sink(config),
        images=images_of(model.config),
    )


def transformers_model(model: object) -> PreTrainedModel:
    """Return the transformers model: `model`, or the one inside a PEFT adapter.

    Raises WeirError if there is none, or it is wrapped in a way that weir does not support.
    """
    kind = type(model).__name__
    if isinstance(model, PreTrainedModel):
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise WeirError(f"this {kind} was compiled as a whole. {_INSTEAD_OF_COMPILING}")
        return model
    if isinstance(model, nn.Module) and hasattr(model, "_orig_mod"):
        raise WeirError(f"this model went through torch.compile. {_INSTEAD_OF_COMPILING}")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise WeirError(
            f"a {kind} distributes rows to copies of a model, but a stream belongs to one model. "
            "Pass the inner module, model.module."
        )
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, dict) and hasattr(model, "get_base_model"):
        if any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters.values()):
            raise WeirError(
                f"this {kind} puts learned prompts before its text, in its own cache, which weir "
                "does not support. Use an adapter that changes weights, such as LoRA."
            )
        return transformers_model(model.get_base_model())
    raise WeirError(
        f"weir works with transformers models, got a {kind}. weir.load returns such a model."
    )


_INSTEAD_OF_COMPILING = (
    "Pass the original model, and call weir.compile_steps(model) to compile its steps."
)


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device for token ids: that of the weights or, if they are offloaded, that of
    accelerate's hook. Raises WeirError if the model has no weights.
    """
    device = model.device
    if device.type != "meta":
        return device
    # Offloaded weights are on "meta" between calls; the hook that loads them knows the device.
    for module in model.modules():
        where = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if where is not None:
            return torch.device(where)
    raise WeirError(
        "this model has no weights: its parameters are on the device meta. Load it, or call "
        "model.to_empty and load its weights."
    )


def attention_modules(decoder: nn.Module) -> list[nn.Module]:
    """Return a decoder's attention modules, in the order of its layers."""
    blocks = next(getattr(decoder, n) for n in ("layers", "h", "blocks") if hasattr(decoder, n))
    names = ("self_attn", "attention", "self_attention", "attn")
    return [next(getattr(b, n) for n in names if hasattr(b, n)) for b in blocks]


def _refuse_numbers(modules: list[nn.Module]) -> None:
    """Refuse layers that were removed, repeated or reordered without new numbers, because the
    number of a layer decides which slots it uses.
    """
    for index, module in enumerate(modules):
        number = getattr(module, "layer_idx", index)
        if number != index:
            raise WeirError(
                f"layer {index} of this model has layer_idx {number}, and a cache finds the keys "
                "and values of a layer by that number. Set layer_idx of each layer's attention "
                f"to the place of the layer, from 0 to {len(modules) - 1}, and copy layers that "
                "are used twice."
            )


def _refuse(model: PreTrainedModel, config: Any) -> None:
    kind, outer = config.model_type, model.config.model_type
    types = getattr(config, "layer_types", None) or []
    if outer in BOTH_WAYS - MULTIMODAL:
        raise WeirError(
            f"the tokens of an image attend in both directions in {outer}, and weir streams only "
            "causal decoders"
        )
    if model.config.is_encoder_decoder or config.is_encoder_decoder:
        raise WeirError(f"{kind} is an encoder-decoder, and weir streams only decoders")
    if getattr(config, "kv_lora_rank", None):
        raise WeirError(
            f"{kind} uses multi-head latent attention: it caches compressed latents, not keys and "
            "values that a pool could choose from"
        )
    if getattr(model, "_is_stateful", False) or any("linear" in t or "mamba" in t for t in types):
        raise WeirError(
            f"{kind} is a state-space or linear-attention model: its memory already has a fixed "
            "size, and holds no tokens that a pool could choose from"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise WeirError(
            f"this {kind} attends in both directions, and weir streams only causal decoders"
        )
    if kind not in INTERFACE_FAMILIES | OWN_FAMILIES or outer not in MULTIMODAL | {kind}:
        raise WeirError(_why_unknown(model, config))
    if not hasattr(model, "get_decoder"):
        raise WeirError(f"{type(model).__name__} has no decoder for token ids")


def _why_unknown(model: PreTrainedModel, config: Any) -> str:
    """Describe why weir does not support a model of a type that it does not know."""
    kind, outer = config.model_type, model.config.model_type
    if is_encoder_config(model.config):
        return (
            f"{outer} is an encoder, whose tokens also see later tokens, and weir streams only "
            "decoders"
        )
    if kind != outer and kind in INTERFACE_FAMILIES | OWN_FAMILIES:
        known = ", ".join(sorted(MULTIMODAL))
        return f"weir does not know the multimodal models of the type {outer}, only {known}"
    if any(name.rpartition(".")[2] in ABSOLUTE for name, _ in model.named_modules()):
        return (
            f"{outer} adds a position to each token before its first layer, and an endless stream "
            "passes its last position. Use a model with rotary positions or ALiBi."
        )
    known = ", ".join(sorted(INTERFACE_FAMILIES | OWN_FAMILIES | MULTIMODAL))
    return f"weir does not know the attention of {outer}. It knows {known}."


def is_encoder_config(config: Any) -> bool:
    """Return whether a configuration is that of an encoder: a model for masked tokens that is not
    configured as a decoder.
    """
    decodes = getattr(config, "is_decoder", False) or config.is_encoder_decoder
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not decodes


def _refuse_closed(kind: str, modules: list[nn.Module]) -> None:
    """Refuse attention that does not use transformers' attention interface, such as Nemotron's in
    transformers 5.12.
    """
    if kind in OWN_FAMILIES:
        return
    written_in = (sys.modules[part.__module__] for part in type(modules[0]).__mro__)
    if not any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in written_in):
        raise WeirError(
            f"the attention of this {kind} cannot be replaced, because its code does not use "
            f"the attention interface of transformers {transformers.__version__}. Try a newer "
            "transformers."
        )


def _sink(config: Any) -> ModelSink:
    """Return the model's sink, after checking that its attention implements it."""
    if sink_of(config).kind == "zero" and config.model_type in OWN_FAMILIES | SUNK:
        raise WeirError(
            "the model's configuration says that it was trained with a Zero Sink, which the "
            f"attention of {config.model_type} cannot have"
        )
    return sink_at_work(config)


def _heads(config: Any, module: Any, dtype: torch.dtype) -> tuple[Heads, int, int]:
    """Return how many heads of which sizes an attention module has in this process, the layer's
    index of the first KV head among them, and how many processes share the heads.
    """
    names = ("num_attention_heads", "num_heads", "n_heads", "n_head")
    heads = next(int(n) for name in names if (n := getattr(config, name, None)) is not None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if config.model_type == "falcon":
        kv_heads = module.num_kv_heads
    dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    dim = dim or config.hidden_size // heads
    shares, mine = _shares(module)
    if kv_heads % shares == 0:
        heads, kv_heads = heads // shares, kv_heads // shares
    else:
        mine = 0
    sizes = Heads(kv_heads, heads // kv_heads, int(dim), int(dim), dtype)
    return sizes, mine * kv_heads, shares


def _shares(module: nn.Module) -> tuple[int, int]:
    """Return the number of processes that a `tp_plan` splits an attention module's heads over, and
    the index of this process among them.
    """
    p: Any
    part: Any
    for p in module.parameters():
        if not hasattr(p, "device_mesh"):  # not a DTensor, whose import would take a second
            continue
        mesh = p.device_mesh
        at = mesh.get_coordinate() or [0] * mesh.ndim
        # Other mesh dimensions split data or layers, as their names tell.
        names = mesh.mesh_dim_names or ("tp",) * mesh.ndim
        for dim, placement in enumerate(p.placements):
            # Projections to heads are split by rows, the output projection by columns.
            if placement.is_shard(0) and names[dim] == "tp":
                return mesh.size(dim), at[dim]
    for part in module.modules():  # older transformers keep plain tensors and these attributes
        if getattr(part, "_hf_tp_plan", None) in ("colwise", "packed_colwise"):
            mesh = part._hf_device_mesh
            return int(mesh.size()), int(mesh.get_local_rank())
    return 1, 0


def _rotates(config: Any, module: Any) -> bool:
    """Return whether an attention module rotates its queries and keys."""
    if config.model_type == "falcon":
        return not config.alibi
    if config.model_type == "exaone4":
        # In models with sliding layers, the full-attention layers have no positions.
        return module.sliding_window is None or bool(module.is_sliding)
    return bool(getattr(module, "use_rope", True))


def read_rotary(module: nn.Module, kind: str | None, reach: int | None) -> Rotary:
    """Read the rotary embedding of one layer type from a model's `rotary_emb`."""
    several = kind is not None and hasattr(module, f"{kind}_inv_freq")
    prefix = f"{kind}_" if several else ""
    frequencies = getattr(module, f"{prefix}inv_freq")
    scaling = getattr(module, f"{prefix}attention_scaling")
    rope_type: Any = getattr(module, "rope_type", "default")
    rope_type = rope_type[kind] if several else rope_type
    config: Any = getattr(module, "config", None)
    if rope_type in ("longrope", "dynamic"):
        # These change frequencies with the length of a call, but the highest position in a cache is
        # fixed.
        more = {"layer_type": kind} if several else {}
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](
            config, frequencies.device, seq_len=reach or 1, **more
        )
    sections = getattr(module, "mrope_section", None)
    if sections is None:
        sections = (getattr(config, "rope_parameters", None) or {}).get("mrope_section")
    sections = None if sections is None else tuple(sections)
    return Rotary(frequencies.detach().to(torch.float64), float(scaling), sections)


def read_alibi(config: Any, decoder: Any) -> Alibi:
    """Read ALiBi slopes (Press, Smith and Lewis 2022): the model's own biases at distance 1."""
    device = next(decoder.parameters()).device
    if device.type == "meta":  # offloaded, or described before it is loaded
        device = torch.device("cpu")
    if config.model_type == "mpt":
        # MPT counts positions up to 0, the newest.
        bias = decoder.build_mpt_alibi_tensor(config.n_heads, 2, device=device)
        return Alibi(-bias[:, 0, 0].float())
    two = torch.ones(1, 2, dtype=torch.int64, device=device)
    heads = config.num_attention_heads
    if config.model_type == "bloom":
        bias = decoder.build_alibi_tensor(two, heads, torch.float32)
        return Alibi(bias[:, 0, 1])
    # Imported here: the import takes a sixth of a second.
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    bias = build_alibi_tensor(two, heads, torch.float32)
    # The bias is added before the logits are scaled, and is scaled with them. transformers' eager
    # attention adds it twice, the second time within the mask.
    times = 2 if config._attn_implementation == "eager" else 1
    scale = times / math.sqrt(config.head_dim)
    return Alibi(bias[:, 0, 1], rounding=torch.bfloat16, factor=scale)


def window_of(config: PreTrainedConfig) -> int | None:
    """Return the length of a model's context window; None if the configuration does not say."""
    text = config.get_text_config(decoder=True)
    return next((int(size) for name in WINDOW_NAMES if (size := getattr(text, name, None))), None)


def frequencies_change_at(config: PreTrainedConfig) -> int | None:
    """Return the length of a text beyond which a model uses other rotary frequencies (LongRoPE);
    None for a model without LongRoPE, or if its two lists of factors are the same.
    """
    text = config.get_text_config(decoder=True)
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope" or rope.get("long_factor") == rope.get("short_factor"):
        return None
    return int(rope.get("original_max_position_embeddings") or text.max_position_embeddings)


def sight_of(model: PreTrainedModel) -> int | None:
    """Return how many tokens a model can attend to: the length of its context window, or of the
    sliding window of its layers if all of them have one and it is shorter. None if the
    configuration does not say.
    """
    limits = (window_of(model.config), describe(model).sliding)
    return min((size for size in limits if size), default=None)


def out_of_range(token: int, vocabulary: int, where: str = "") -> WeirError:
    """Return the error for a token id without an embedding; it begins with `where`."""
    return WeirError(
        f"{where}token id {token} is out of range. The model's ids are 0 to {vocabulary - 1}"
    )
