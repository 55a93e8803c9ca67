"""weir inside a model's forward: hooks that arm it for calls with one of its caches.

A model that has caches of weir is as it was between calls, and in calls without such a cache.
During a call with one:

- the attention implementation of its configuration is `weir`, or, for families that have attention
  of their own, their attention modules pass it on to weir (`own_attention`);
- its rotary embedding returns cosines and sines of weir's own positions, exact however far out, so
  that queries and keys arrive where weir wants them;
- its decoder gets no attention mask and small positions: weir has read the real ones, and nothing
  is built from them that grows with the stream.

The hooks go when the last cache of the model goes.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from weir.errors import WeirError
from weir.models.compiling import Compiled, Compiling
from weir.models.facts import ModelFacts, describe
from weir.models.own_attention import install, unmasked
from weir.slab import Form


class Running(Protocol):
    """A call under way, or the compiled step that is its heart."""

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, form: Form
    ) -> Tensor:
        """One layer's attention; shapes as in `cache.layer.Layer.attend`."""

    def rotations(
        self, kind: str | None, width: int, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines at the places of the call."""


class Streaming(Running, Protocol):
    """A cache of weir, as the hooks know it."""

    attachment: Attachment

    def weir_begin(self, given: dict[str, Any]) -> None:
        """A forward begins."""

    def weir_end(self, *, finished: bool) -> None:
        """A forward has ended."""

    def step(self) -> Any:
        """What stands for the cache in a compiled step; None if there cannot be one."""

    def stepped(self, step: Any) -> None:
        """A compiled step has been made."""


_COMPILED: weakref.WeakKeyDictionary[nn.Module, Compiling] = weakref.WeakKeyDictionary()
"""Decoders whose steps are to be compiled."""

_ATTACHED: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()
"""By decoder."""


class Attachment:
    """The hooks of one model, shared by its caches.

    Attributes:
        facts: what weir knows of the model.
        caches: the caches that live.
        running: the cache of the call that is under way; None between calls.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self.running: Running | None = None
        self._cache: Any = None
        self._switched = False
        self._previous: str | None = None
        self._signature = inspect.signature(facts.decoder.forward)
        before = facts.decoder.register_forward_pre_hook(self._before, with_kwargs=True)
        after = facts.decoder.register_forward_hook(self._after, always_call=True)
        self._handles = [before, after]
        self._handles += [
            module.register_forward_hook(self._placed, with_kwargs=True)
            for module in facts.rotaries
        ]
        self._compiled: Compiled | None = None
        self._replaced_forward: dict[str, Any] = {}
        self.compile(_COMPILED.get(facts.decoder))
        self._uninstall = install(facts.kind, facts.decoder, facts.attentions, self)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, form: Form
    ) -> Tensor:
        """One layer's attention in the call under way; shapes as in `Layer.attend`."""
        assert self.running is not None
        return self.running.attend(layer, queries, keys, values, form)

    def compile(self, compiling: Compiling | None) -> None:
        """Compile decode steps from now on; None: do not."""
        decoder = vars(self.facts.decoder)
        if self._compiled is not None:
            decoder.pop("forward")
            decoder.update(self._replaced_forward)
            self._compiled = None
        if compiling is not None:
            self._replaced_forward = {k: v for k, v in decoder.items() if k == "forward"}
            self._compiled = Compiled(self.facts.decoder, compiling)
            decoder["forward"] = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The decoder's forward while its steps are compiled."""
        cache: Streaming | None = self._cache
        compiled = self._compiled
        assert compiled is not None
        plain = any(kwargs.get(name) for name in _MORE) or kwargs.get("return_dict") is False
        if cache is not None and self.running is cache and not (args or plain):
            output = self._step(cache, compiled, kwargs)
            if output is not None:
                return output
        return compiled.own(*args, **kwargs)

    def _step(self, cache: Streaming, compiled: Compiled, given: dict[str, Any]) -> Any:
        """The decoder's output for a token by a compiled step; None if there cannot be one."""
        step = cache.step()
        if step is None:
            return None
        self.running = step
        try:
            output = compiled(step, given)
        finally:
            self.running = cache
        if output is not None:
            cache.stepped(step)
            output.past_key_values = cache
        return output

    def leave(self) -> None:
        """Take the hooks off; the model is as it was."""
        self._disarm()
        self.compile(None)
        self._uninstall()
        for handle in self._handles:
            handle.remove()

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._disarm()  # a call that Ctrl-C ended never reached its own end
        given = self._named(args, kwargs)
        cache: Any = given.get("past_key_values")
        if not hasattr(cache, "weir_begin"):
            return None
        if cache.attachment.running is cache:
            return None  # a module around this one has armed it
        if cache.attachment is not self:
            raise WeirError("this cache was made for another model; a cache serves one model only")
        _refuse_images(given)
        cache.weir_begin(given)
        self.running = self._cache = cache
        self._previous = self.facts.config._attn_implementation
        self._set_attention("weir")
        self._switched = True
        return (), {**given, **self._replaced(given)}

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name; some families pass the token ids without one."""
        given = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
        return given

    def _replaced(self, given: dict[str, Any]) -> dict[str, Any]:
        """What the decoder gets in place of a mask and of positions as long as the stream."""
        ids = given.get("input_ids")
        tokens = given["inputs_embeds"] if ids is None else ids
        alibi = any(layer.alibi is not None for layer in self.facts.layers)
        replaced: dict[str, Any] = {"attention_mask": unmasked(self.facts.kind, alibi, tokens)}
        if "position_ids" in self._signature.parameters:
            # Some scalings of RoPE change a model for good when they meet a high position.
            zeros = torch.zeros(1, tokens.shape[1], dtype=torch.int64, device=tokens.device)
            replaced["position_ids"] = zeros
        return replaced

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        cache = self._cache
        self._disarm()
        if cache is not None:
            cache.weir_end(finished=output is not None)

    def _disarm(self) -> None:
        if self._switched:
            self._set_attention(self._previous)
        self._switched = False
        self.running = self._cache = None

    def _set_attention(self, name: str | None) -> None:
        # A name alone would be set in every configuration inside this one as well (MPT has one).
        self.facts.config._attn_implementation = {"": name}

    def _placed(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Cosines and sines [batch or 1, length, as wide as the model's], float32.

        In float32 in any model, so that what is rounded to half precision is the rotated key.
        """
        if self.running is None:
            return None
        # Models that rotate their types of layers differently say which type they ask for.
        kind = args[2] if len(args) > 2 else kwargs.get("layer_type")
        return self.running.rotations(kind, output[0].shape[-1], output[0].device)


_MORE = ("output_hidden_states", "output_attentions")
"""What a compiled step does not return."""


def _refuse_images(given: dict[str, Any]) -> None:
    kinds = given.get("token_type_ids")
    if given.get("pixel_values") is not None or (kinds is not None and bool(kinds.any())):
        raise WeirError("the tokens of an image attend both ways; weir streams text only")


def attach(model: PreTrainedModel, cache: Streaming) -> Attachment:
    """The attachment of a model, made with its first cache; `cache` is one more of them.

    A model and the base model inside it have one decoder, and one attachment.
    """
    decoder = model.base_model
    held = _ATTACHED.get(decoder)
    if held is None:
        held = Attachment(describe(model))
        _ATTACHED[decoder] = held
    held.caches.add(cache)
    weakref.finalize(cache, _release, weakref.ref(decoder))
    return held


def compile_steps(model: PreTrainedModel, *, on: bool = True, **options: Any) -> None:
    """Compile decode steps of a model with caches of weir, those that live and those to come.

    A step is one token for each row. The first one after a prompt compiles, which takes as long as
    `torch.compile` takes for the model, and needs a C++ compiler; each size of batch and of cache
    is compiled by itself, and so are policies that keep different things beside keys and values.
    Answers differ by rounding only.

    Args:
        model: the causal language model.
        on: False to do so no longer.
        options: for `torch.compile`: `mode`, `backend`, `options`.

    Raises:
        WeirError: weir cannot serve the model, or `torch.compile` has no such option.
    """
    decoder = describe(model).decoder
    compiling = Compiling(options) if on else None
    _COMPILED.pop(decoder, None)
    if compiling is not None:
        _COMPILED[decoder] = compiling
    held = _ATTACHED.get(decoder)
    if held is not None:
        held.compile(compiling)


def detach(cache: Streaming) -> None:
    """Give up one cache of a model; with the last one the hooks go."""
    cache.attachment.caches.discard(cache)
    _leave_unused(cache.attachment.facts.decoder)


def _release(reference: weakref.ref[nn.Module]) -> None:
    decoder = reference()
    if decoder is not None:
        _leave_unused(decoder)


def _leave_unused(decoder: nn.Module) -> None:
    held = _ATTACHED.get(decoder)
    # Not `not held.caches`: while a cache is going the set still counts it, but lists it no more.
    if held is not None and not list(held.caches):
        held.leave()
        del _ATTACHED[decoder]


def weir_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function for calls with a cache of weir.

    Args:
        query: at its place in the stream [batch, heads, length, key_dim].
        key, value: of the new tokens only [batch, kv_heads, length, dim], with the mark that
            `StreamingCache.update` left on `key`, or in a tuple with it (`Step.update`).

    Returns:
        ([batch, length, heads, value_dim], None).
    """
    if isinstance(key, tuple):  # a compiled step, which cannot mark a tensor
        cache, layer, key = key
    else:
        mark = getattr(key, "weir", None)
        if mark is None:
            raise WeirError("weir attention was chosen for a call without a StreamingCache")
        cache, layer = mark
    form = Form(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float().view(key.shape[1], -1),
        placed=True,
    )
    # Rotation has made float32 of half precision.
    out = cache.attend(layer, query.to(value.dtype), key.to(value.dtype), value, form)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("weir", weir_attention)
