"""`StreamingCache`: a transformers `Cache` that holds a policy's slots and no more.

Between transformers and the layers: how many tokens each row has seen, which of the columns fed are
padding, how a forward is cut. Knows nothing about what the pools do.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from weir.attach import attach, detach
from weir.attention import Form
from weir.draws import Draws
from weir.errors import WeirError
from weir.layer import Layer, Place
from weir.models import LayerFacts, describe
from weir.plan import Plan, cut
from weir.policy import Pipe, Policy, policy_of
from weir.pools import Recent

Positions = Literal["rolling", "original"]
Prefill = Literal["chunked", "full"]

_ROWS = ("_seen", "_waiting", "_claimed", "_last", "_ended")
"""What a cache keeps for every row of the batch."""

_GO_ON = (
    "pass the whole conversation again, or only what is new with an attention_mask that covers "
    "everything so far"
)


@dataclass(frozen=True)
class Held:
    """What one layer holds now; slots that are empty have position -1.

    Attributes:
        position: places in the stream [batch, kv_heads, slots], int64.
        a, b: log-weights in numerator and denominator [batch, kv_heads, slots], float32.
        keys: as attention reads them [batch, kv_heads, slots, key_dim].
        values: [batch, kv_heads, slots, value_dim].
        pool: which of `pools` holds each slot [batch, kv_heads, slots], int64; -1 for none.
        pools: the pools' names in the order of the pipe, and last "new" for tokens that wait for
            the next fold.
        mass: attention received [batch, kv_heads, slots], float32, where a pool asks for it.
    """

    position: Tensor
    a: Tensor
    b: Tensor
    keys: Tensor
    values: Tensor
    pool: Tensor
    pools: tuple[str, ...]
    mass: Tensor | None = None


class StreamingCache(Cache):
    """A KV cache of fixed size for streams without end.

    Pass it to `model.generate(..., past_key_values=cache)` or `model(..., past_key_values=cache)`.
    Several turns may use one cache: pass the whole conversation again, or only what is new together
    with an attention mask as long as everything so far.

    Args:
        model: the causal language model it is for.
        policy: a pipe, `"sink(4) | recent(252)"`, or a named policy, `"streaming_llm(budget=256)"`.
        chunk: tokens that are taken in before the pipe folds them; the slab has `chunk` slots more
            than the policy. With 1, StreamingLLM to the letter.
        seed: of all random draws.
        positions: `"rolling"`: positions inside the cache (StreamingLLM, section 3.2), for streams
            without end. `"original"`: keys stay where they were said, for streams within the
            model's window.
        prefill: `"chunked"`: a prompt is fed through the tail like everything else, so it never
            takes more than the slab. `"full"`: the papers' protocol; the first call attends to all
            of its tokens exactly and folds them once. That holds the keys and values of the whole
            prompt in one layer at a time, and time that grows with its square.
        origin: the place in the stream of the first token.

    Raises:
        WeirError: the model cannot be served, or an argument makes no sense.
        PolicyError: the policy cannot be read.
    """

    _batch: int | None

    def __init__(
        self,
        model: PreTrainedModel,
        policy: str | Policy = "streaming_llm(budget=256)",
        *,
        chunk: int = 64,
        seed: int = 0,
        positions: Positions = "rolling",
        prefill: Prefill = "chunked",
        origin: int = 0,
    ) -> None:
        super().__init__(layers=[])
        _one_of("positions", positions, ("rolling", "original"))
        _one_of("prefill", prefill, ("chunked", "full"))
        for name, value, least in (("chunk", chunk, 1), ("seed", seed, 0), ("origin", origin, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise WeirError(f"{name} must be a whole number from {least} on, not {value!r}")
        self.policy = policy_of(policy)
        self.chunk = chunk
        self.seed = seed
        self.positions = positions
        self.prefill = prefill
        self.origin = origin
        self._model = weakref.ref(model)
        self.stack = self._make_layers(model)
        self.attachment = attach(model, self)
        self.reset()

    def _make_layers(self, model: PreTrainedModel) -> list[Layer]:
        count = len(describe(model).layers)
        pipes = [self.policy.for_layer(index, count) for index in range(count)]
        most = max((pipe.slots or 0) for pipe in pipes) + self.chunk
        limited = all(pipe.slots is not None for pipe in pipes)
        facts = describe(model, reach=most if limited and self.positions == "rolling" else None)
        everywhere = facts.sliding is not None and limited
        if everywhere and facts.sliding is not None and most > facts.sliding:
            raise WeirError(
                f"every layer of this model sees only {facts.sliding} tokens, fewer than the "
                f"policy's {most - self.chunk} slots and a chunk of {self.chunk}; "
                "take a smaller budget"
            )
        layers = []
        for index, (layer, pipe) in enumerate(zip(facts.layers, pipes, strict=True)):
            window = None if everywhere else layer.window
            # A sliding layer beside full ones keeps its own window; the policy is not for it.
            own = pipe if window is None else Pipe((Recent(window),))
            place = self._place(layer, model, window)
            draws = Draws(self.seed, index)
            layers.append(Layer(own, place, self.chunk, draws, index, count))
        return layers

    def _place(self, facts: LayerFacts, model: PreTrainedModel, window: int | None) -> Place:
        return Place(facts.rotary, facts.alibi, window, self.positions == "rolling")

    # --- what transformers asks of a cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass new keys and values on to weir's attention, marked; nothing is stored yet.

        Raises:
            WeirError: the call did not come through the model this cache was made for.
        """
        if self.attachment.running is not self:
            raise WeirError(
                "this cache was made for another model, or detached from this one; "
                "a cache serves one model only"
            )
        key_states = key_states.view_as(key_states)
        key_states.weir = (self, layer_idx)  # type: ignore[attr-defined]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns fed so far, padding too; `generate` feeds what comes after them."""
        return self._columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Sizes for a mask nobody reads: (query_length, 0)."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Columns fed so far."""
        return self._columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit on what can be fed: -1."""
        return -1

    @property
    def is_compileable(self) -> bool:
        """False: `generate` is not to compile the forward."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether anything was fed."""
        return self._columns > 0

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first token."""
        return -1 if self._batch is None else self._batch

    @property
    def is_croppable(self) -> bool:
        """False: tokens that were folded cannot be taken back."""
        return False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: tokens that were folded cannot be taken back.

        Raises:
            WeirError: always.
        """
        raise WeirError("a StreamingCache cannot be cropped: what left its slots is gone")

    def activate_past_recording(self, *args: Any, **kwargs: Any) -> None:
        """Refused: assisted and prompt-lookup decoding take tokens back.

        Raises:
            WeirError: always.
        """
        raise WeirError(
            "assisted and prompt-lookup decoding take back tokens, which a StreamingCache cannot; "
            "generate without assistant_model and prompt_lookup_num_tokens"
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows change places, as beam search asks after each step; `beam_idx` [batch]."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` [n], in that order; a row may come more than once."""
        rows = indices.tolist()
        if self._batch is None:
            return
        for layer in self.stack:
            if layer.slab is not None:
                layer.select_rows(indices.to(layer.slab.keys.device, torch.int64))
        self._batch = len(rows)
        for name in _ROWS:
            held = getattr(self, name)
            setattr(self, name, [held[row] for row in rows])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        if self._batch is not None:
            self.batch_select_indices(torch.arange(self._batch).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamingCache:
        """A cache of the same model that goes on from here alone: one prompt, many answers."""
        model = self._model()
        if model is None:
            raise WeirError("the model of this cache is gone")
        made = StreamingCache(model, self.policy, seed=self.seed, **self.state()["made_with"])
        made.load_state(self.state())
        for mine, other in zip(self.stack, made.stack, strict=True):
            if mine.slab is not None:
                everyone = torch.arange(len(self._seen), device=mine.slab.keys.device)
                other.load_slab(mine.slab.rows(everyone))
                other.queries = mine.queries
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: the model would have to go along.

        Raises:
            WeirError: always.
        """
        raise WeirError(
            "a StreamingCache cannot be pickled or copied shallowly; copy.deepcopy makes a second "
            "one, and weir.Stream saves to a file"
        )

    def reset(self) -> None:
        """Forget everything; the next call starts a new stream."""
        for layer in self.stack:
            layer.slab = None
            layer.queries = None
        self._columns = 0
        self._batch = None
        self._seen: list[int] = []
        self._waiting: list[int] = []
        # Tokens per row as generate() counts them: it goes on counting rows that have ended.
        self._claimed: list[int] = []
        self._last: list[int | None] = []
        self._ended: list[bool] = []
        self._plan: Plan | None = None
        self._broken = False

    def detach(self) -> None:
        """Take weir out of the model; the cache cannot be used any more."""
        model = self._model()
        if model is not None:
            detach(model, self)

    # --- what the stream and the command line ask

    @property
    def batch(self) -> int | None:
        """Rows of the batch; None before the first token."""
        return self._batch

    @property
    def seen(self) -> list[int]:
        """Tokens of the stream so far, by row; padding does not count."""
        return list(self._seen)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs; fixed from the first token on."""
        return sum(layer.slab.nbytes for layer in self.stack if layer.slab is not None)

    def slots(self, layer: int = 0) -> Held:
        """What one layer holds now.

        Raises:
            WeirError: there is no such layer, or nothing was fed yet.
        """
        if not 0 <= layer < len(self.stack):
            raise WeirError(f"layer {layer} does not exist; the model has {len(self.stack)}")
        it = self.stack[layer]
        if it.slab is None:
            raise WeirError("nothing was fed to this cache yet")
        ends = it.ends(self._waiting)
        part = it.slab.run(0, max(ends))
        steps = torch.arange(max(ends), device=part.position.device)
        used = steps < torch.tensor(ends, device=steps.device)[:, None]
        position = part.position.masked_fill(~used[:, None], -1)
        pools = torch.full_like(position, -1)
        names = tuple(pool.name for pool in it.pipe.pools)
        for row, lengths in enumerate(it.lengths):
            start = 0
            for pool in (*it.pipe.front, *it.pipe.run):
                pools[row, :, start : start + lengths[pool]] = pool
                start += lengths[pool]
            pools[row, :, start : ends[row]] = len(names)
        empty = position < 0
        return Held(
            position=position,
            a=part.a.masked_fill(empty, -torch.inf),
            b=part.b.masked_fill(empty, -torch.inf),
            keys=part.keys.clone(),
            values=part.values.clone(),
            pool=pools.masked_fill(empty, -1),
            pools=(*names, "new"),
            mass=None if part.mass is None else part.mass.clone(),
        )

    def report(self) -> dict[str, Any]:
        """Bytes, tokens seen, and per layer its bytes and the slots of every pool (row 0)."""
        layers = []
        for layer in self.stack:
            lengths = layer.lengths[0] if layer.slab is not None else [0] * len(layer.pipe.pools)
            held: dict[str, int] = {}
            for pool, length in zip(layer.pipe.pools, lengths, strict=True):
                held[pool.name] = held.get(pool.name, 0) + length
            held["new"] = self._waiting[0] if self._waiting else 0
            layers.append(
                {
                    "policy": str(layer.pipe),
                    "slots": held,
                    "bytes": 0 if layer.slab is None else layer.slab.nbytes,
                }
            )
        return {
            "policy": str(self.policy),
            "positions": self.positions,
            "chunk": self.chunk,
            "seen": self.seen,
            "bytes": self.nbytes,
            "layers": layers,
        }

    def state(self) -> dict[str, Any]:
        """Everything but the tensors, as JSON can hold it.

        Raises:
            WeirError: a call was interrupted while it folded.
        """
        self._check_whole()
        return {
            "made_with": {
                "chunk": self.chunk,
                "positions": self.positions,
                "prefill": self.prefill,
                "origin": self.origin,
            },
            "columns": self._columns,
            "batch": self._batch,
            "rows": {name: getattr(self, name) for name in _ROWS},
            "lengths": [layer.lengths for layer in self.stack],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned; the layers' slabs come apart from it."""
        self._columns = state["columns"]
        self._batch = state["batch"]
        for name in _ROWS:
            setattr(self, name, list(state["rows"][name]))
        for layer, lengths in zip(self.stack, state["lengths"], strict=True):
            layer.lengths = [list(row) for row in lengths]

    # --- what the hooks of the model ask

    def weir_begin(self, given: dict[str, Any]) -> None:
        """A forward begins; `given` are the decoder's arguments by name.

        Raises:
            WeirError: the forward does not continue this stream.
        """
        if self._plan is not None:
            self.weir_end(finished=False)  # a call that Ctrl-C ended never reached its own end
        self._check_whole()
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        tokens = ids if ids is not None else embeds
        if tokens is None:
            raise WeirError("neither input_ids nor inputs_embeds was given")
        if tokens.ndim < 2:
            raise WeirError(f"input_ids must be [batch, tokens], not {list(tokens.shape)}")
        batch, length = tokens.shape[:2]
        if length == 0 and self._columns:
            raise WeirError(f"nothing new was fed after {self._columns} tokens; {_GO_ON}")
        if length == 0:
            raise WeirError("a prompt of zero tokens was fed; a stream needs at least one")
        if given.get("use_cache") is False:
            # Also where nobody said so: MPT's configurations do.
            raise WeirError(
                "use_cache=False would feed the whole text at every step; pass use_cache=True"
            )
        if self._columns and batch != self._batch:
            raise WeirError(
                f"this cache holds {self._batch} rows but a batch of {batch} was fed; "
                "use one cache per batch, or reset() it"
            )
        if ids is not None and (ids.device.type == "cpu" or length > 1):
            self._check_ids(ids)
        if not self._columns:
            self._batch = batch
            self._seen, self._waiting, self._claimed = ([0] * batch for _ in range(3))
            self._last, self._ended = [None] * batch, [False] * batch
        claimed = self._real(given.get("attention_mask"), batch, length)
        real = self._without_ended(ids, claimed, given)
        self._check_positions(given.get("position_ids"), claimed, batch)
        first = self.prefill == "full" and not any(self._seen)
        self._plan = cut(
            real,
            batch,
            length,
            self._seen,
            self._waiting,
            self.chunk,
            tokens.device,
            full=first,
            origin=self.origin,
        )
        counts = [length] * batch if claimed is None else claimed.sum(dim=1).tolist()
        self._next_claimed = [c + n for c, n in zip(self._claimed, counts, strict=True)]
        self._next_last = self._last if ids is None else ids[:, -1].tolist()
        self._next_columns = self._columns + length
        self._touched = False

    def weir_end(self, *, finished: bool) -> None:
        """A forward has ended; if not `finished`, it failed somewhere on its way."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        if not finished:
            self._give_up(plan)
            return
        self._columns = self._next_columns
        self._claimed = self._next_claimed
        self._last = self._next_last
        self._ended = self._next_ended
        for piece in plan.pieces:
            for row, count in enumerate(piece.counts):
                self._seen[row] = piece.seen[row] + count
                done = row in piece.full
                self._waiting[row] = 0 if done else piece.waiting[row] + count

    def _give_up(self, plan: Plan) -> None:
        """A forward failed; the stream is as it was before, or broken where layers disagree."""
        if not self._columns:
            self.reset()
            return
        # Without a fold, all that was written are slots of the tail that still wait for a token.
        folds = any(piece.full for piece in plan.pieces)
        counts = any(layer.pipe.needs_mass or layer.pipe.needs_queries for layer in self.stack)
        self._broken = self._touched and (folds or counts)

    def _check_whole(self) -> None:
        if self._plan is not None or self._broken:
            raise WeirError(
                "a call with this cache was interrupted while it folded; reset() it or restore a "
                "saved session"
            )

    @torch.no_grad()
    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, form: Form
    ) -> Tensor:
        """One layer's attention in the forward under way; shapes as in `Layer.attend`."""
        assert self._plan is not None
        self._touched = True
        return self.stack[layer].attend(queries, keys, values, form, self._plan)

    def _check_ids(self, ids: Tensor) -> None:
        vocabulary = self.attachment.facts.vocabulary
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocabulary:
            wrong = low if low < 0 else high
            raise WeirError(
                f"token id {wrong} is out of range; the model knows 0 to {vocabulary - 1}"
            )

    def _real(self, mask: Tensor | None, batch: int, length: int) -> Tensor | None:
        """Which of the new columns hold tokens [batch, length]; None if all do."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise WeirError("attention_mask must be [batch, tokens]; weir makes its own 4D masks")
        if mask.shape[0] != batch or mask.shape[1] not in (length, self._columns + length):
            raise WeirError(
                f"attention_mask is {list(mask.shape)}, but {batch} rows of {length} new tokens "
                f"after {self._columns} need [{batch}, {self._columns + length}]"
            )
        real = mask[:, -length:].bool()
        return None if bool(real.all()) else real

    def _without_ended(
        self, ids: Tensor | None, real: Tensor | None, given: dict[str, Any]
    ) -> Tensor | None:
        """Leave out the padding that generate() feeds, with mask 1, to rows that have ended."""
        model = self._model()
        stepping = ids is not None and ids.shape[1] == 1 and given.get("position_ids") is not None
        if model is None or ids is None or not stepping or ids.shape[0] == 1:
            self._next_ended = [False] * len(self._ended)
            return real
        config = model.generation_config
        stops = config.eos_token_id
        stops = {stops} if isinstance(stops, int) else set(stops or ())
        pad = config.pad_token_id if config.pad_token_id is not None else next(iter(stops), None)
        fed = ids[:, 0].tolist()
        self._next_ended = [
            token == pad and (ended or last in stops)
            for token, last, ended in zip(fed, self._last, self._ended, strict=True)
        ]
        if not any(self._next_ended):
            return real
        going = ~torch.tensor(self._next_ended, device=ids.device)[:, None]
        return going if real is None else real & going

    def _check_positions(self, given: Tensor | None, real: Tensor | None, batch: int) -> None:
        """Refuse a forward whose tokens are not the next ones of the stream."""
        if given is None or given.ndim != 2 or given.device.type == "meta":
            return
        places = given.expand(batch, -1)
        first = places[:, 0]
        if places.shape[1] > 1:
            each = torch.ones_like(places, dtype=torch.bool) if real is None else real
            # The same for all tokens of a row where positions rise by one from token to token.
            start = places - each.cumsum(dim=1) + 1
            first = start.gather(1, each.int().argmax(dim=1, keepdim=True))[:, 0]
            if bool(((start != first[:, None]) & each).any()):
                raise WeirError("position_ids must rise by one from token to token of a row")
        for row, place in enumerate(first.tolist()):
            if real is not None and not bool(real[row].any()):
                continue
            if place not in (self._seen[row], self._claimed[row], self._columns):
                raise WeirError(
                    f"row {row} was fed a token for position {place}, but its stream has seen "
                    f"{self._seen[row]}; {_GO_ON}"
                )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise WeirError(f"{name} must be {' or '.join(map(repr, allowed))}, not {value!r}")
