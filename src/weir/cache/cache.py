"""`StreamingCache`: a transformers `Cache` that holds a policy's slots and no more.

Between transformers and the layers: it answers what a cache is asked, and runs a forward's plan
through the layers. Knows nothing about what the pools do.
"""

from __future__ import annotations

import weakref
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from weir.cache.contents import Held, look
from weir.cache.layer import Layer, Plan
from weir.cache.rows import Rows
from weir.cache.step import Step
from weir.errors import NotFiniteError, WeirError, shortened, shown
from weir.models import DROPPING, Endings, LayerFacts, attach, describe, detach
from weir.policies import Pipe, Policy, policy_of
from weir.pools import Draws, Recent, fits
from weir.slab import Form, Place

Positions = Literal["rolling", "original"]
Prefill = Literal["chunked", "full"]


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

    rows: Rows

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
        self.stack = self._make_layers(model)
        self._model = weakref.ref(model)
        self.attachment = attach(model, self)
        self.reset()

    def _make_layers(self, model: PreTrainedModel) -> list[Layer]:
        known = describe(model).layers
        count = len(known)
        # Sliding layers beside full ones keep their own window; the policy shares out the others.
        full = [index for index, layer in enumerate(known) if layer.window is None]
        served = full or list(range(count))
        asked = [self.policy.for_layer(place, len(served)) for place in range(len(served))]
        pipes = [asked[served.index(index) if index in served else 0] for index in range(count)]
        most = max((pipe.slots or 0) for pipe in pipes) + self.chunk
        limited = all(pipe.slots is not None for pipe in pipes)
        facts = describe(model, reach=most if limited and self.positions == "rolling" else None)
        self._rotations = facts.rotations
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
        return self.rows.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Sizes for a mask nobody reads: (query_length, 0)."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Columns fed so far."""
        return self.rows.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit on what can be fed: -1."""
        return -1

    def __len__(self) -> int:
        """Layers of the model, as for every cache of transformers."""
        return len(self.stack)

    def __bool__(self) -> bool:
        """True, from the first token on and before; but see `models.DROPPING`."""
        return self.attachment.facts.kind not in DROPPING

    @property
    def is_compileable(self) -> bool:
        """False: `generate` is not to compile the forward."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether anything was fed."""
        return self.rows.columns > 0

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first token."""
        return -1 if self.rows.batch is None else self.rows.batch

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
        if self.rows.batch is None:
            return
        for layer in self.stack:
            if layer.slab is not None:
                layer.select_rows(indices.to(layer.slab.keys.device, torch.int64))
        self.rows = self.rows.select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        if self.rows.batch is not None:
            self.batch_select_indices(torch.arange(self.rows.batch).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamingCache:
        """A cache of the same model that goes on from here alone: one prompt, many answers."""
        model = self._model()
        if model is None:
            raise WeirError("the model of this cache is gone")
        made = StreamingCache(model, self.policy, seed=self.seed, **self.state()["made_with"])
        made.load_state(self.state())
        for mine, other in zip(self.stack, made.stack, strict=True):
            if mine.slab is not None:
                everyone = torch.arange(len(self.rows.seen), device=mine.slab.keys.device)
                other.load_slab(mine.slab.rows(everyone))
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
            layer.reset()
        self.rows = Rows()
        self._asked: set[tuple[str | None, int]] = set()
        self._running: tuple[Plan, Rows] | None = None
        self._broken = False

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
        policy = shortened(" ".join(str(self.policy).split()))
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
        return sum(layer.slab.nbytes for layer in self.stack if layer.slab is not None)

    def slots(self, layer: int = 0) -> Held:
        """What one layer holds now.

        Raises:
            WeirError: there is no such layer, or nothing was fed yet.
        """
        self._check_whole()
        if not fits(layer, int) or not 0 <= layer < len(self.stack):
            last = len(self.stack) - 1
            raise WeirError(
                f"layer {shown(layer)} does not exist; the model's layers are 0 to {last}"
            )
        return look(self.stack[layer], self.rows.waiting)

    def report(self) -> dict[str, Any]:
        """Bytes, tokens seen, and per layer its bytes and the slots of every pool (row 0)."""
        self._check_whole()
        layers = []
        for layer in self.stack:
            lengths = layer.lengths[0] if layer.slab is not None else [0] * len(layer.pipe.pools)
            held: dict[str, int] = {}
            for pool, length in zip(layer.pipe.pools, lengths, strict=True):
                held[pool.name] = held.get(pool.name, 0) + length
            held["new"] = self.rows.waiting[0] if self.rows.waiting else 0
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
            "rows": self.rows.as_json(),
            "lengths": [layer.lengths for layer in self.stack],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned; the layers' slabs come apart from it."""
        self.rows = Rows(**state["rows"])
        for layer, lengths in zip(self.stack, state["lengths"], strict=True):
            layer.lengths = [list(row) for row in lengths]

    # --- what the hooks of the model ask

    def weir_begin(self, given: dict[str, Any]) -> None:
        """A forward begins; `given` are the decoder's arguments by name.

        Raises:
            WeirError: the forward does not continue this stream.
        """
        self._check_whole()
        self._running = self.rows.take(
            given,
            Endings.of(getattr(self._model(), "generation_config", None)),
            vocabulary=self.attachment.facts.vocabulary,
            chunk=self.chunk,
            full=self.prefill == "full",
            origin=self.origin,
        )

    def weir_end(self, *, finished: bool) -> None:
        """A forward has ended; if not `finished`, it failed somewhere and never happened.

        Raises:
            NotFiniteError: keys or values of the forward are not finite; it never happened.
        """
        running, self._running = self._running, None
        if running is None:
            return
        refused = self._refusal() if finished else None
        if not finished or refused is not None:
            for layer in self.stack:
                layer.take_back()
            if refused is not None:
                raise refused
            return
        self._broken = True
        for layer in self.stack:
            layer.settle()
        self._broken = False
        self.rows = running[1]

    def _refusal(self) -> NotFiniteError | None:
        """What is to be said of the forward under way, if it is one of which no token may stay."""
        unseen = [numbers for layer in self.stack for numbers in layer.unseen]
        if not unseen:
            return None
        device = unseen[0].device
        if bool(torch.cat([numbers.to(device) for numbers in unseen]).isfinite().all()):
            return None
        wrong = [not all(bool(t.isfinite().all()) for t in layer.unseen) for layer in self.stack]
        return NotFiniteError(wrong.index(True))

    def _check_whole(self) -> None:
        if self._running is not None:
            self.weir_end(finished=False)  # a call that Ctrl-C ended never reached its own end
        if self._broken:
            raise WeirError(
                "a call with this cache was interrupted while it folded; reset() it or restore a "
                "saved session"
            )

    def rotations(
        self, kind: str | None, width: int, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines at the places of the forward under way.

        Args:
            kind: the type of layers; None where the model does not tell them apart.
            width: as many as the model wants for a head.
            device: where.

        Returns:
            Twice [batch or 1, length, width], float32; None where no layer rotates.
        """
        assert self._running is not None
        self._asked.add((kind, width))
        if not self._rotations:
            return None
        rotary = self._rotations.get(kind) or next(iter(self._rotations.values()))
        return rotary.tables(self._running[0].positions.to(device), width)

    def step(self) -> Step | None:
        """The forward under way as a compiled step; None if it has to go the usual way."""
        assert self._running is not None
        plan = self._running[0]
        piece = plan.pieces[0] if len(plan.pieces) == 1 else None
        if piece is None or plan.full or not (plan.whole and piece.even and piece.width == 1):
            return None
        spots = [layer.spot() for layer in self.stack]
        whole = [spot for spot in spots if spot is not None and spot.b.device == piece.device]
        if torch.is_grad_enabled() or len(whole) < len(spots):
            return None
        ends = [layer.ends(piece.waiting) for layer in self.stack]
        if any(len(set(rows)) > 1 for rows in ends):
            return None
        return Step(
            whole,
            torch.tensor([rows[0] for rows in ends], device=piece.device),
            torch.tensor(piece.waiting[:1], device=piece.device),
            {key: self.rotations(*key, piece.device) for key in tuple(self._asked)},
        )

    def stepped(self, step: Step) -> None:
        """A compiled step of the forward under way has been made."""
        assert self._running is not None
        (piece,) = self._running[0].pieces
        for layer, largest in zip(self.stack, step.largest.split(1), strict=True):
            layer.stepped(piece, largest)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, form: Form
    ) -> Tensor:
        """One layer's attention in the forward under way; shapes as in `Layer.attend`."""
        assert self._running is not None
        plan = self._running[0].on(queries.device)
        if torch.is_grad_enabled():  # asked first: to switch it costs more than to ask
            with torch.no_grad():
                return self.stack[layer].attend(queries, keys, values, form, plan)
        return self.stack[layer].attend(queries, keys, values, form, plan)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise WeirError(f"{name} must be {' or '.join(map(repr, allowed))}, not {value!r}")
