"""weir inside a model's forward: what is different during a call with one of its caches.

A model that has caches of weir is as it was between calls, and in calls without such a cache.
During a call with one:

- the attention implementation of its configuration is `weir`, or, for families that have attention
  of their own, their attention modules pass it on to weir (`legacy_attention`);
- its rotary embedding returns cosines and sines of weir's own positions, exact however far out, so
  that queries and keys arrive where weir wants them;
- its decoder gets no attention mask and small positions: weir has read the real ones, and nothing
  is built from them that grows with the stream.

All calls of a model take turns, those without a cache of weir too: what a call switches, another
thread must not see. What was put on the model goes when its last cache goes, and a copy of the
model does not have it. Knows caches and calls as two protocols, `Streaming` and `Running`.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from weir.errors import WeirError
from weir.models.attention_sinks import SUNK_ATTENTION
from weir.models.compiling import Compiled, CompiledStep, Compiling
from weir.models.embedding import mismatch
from weir.models.forward_lock import forward_lock_of, wait_for_others
from weir.models.images import pictures_in
from weir.models.legacy_attention import install, unmasked
from weir.models.linear_kernels import choose_products
from weir.models.method_patch import MethodPatch
from weir.models.model_spec import ModelSpec, describe, input_device
from weir.models.mrope import OFFSETS, noting_sizes, offsets
from weir.models.quantized_weights import quantizes_inputs
from weir.slab import AttentionParams

_COMPILED: weakref.WeakKeyDictionary[nn.Module, Compiling] = weakref.WeakKeyDictionary()
"""Decoders whose steps are to be compiled."""

_ATTACHED: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()
"""By decoder."""

_MAKING = threading.RLock()
"""Held while the dictionaries above change; by one thread twice where its garbage is collected."""


class Attending(Protocol):
    """What answers a layer's queries: a call under way, or the compiled step at its heart."""

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """One layer's attention: take in new tokens and answer their queries.

        Args:
            layer: which layer.
            queries: [batch, heads, length, key_dim].
            keys: [batch, kv_heads, length, key_dim].
            values: [batch, kv_heads, length, value_dim].
            form: how the layer attends.

        Returns:
            [batch, heads, length, value_dim].
        """

    def rotations(
        self, kind: str | None, width: int, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines at the places of the call.

        Args:
            kind: the type of layers; None where the model does not tell them apart.
            width: as many as the model wants for a head.
            device: where.

        Returns:
            Twice [batch or 1, length, width], float32; None where no layer rotates.
        """


class Standing(Attending, CompiledStep, Protocol):
    """What stands for the cache in a compiled step: `cache.step.Step`."""


class Running(Attending, Protocol):
    """A call under way: `cache.forward.Forward`."""

    given: dict[str, Any]

    def step(self) -> Standing | None:
        """What stands for the cache in a compiled step; None if the call has to go as usual."""

    def commit_step(self, step: Any) -> None:
        """The compiled step has been made."""

    def finish(self) -> Running | None:
        """The call has succeeded; another one if it is to be made again, without some rows."""

    def abandon(self, error: BaseException) -> Running | None:
        """The call has failed and never happened; another one if it can do without some rows."""


class Streaming(Protocol):
    """A cache of weir."""

    attachment: Attachment

    def begin(self, given: dict[str, Any]) -> Running:
        """A call begins, with the decoder's arguments by name."""

    def end(self) -> None:
        """The call has ended, and everything is as it is to stay: say what was refused in it."""


class Attachment:
    """What weir puts on one model, shared by its caches.

    Attributes:
        facts: what weir knows of the model.
        caches: the caches that live.
        running: the call that is under way; None between calls.
    """

    def __init__(self, facts: ModelSpec) -> None:
        self.facts = facts
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self.running: Attending | None = None
        self._lock = forward_lock_of(facts.config)
        self._attention = "weir" if facts.sink.kind != "zero" else SUNK_ATTENTION
        self._alone = False
        self._signature = inspect.signature(facts.decoder.forward)
        self._forward = MethodPatch(facts.decoder, "forward", self._call)
        compiling = _COMPILED.get(facts.decoder)
        self._rotaries = [] if compiling is None else compiling.rotaries
        for kept in self._rotaries:
            kept.put(self._rotate)
        if not self._rotaries:
            self._rotaries = [
                MethodPatch(rotary, "forward", self._rotate) for rotary in facts.rotaries
            ]
        self._compiled: Compiled | None = None
        self.compile(compiling)
        self._towers = []
        if facts.images is not None and facts.images.axes:
            for kind in ("image", "video"):
                name = f"get_{kind}_features"
                self._towers.append(MethodPatch(facts.decoder, name, noting_sizes(kind)))
        self._uninstall = install(facts.kind, facts.decoder, facts.attentions, self)

    def wait(self) -> None:
        """Wait for the call that another thread may be making."""
        with self._lock:
            pass

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """`Attending.attend` of the call under way."""
        assert self.running is not None
        return self.running.attend(layer, queries, keys, values, params)

    def compile(self, compiling: Compiling | None) -> None:
        """Compile decode steps from now on; None: do not."""
        compiled = None
        if compiling is not None:
            compiling.rotaries = self._rotaries
            compiled = Compiled(self._forward.own, compiling)
        self._compiled = compiled

    def give_up(self, cache: Streaming) -> None:
        """One cache less, after the call that is under way."""
        with self._lock:
            self.caches.discard(cache)
            _leave_unused(self.facts.decoder)

    def leave(self) -> None:
        """Take everything off; the model is as it was."""
        self._uninstall()
        for around in (self._forward, *self._rotaries, *self._towers):
            around.remove()

    def _call(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The decoder's forward, with a cache of weir or without one."""
        with self._lock:
            given = self._named(args, kwargs)
            cache: Any = given.get("past_key_values")
            if self.running is not None or not isinstance(
                getattr(cache, "attachment", None), Attachment
            ):
                return own(*args, **kwargs)
            if cache.attachment.running is not None:
                return own(*args, **kwargs)  # a module around this one has begun the call
            if cache.attachment is not self:
                raise WeirError(
                    "this cache was made for another model; a cache serves one model only"
                )
            if self.facts.images is not None:
                self.facts.images.check(given)
                if self.facts.images.axes and pictures_in(given):
                    decoder: Any = self.facts.decoder
                    given[OFFSETS] = offsets(decoder, given)
            _refuse_checkpointing(self.facts.decoder)
            _refuse_weightless(self.facts.decoder)
            if not self._alone:
                wait_for_others(self.facts.decoder, Attachment._call.__code__)
                self._alone = True
            previous = self.facts.config._attn_implementation
            running: Running | None = cache.begin(given)
            try:
                self._set_attention(self._attention)
                while running is not None:
                    self.running = running
                    try:
                        output = self._answer(own, running)
                    except BaseException as error:
                        running = running.abandon(error)
                        if running is None:
                            told = mismatch(error)
                            if told is not None:
                                raise told from None
                            raise
                    else:
                        running = running.finish()
            finally:
                self.running = None
                self._set_attention(previous)
            if getattr(output, "past_key_values", cache) is not cache:
                output.past_key_values = cache
            cache.end()
            return output

    def _answer(self, own: Callable[..., Any], running: Running) -> Any:
        """The decoder's output, by a compiled step where there can be one."""
        given = {**running.given, **self._replaced(running.given)}
        given.pop(OFFSETS, None)
        plain = any(given.get(name) for name in _MORE) or given.get("return_dict") is False
        compiled = self._compiled  # another thread may say that no more is to be compiled
        if compiled is not None and not plain:
            step = running.step()
            if step is not None:
                self.running = step
                try:
                    output = compiled(step, given)
                finally:
                    self.running = running
                if output is not None:
                    running.commit_step(step)
                    return output
        return own(**given)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name; some families pass the token ids without one."""
        if not args:
            return dict(kwargs)
        given = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given.update(given.pop(name, {}))
        return given

    def _replaced(self, given: dict[str, Any]) -> dict[str, Any]:
        """What the decoder gets in place of a mask and of positions as long as the stream."""
        ids = given.get("input_ids")
        tokens = given["inputs_embeds"] if ids is None else ids
        alibi = any(layer.positions.alibi is not None for layer in self.facts.layers)
        replaced: dict[str, Any] = {"attention_mask": unmasked(self.facts.kind, alibi, tokens)}
        if "position_ids" in self._signature.parameters:
            # Some scalings of RoPE change a model for good when they meet a high position.
            zeros = torch.zeros(1, tokens.shape[1], dtype=torch.int64, device=tokens.device)
            replaced["position_ids"] = zeros
        return replaced

    def _set_attention(self, name: str | None) -> None:
        held = vars(self.facts.config)
        if _NAME in held:  # as below, without a walk through what a configuration is made of
            held[_NAME] = name
        else:
            # A name alone would be set in every configuration inside as well (MPT has one).
            self.facts.config._attn_implementation = {"": name}

    def _rotate(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Cosines and sines [batch or 1, length, as wide as the model's], float32.

        In float32 in any model, so that what is rounded to half precision is the rotated key.
        """
        output = own(*args, **kwargs)
        if self.running is None:
            return output
        # Models that rotate their types of layers differently say which type they ask for.
        kind = args[2] if len(args) > 2 else kwargs.get("layer_type")
        made = self.running.rotations(kind, output[0].shape[-1], output[0].device)
        if made is not None and output[0].ndim == 4:
            # transformers 5.12 picks from tables of each axis later on; these have been picked.
            made = (made[0].expand(3, *made[0].shape), made[1].expand(3, *made[1].shape))
        return output if made is None else made


_NAME = "_attn_implementation_internal"
"""Where transformers' configurations hold the attention's name."""
_MORE = ("output_hidden_states", "output_attentions")
"""What a compiled step does not return."""


def _refuse_checkpointing(decoder: Any) -> None:
    if decoder.training and getattr(decoder, "gradient_checkpointing", False):
        raise WeirError(
            "gradient checkpointing runs layers twice, which a stream cannot; "
            "model.gradient_checkpointing_disable() or model.eval()"
        )


def _refuse_weightless(decoder: Any) -> None:
    if decoder.get_input_embeddings().weight.is_meta:
        input_device(decoder)  # says so, or knows where the weights wait


def attach(model: PreTrainedModel, cache: Streaming) -> Attachment:
    """The attachment of a model, made with its first cache; `cache` is one more of them.

    A model and the base model inside it have one decoder, and one attachment.
    """
    facts = describe(model)
    with _MAKING:
        held = _ATTACHED.get(facts.decoder)
        while held is None or cache not in held.caches:
            held = held or _ATTACHED.setdefault(facts.decoder, Attachment(facts))
            held.caches.add(cache)
            # The last other cache may have been collected, and everything with it, just before.
            held = _ATTACHED.get(facts.decoder)
    weakref.finalize(cache, _release, weakref.ref(facts.decoder))
    return held


def compile_steps(
    model: PreTrainedModel, *, on: bool = True, strict: bool = False, **options: Any
) -> None:
    """Compile decode steps of a model with caches of weir, those that live and those to come.

    A step is one token for each row. The first one compiles, says so on standard error, takes as
    long as `torch.compile` takes for the model, and needs a C++ compiler; without one, or without
    room for what it makes, steps go the usual way after one sentence there. Each size of batch and
    of cache is compiled by itself, and so are policies that keep different things beside keys and
    values. Rows may stand in different places of their streams. On a CPU matrix products are those
    of `choose_products`, which is called here. Answers differ by rounding only.

    Weights are not packed or frozen: they may be loaded, trained or moved to another dtype
    afterwards, for which a step is compiled anew. So it is where modules of the model
    are replaced, but not where a program replaces functions of libraries: call this once more then.

    Args:
        model: the causal language model.
        on: False to do so no longer; products that were chosen stay.
        strict: raise a WeirError where a step cannot be compiled, and write nothing on standard
            error: for those who say by themselves what is waited for.
        options: for `torch.compile`: `mode`, `backend`, `options`.

    Raises:
        WeirError: weir cannot serve the model, or `torch.compile` has no such option.
    """
    facts = describe(model)
    decoder = facts.decoder
    compiling = Compiling(options, strict) if on else None
    if on and options.get("backend", "inductor") == "inductor":
        # Others make no loops, for which products are written. Weights are moved, and a call of
        # another thread that is under way would read on where they lay.
        with forward_lock_of(facts.config):
            choose_products(model)
        if compiling is not None and input_device(model).type == "cpu" and quantizes_inputs(model):
            compiling.give_up(
                "its layers quantize what they multiply, of which PyTorch's compiler gives wrong "
                "numbers for one row on a CPU"
            )
    with _MAKING:
        _COMPILED.pop(decoder, None)
        if compiling is not None:
            _COMPILED[decoder] = compiling
        held = _ATTACHED.get(decoder)
    if held is not None:
        held.compile(compiling)


def detach(cache: Streaming) -> None:
    """Give up one cache of a model; with the last one everything goes that weir put on it."""
    cache.attachment.give_up(cache)


def _release(reference: weakref.ref[nn.Module]) -> None:
    decoder = reference()
    if decoder is not None:
        _leave_unused(decoder)


def _leave_unused(decoder: nn.Module) -> None:
    with _MAKING:
        held = _ATTACHED.get(decoder)
        # Not `not held.caches`: `WeakSet.__len__` still counts a cache that is being collected.
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
            `StreamingCache.update` left on `key`, or in a tuple with it (`Step.update`). A mark and
            not `module.layer_idx`, for a module does not know which cache its call is about.

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
        # A layer keeps its last keys for a while, and with the mark they would keep the cache.
        del key.weir  # type: ignore[attr-defined]
    params = AttentionParams(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float().view(key.shape[1], -1),
    )
    # The model's rotation, in float32, has made float32 queries and keys of half precision.
    out = cache.attend(layer, query.to(value.dtype), key.to(value.dtype), value, params)
    return out.transpose(1, 2).contiguous(), None


def weir_sink_attention(
    module: nn.Module, query: Tensor, key: Tensor, *others: Any, **options: Any
) -> tuple[Tensor, None]:
    """`weir_attention` of a model with a Zero Sink: every head has a sink logit of zero."""
    options["s_aux"] = query.new_zeros(query.shape[1])
    return weir_attention(module, query, key, *others, **options)


AttentionInterface.register("weir", weir_attention)
AttentionInterface.register(SUNK_ATTENTION, weir_sink_attention)
