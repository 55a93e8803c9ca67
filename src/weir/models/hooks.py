"""Hooks that route a model's forward through a weir cache.

During a call with a weir cache, and in no other:

- the model's configuration selects weir's attention implementation; in families with their own
  attention code, the configuration is left as it is, and patched attention modules call weir
  (`legacy_attention`);
- the model's rotary embedding returns cosines and sines of weir's own positions;
- the decoder gets zeros as positions, and no attention mask or a small one, so that it builds
  nothing that grows with the stream.

`generate_calls` has the hook on the model's `generate`.

Calls of a model take turns, so that no thread sees what another thread has switched. The hooks are
removed with the model's last cache, and copies of the model do not have them. A cache is a
`StreamingCache`, and a running call is a `Forward`; both are defined in rooms above this one.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from weir.errors import WeirError
from weir.kernels import note_missing_kernels
from weir.models.attention_sinks import SUNK_ATTENTION
from weir.models.cache_name import CACHE, with_one_name
from weir.models.embedding import mismatch
from weir.models.generate_calls import GenerateHook
from weir.models.images import OFFSETS, note_sizes, offsets, pictures_in
from weir.models.interception import MethodPatch, forward_lock_of, plain_attention_of
from weir.models.legacy_attention import install
from weir.models.model_spec import (
    OWN_FAMILIES,
    ModelSpec,
    describe,
    input_device,
    transformers_model,
)
from weir.models.step_engine import Given, MakeEngine, OwnForward, StepEngine
from weir.models.streamed_call import Attending, StreamedCache, StreamedCall
from weir.slab import AttentionParams, StepSlots


@dataclass(frozen=True)
class Chosen:
    """The choice of an engine for the decode steps of a model.

    Attributes:
        make: makes the engine; None if the model runs its own steps.
        reason: why there is no engine.
    """

    make: MakeEngine | None
    reason: str = ""


NOT_ASKED = Chosen(None, "weir.compile_steps(model) has not been called")
"""The choice for a model for which no engine was requested."""

_CHOSEN: weakref.WeakKeyDictionary[nn.Module, Chosen] = weakref.WeakKeyDictionary()
"""The choice for each decoder."""

_ATTACHED: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()
"""Attachments by decoder."""

_MAKING = threading.RLock()
"""Guards the dictionaries above. It is reentrant, because the garbage collector may release a cache
while the lock is held.
"""


class Attachment:
    """The hooks on one model, shared by all caches of that model.

    Attributes:
        facts: the model's description.
        caches: the caches that are alive.
        engine: runs decode steps; None if the model runs its own.
    """

    def __init__(self, facts: ModelSpec) -> None:
        self.facts = facts
        self.caches: weakref.WeakSet[StreamedCache] = weakref.WeakSet()
        self._running: StreamedCall | None = None
        self._lock = forward_lock_of(facts.config)
        self._attention = attention_name(facts)
        self._alibi = any(layer.positions.alibi is not None for layer in facts.layers)
        self._signature = inspect.signature(facts.decoder.forward)
        self._forward = MethodPatch(facts.decoder, "forward", self._call)
        self._patches: list[MethodPatch] = []
        self._rotary: tuple[nn.Module, MethodPatch] | None = None
        for rotary in facts.rotaries:
            self.hook_rotary(rotary)
        self.engine: StepEngine | None = None
        self._no_engine = ""
        self.choose_engine(_CHOSEN.get(facts.decoder, NOT_ASKED))
        if facts.images is not None and facts.images.axes:
            for kind in ("image", "video"):
                name = f"get_{kind}_features"
                self._patches.append(MethodPatch(facts.decoder, name, note_sizes(kind)))
        self._generates: list[GenerateHook] = []
        mine = facts.kind, facts.decoder, facts.attentions
        self._patches += install(*mine, lambda: self.running)

    @property
    def running(self) -> StreamedCall | None:
        """The running call in this thread; None between calls, and in calls of other threads that
        began before the model had hooks.
        """
        return self._running if self._lock.is_switched_here() else None

    def hook_generate(self, model: nn.Module) -> None:
        """Put a hook on the `generate` of a model around the decoder, unless it has one."""
        if not any(hook.serves(model) for hook in self._generates):
            self._generates.append(GenerateHook(model, self._has))

    def hook_rotary(self, module: nn.Module | None) -> None:
        """Hook the model's rotary embedding, which may be another module than at the last call."""
        if module is None or (self._rotary is not None and module is self._rotary[0]):
            return
        if self._rotary is not None:
            self._rotary[1].remove()
            self._patches.remove(self._rotary[1])
        self._rotary = module, MethodPatch(module, "forward", self._rotate)
        self._patches.append(self._rotary[1])

    def _has(self, cache: object) -> bool:
        return getattr(cache, "attachment", None) is self

    def wait(self) -> None:
        """Wait until no other thread is calling the model."""
        with self._lock:
            pass

    def choose_engine(self, chosen: Chosen) -> None:
        """Let an engine, or none, run decode steps from now on. No call may be running."""
        self.engine = None if chosen.make is None else chosen.make(self.facts)
        self._no_engine = chosen.reason

    def describe_steps(self, slots: StepSlots, rows: int) -> dict[str, str | None]:
        """Return how steps over a cache's slots run now, and if the model runs them, why.

        Args:
            slots: the slots of the cache.
            rows: number of rows of the cache.
        """
        engine = self.engine
        if engine is None:
            return {"run": "eager", "reason": self._no_engine}
        with self._lock, self._lock.attention(self._attention):
            engine.prepare()
        reason = engine.why_not(slots, rows)
        return {"run": engine.run if reason is None else "eager", "reason": reason}

    def run_step(
        self, model: nn.Module, cache: StreamedCache, slots: StepSlots, tokens: list[int]
    ) -> Tensor | None:
        """Run a step of a model without calling the model, if the engine runs whole steps.

        Args:
            model: the causal language model around the decoder.
            cache: a cache of this model.
            slots: the slots of the cache.
            tokens: one token for each row.

        Returns:
            The logits [batch, vocabulary]. None if the model has to be called instead; nothing has
            changed in this case.
        """
        engine = self.engine
        if engine is None or self.facts.images is not None:
            return None
        with self._lock:
            run = engine.whole_step(model, slots)
            running = None if run is None or self._running is not None else cache.begin_step(tokens)
            if run is None or running is None:
                return None
            try:
                step = running.step()
                logits = None if step is None else run(step, tokens)
                if step is None or logits is None:
                    return None
                running.commit_step(step)
            except BaseException as error:
                running.abandon(error)
                raise
            running.finish()
            cache.end()
            return logits

    def leave(self) -> None:
        """Remove all hooks and restore the model."""
        for patch in (self._forward, *self._patches):
            patch.remove()
        for hook in self._generates:
            hook.remove()

    def _call(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the decoder's forward, with or without a weir cache."""
        with self._lock:
            given: Given = with_one_name(self._named(args, kwargs))
            cache: StreamedCache = cast(StreamedCache, given.get(CACHE))
            attachment = getattr(cache, "attachment", None)
            kwargs = with_one_name(kwargs)  # transformers would blame weir for an old name
            if self.running is not None or not isinstance(attachment, Attachment):
                return own(*args, **kwargs)
            if attachment.running is not None:
                return own(*args, **kwargs)  # an enclosing module has begun this call
            if attachment is not self:
                raise WeirError(
                    "this cache was made for another model, and a cache works with only one "
                    "model. Make a new cache for this model."
                )
            if self.facts.images is not None:
                self.facts.images.check(given)
                if self.facts.images.axes and pictures_in(given):
                    given[OFFSETS] = offsets(cast(Any, self.facts.decoder), given)
            _refuse(self.facts.decoder)
            running = cache.begin(given)
            try:
                with self._lock.attention(self._attention):
                    output = self._finish(own, running)
            finally:
                self._running = None
            if getattr(output, CACHE, cache) is not cache:
                setattr(output, CACHE, cache)
            cache.end()
            return output

    def _finish(self, own: OwnForward, running: StreamedCall) -> BaseModelOutputWithPast:
        """Run a call that has begun, and repeat it without the rows that fail."""
        while True:
            self._running = running
            try:
                output = self._call_decoder(own, running)
            except BaseException as error:
                again = running.abandon(error)
                if again is not None:
                    running = again
                    continue
                refusal = mismatch(error)
                if refusal is not None:
                    raise refusal from None
                raise
            again = running.finish()
            if again is None:
                return output
            running = again

    def _call_decoder(self, own: OwnForward, running: StreamedCall) -> BaseModelOutputWithPast:
        """Run the decoder; steps are run by an engine if possible."""
        given = {**running.given, **self._replaced(running.given)}
        given.pop(OFFSETS, None)
        config = self.facts.config
        plain = given.get("return_dict") is False
        for name in _MORE:
            asked = given.get(name)
            plain |= bool(getattr(config, name, False) if asked is None else asked)
        plain |= torch.is_grad_enabled()
        step = None if self.engine is None or plain else running.step()
        if self.engine is not None and step is not None:
            output = self.engine.step(step, given, own)
            if output is not None:
                if step.largest is not None:
                    running.commit_step(step)
                return output
        return own(**given)

    def _named(self, args: tuple[Any, ...], kwargs: Given) -> Given:
        """Return a call's arguments by name; some families pass the token ids by position."""
        if not args:
            return dict(kwargs)
        given = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
        return given

    def _replaced(self, given: Given) -> Given:
        """Return replacements for the mask, whose size would grow with the stream, and for the
        positions, whose values would.

        Most decoders ask their attention implementation for a mask and get none. MPT uses a 4D mask
        unchanged. Falcon, and Bloom in older transformers, build biases for the columns of their
        masks.
        """
        ids = given.get("input_ids")
        tokens = given["inputs_embeds"] if ids is None else ids
        replaced: Given = {"attention_mask": None}
        whole: dict[str, Any] = {"dtype": torch.int64, "device": tokens.device}
        if self.facts.kind == "mpt":
            replaced["attention_mask"] = torch.ones(1, 1, 1, 1, device=tokens.device).bool()
        elif self.facts.kind in ("falcon", "bloom") and self._alibi:
            replaced["attention_mask"] = torch.ones(tokens.shape[:2], **whole)
        if "position_ids" in self._signature.parameters:
            # Some RoPE scalings change a model permanently when they see a high position.
            replaced["position_ids"] = torch.zeros(1, tokens.shape[1], **whole)
        return replaced

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _rotate(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return cosines and sines [batch or 1, length, width], as wide as the model's own.

        They are float32 in any model, so that only the rotated key is rounded to half precision.
        """
        output = own(*args, **kwargs)
        if self.running is None:
            return output
        # Models that rotate layer types differently pass the type.
        kind = args[2] if len(args) > 2 else kwargs.get("layer_type")
        made = self.running.rotations(kind, output[0].shape[-1], output[0].device)
        if made is not None and output[0].ndim == 4:
            # transformers 5.12 expects a table for each axis, and selects from the three later. In
            # ours, this has been done already, so all three can be the same.
            made = (made[0].expand(3, *made[0].shape), made[1].expand(3, *made[1].shape))
        return output if made is None else made


_MORE = ("output_hidden_states", "output_attentions")
"""Outputs that an engine does not return."""


def _refuse(decoder: Any) -> None:
    """Refuse a decoder that runs its layers twice or has no weights."""
    if decoder.training and getattr(decoder, "gradient_checkpointing", False):
        raise WeirError(
            "gradient checkpointing runs layers twice, which does not work with a stream. Call "
            "model.gradient_checkpointing_disable() or model.eval()."
        )
    weight = decoder.get_input_embeddings()._parameters.get("weight")
    if weight is not None and weight.is_meta:
        input_device(decoder)  # raises unless the weights are offloaded


def attention_name(facts: ModelSpec) -> str | None:
    """Return the attention implementation to select in calls with a weir cache. None to leave the
    model's own name in place.
    """
    if facts.kind in OWN_FAMILIES:
        return None  # their patched attention modules call weir, whatever the name is
    return "weir" if facts.sink.kind != "zero" else SUNK_ATTENTION


def attach(model: PreTrainedModel, cache: StreamedCache) -> Attachment:
    """Attach a cache to a model and return the attachment of the model's decoder."""
    facts = describe(model)
    note_missing_kernels(model.device.type)
    with _MAKING:
        held = _ATTACHED.get(facts.decoder)
        while held is None or cache not in held.caches:
            held = held or _ATTACHED.setdefault(facts.decoder, Attachment(facts))
            held.caches.add(cache)
            # The last other cache, and the hooks with it, may have been collected just before.
            held = _ATTACHED.get(facts.decoder)
        held.hook_generate(transformers_model(model))
    weakref.finalize(cache, _leave_unused, weakref.ref(facts.decoder))
    return held


def choose_engine(decoder: nn.Module, chosen: Chosen) -> None:
    """Choose what runs a decoder's steps, for existing and later caches."""
    with _MAKING:
        _CHOSEN[decoder] = chosen
        held = _ATTACHED.get(decoder)
    if held is not None:
        with forward_lock_of(held.facts.config):
            held.choose_engine(chosen)


def detach(cache: Any) -> None:
    """Detach a cache from its model. When the last cache is detached, the hooks are removed."""
    held: Attachment = cache.attachment
    with forward_lock_of(held.facts.config):  # wait for the running call
        held.caches.discard(cache)
        _leave_unused(weakref.ref(held.facts.decoder))


def _leave_unused(reference: weakref.ref[nn.Module]) -> None:
    with _MAKING:
        decoder = reference()
        held = None if decoder is None else _ATTACHED.get(decoder)
        # Not `not held.caches`: `WeakSet.__len__` still counts a cache that is being collected.
        if decoder is not None and held is not None and not list(held.caches):
            held.leave()
            del _ATTACHED[decoder]


def weir_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | tuple[Attending, int, Tensor],
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers, used in calls with a weir cache.

    A call of another thread that began before the model had hooks may also arrive here. It
    continues with the attention that it had.

    Takes queries rotated to their positions [batch, heads, length, key_dim], and keys and values of
    the new tokens only [batch, kv_heads, length, dim]. `key` carries the index of the layer and the
    object that computes attention for the running call, as a mark set by `StreamingCache.update` or
    in a tuple (`StepCache.update`), because a module does not know the cache of its call. Returns
    ([batch, length, heads, value_dim], None).
    """
    cache: Attending
    if isinstance(key, tuple):  # from a compiled step, which cannot mark a tensor
        cache, layer, key = key
    else:
        mark: tuple[Attending, int] | None = getattr(key, "weir", None)
        if mark is None:
            given = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
            kwargs |= {name: value for name, value in given.items() if value is not None}
            return _plain_attention(module)(module, query, key, value, attention_mask, **kwargs)
        cache, layer = mark
        # A layer keeps its last keys for a while, and the mark on them would keep the cache alive.
        del key.weir  # type: ignore[attr-defined]
    params = AttentionParams.from_call(query, key, scaling, softcap, s_aux)
    # The model's float32 rotation has turned half-precision queries and keys into float32.
    out = cache.attend(layer, query.to(value.dtype), key.to(value.dtype), value, params)
    return out.transpose(1, 2).contiguous(), None


def _plain_attention(module: nn.Module) -> Callable[..., Any]:
    """Return the attention of a call without a cache of weir."""
    name = plain_attention_of(module.config)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if name is None or name in OURS or eager is None:
        raise WeirError("weir attention was chosen for a call without a StreamingCache")
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def weir_mask(*args: Any, config: Any = None, **options: Any) -> Tensor | None:
    """Mask function for transformers. weir's attention needs no mask. A call of another thread that
    began before the model had hooks gets the mask that it would have had.
    """
    name = plain_attention_of(config)
    if name is None or name in OURS or name not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    mask: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[name](*args, config=config, **options)
    return mask


def weir_sink_attention(
    module: nn.Module, query: Tensor, key: Tensor, *others: Any, **options: Any
) -> tuple[Tensor, None]:
    """Call `weir_attention` for a model with a Zero Sink: every head has a sink logit of zero."""
    if isinstance(key, tuple) or hasattr(key, "weir"):
        options["s_aux"] = query.new_zeros(query.shape[1])
    return weir_attention(module, query, key, *others, **options)


OURS = {"weir": weir_attention, SUNK_ATTENTION: weir_sink_attention}
"""Attention functions, by the names under which transformers finds them."""

for _name, _function in OURS.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, weir_mask)
