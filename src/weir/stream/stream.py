"""`Stream`: an endless stream of tokens through one model in constant memory.

Tokens in, logits out; what happens between is the cache's business. Knows nothing about text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache import Held, Positions, Prefill, StreamingCache
from weir.errors import NotFiniteError, PolicyError, WeirError
from weir.models import Endings
from weir.policies import Policy, Recompute, policy_of
from weir.slab import Slab
from weir.stream import session
from weir.stream.fingerprint import fingerprint
from weir.stream.recompute import Recomputation
from weir.stream.sampling import Sampling
from weir.stream.tokens import Tokens, is_count, read_ids, read_stops

PIECE = 512
"""Tokens of a forward; more would not be faster and would hold more activations."""
MOST_LOGITS = 1 << 25
"""Logits written out at once, 128 MB in float32."""


class Stream:
    """A stream of tokens through a model, or a batch of them in step.

    Args:
        model: a causal language model.
        policy: a pipe or a named policy; `recompute(budget=...)` works here too.
        chunk, seed, positions, prefill, origin: as for `StreamingCache`.

    Attributes:
        policy: the policy.
        cache: the `StreamingCache`; None under `recompute`.

    Raises:
        WeirError: the model cannot be served, or an argument makes no sense.
        PolicyError: the policy cannot be read.
    """

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
        _check_head(model)
        self.model = model
        self.policy = policy_of(policy)
        self.seed = seed
        self.cache: StreamingCache | None = None
        self._recomputation: Recomputation | None = None
        if isinstance(self.policy, Recompute):
            self._recomputation = Recomputation(model, self.policy)
        else:
            self.cache = StreamingCache(
                model,
                self.policy,
                chunk=chunk,
                seed=seed,
                positions=positions,
                prefill=prefill,
                origin=origin,
            )
        self._logits: Tensor | None = None
        self._last: list[int] = []
        self._seen = 0
        # On the CPU whatever the model's device: a saved stream may go on elsewhere.
        self._generator = torch.Generator().manual_seed(seed % 2**63)

    def __repr__(self) -> str:
        if self.cache is not None:
            return f"<weir.Stream {self.cache.summary()}>"
        return f"<weir.Stream {self.policy}: {self._seen:,} tokens seen, {self.nbytes:,} bytes>"

    @property
    def seen(self) -> int:
        """Tokens of the stream so far (of each row, in a batch)."""
        return self._seen

    @property
    def last(self) -> list[int]:
        """The last token of each row; none before the first."""
        return list(self._last)

    @property
    def ends(self) -> set[int]:
        """The tokens that end an answer, as the model's generation configuration names them."""
        return set(Endings.of(self.model.generation_config).stops)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and what belongs to them; fixed from the first token on."""
        held = self._recomputation if self.cache is None else self.cache
        return 0 if held is None else held.nbytes

    def feed(self, token_ids: Tokens, *, all_logits: bool = False) -> Tensor:
        """Feed tokens, any number, in bounded memory.

        Args:
            token_ids: [length], or [batch, length] for several streams in step; what a tokenizer
                returned will do, as long as it has no padding.
            all_logits: also return the logits before the last; that takes length * vocabulary
                numbers.

        Returns:
            Logits after the last token [batch, vocabulary]; with `all_logits` after every token
            [batch, length, vocabulary].

        Raises:
            WeirError: there are no tokens, one is out of range, or the batch is not the stream's.
            NotFiniteError: the model makes keys or values of a token that are not finite numbers;
                the stream holds the tokens before it, as `seen` says, and goes on from there.
        """
        kept = [
            logits if all_logits else logits[:, -1:]
            for logits in self._forward(self._ids(token_ids), all_logits)
        ]
        return torch.cat(kept, dim=1) if all_logits else kept[-1][:, 0]

    def score(self, token_ids: Tokens) -> Tensor:
        """Feed tokens and say how surprising each was.

        Args:
            token_ids: as for `feed`.

        Returns:
            The negative log-likelihood of each token given everything before it, in nats
            [batch, length], float32. NaN for the first token of a stream: nothing came before.

        Raises:
            WeirError: as `feed`.
        """
        ids = self._ids(token_ids)
        before = self._logits
        parts, done = [], 0
        for logits in self._forward(ids, True):
            these = ids[:, done : done + logits.shape[1]]
            done += logits.shape[1]
            if before is None:
                parts.append(torch.full_like(these[:, :1], math.nan, dtype=torch.float32))
            else:
                parts.append(_nll(before[:, None], these[:, :1]))
            parts.append(_nll(logits[:, :-1], these[:, 1:]))
            before = logits[:, -1]
        return torch.cat(parts, dim=1)

    def generate(
        self,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | Sequence[int] | None = None,
    ) -> Iterator[int]:
        """Continue the stream.

        Every token that is yielded is already part of the stream, so stopping at any time leaves it
        whole. The end token, if one comes, is yielded last.

        Args:
            max_new_tokens: at most so many; 0 or more.
            temperature: 0 takes the likeliest token; otherwise logits are divided by it.
            top_k: draw from the likeliest k only.
            top_p: draw from the likeliest tokens that make up this probability.
            stop: the id of a token that ends it, or several; by default the model's end tokens,
                none with `[]`.

        Raises:
            WeirError: nothing was fed yet, the stream is a batch, or an argument makes no sense.
        """
        if self._logits is None:
            raise WeirError("feed at least one token before generating")
        if self._logits.shape[0] != 1:
            raise WeirError(
                f"generate continues one stream and this is a batch of {self._logits.shape[0]}; "
                "use model.generate(..., past_key_values=weir.StreamingCache(...)) for batches"
            )
        if not is_count(max_new_tokens):
            raise WeirError(f"max_new_tokens must be 0 or more, not {max_new_tokens!r}")
        sampling = Sampling(temperature, top_k, top_p)
        ends = self.ends if stop is None else read_stops(stop)
        return self._generate(max_new_tokens, sampling, ends)

    def _generate(self, most: int, sampling: Sampling, ends: set[int]) -> Iterator[int]:
        for _ in range(most):
            assert self._logits is not None
            chosen = sampling.pick(self._logits, self._generator)
            token = int(chosen)
            self.feed(chosen)
            yield token
            if token in ends:
                return

    def slots(self, layer: int = 0) -> Held:
        """What one layer holds now; see `Held`.

        Raises:
            WeirError: there is no such layer, nothing was fed yet, or nothing is cached.
        """
        return self._cached().slots(layer)

    def report(self) -> dict[str, Any]:
        """Bytes, tokens seen, and what each layer holds."""
        if self.cache is None:
            return {"policy": str(self.policy), "seen": [self._seen], "bytes": self.nbytes}
        return self.cache.report()

    def save(self, path: str | Path) -> None:
        """Write the stream to a safetensors file; an interrupted save leaves the old file whole.

        Raises:
            WeirError: the file cannot be written, or the policy is `recompute`.
        """
        cache = self._cached()
        facts = {
            "model": fingerprint(self.model),
            "policy": str(self.policy),
            "seed": self.seed,
            "tokens": self._seen,
            "last": self._last,
            "cache": cache.state(),
        }
        tensors = {"generator": self._generator.get_state()}
        if self._logits is not None:
            tensors["logits"] = self._logits
        for index, layer in enumerate(cache.stack):
            if layer.slab is not None:
                for name, t in layer.slab.tensors().items():
                    tensors[f"{index}.{name}"] = t
        session.write(path, facts, tensors)

    @classmethod
    def restore(
        cls, model: PreTrainedModel, path: str | Path, policy: str | Policy | None = None
    ) -> Stream:
        """A saved stream, to be continued as if it had never been interrupted.

        Args:
            model: the model it was saved with.
            path: the file.
            policy: the policy it is expected to have; None takes whatever the file says.

        Raises:
            WeirError: the file is missing, damaged, foreign, or of another model or policy.
        """
        facts, tensors = session.read(path)
        session.check_model(path, facts, model)
        try:
            saved = policy_of(facts["policy"])
        except PolicyError as error:
            raise WeirError(f"{path} has a policy that this weir does not know: {error}") from None
        if policy is not None and policy_of(policy) != saved:
            raise WeirError(f"{path} has the policy {saved}, not {policy_of(policy)}")
        made = facts["cache"]["made_with"]
        stream = cls(model, saved, seed=facts["seed"], **made)
        cache = stream._cached()
        cache.load_state(facts["cache"])
        device = model.device
        stream._seen = facts["tokens"]
        stream._last = facts["last"]
        stream._generator.set_state(tensors["generator"])
        if "logits" in tensors:
            stream._logits = tensors["logits"].to(device)
        for index, layer in enumerate(cache.stack):
            mine = {
                name.partition(".")[2]: t.to(device)
                for name, t in tensors.items()
                if name.startswith(f"{index}.")
            }
            if mine:
                layer.load_slab(Slab.of(mine))
        return stream

    def _cached(self) -> StreamingCache:
        if self.cache is None:
            raise WeirError("recompute caches nothing, so there is nothing to look at or to save")
        return self.cache

    @property
    def _vocabulary(self) -> int:
        """How many token ids the model knows."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def _ids(self, token_ids: Tokens) -> Tensor:
        """Checked token ids [batch, length], int64, on the model's device."""
        ids = read_ids(token_ids, self._vocabulary)
        if self._logits is not None and self._logits.shape[0] != ids.shape[0]:
            raise WeirError(
                f"this stream has {self._logits.shape[0]} rows, {ids.shape[0]} were fed"
            )
        return ids.to(self.model.device)

    def _forward(self, ids: Tensor, all_logits: bool) -> Iterator[Tensor]:
        """Logits after the tokens, some pieces one after the other [batch, piece, vocabulary]."""
        size = PIECE
        if all_logits:
            size = max(1, min(size, MOST_LOGITS // (self._vocabulary * ids.shape[0])))
        if self.cache is not None and self.cache.prefill == "full" and not self._seen:
            size = ids.shape[1]
        for start in range(0, ids.shape[1], size):
            piece = ids[:, start : start + size]
            try:
                yield self._step(piece, all_logits)
            except NotFiniteError:
                yield from self._one_by_one(piece, all_logits, start)

    def _one_by_one(self, piece: Tensor, all_logits: bool, start: int) -> Iterator[Tensor]:
        """Feed a piece up to the token that is to be refused; `start` of the call stand before."""
        for place, token in enumerate(piece.split(1, dim=1), start + 1):
            try:
                yield self._step(token, all_logits)
            except NotFiniteError as refusal:
                ids = ", ".join(map(str, token.flatten().tolist()))
                what = f"token {place} of this call (id {ids}) and what comes after it"
                raise NotFiniteError(refusal.layer, what) from None

    def _step(self, piece: Tensor, all_logits: bool) -> Tensor:
        """One forward; logits [batch, piece, vocabulary], or of the last token only."""
        with torch.no_grad():
            if self._recomputation is not None:
                logits = self._recomputation.forward(piece, all_logits)
            else:
                logits = self._model_logits(piece, all_logits)
        self._logits = logits[:, -1].clone()
        self._last = piece[:, -1].tolist()
        self._seen += piece.shape[1]
        return logits

    def _model_logits(self, piece: Tensor, all_logits: bool) -> Tensor:
        keep = {} if all_logits or piece.shape[1] == 1 else {"logits_to_keep": 1}
        logits: Tensor = self.model(
            input_ids=piece, past_key_values=self.cache, use_cache=True, **keep
        ).logits
        return logits


def _check_head(model: object) -> None:
    """Refuse a base model: a stream answers with logits.

    Raises:
        WeirError: the model makes none.
    """
    if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is None:
        kind = type(model).__name__
        raise WeirError(f"a {kind} makes no logits; take the causal language model around it")


def _nll(logits: Tensor, ids: Tensor) -> Tensor:
    """How surprising `ids` [batch, n] are after logits [batch, n, vocabulary], in nats."""
    picked = logits.gather(-1, ids[..., None])[..., 0].float()
    return logits.float().logsumexp(-1) - picked
