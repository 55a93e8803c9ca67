"""`Stream`: an endless stream of tokens through one model in constant memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.cache import Contents, Holding, Positions, Prefill, StreamingCache, choose_policy
from weir.errors import NotFiniteError, WeirError, in_words
from weir.models import CACHE, StopTokens, images_of, input_device, transformers_model
from weir.policies import KVzip, Policy, Recompute
from weir.stream import session
from weir.stream.archive import Archive, Excerpt
from weir.stream.held import HeldPlaces
from weir.stream.inputs import Inputs, Tokens, is_count, pieces_of, read_inputs, read_stops
from weir.stream.recomputation import Recomputation
from weir.stream.sampling import RepetitionPenalty, Sampling, check_penalty
from weir.stream.stream_text import StreamText
from weir.stream.whole_text import WholeText, new_cache

PIECE = 1024
"""Largest number of new tokens that the model reads in one call, except for the first call of a
stream with `prefill="full"`. (Under `recompute`, a call also reads the tokens of its windows
again.) Memory grows with this number. Smaller pieces take longer, because layers that keep a window
attend and fold once for each piece (`weir.cache.layer.attention`).
"""
MOST_LOGITS = 1 << 25
"""Largest number of logits that are computed at once, 128 MB in float32."""


class Stream:
    """A stream of tokens through a model, or a batch of streams that advance together.

    Args:
        model: a causal language model.
        policy: as for `StreamingCache`; `recompute` and `kvzip` also work here.
        chunk, positions, prefill, origin, slots: as for `StreamingCache`.
        seed: seed of all random draws, those of the policy and of sampling.
        archive: stores the text that the stream reads, for `recall`. It needs the `tokenizer`, and
            the stream must have one row. A copy of the stream has no archive.
        tokenizer: converts tokens to text for the archive. Under `kvzip`, it also tokenizes the
            words that ask the model to repeat the text.

    Attributes:
        model, seed: as given.
        policy: the policy, parsed.
        cache: the `StreamingCache`; None under `recompute`, and under `kvzip` until its text has
            been read.

    Raises:
        WeirError: the model is not supported, or an argument is invalid.
        PolicyError: the policy cannot be parsed.
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
        slots: str | None = None,
        archive: Archive | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._served = served = transformers_model(model)
        if served.get_output_embeddings() is None:  # a base model
            kind = type(served).__name__
            raise WeirError(
                f"a {kind} does not compute logits. Use the causal language model around it."
            )
        self.model = model
        self._device = input_device(served)
        self._images = images_of(served.config)
        self.policy = choose_policy(served, policy, slots, chunk)
        self.seed = seed
        self.cache: StreamingCache | None = None
        self._held: StreamingCache | Recomputation
        self._tokenizer = tokenizer
        self._whole: WholeText | None = None  # under `kvzip`, until its text has been read
        self._options: dict[str, Any] = {
            "chunk": chunk,
            "seed": seed,
            "positions": positions,
            "prefill": prefill,
            "origin": origin,
            "failures": "keep",
        }
        if isinstance(self.policy, Recompute):
            self._held = Recomputation(model, self.policy)
        elif isinstance(self.policy, KVzip):
            self._whole = WholeText(served, self.policy, tokenizer, self._options)
            self._held = self._whole.cache
        else:
            self._held = self.cache = StreamingCache(model, self.policy, **self._options)
        # The logits after the last token of each row [batch, vocabulary], and its id, if it has
        # one.
        self._logits: Tensor | None = None
        self._last: list[int | None] = []
        # Always on the CPU, because a saved stream may continue on another device.
        self._generator = torch.Generator().manual_seed(seed % 2**63)
        self._text: StreamText | None = None
        if archive is not None:
            self.use_archive(archive, tokenizer)

    def use_archive(self, archive: Archive, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """From now on, store the text that the stream reads in an archive. `recall` searches it.

        Raises:
            WeirError: there is no tokenizer, or the stream has several rows.
        """
        if tokenizer is None:
            raise WeirError(
                "archive needs the tokenizer, to turn tokens into text. Use Stream(..., "
                "archive=archive, tokenizer=tokenizer)."
            )
        if len(self._last) > 1:
            raise WeirError(
                f"an archive is for one stream, and this is a batch of {len(self._last)}. Use a "
                "Stream for each."
            )
        self._text = StreamText(archive, tokenizer, self.seen)

    def recall(self, text: str, most: int = 8) -> list[Excerpt]:
        """Find answers to a question in the text that has left the cache.

        Nothing is fed. To let the model read the excerpts, feed them.

        Args:
            text: a question; its names, numbers and rare words are searched for.
            most: largest number of excerpts.

        Returns:
            The excerpts, the best first; none if nothing matches well enough.

        Raises:
            WeirError: the stream has no archive, or the archive cannot be read.
        """
        if self._text is None:
            raise WeirError(
                "this stream has no archive. Use Stream(..., archive=weir.Archive(path), "
                "tokenizer=tokenizer)."
            )
        self._text.flush()
        if (archive := self._text.archive) is None:
            return []
        return archive.search(text, is_held=HeldPlaces(self), most=most)

    def __repr__(self) -> str:
        return f"<weir.Stream {self._held.summary()}>"

    def __copy__(self) -> Stream:
        """Refuse a shallow copy (WeirError): both would feed the same cache."""
        raise WeirError(
            "a Stream cannot be copied shallowly, because both copies would use one cache. Use "
            "copy.deepcopy."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Stream:
        """Return a second, independent stream of the same model that continues from here.

        If the model is copied in the same call of `deepcopy`, the second stream uses the copied
        model.
        """
        model = memo.get(id(self.model), self.model)
        made_with = {} if isinstance(self._held, Recomputation) else self._held.made_with
        made = Stream(model, self.policy, seed=self.seed, tokenizer=self._tokenizer, **made_with)
        if isinstance(self._held, Recomputation):
            assert isinstance(made._held, Recomputation)
            made._held.held, made._held.seen = self._held.held, self._held.seen
        elif self._whole is not None and made._whole is not None:
            made._whole.copy(self._whole)
        else:
            made._open().put_rows(self._cached().take_rows(), check=False)
        made._logits, made._last = self._logits, list(self._last)
        made._generator.set_state(self._generator.get_state())
        return made

    @property
    def seen(self) -> int:
        """Tokens of the stream so far; in a batch, those of the longest row."""
        return max(self._held.seen, default=0)

    @property
    def last(self) -> list[int | None]:
        """The last token of each row, None if it has no id; empty before the first token."""
        return list(self._last)

    @property
    def ends(self) -> set[int]:
        """The tokens that end an answer, from the model's generation configuration."""
        return set(StopTokens.of(self.model.generation_config).stops)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and the data that belongs to them; fixed from the first token on,
        except under policies that keep every token (see `StreamingCache.nbytes`).

        Under `recompute`, bytes of the ids in the window. Under `kvzip`, until its text has been
        read, bytes of a cache that holds all of the text.
        """
        return self._held.nbytes

    @property
    def capacity(self) -> int | None:
        """Slots that the policy has in its largest layer, without those of new tokens.

        None if there is no limit, or nothing is cached.
        """
        each = [] if self.cache is None else self.cache.slots_by_layer
        return None if None in each else max((n for n in each if n is not None), default=None)

    def feed(
        self,
        token_ids: Tokens | Iterator[int] | None = None,
        *,
        embeddings: Tensor | None = None,
        offsets: Tensor | None = None,
        all_logits: bool = False,
    ) -> Tensor:
        """Feed any number of tokens, piece by piece.

        Memory is bounded, however many tokens there are, except with `prefill="full"`, under
        `kvzip`, and under policies that keep every token.

        Args:
            token_ids: [length], or [batch, length] for several streams in step. The output of a
                tokenizer is accepted if it has no padding, and so is the output of the model's
                processor for text with images. An iterator of ids is read and fed piece by piece,
                however long it is. If an id in a piece is refused, the pieces before it have
                already been fed.
            embeddings: fed instead of ids, [length, width] or [batch, length, width], as the
                model's decoder reads them. `token_ids` are then their ids, or None. These ids are
                used only for `last` and an archive.
            offsets: for embeddings of a model whose positions have three axes (Qwen2-VL,
                Qwen2.5-VL), the place of each embedding within its image, as `weir.models.offsets`
                returns it; None if there are no images.
            all_logits: return the logits after every token, which takes length * vocabulary
                numbers.

        Returns:
            Logits after the last token [batch, vocabulary]; with `all_logits`, after every token
            [batch, length, vocabulary].

        Raises:
            WeirError: there are no tokens, one is out of range, images and image tokens do not
                match, embeddings do not fit the model, or the batch does not fit the stream.
                Nothing was fed, except the earlier pieces of an iterator.
            NotFiniteError: the model computed keys or values of a token that are not finite. The
                stream holds the tokens before it (see `seen`), and can continue from there. In a
                batch, this holds only for that row: the other rows have read all their tokens.
                Under `recompute`, this error means that the logits of a token are NaN, and all rows
                hold only the tokens before it.
        """
        if isinstance(token_ids, Iterator):
            if embeddings is not None or offsets is not None:
                raise WeirError("the ids of embeddings must be a list, got an iterator")
            pieces = (self._read_inputs(piece) for piece in pieces_of(token_ids, PIECE))
            return self._feed(pieces, all_logits)
        inputs = self._read_inputs(token_ids, embeddings, offsets)
        if inputs.ids.numel() == len(self._last) == 1 and inputs.embeddings is None:
            logits = None if all_logits else self._step(int(inputs.ids))
            if logits is not None:
                return logits.clone()
        return self._feed([inputs], all_logits)

    def _feed(self, inputs: Iterable[Inputs], all_logits: bool = False) -> Tensor:
        kept: list[Tensor] = []
        for piece in inputs:
            for logits in self._forward(piece, all_logits):
                if not all_logits:
                    kept.clear()
                kept.append(logits if all_logits else logits[:, -1])
        self._end_text()
        return torch.cat(kept, dim=1) if all_logits else kept[-1]

    def score(self, token_ids: Tokens) -> Tensor:
        """Feed tokens, and return how surprising each was.

        Args:
            token_ids: as for `feed`, but no iterator.

        Returns:
            The negative log-likelihood of each token given everything before it, in nats
            [batch, length], float32. NaN for the first token of a stream, because nothing came
            before it, and for image tokens, which are not predicted.

        Raises:
            WeirError: as for `feed`.
        """
        inputs = self._read_inputs(token_ids)
        ids, before = inputs.ids, self._logits
        parts, done = [], 0
        for logits in self._forward(inputs, True):
            these = ids[:, done : done + logits.shape[1]]
            done += logits.shape[1]
            if before is None:
                parts.append(torch.full_like(these[:, :1], math.nan, dtype=torch.float32))
            else:
                parts.append(_nll(before[:, None], these[:, :1]))
            parts.append(_nll(logits[:, :-1], these[:, 1:]))
            before = logits[:, -1]
        self._end_text()
        found = torch.cat(parts, dim=1)
        if self._images is None or inputs.embeddings is None:
            return found
        return found.masked_fill(self._images.in_ids(ids[:, : found.shape[1]]), math.nan)

    def generate(
        self,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: int | Sequence[int] | None = None,
    ) -> Iterator[int]:
        """Continue the stream.

        Every token that is yielded is already part of the stream, so you can stop at any time. The
        end token, if there is one, is yielded last.

        Args:
            max_new_tokens: largest number of tokens, 0 or more. None continues until the end token,
                and with `stop=[]` forever.
            temperature: 0 takes the likeliest token; otherwise logits are divided by it.
            top_k: draw only from the likeliest k tokens.
            top_p: draw only from the likeliest tokens whose probabilities add up to this.
            min_p: draw only from tokens that have at least this share of the probability of the
                likeliest.
            repetition_penalty: a value over 1 makes tokens that this call has yielded less likely
                (CTRL, section 4.1).
            stop: the id of a token that ends the answer, or several ids. By default, the model's
                end tokens; `[]` for none.

        Raises:
            WeirError: nothing was fed yet, the stream is a batch, or an argument is invalid.
        """
        logits = self._logits
        if logits is None:
            raise WeirError("feed at least one token before generating")
        if logits.shape[0] != 1:
            raise WeirError(
                f"generate continues one stream, but this is a batch of {logits.shape[0]}. For "
                "batches, use model.generate(..., past_key_values=weir.StreamingCache(...))."
            )
        if max_new_tokens is not None and not is_count(max_new_tokens):
            raise WeirError(
                "max_new_tokens must be a whole number of at least 0, or None for no limit, got "
                f"{max_new_tokens!r}"
            )
        check_penalty(repetition_penalty)
        sampling = Sampling(temperature, top_k, top_p, min_p)
        ends = self.ends if stop is None else read_stops(stop)
        return self._generate(max_new_tokens, sampling, float(repetition_penalty), ends)

    def _generate(
        self, limit: int | None, sampling: Sampling, penalty: float, ends: set[int]
    ) -> Iterator[int]:
        said = None if penalty == 1 else RepetitionPenalty(penalty)
        for _ in itertools.count() if limit is None else range(limit):
            logits = self._logits
            assert logits is not None
            if said is not None:
                logits = said.penalize(logits)
            chosen = sampling.pick(logits, self._generator)
            token = int(chosen)
            if said is not None:
                said.add(token)
            if self._step(token) is None:
                self._feed([Inputs(chosen.to(self._device))])
            yield token
            if token in ends:
                return

    def slots(self, layer: int = 0) -> Contents:
        """Return the slots that one layer holds now; see `weir.cache.Contents`.

        Raises:
            WeirError: there is no such layer, nothing was fed yet, or nothing is cached.
        """
        return self._cached().slots(layer)

    def holding(self, row: int = 0) -> Holding:
        """Return the tokens of a row that each pool still holds, in all layers; see
        `weir.cache.Holding`.

        Raises:
            WeirError: there is no such row, nothing was fed yet, or nothing is cached.
        """
        return self._cached().holding(row)

    def report(self, row: int = 0) -> dict[str, Any]:
        """Report bytes, tokens seen, and what each layer holds of a row; see
        `StreamingCache.report`. Under `recompute`, no layer holds anything, and `row` has no
        effect.

        Raises:
            WeirError: there is no such row.
        """
        return self._held.report(row)

    def save(self, path: str | Path, *, row: int | None = None) -> None:
        """Write the stream to a safetensors file. An interrupted save leaves the old file intact.

        Args:
            path: the file.
            row: in a batch, the row to save as a separate stream; None for all rows.

        Raises:
            WeirError: the file cannot be written, there is no such row, the policy is `recompute`,
                or it is `kvzip` and no text was fed yet.
        """
        cache, logits = self._cached(), self._logits
        rows = cache.take_rows() if row is None else [cache.take_row(row)]
        these = slice(None) if row is None else slice(row, row + 1)
        saved = session.Session(
            last=self._last[these],
            generator=self._generator.get_state(),
            logits=None if logits is None else logits[these],
            rows=rows,
        )
        session.write(path, saved, cache, self._served)

    @classmethod
    def restore(
        cls, model: PreTrainedModel, path: str | Path, policy: str | Policy | None = None
    ) -> Stream:
        """Load a saved stream, which continues as if it had never been interrupted.

        Args:
            model: the model it was saved with.
            path: the file.
            policy: the policy that it must have; None accepts the policy in the file.

        Raises:
            WeirError: the file is missing, damaged, not a session, or of another model or policy.
        """
        served = transformers_model(model)
        file = session.SessionFile(path)
        file.check_model(served)
        saved_policy = file.policy(policy)
        with file.refusing():
            stream = cls(model, saved_policy, seed=file.facts["seed"], **file.facts["made_with"])
            cache = stream._open()
        saved = file.read(cache)
        cache.put_rows(saved.rows, check=False)  # `SessionFile.read` has checked them
        stream._last = saved.last
        stream._logits = None if saved.logits is None else saved.logits.to(stream._device)
        stream._generator.set_state(saved.generator)
        return stream

    def _cached(self) -> StreamingCache:
        if self._whole is not None:
            raise WeirError("kvzip has not read a text yet. Feed one first.")
        if self.cache is None:
            raise WeirError("recompute caches nothing, so there is nothing to look at or to save")
        return self.cache

    def _open(self) -> StreamingCache:
        """Return the cache; under `kvzip`, an empty one for a stream that has read its text."""
        if self._whole is not None and isinstance(self.policy, KVzip):
            self._held = self.cache = new_cache(self._served, self.policy, self._options)
            self._whole.close()
            self._whole = None
        return self._cached()

    def _end_text(self) -> None:
        """Choose what `kvzip` keeps, if the tokens that were just fed were the text."""
        if self._whole is not None:
            self._held = self.cache = self._whole.keep()
            self._whole = None

    @property
    def _vocabulary(self) -> int:
        """The number of token ids of the model."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def _read_inputs(
        self,
        token_ids: Tokens | None,
        embeddings: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Inputs:
        """Check tokens, and return them on the model's device."""
        known = self._served, self._images, self._vocabulary
        inputs = read_inputs(token_ids, embeddings, *known, offsets)
        logits = self._logits
        if logits is not None and logits.shape[0] != inputs.rows:
            raise WeirError(
                f"this stream has {in_words(logits.shape[0], 'row')}, but {inputs.rows} were fed"
            )
        if self._text is not None and inputs.rows > 1:
            raise WeirError(
                f"a stream with an archive has one row, but {inputs.rows} were fed. Use a Stream "
                "for each."
            )
        return inputs.to(self._device)

    def _forward(self, inputs: Inputs, all_logits: bool) -> Iterator[Tensor]:
        """Yield logits piece by piece: those after all tokens of the piece, or, without
        `all_logits`, possibly only after the last [batch, length or 1, vocabulary]. If tokens of
        rows were refused, raises the NotFiniteError of the first such row at the end.
        """
        size = PIECE
        if all_logits:
            size = max(1, min(size, MOST_LOGITS // (self._vocabulary * inputs.rows)))
        if self._whole is not None:
            self._whole.check(inputs.embeddings)
        cache = self.cache
        if cache is not None and cache.prefill == "full" and not self.seen:
            size = len(inputs)
        refused: dict[int, NotFiniteError] = {}
        start = 0
        while start < len(inputs):
            stop = start + size
            piece = inputs if stop - start == len(inputs) else inputs.part(start, stop)
            logits = self._read(piece, all_logits, start, refused)
            if logits is None:
                break
            start = stop
            yield logits
        if refused:
            raise refused[min(refused)]

    def _read(
        self, piece: Inputs, all_logits: bool, start: int, refused: dict[int, NotFiniteError]
    ) -> Tensor | None:
        """Feed the next tokens of all rows that were not refused, and return logits [batch, length
        or 1, vocabulary]; None if no row is left.

        `start` tokens of the call came before the piece. `refused` has the error of each row whose
        tokens are no longer read. Rows that are refused now are added to `refused`, after their
        tokens before the bad one have been read.
        """
        if isinstance(self._held, Recomputation):
            return self._recompute(self._held, piece, all_logits, start)
        try:
            logits: Tensor | None = self._call(self._held, piece, all_logits, refused)
        except NotFiniteError:
            logits = None
        failed = self._held.failed.items()
        new = {row: error for row, error in failed if isinstance(error, NotFiniteError)}
        if logits is not None:
            self._keep(piece, logits, {*refused, *new})
        for row, error in new.items():
            place = error.place or 0
            if place:
                only = {other for other in range(piece.rows) if other != row}
                before = piece.part(0, place)
                self._keep(before, self._call(self._held, before, False, only), only)
            refused[row] = NotFiniteError(
                error.layer,
                row=error.row,
                place=start + place,
                token=error.token,
                from_there=True,
            )
        return logits

    def _recompute(
        self, window: Recomputation, piece: Inputs, all_logits: bool, start: int
    ) -> Tensor:
        """Do for `recompute` what `_read` does with a cache. If some logits are NaN, read the piece
        again token by token; all rows then stop at the same token.
        """
        if piece.embeddings is not None:
            raise WeirError(
                "recompute computes its window again from token ids, so it does not accept images "
                "or embeddings. Use a policy that caches."
            )
        try:
            return self._keep(piece, window.forward(piece.ids, all_logits))
        except NotFiniteError:
            if len(piece) == 1:
                token = int(piece.ids[0, 0])
                raise NotFiniteError(None, place=start, token=token, from_there=True) from None
            tokens = [(start + at, piece.part(at, at + 1)) for at in range(len(piece))]
            return torch.cat([self._recompute(window, it, True, at) for at, it in tokens], dim=1)

    def _call(
        self, cache: StreamingCache, piece: Inputs, all_logits: bool, without: Collection[int]
    ) -> Tensor:
        """Call the model and return its logits; the rows `without` are fed nothing, and their
        logits are undefined.
        """
        more: dict[str, Any] = {}
        if not (all_logits or len(piece) == 1):
            more["logits_to_keep"] = 1
        if without:
            mask = torch.ones_like(piece.ids)
            mask[list(without)] = 0
            more["attention_mask"] = mask
        with torch.no_grad():
            more |= {CACHE: cache, "use_cache": True}
            logits: Tensor = self.model(**piece.given, **more).logits
        return logits

    def _step(self, token: int) -> Tensor | None:
        """Let an engine run the decode step of a token in the only row, and return the logits that
        the stream keeps. Returns None, with no effect, if the model must be called instead; that
        call also reports why a token is refused.
        """
        if self.cache is None or self.model is not self._served:
            return None
        try:
            logits = self.cache.run_step([token])
        except NotFiniteError:
            return None
        if logits is not None:
            self._logits, self._last = logits, [token]
            if self._text is not None:
                self._text.add([token])
        return logits

    def _keep(self, piece: Inputs, logits: Tensor, without: Collection[int] = ()) -> Tensor:
        """Store the last tokens and logits of all rows but `without`, and return the logits."""
        last, after = piece.last, logits[:, -1].clone()
        if without:
            before = torch.zeros_like(after) if self._logits is None else self._logits
            for row in without:
                after[row] = before[row]
                last[row] = self._last[row] if self._last else 0
        self._logits, self._last = after, last
        if self._whole is not None:
            self._whole.add(piece.ids, without)
        if self._text is not None:
            ids = piece.ids[0].tolist()
            # Image tokens are passed on, too, because the archive counts places in the stream.
            self._text.add(ids)
        return logits


def _nll(logits: Tensor, ids: Tensor) -> Tensor:
    """Compute the loss of `ids` [batch, n] after logits [batch, n, vocabulary], in nats."""
    picked = logits.gather(-1, ids[..., None])[..., 0].float()
    return logits.float().logsumexp(-1) - picked
