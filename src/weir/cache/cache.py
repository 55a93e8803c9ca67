"""`StreamingCache`: a transformers `Cache` that holds a policy's slots and no more."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache

from weir.cache.default_policy import check_origin, choose_policy
from weir.cache.ended_rows import watch
from weir.cache.forward import Folded, Forward, LayerStack, Outcome
from weir.cache.layer import Layer
from weir.cache.layers import (
    LayerPlan,
    check_memory,
    keep_freed_memory,
    known_places,
    plan_layers,
    three_axes,
    warn_of_place,
    warn_of_window,
    with_gates,
)
from weir.cache.plan import BegunForward, Rows
from weir.cache.row_state import RowFormat, RowState, check_kind, check_state
from weir.cache.snapshot import (
    Contents,
    Holding,
    contents_of,
    held_places,
    layer_report,
    snapshot_row,
)
from weir.errors import WeirError, in_words, quote, shorten
from weir.models import (
    DROPPING,
    Given,
    RotaryWatch,
    StopTokens,
    attach,
    detach,
    input_device,
    transformers_model,
    weights_of,
)
from weir.policies import Policy, resolve_chunk
from weir.pools import Kept, Marks, fits
from weir.slab import Heads

ASSISTED = (
    "assisted and prompt-lookup decoding take back tokens, which a StreamingCache cannot do. "
    "Generate without assistant_model and prompt_lookup_num_tokens."
)
"""The error for decoding with an assistant."""

Positions = Literal["rolling", "original"]
Prefill = Literal["chunked", "full"]
Failures = Literal["raise", "keep"]


class StreamingCache(Cache):
    """A KV cache of fixed size for endless streams.

    Pass it to `model.generate(..., past_key_values=cache)` or `model(..., past_key_values=cache)`.
    One cache can serve several turns: pass the whole conversation again, or pass only the new
    tokens with an attention mask that also covers everything so far.

    Each row of a batch is a separate stream. Rows can be taken out, put in and emptied while the
    others go on (`take_row`, `put_row`, `reset_row`). If a row's keys are not finite, or one of its
    tokens is out of range, only that row's tokens are undone.

    Args:
        model: the causal language model that the cache serves.
        policy: a pipe, `"sink(4) | recent(252)"`, or a named policy, `"h2o(budget=256)"`. If
            neither this nor `slots` is given, the policy is the `weir.toml` in the model's folder,
            or else `"weir"`.
        chunk: number of tokens that are appended before the pipe folds them; None for the number
            that a policy file was measured with, or else 64. The slab has `chunk` slots more than
            the policy. With a chunk of 1, `streaming_llm` is exactly the paper's method.
        seed: the seed of the policy's random draws. It does not affect sampling, which is seeded
            with `torch.manual_seed`, or by the seed of a `Stream`.
        positions: `"rolling"`: positions inside the cache (StreamingLLM, section 3.2), for endless
            streams. `"original"`: keys keep their places in the stream, for streams within the
            model's window. The cache warns once if a stream goes past the window.
        prefill: `"chunked"`: a prompt is fed through the tail like everything else, so it never
            takes more than the slab. `"full"`: the papers' protocol, in which the first call
            attends to all of its tokens exactly and folds them once. This holds the keys and values
            of the whole prompt in one layer at a time, and takes time that grows with the square of
            its length.
        origin: the place in the stream of the first token. Random draws of pools and the rounding
            to 8 and 4 bits depend on the place. If a policy draws or rounds, two caches with
            different origins answer differently.
        batch: number of rows, empty at first, with their slots allocated at once; None for as many
            as the first call feeds.
        slots: the format of all slots except those of the first and the newest tokens, which stay
            exact: `"exact"` as the model computes, `"int8"` or `"fp8"` in 8 bits, `"k8v4"` with
            keys in 8 and values in 4 bits, `"int4"` in 4 bits, None as the policy says.
            `slots="int8"` is the same as the policy `"quantized(POLICY, slots=int8)"`, which has
            more options. If the policy has an option `slots`, as the default does, the argument
            sets this option, as in `"weir(budget=256, slots=exact)"`. The argument cannot be
            combined with a policy that already sets the format.
        failures: what to do if a row's tokens are refused while the others go on: `"raise"` an
            error at the end of the call, or `"keep"` it in `failed` and let the call return.

    Attributes:
        on_fold: function called with `Folded` after each forward in which rows folded; None for
            none. The forward is complete by then, so rows may be read, taken and put. Errors
            that it raises are passed on to the caller of the model.
        failed: by row, why its tokens of the last forward were refused, with `failures="keep"`.
        only_new: whether `generate` was given embeddings of new tokens only and feeds them next.
        plans: the pipe of each layer and the sizes of its slots, known before slots are allocated.
        stack: the layers, the progress of each row, and the outcome of the last forward.
        attachment: weir's hooks on the model, which all caches of the model share.

    Raises:
        WeirError: the model cannot be served, an argument makes no sense, or the slots do not fit
            into memory.
        PolicyError: the policy cannot be read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy | None = None,
        *,
        chunk: int | None = None,
        seed: int = 0,
        positions: Positions = "rolling",
        prefill: Prefill = "chunked",
        origin: int = 0,
        batch: int | None = None,
        slots: str | None = None,
        failures: Failures = "raise",
    ) -> None:
        super().__init__(layers=[])
        _one_of("positions", positions, ("rolling", "original"))
        _one_of("prefill", prefill, ("chunked", "full"))
        _one_of("failures", failures, ("raise", "keep"))
        numbers = [("seed", seed, 0), ("origin", origin, 0)]
        if batch is not None:
            numbers.append(("batch", batch, 1))
        for name, value, at_least in numbers:
            if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
                raise WeirError(
                    f"{name} must be a whole number of at least {at_least}, got {value!r}"
                )
        served = transformers_model(model)
        self.policy = choose_policy(served, policy, slots, chunk)
        self.chunk = chunk = resolve_chunk(self.policy, chunk)
        self.seed = seed
        self.positions = positions
        self.prefill = prefill
        self.origin = origin
        self.failures = failures
        self._on_fold: Callable[[Folded], None] | None = None
        check_origin(self.policy, served)
        rolling = positions == "rolling"
        facts, plans = plan_layers(served, self.policy, chunk, seed=seed, rolling=rolling)
        self._device = input_device(served)
        self._rotaries = facts.rotations
        self._rotary_watch = RotaryWatch(served, facts.rotations)
        self.plans = with_gates(plans, facts)
        check_memory(self.plans, self.policy, batch or 1, self._device)
        keep_freed_memory()
        if rolling:
            warn_of_window(served, self.policy, chunk)
        # None after the warning has been given. Rolling positions need no such warning, because
        # they stay below the number of slots.
        self._known_places = None if rolling else known_places(served)
        self._kind = facts.kind
        self._model = weakref.ref(served)
        self.stack = LayerStack(Layer(plan.spec) for plan in self.plans)
        self.attachment = attach(served, self)
        self._batch = batch
        self.only_new = False
        self._pad: int | None = None
        self.reset()

    # --- the cache interface of transformers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Mark new keys for weir's attention and pass them on; nothing is stored yet.

        WeirError if the call did not come through the model this cache was made for.
        """
        forward = self.attachment.running
        if not isinstance(forward, Forward) or forward.stack is not self.stack:
            raise WeirError(
                "this cache was made for another model, or detached from this one. Make a new "
                "cache for this model."
            )
        key_states = key_states.view_as(key_states)
        key_states.weir = (forward, layer_idx)  # type: ignore[attr-defined]
        return key_states, value_states

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamingCache:
        """Copy the cache, for the same model: one prompt, many answers."""
        model = self._model()
        if model is None:
            raise WeirError(
                "the model that this cache was made for no longer exists. Make a new cache."
            )
        # If the model is copied in the same call, the new cache serves the copied model.
        made = StreamingCache(
            memo.get(id(model), model),
            self.policy,
            seed=self.seed,
            failures=self.failures,
            **self.made_with,
        )
        made.put_rows(self.take_rows(), check=False)
        made._batch, made._pad = self._batch, self._pad
        return made

    def reset(self) -> None:
        """Forget everything; the next call starts a new stream in each row.

        Raises:
            WeirError: the cache is restricted to some of its rows (`only`).
        """
        self._check_wide()
        self.stack.reset()
        if self._batch is not None:
            self._open(self._batch)

    @property
    def rows(self) -> Rows:
        """The progress of each row of the batch."""
        return self.stack.rows

    @property
    def broken(self) -> bool:
        """Whether a call was interrupted during a fold."""
        return self.stack.outcome.broken

    @property
    def failed(self) -> dict[int, WeirError]:
        """By row, why its tokens of the last forward were refused; see the class."""
        return self.stack.outcome.failed

    @property
    def on_fold(self) -> Callable[[Folded], None] | None:
        """Called after each forward in which rows folded; see the class."""
        return self._on_fold

    @on_fold.setter
    def on_fold(self, listener: Callable[[Folded], None] | None) -> None:
        if listener is not None and not callable(listener):
            raise WeirError(f"on_fold must be a function or None, got {quote(listener)}")
        self._on_fold = listener

    def detach(self) -> None:
        """Remove weir's hooks from the model; the cache cannot be used any more."""
        detach(self)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns fed so far, including padding; `generate` feeds the columns
        after them.

        If a caller passes embeddings, transformers assumes that they are those of the whole text,
        and leaves out the first ones, as many as this number. If they are embeddings of new tokens
        only, none may be left out, so the number is 0.
        """
        return 0 if self.only_new else self.rows.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return (query_length, 0), sizes for a mask that is never read."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the number of columns fed so far, including padding."""
        return self.rows.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: the number of tokens has no limit."""
        return -1

    def __len__(self) -> int:
        """Return the number of layers, as every cache of transformers does."""
        return len(self.stack.by_index)

    def __bool__(self) -> bool:
        """Return True, even before the first token; False for models whose `generate` would drop a
        cache that is true (`models.DROPPING`).
        """
        return self._kind not in DROPPING

    @property
    def is_linear(self) -> list[bool]:
        """Return False for every layer, because none is a state space.

        From 5.24 on, transformers leaves out tokens that were fed before, unless every entry of
        this list is True. An empty list would count as all True.
        """
        return [False] * len(self)

    @property
    def is_compileable(self) -> bool:
        """False: `generate` must not compile the forward."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether anything was fed."""
        return self.rows.columns > 0

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 if there are none yet."""
        return -1 if self.rows.batch is None else self.rows.batch

    @property
    def is_croppable(self) -> bool:
        """False: folded tokens cannot be removed."""
        return False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to crop (WeirError): folded tokens cannot be removed.

        Older versions of transformers call this for an assistant, after a first forward.
        """
        raise WeirError(
            f"a StreamingCache cannot be cropped, because evicted tokens are gone: {ASSISTED}"
        )

    def activate_past_recording(self, *args: Any, **kwargs: Any) -> None:
        """Refuse assisted and prompt-lookup decoding, which remove tokens (WeirError)."""
        raise WeirError(ASSISTED)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows by `beam_idx` [batch], for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` [n], in that order; a row may come more than once.

        Raises:
            WeirError: there is no such row, none is named, or the cache is restricted (`only`).
        """
        self._check_wide()
        batch = self.rows.batch
        if batch is None:
            return
        wanted = indices.tolist()
        if not wanted or not all(0 <= row < batch for row in wanted):
            raise WeirError(
                f"rows {quote(str(wanted))} cannot be kept: the rows are 0 to {batch - 1}, and at "
                "least one must stay"
            )
        for layer in self.stack:
            slab = layer.state.slab
            if slab is not None:
                layer.state.select_rows(torch.tensor(wanted, device=slab.keys.device))
        self.stack.rows = self.rows.select(wanted)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times.

        Raises:
            WeirError: `repeats` is below 1, or the cache is restricted (`only`).
        """
        if not fits(repeats, int) or repeats < 1:
            raise WeirError(f"repeats of rows must be at least 1, got {quote(repeats)}")
        if self.rows.batch is not None:
            self.batch_select_indices(torch.arange(self.rows.batch).repeat_interleave(repeats))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to pickle (WeirError): the model would have to be pickled too."""
        raise WeirError(
            "a StreamingCache cannot be pickled or copied shallowly. Use copy.deepcopy to copy "
            "it, or weir.Stream.save to write a file."
        )

    # --- for users, the stream and the command line

    def __repr__(self) -> str:
        return f"<weir.StreamingCache {self.summary()}>"

    def summary(self) -> str:
        """Return one line: the policy, the chunk, the tokens seen by each of the first four rows,
        and the bytes.
        """
        seen = " and ".join(f"{n:,}" for n in self.seen[:4]) or "0"
        more = f" and {in_words(len(self.seen) - 4, 'row')} more" if len(self.seen) > 4 else ""
        tokens = "token" if self.seen[:4] == [1] else "tokens"
        policy = shorten(" ".join(str(self.policy).split()))
        return f"{policy}, chunk {self.chunk}: {seen}{more} {tokens} seen, {self.nbytes:,} bytes"

    @property
    def batch(self) -> int | None:
        """Rows of the batch; None if there are none yet."""
        return self.rows.batch

    @property
    def seen(self) -> list[int]:
        """Tokens of the stream so far, by row; padding does not count."""
        return list(self.rows.seen)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs; fixed from the first token on.

        Under `dense` and other policies that keep every token, these are the bytes of keys and
        values that transformers' own cache would hold, which grow with the stream. weir takes more
        memory than that, because it enlarges the slab in advance.
        """
        return sum(layer.state.nbytes(self.rows.columns) for layer in self.stack)

    @property
    def waiting(self) -> list[int]:
        """Tokens that wait for the next fold, by row."""
        return list(self.rows.waiting)

    @property
    def slots_by_layer(self) -> list[int | None]:
        """For each layer, the policy's slots in the KV head that has the most of them, without the
        slots for new tokens; None where there is no limit.
        """
        sizes = ([part.spec.pipe.slots for part in layer.parts] for layer in self.stack.by_index)
        return [None if None in each else max(n or 0 for n in each) for each in sizes]

    def slots(self, layer: int = 0) -> Contents:
        """Return a copy of one layer's slots.

        Raises:
            WeirError: there is no such layer, or the cache has no rows yet.
        """
        self._check_whole()
        if not fits(layer, int) or not 0 <= layer < len(self):
            last = len(self) - 1
            raise WeirError(
                f"layer {quote(layer)} does not exist. The model's layers are 0 to {last}"
            )
        return contents_of(self.stack.by_index[layer].parts, self.rows.waiting)

    def holding(self, row: int = 0) -> Holding:
        """Return which tokens of a row are still held, and by which pools, in all layers.

        Raises:
            WeirError: there is no such row.
        """
        self._check_whole()
        self._check_row(row)
        return snapshot_row(
            self.stack, row, self.rows.seen[row], self.rows.waiting[row], self.origin
        )

    def count_held(self, row: int = 0) -> int:
        """Count the tokens of a row that any layer and KV head still holds in a slot.

        The same as `len(holding(row).tokens())`, in a fraction of the time.
        """
        self._check_row(row)
        return len(self.held_tokens(row))

    def held_tokens(self, row: int = 0) -> Tensor:
        """Return the tokens of a row that any layer and KV head still holds [tokens], int64.

        Tokens are counted from 0. They are in ascending order.
        """
        self._check_row(row)
        return held_places(self.stack, row, self.rows.waiting[row]) - self.origin

    @property
    def steps(self) -> dict[str, str | None]:
        """How decode steps of this cache run now.

        "run" is "native", "compiled" (on a GPU) or "eager". "reason" says why steps are eager; for
        native and compiled steps, it is None. While the kernel is still being compiled, steps are
        "eager".
        """
        return self.attachment.describe_steps(self.stack.slots, len(self.rows.seen))

    def report(self, row: int = 0) -> dict[str, Any]:
        """Report bytes, tokens seen, how steps run, and per layer its bytes and the slots of one
        row.

        "slots" has the slots by pool, with the tokens that wait for the next fold as "new"; "held"
        is their sum. For a layer whose KV heads have several pipes, these are means over the heads,
        and "heads" has the same figures for each pipe, with the heads that have it.
        """
        self._check_whole()
        waiting = 0
        if self.rows.waiting:
            self._check_row(row)
            waiting = self.rows.waiting[row]
        return {
            "policy": str(self.policy),
            "positions": self.positions,
            "chunk": self.chunk,
            "seen": self.seen,
            "bytes": self.nbytes,
            "steps": self.steps,
            "layers": [
                layer_report(layer.parts, row, waiting, self.rows.columns)
                for layer in self.stack.by_index
            ],
        }

    @property
    def made_with(self) -> dict[str, Any]:
        """The chunk, positions, prefill and origin of the cache, as arguments of its class."""
        return {
            "chunk": self.chunk,
            "positions": self.positions,
            "prefill": self.prefill,
            "origin": self.origin,
        }

    # --- rows

    @property
    def kind(self) -> dict[str, Any]:
        """Properties that another cache must share to continue this one's rows (`RowState`)."""
        facts = self.attachment.facts
        return {
            "policy": str(self.policy),
            "pools": self.policy.stands_for,
            "chunk": self.chunk,
            "positions": self.positions,
            "origin": self.origin,
            "model": {
                "kind": facts.kind,
                "layers": len(self.stack),
                "heads": [_describe_heads(plan.heads) for plan in self._plans_now],
            },
            "weights": weights_of(facts.decoder, facts.config),
        }

    @property
    def row_format(self) -> RowFormat:
        """The format that a row must have to continue in this cache."""
        return RowFormat(self.kind, self._plans_now, self.attachment.facts.vocabulary)

    def take_row(self, row: int) -> RowState:
        """Copy the complete state of a row, to put into this cache or another.

        Raises:
            WeirError: there is no such row.
        """
        self._check_row(row)
        self._check_whole()
        return self._take(row, self.kind)

    def _take(self, row: int, kind: dict[str, Any]) -> RowState:
        only = self.rows.select([row])
        tensors: dict[str, Tensor] = {}
        lengths = []
        for index, layer in enumerate(self.stack):
            taken, used = layer.state.take_row(row)
            tensors |= {f"{index}.{name}": t for name, t in taken.items()}
            lengths.append(used)
        facts: dict[str, Any] = {
            "columns": only.columns,
            "seen": only.seen[0],
            "waiting": only.waiting[0],
            "claimed": only.claimed[0],
            "last": only.last[0],
            "ended": only.ended[0],
            "seed": self.stack[0].state.seeds[row],
            "marks": _marks_fact(only.marks[0]),
            "lengths": lengths,
        }
        if three_axes(self.plans):
            facts["drift"] = only.drift[0]
        return RowState(kind, facts, tensors)

    def put_row(self, row: int, state: RowState, *, check: bool = True) -> None:
        """Overwrite a row with a state, so that it continues exactly from where it was taken.

        Args:
            row: the row; in an empty cache, row 0 makes it a cache of one row.
            state: from `take_row` of any cache of the same model, policy, chunk, positions and
                origin.
            check: whether to check all numbers, which takes longer than putting the row. A state
                from `take_row` that has not been changed since does not need it. `state.kind` is
                always checked.

        Raises:
            WeirError: there is no such row, or the state is of another model, policy, chunk or
                dtype, or one that no row can have. The row then stays as it was.
        """
        self._check_whole()
        new = self.rows.batch is None and fits(row, int) and row == 0
        if not new:
            self._check_row(row)
        self._check([state], numbers=check)
        if new:
            self._open(1)
        self._put(row, state)

    def _put(self, row: int, state: RowState) -> None:
        """Overwrite a row with a state that has been checked."""
        facts, own = state.facts, []
        for index, layer in enumerate(self.stack):
            slab = layer.state.slab
            assert slab is not None
            mine = slab.tensors().items()  # the state may be on another device
            own.append({n: state.tensors[f"{index}.{n}"].to(t.device) for n, t in mine})
        names = ("seen", "waiting", "claimed", "last", "ended")
        parts: list[Any] = [[facts[name]] for name in names]
        # Only rows of models whose positions have three axes have "drift" (`Segment.drift`).
        parts += [[Marks(**facts["marks"])], [facts.get("drift", 0)]]
        for layer, tensors, lengths in zip(self.stack, own, facts["lengths"], strict=True):
            layer.state.put_row(row, tensors, lengths, facts["seed"])
        self.stack.rows = self.rows.with_row(row, Rows(facts["columns"], *parts))

    def take_rows(self) -> list[RowState]:
        """Copy the complete state of every row; return an empty list if there are no rows yet."""
        self._check_whole()
        if self.rows.batch is None or self.stack[0].state.slab is None:
            return []
        kind = self.kind
        return [self._take(row, kind) for row in range(self.rows.batch)]

    def put_rows(self, states: Iterable[RowState], *, check: bool = True) -> None:
        """Replace all rows by rows of another cache.

        Args:
            states: the state of each row.
            check: as for `put_row`.

        Raises:
            WeirError: as for `put_row`, or `states` is not a list of states; the rows are
                unchanged.
        """
        given = list(states) if isinstance(states, Iterable) else states
        if not isinstance(given, list):
            raise WeirError(f"rows must be a list of states from take_row, got {quote(states)}")
        self._check_wide()
        if given:
            self._check(given, numbers=check)
        self.reset()
        if not given:
            return
        self._open(len(given))
        for row, state in enumerate(given):
            self._put(row, state)
        columns = max(state.facts["columns"] for state in given)
        self.stack.rows = replace(self.rows, columns=columns)

    def _check(self, states: list[RowState], *, numbers: bool) -> None:
        """Refuse states of another kind, and with `numbers` those that no row of this cache can
        have (WeirError).
        """
        row_format = self.row_format
        for state in states:
            if not isinstance(state, RowState):
                raise WeirError(f"a row's state must come from take_row, got {quote(state)}")
            check_kind(row_format.kind, state.kind)
            if numbers:
                check_state(row_format, state)

    def why_not_drop(self) -> str | None:
        """Return why tokens cannot be dropped from this cache (`drop`); None if they can."""
        for plan in self.plans:
            if plan.spec.pipe.slots is None:
                return f"{self.policy} keeps every token as the model computes it"
            for pool in plan.spec.pipe.pools:
                if not pool.drops:
                    return f"the slots of the pool {pool.name} can represent several tokens"
        return None

    def drop(self, row: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Drop tokens of a row: attention no longer reads them, and no pool keeps them.

        No other token moves. Dropping a token that no slot holds any more does nothing.

        Args:
            row: the row.
            ranges: for each range of tokens, the place in the stream of its first token, and the
                place after its last one.

        Raises:
            WeirError: there is no such row, a range has tokens that were not fed, or the policy
                does not allow it (`why_not_drop`).
        """
        self._check_whole()
        self._check_row(row)
        if (why := self.why_not_drop()) is not None:
            raise WeirError(f"no token can be dropped: {why}")
        given = list(ranges)
        last = self.origin + self.rows.seen[row]
        for start, stop in given:
            if not (fits(start, int) and fits(stop, int) and self.origin <= start <= stop <= last):
                raise WeirError(
                    f"the tokens of row {row} begin at place {self.origin} and end before place "
                    f"{last}, so {quote(start)} to {quote(stop)} cannot be dropped"
                )
        for layer in self.stack:
            layer.state.drop(row, given, self.rows.waiting[row])

    def reset_row(self, row: int, *, seed: int | None = None) -> None:
        """Empty a row, for a new stream; the others stay as they are.

        Args:
            row: the row.
            seed: the seed of its draws; None for the cache's.

        Raises:
            WeirError: there is no such row, or the seed is invalid.
        """
        if seed is not None and (not fits(seed, int) or seed < 0):
            raise WeirError(f"seed must be a whole number of at least 0, got {quote(seed)}")
        self._check_whole()
        self._check_row(row)
        for layer in self.stack:
            layer.state.reset_row(row, self.origin, self.seed if seed is None else seed)
        self.stack.rows = self.rows.with_row(row, Rows.empty(1))

    @property
    def marks(self) -> list[Marks]:
        """The marks of each row (`mark`)."""
        return list(self.rows.marks)

    def mark(self, row: int, marks: Marks) -> None:
        """Set the marks of a row: facts about its stream that pools cannot read from the tokens.

        The pools `beginning`, `header` and `kept` read them from the next fold on; others ignore
        them. Marks stay with the row when it is taken and put. The pool `kept` can keep a marked
        token only if the token is still held when it is marked. This is sure for the newest tokens
        (`window` says how many) and for tokens that have not been read yet.

        Args:
            row: the row; in an empty cache, row 0 makes it a cache of one row.
            marks: the new marks.

        Raises:
            WeirError: there is no such row, tokens of the row have been folded with another
                beginning, or the tokens to keep do not fit into the slots that the beginning leaves
                free.
        """
        if not isinstance(marks, Marks):
            raise WeirError(f"marks of a row must be weir.pools.Marks, got {quote(marks)}")
        self._check_whole()
        if row == 0 and self.rows.batch is None:
            self._open(1)
        self._check_row(row)
        before = self.rows.marks[row]
        if self.rows.seen[row] > self.rows.waiting[row] and before.beginning != marks.beginning:
            now = "none" if before.beginning is None else in_words(before.beginning, "token")
            raise WeirError(
                f"the beginning of row {row} is {now} and can no longer become {marks.beginning}, "
                "because it has been folded"
            )
        tokens, room = sum(stop - start for start, stop in marks.kept), self.room_to_keep(marks)
        if tokens and room is not None and tokens > room:
            raise WeirError(
                f"{in_words(tokens, 'token')} must be kept, but the slots of the beginning have "
                f"room for only {room}"
            )
        self.stack.rows = self.rows.marked(row, marks)

    def room_to_keep(self, marks: Marks) -> int | None:
        """Return how many marked tokens (`Marks.kept`) fit in the slots that the beginning of a row
        leaves free: 0 if the marks name no beginning, None if `slots_to_keep` is None.
        """
        slots = self.slots_to_keep
        if slots is None:
            return None
        return 0 if marks.beginning is None else max(0, slots - marks.beginning)

    @property
    def slots_to_keep(self) -> int | None:
        """The number of slots for the beginning of a row and for the tokens that its marks keep;
        None unless every pipe with a limit has a pool that keeps marked tokens.
        """
        pipes = [plan.spec.pipe for plan in self.plans if plan.spec.pipe.slots is not None]
        found = [[pool.n for pool in pipe.pools if isinstance(pool, Kept)] for pipe in pipes]
        return min((min(slots) for slots in found), default=None) if all(found) else None

    @property
    def window(self) -> int:
        """The number of newest tokens that every layer and KV head is sure to hold, in addition
        to those that wait for a fold. Pools without a limit are not counted: under `dense`, which
        holds every token, this is 0.
        """
        pipes = (plan.spec.pipe for plan in self.plans)
        return min(pipe.slots_of(pipe.run) for pipe in pipes)

    @contextmanager
    def only(self, start: int, stop: int) -> Iterator[None]:
        """Restrict the cache to the rows `start` to `stop` within the context, where they are
        numbered from 0.

            with cache.only(2, 3):  # a prompt for row 2, and nothing is computed for the others
                model(prompt, past_key_values=cache)

        Nothing is copied. Changes to these rows stay, even if the last forward in the context has
        failed.

        Args:
            start: the first row.
            stop: the row after the last.

        Raises:
            WeirError: there are no such rows, the cache is already restricted, or the policy has no
                limit.
        """
        self._check_whole()
        self._check_row(start)
        self._check_row(stop - 1 if fits(stop, int) and stop > start else -1)
        stack = self.stack
        if any(layer.spec.pipe.slots is None for layer in stack):
            raise WeirError(
                "this policy has no limit, so its rows cannot be fed separately. Use a policy "
                "with a limit."
            )
        if any(layer.state.narrowed for layer in stack):
            raise WeirError("this cache is already restricted to some of its rows")
        rows = stack.rows
        if start == 0 and stop == rows.batch:
            yield
            return
        for layer in stack:
            layer.state.narrow(start, stop)
        stack.rows = rows.select(list(range(start, stop)))
        try:
            yield
        finally:
            for layer in stack:
                layer.state.widen()
            inside, stack.rows = stack.rows, rows
            for row in range(start, stop):
                stack.rows = stack.rows.with_row(row, inside.select([row - start]))

    def _open(self, batch: int) -> None:
        """Allocate the slots of `batch` empty rows."""
        check_memory(self.plans, self.policy, batch, self._device)
        for layer, plan in zip(self.stack, self.plans, strict=True):
            device = self._device_of(plan.spec.index)
            start = torch.full((batch,), self.origin, dtype=torch.int64, device=device)
            layer.state.allocate(plan.heads, batch, start, device, [self.seed] * batch)
        self.stack.rows = Rows.empty(batch)

    def _device_of(self, layer: int) -> torch.device:
        """Return the device of a layer's keys."""
        model = self._model()
        placed = getattr(model, "hf_device_map", None)
        if model is None or not placed:
            return self._device
        module = self.attachment.facts.attentions[layer]
        held = next(module.parameters(), None)
        where = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if where is not None:
            return torch.device(where)
        return self._device if held is None or held.device.type == "meta" else held.device

    @property
    def _plans_now(self) -> list[LayerPlan]:
        """The plans; if the heads of the model are distributed over devices, with this device's
        share of the heads.
        """
        both = zip(self.plans, self.stack, strict=True)
        return [plan.of(layer.state.slab) for plan, layer in both]

    def _check_row(self, row: int) -> None:
        """Refuse a row that does not exist (WeirError)."""
        batch = self.rows.batch
        if batch is None or self.stack[0].state.slab is None:
            raise WeirError(
                "this cache has no rows yet: feed it, or make it with batch=n for n empty rows"
            )
        if not fits(row, int) or not 0 <= row < batch:
            raise WeirError(f"row {quote(row)} does not exist. The rows are 0 to {batch - 1}")

    def _check_wide(self) -> None:
        """Refuse to change the set of rows while the cache is restricted by `only` (WeirError)."""
        if any(layer.state.narrowed for layer in self.stack):
            raise WeirError(
                "this cache is restricted to some of its rows. Leave the only() block first."
            )

    def _check_whole(self) -> None:
        if self.broken:
            self.attachment.wait()  # it may be folding in another thread
        if self.broken:
            raise WeirError(
                "a call with this cache was interrupted during a fold. Call reset(), or restore a "
                "saved session."
            )

    # --- for callers of the model, and its hooks

    def run_step(self, tokens: list[int]) -> Tensor | None:
        """Run a step of the model without calling it: a token of each row goes in, and logits
        [batch, vocabulary] come out.

        Returns None and changes nothing if the model has to be called instead, for example because
        the engine does not run whole steps, or because a token is refused.
        """
        model = self._model()
        if model is None:
            return None
        return self.attachment.run_step(model, self, self.stack.slots, tokens)

    def begin(self, given: Given, without: tuple[int, ...] = ()) -> Forward:
        """Begin a forward. `given` are the decoder's arguments by name, and `without` are the rows
        whose tokens are left out.

        WeirError if the forward does not continue the stream of every row.
        """
        self._check_whole()
        if self not in self.attachment.caches:
            raise WeirError("this cache was detached from its model. Make a new one.")
        if not without:
            self.stack.outcome = Outcome()
        begun = self.rows.begin(
            given,
            vocabulary=self.attachment.facts.vocabulary,
            chunk=self.chunk,
            prefill=self.prefill == "full",
            origin=self.origin,
            without=without,
            fixed=self._batch is not None,
            is_pad=self._is_pad,
        )
        return self._start(given, begun, without)

    def begin_step(self, tokens: list[int]) -> Forward | None:
        """Begin a forward of one token of each row, faster than `begin`. Returns None in cases that
        only `begin` handles, for example if a row has ended or a token is out of range.
        """
        self._check_whole()
        if self not in self.attachment.caches:
            return None
        facts = self.attachment.facts
        begun = self.rows.begin_step(
            tokens,
            vocabulary=facts.vocabulary,
            chunk=self.chunk,
            origin=self.origin,
            device=self._device,
        )
        if begun is None:
            return None
        self.stack.outcome = Outcome()
        return self._start({"input_ids": np.array(tokens)[:, None]}, begun, ())

    def _start(self, given: Given, begun: BegunForward, without: tuple[int, ...]) -> Forward:
        self.only_new = False
        known, model = self._known_places, self._model()
        if model is not None and self._rotaries:
            rotary = self._rotary_watch.find(model, self.attachment.facts.decoder)
            self.attachment.hook_rotary(rotary)
            self._rotary_watch.check(rotary)
        if known is not None and model is not None and self.origin + max(begun.after.seen) > known:
            self._known_places = None
            warn_of_place(model)
        if self.rows.batch is None and len(begun.after.seen) > 1:
            check_memory(self.plans, self.policy, len(begun.after.seen), self._device)
        return Forward(self.stack, given, begun, self._rotaries, self.begin, without)

    def watch(self, config: GenerationConfig, criteria: StoppingCriteriaList) -> Any:
        """Return the stopping criteria of a call of `generate`, which tell which rows ended."""
        return watch(config, criteria, self._note_ended)

    def _note_ended(self, padded: list[bool], pad: int | None) -> None:
        """Note in which rows the newest token of `generate`, not fed yet, is padding."""
        if len(padded) == self.rows.batch:
            self._pad = pad
            self.stack.rows = replace(self.rows, ended=padded)

    def _is_pad(self, tokens: Tensor) -> Tensor:
        """Return which of some ids [rows] or embeddings [rows, width] are padding tokens."""
        said = self._pad
        if said is None:  # the rows were put into this cache from another
            said = StopTokens.of(getattr(self._model(), "generation_config", None)).pad
        if said is None:
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        if not tokens.is_floating_point():
            return tokens == said
        decoder: Any = self.attachment.facts.decoder
        look_up = decoder.get_input_embeddings()
        pad = torch.tensor([said], device=tokens.device)
        with torch.no_grad():
            return (tokens == look_up(pad).to(tokens)).all(dim=-1)

    def end(self) -> None:
        """End a forward: call `on_fold` if rows folded.

        Then, with `failures="raise"`, raise an error if tokens of some rows were refused. The other
        rows have advanced.
        """
        outcome = self.stack.outcome
        folded, outcome.folded = outcome.folded, None
        if folded is not None and self.on_fold is not None:
            self.on_fold(folded)
        if outcome.failed and self.failures == "raise":
            # A raised error references this frame, and this frame references the cache. If the
            # cache held the error, the two would keep each other alive.
            failed, outcome.failed = outcome.failed, {}
            raise failed[min(failed)]


def _marks_fact(marks: Marks) -> dict[str, Any]:
    """Return the marks of a row as JSON."""
    fact = asdict(marks)
    kept = fact.pop("kept")
    return fact | {"kept": [list(one) for one in kept]} if kept else fact


def _describe_heads(heads: Heads) -> list[int | str]:
    """Return the sizes of a layer's heads, as JSON."""
    sizes = [heads.kv_heads, heads.group, heads.key_dim, heads.value_dim]
    return [*sizes, str(heads.dtype).removeprefix("torch.")]


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise WeirError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")
