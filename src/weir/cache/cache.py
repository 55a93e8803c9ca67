"""`StreamingCache`: a transformers `Cache` that holds a policy's slots and no more.

Between transformers and the layers: it answers what a cache is asked, and gives its rows to those
who move them. Knows nothing about what the pools do, nor how a call goes through the layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel

from weir.cache.checks import check_memory, check_origin, keep_freed_memory, warn_of_window
from weir.cache.default_policy import choose_policy
from weir.cache.forward import Folded, Forward
from weir.cache.layer import Layer
from weir.cache.layers import pipes_of, plan_layers, reach_of
from weir.cache.moving import MovingRows
from weir.cache.rows import Rows
from weir.cache.snapshot import Contents, Holding, contents_of, layer_report, snapshot_row
from weir.errors import WeirError, quote, shorten
from weir.models import (
    StopTokens,
    attach,
    describe,
    detach,
    input_device,
    transformers_model,
)
from weir.policies import Policy, resolve_chunk
from weir.pools import fits

Positions = Literal["rolling", "original"]
Prefill = Literal["chunked", "full"]
Failures = Literal["raise", "keep"]


class StreamingCache(MovingRows):
    """A KV cache of fixed size for streams without end.

    Pass it to `model.generate(..., past_key_values=cache)` or `model(..., past_key_values=cache)`.
    Several turns may use one cache: pass the whole conversation again, or only what is new together
    with an attention mask as long as everything so far.

    Each row of a batch is a stream of its own. Rows can be taken out, put in and emptied while the
    others go on (`take_row`, `put_row`, `reset_row`), and where the keys of one are no numbers, or
    a token of one is out of range, only that row's tokens are taken back.

    Args:
        model: the causal language model it is for.
        policy: a pipe, `"sink(4) | recent(252)"`, or a named policy, `"h2o(budget=256)"`; where
            neither this nor `slots` is given, the `weir.toml` in the model's folder, or else
            `"weir(budget=256)"`.
        chunk: tokens that are taken in before the pipe folds them, 64 unless a policy file was
            measured with another number; the slab has `chunk` slots more
            than the policy. With 1, StreamingLLM to the letter.
        seed: of all random draws of the policy; that of sampling is `torch.manual_seed`'s, or a
            `Stream`'s own.
        positions: `"rolling"`: positions inside the cache (StreamingLLM, section 3.2), for streams
            without end. `"original"`: keys stay where they were said, for streams within the
            model's window.
        prefill: `"chunked"`: a prompt is fed through the tail like everything else, so it never
            takes more than the slab. `"full"`: the papers' protocol; the first call attends to all
            of its tokens exactly and folds them once. That holds the keys and values of the whole
            prompt in one layer at a time, and time that grows with its square.
        origin: the place in the stream of the first token.
        batch: how many rows there are, empty at first, their slots made at once; None for as many
            as are fed first.
        slots: how the slots of the policy's middle are held: `"exact"` as the model computes,
            `"int8"` or `"fp8"` in 8 bits, `"k8v4"` with values in 4; None as the policy says. The
            first and the newest tokens stay exact. It is the same as the policy
            `"quantized(POLICY, slots=int8)"`, which can say more; a policy that has a word for it,
            as the default has, is given it there: `"weir(budget=256, slots=exact)"`. One that says
            by itself how its slots are held takes no other word.
        failures: what becomes of a row whose tokens are refused while the others go on: `"raise"`
            an error at the end of the call, or `"keep"` it in `failed`, and let the call answer.

    Attributes:
        on_fold: called after each forward in which rows folded, with what folded; None to listen no
            longer. Everything is as it is to stay by then, so rows may be looked at, taken and put;
            what it raises comes out of the call.
        failed: by row, why its tokens of the last forward were refused, with `failures="keep"`.
        plans: of each layer its pipe and the sizes of its slots, known before there are any.

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
        if chunk is not None:
            numbers.append(("chunk", chunk, 1))
        if batch is not None:
            numbers.append(("batch", batch, 1))
        for name, value, at_least in numbers:
            if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
                raise WeirError(f"{name} must be a whole number from {at_least} on, not {value!r}")
        served = transformers_model(model)
        self.policy = choose_policy(served, policy, slots)
        self.chunk = chunk = resolve_chunk(self.policy, chunk)
        self.seed = seed
        self.positions = positions
        self.prefill = prefill
        self.origin = origin
        self.failures = failures
        self._on_fold: Callable[[Folded], None] | None = None
        check_origin(self.policy, served)
        rolling = positions == "rolling"
        pipes = pipes_of(self.policy, describe(served))
        self._device = input_device(served)
        facts = describe(served, reach=reach_of(pipes, chunk, rolling=rolling))
        self._rotaries = facts.rotations
        self.plans = plan_layers(facts, pipes, chunk, seed=seed, rolling=rolling)
        check_memory(self.plans, self.policy, batch or 1, self._device)
        keep_freed_memory()
        if rolling:
            warn_of_window(served, self.policy, chunk)
        self.stack = [Layer(plan.spec) for plan in self.plans]
        self._kind = facts.kind
        self._model = weakref.ref(served)
        self.attachment = attach(served, self)
        self._batch = batch
        self.reset()

    # --- what transformers asks of a cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass new keys and values on to weir's attention, marked; nothing is stored yet.

        Raises:
            WeirError: the call did not come through the model this cache was made for.
        """
        forward = self.attachment.running
        if not isinstance(forward, Forward) or forward.owner is not self:
            raise WeirError(
                "this cache was made for another model, or detached from this one; "
                "a cache serves one model only"
            )
        key_states = key_states.view_as(key_states)
        key_states.weir = (forward, layer_idx)  # type: ignore[attr-defined]
        return key_states, value_states

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamingCache:
        """A cache of the same model that goes on from here alone: one prompt, many answers."""
        model = self._model()
        if model is None:
            raise WeirError("the model of this cache is gone")
        # Copied together with its model, it is a cache of the copy.
        made = StreamingCache(
            memo.get(id(model), model), self.policy, seed=self.seed, **self.made_with
        )
        made.put_rows(self.take_rows())
        return made

    def reset(self) -> None:
        """Forget everything; the next call starts a new stream in each row.

        Raises:
            WeirError: it is narrowed to some of its rows (`only`).
        """
        self._check_wide()
        for layer in self.stack:
            layer.reset()
        self.rows = Rows()
        self.broken = False
        self.failed: dict[int, WeirError] = {}
        self.folded: Folded | None = None
        if self._batch is not None:
            self._open(self._batch)

    @property
    def on_fold(self) -> Callable[[Folded], None] | None:
        """Called after each forward in which rows folded; see the class."""
        return self._on_fold

    @on_fold.setter
    def on_fold(self, listener: Callable[[Folded], None] | None) -> None:
        if listener is not None and not callable(listener):
            raise WeirError(
                f"on_fold is called with what folded, and {quote(listener)} cannot be; give it a "
                "function, or None"
            )
        self._on_fold = listener

    def detach(self) -> None:
        """Take weir out of the model; the cache cannot be used any more."""
        detach(self)

    # --- what people, the stream and the command line ask

    def __repr__(self) -> str:
        return f"<weir.StreamingCache {self.summary()}>"

    def summary(self) -> str:
        """One line: the policy, the chunk, tokens seen (of each row) and bytes."""
        seen = " and ".join(f"{n:,}" for n in self.seen[:4]) or "0"
        more = f" and {len(self.seen) - 4} rows more" if len(self.seen) > 4 else ""
        policy = shorten(" ".join(str(self.policy).split()))
        return f"{policy}, chunk {self.chunk}: {seen}{more} tokens seen, {self.nbytes:,} bytes"

    @property
    def batch(self) -> int | None:
        """Rows of the batch; None before the first token."""
        return self.rows.batch

    @property
    def seen(self) -> list[int]:
        """Tokens of the stream so far, by row; padding does not count."""
        return list(self.rows.seen)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs; fixed from the first token on."""
        return sum(layer.state.slab.nbytes for layer in self.stack if layer.state.slab is not None)

    @property
    def waiting(self) -> list[int]:
        """Tokens that wait for the next fold, by row."""
        return list(self.rows.waiting)

    @property
    def slots_by_layer(self) -> list[int | None]:
        """Slots that the policy has in each layer, those of new tokens not among them; None where
        there is no limit.
        """
        return [layer.spec.pipe.slots for layer in self.stack]

    def slots(self, layer: int = 0) -> Contents:
        """What one layer holds now.

        Raises:
            WeirError: there is no such layer, or nothing was fed yet.
        """
        self._check_whole()
        if not fits(layer, int) or not 0 <= layer < len(self.stack):
            last = len(self.stack) - 1
            raise WeirError(
                f"layer {quote(layer)} does not exist; the model's layers are 0 to {last}"
            )
        return contents_of(self.stack[layer], self.rows.waiting)

    def holding(self, row: int = 0) -> Holding:
        """Which tokens of a row are still held, by whom, in all layers.

        Raises:
            WeirError: nothing was fed yet, or there is no such row.
        """
        self._check_whole()
        self._check_row(row)
        return snapshot_row(
            self.stack, row, self.rows.seen[row], self.rows.waiting[row], self.origin
        )

    def report(self, row: int = 0) -> dict[str, Any]:
        """Bytes, tokens seen, and per layer its bytes and the slots that one row holds.

        "slots" has them by pool, with the tokens that wait for the next fold as "new"; "held" is
        their sum.
        """
        self._check_whole()
        waiting = self.rows.waiting[row] if self.rows.waiting else 0
        return {
            "policy": str(self.policy),
            "positions": self.positions,
            "chunk": self.chunk,
            "seen": self.seen,
            "bytes": self.nbytes,
            "layers": [layer_report(layer, row, waiting) for layer in self.stack],
        }

    @property
    def made_with(self) -> dict[str, Any]:
        """What it was made with beside the model, the policy and the seed."""
        return {
            "chunk": self.chunk,
            "positions": self.positions,
            "prefill": self.prefill,
            "origin": self.origin,
        }

    # --- what the hooks of the model ask

    def begin(self, given: dict[str, Any], without: tuple[int, ...] = ()) -> Forward:
        """A forward begins; `given` are the decoder's arguments by name.

        Raises:
            WeirError: the forward does not continue this stream.
        """
        self._check_whole()
        if self not in self.attachment.caches:
            raise WeirError("this cache was detached from its model; make a new one")
        if not without:
            self.failed, self.folded = {}, None
        begun = self.rows.begin(
            given,
            StopTokens.of(getattr(self._model(), "generation_config", None)),
            vocabulary=self.attachment.facts.vocabulary,
            chunk=self.chunk,
            prefill=self.prefill == "full",
            origin=self.origin,
            without=without,
            fixed=self._batch is not None,
        )
        if self.rows.batch is None and len(begun.after.seen) > 1:
            check_memory(self.plans, self.policy, len(begun.after.seen), self._device)
        return Forward(self, given, begun, self._rotaries, without)

    def end(self) -> None:
        """A forward has ended.

        Raises:
            WeirError: tokens of a row were refused; the other rows went on.
        """
        folded, self.folded = self.folded, None
        if folded is not None and self.on_fold is not None:
            self.on_fold(folded)
        if self.failed and self.failures == "raise":
            # An error that is raised knows this frame: held here, it would keep the cache alive.
            failed, self.failed = self.failed, {}
            raise failed[min(failed)]


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise WeirError(f"{name} must be {' or '.join(map(repr, allowed))}, not {value!r}")
