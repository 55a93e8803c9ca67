"""Model adapter for lm-evaluation-harness: any of its tasks under any cache policy.

Tasks, prompts and metrics come from the harness. This file answers the three kinds of request from
a cache of fixed size. Nothing is ever truncated; the policy decides which tokens to drop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.cache import DEFAULT, Positions, Prefill, StreamingCache
from weir.errors import WeirError
from weir.evals.answers import generate_answer
from weir.loading import load
from weir.models import CACHE, ModelSink, sink_of, transformers_model
from weir.policies import KVzip, Policy, Recompute, parse_policy
from weir.stream import MOST_LOGITS, PIECE, Stream, cut_at_stop, render_chat

Likelihood = tuple[float, bool]
"""Log-likelihood of a continuation, in nats, and whether greedy decoding would give it."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The sampling options that work under policies that transformers' `generate` cannot run."""


def pad_rows(rows: Sequence[Sequence[int]], pad: int, left: bool) -> tuple[Tensor, Tensor]:
    """Pad rows of ids to one tensor [batch, longest], with a mask that is 0 at padding."""
    side = "left" if left else "right"
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    mask = pad_sequence([torch.ones_like(row) for row in ids], True, 0, side)
    return pad_sequence(ids, True, pad, side), mask


@torch.no_grad()
def likelihoods(
    make_stream: Callable[[], Stream],
    contexts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
) -> list[Likelihood]:
    """Compute the likelihood of each continuation after its context, both non-empty ids.

    All rows form one batch, on the cache of one new stream. Under `recompute` and `kvzip`, a new
    stream has no cache, so the rows are read one by one.
    """
    stream = make_stream()
    if stream.cache is None and len(contexts) > 1:
        pairs = zip(contexts, continuations, strict=True)
        return [likelihoods(make_stream, [a], [b])[0] for a, b in pairs]
    # Any token can be used as padding.
    ids, mask = pad_rows(contexts, 0, left=True)
    logits = _feed(stream, ids, mask, every=False)[:, -1].float()
    asked, counts = pad_rows(continuations, 0, left=False)
    total = torch.zeros(len(asked), dtype=torch.float64)
    greedy = torch.ones(len(asked), dtype=torch.bool)
    step = max(1, min(PIECE, MOST_LOGITS // (logits.shape[-1] * len(asked))))
    for start in range(0, asked.shape[1], step):
        piece, real = asked[:, start : start + step], counts[:, start : start + step].bool()
        before = logits[:, None]
        # No prediction follows the very last token, so it is not fed.
        fed = piece if start + step < asked.shape[1] else piece[:, :-1]
        if fed.shape[1]:
            # Padding on the right is fed like text, because nothing that counts comes after it.
            mask = torch.cat([mask, torch.ones_like(fed)], dim=1)
            after = _feed(stream, fed, mask, every=True).float()
            before = torch.cat([before, after], dim=1)[:, : piece.shape[1]]
            logits = after[:, -1]
        said = before.log_softmax(-1).gather(-1, piece.to(before.device)[..., None])[..., 0].cpu()
        total += torch.where(real, said.double(), 0.0).sum(1)
        greedy &= ((before.argmax(-1).cpu() == piece) | ~real).all(1)
    return list(zip(total.tolist(), greedy.tolist(), strict=True))


def _feed(stream: Stream, ids: Tensor, mask: Tensor, every: bool) -> Tensor:
    """Feed ids [batch, n], given the mask of everything so far, and return the logits of all
    tokens, or of the last.
    """
    model, cache = stream.model, stream.cache
    if cache is None:
        logits = stream.feed(ids, all_logits=every)
        return logits if every else logits[:, None]
    # With full prefill, the prompt is read in one call. Otherwise it is read in pieces, which saves
    # memory.
    whole = cache.prefill == "full" and not cache.is_initialized
    seen = mask.shape[1] - ids.shape[1]
    parts: list[Tensor] = []
    for piece in ids.split(ids.shape[1] if whole else PIECE, dim=1):
        seen += piece.shape[1]
        logits = model(
            input_ids=piece.to(model.device),
            attention_mask=mask[:, :seen].to(model.device),
            use_cache=True,
            logits_to_keep=0 if every else 1,
            **{CACHE: cache},
        ).logits
        parts = [*parts, logits] if every else [logits]
    return torch.cat(parts, dim=1)


class WeirLM(TemplateLM):
    """A model under a cache policy, with the interface that the harness expects.

    Args:
        pretrained: a name as for `weir.load`, such as `nano`, a folder or a Hub id; or a loaded
            model.
        policy: a pipe or a named policy.
        chunk, seed, positions, prefill: as for `StreamingCache`.
        dtype, device, device_map, revision, trust_remote_code: as for `weir.load`, with two
            exceptions: if there is no GPU, the device "cuda" means the CPU; and `device` is ignored
            if `device_map` is given.
        tokenizer: tokenizer of a loaded model.
        batch_size: number of requests at once.
        max_batch_size: ignored. The harness passes it for automatic batch sizes.
        max_gen_toks: largest number of tokens of an answer, if the task does not set one.
        unknown: any other argument, which is refused.

    Raises:
        WeirError: an argument is unknown or invalid, or the model cannot be loaded.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel = "nano",
        policy: str | Policy = DEFAULT,
        *,
        chunk: int | None = None,
        seed: int = 0,
        positions: Positions = "rolling",
        prefill: Prefill = "chunked",
        dtype: str = "auto",
        device: str | None = None,
        device_map: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        max_gen_toks: int = 256,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise WeirError(
                f"unknown model argument {next(iter(unknown))!r}. weir accepts pretrained, "
                "policy, chunk, seed, positions, prefill, dtype, device, device_map, revision, "
                "trust_remote_code, batch_size and max_gen_toks."
            )
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise WeirError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
        self.policy = parse_policy(policy)
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # the harness asks for a GPU by default
        if isinstance(pretrained, str):
            self.model, self.tokenizer = load(
                pretrained,
                dtype=dtype,
                device=None if device_map else device,
                device_map=device_map,
                revision=revision,
                trust_remote_code=bool(trust_remote_code),
            )
        elif tokenizer is not None:
            self.model, self.tokenizer = pretrained, tokenizer
        else:
            raise WeirError("a model object needs its tokenizer, too. Pass tokenizer=.")
        options = {"chunk": chunk, "seed": seed, "positions": positions, "prefill": prefill}
        self.options: dict[str, Any] = options
        self.batch_size = int(batch_size)
        self.max_gen_toks = max_gen_toks
        self._device = self.model.device

    def stream(self) -> Stream:
        """A new stream under the policy."""
        return Stream(self.model, self.policy, tokenizer=self.tokenizer, **self.options)

    # --- tokenizer queries of the harness

    @property
    def eot_token_id(self) -> int | None:
        """The end-of-text token; some models have none."""
        found: int | None = self.tokenizer.eos_token_id
        return found

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text without context."""
        for found in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if found is not None:
                return int(found)
        raise WeirError("this tokenizer has no start token to put before a text")

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer, for the harness's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text, with the start token in front unless the text already begins with it or
        the caller forbids it.
        """
        start = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (start and string.startswith(str(start)))
        options = {"add_special_tokens": add_special_tokens, "verbose": False}
        return list(self.tokenizer(string, **options)["input_ids"])

    @property
    def sink(self) -> ModelSink:
        """The sink that the model was trained with; its tokens come first in a context."""
        return sink_of(transformers_model(self.model).config)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the model's chat template."""
        if self.tokenizer.chat_template is None:
            raise WeirError("this model has no chat template. Leave out --apply_chat_template.")
        return render_chat(
            self.tokenizer, chat_history, add_generation_prompt=add_generation_prompt
        )

    # --- the three kinds of request

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[Likelihood]:
        """Log-likelihood of each continuation, and whether greedy decoding would give it."""
        keys, contexts, asked = zip(*requests, strict=True) if requests else ([], [], [])
        contexts = [self.sink.first(context) for context in contexts]
        return self._score("loglikelihood", keys, contexts, asked, disable_tqdm)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of each whole text, read as one stream from the first token."""
        texts = [str(request.args[0]) for request in requests]
        sink = self.sink
        # The prefix of a text is given, and is not scored.
        fronts = [list(sink.tokens) or [self.prefix_token_id]] * len(texts)
        tokens = [sink.first(self.tok_encode(text))[len(sink.tokens) :] for text in texts]
        keys = [(text,) for text in texts]
        return self._score("loglikelihood_rolling", keys, fronts, tokens, disable_tqdm)

    def _score(
        self,
        what: str,
        keys: Sequence[Any],
        contexts: Sequence[list[int]],
        asked: Sequence[list[int]],
        quiet: bool,
    ) -> list[Any]:
        """Return the results of `likelihoods`, computed batch by batch; for rolling requests, only
        the likelihoods.
        """
        lengths = [len(one) + len(other) for one, other in zip(contexts, asked, strict=True)]
        found: dict[int, Any] = {}
        for batch in self._batches(lengths, what, quiet):
            mine = likelihoods(self.stream, [contexts[i] for i in batch], [asked[i] for i in batch])
            for i, one in zip(batch, mine, strict=True):
                found[i] = one if what == "loglikelihood" else one[0]
                self.cache_hook.add_partial(what, keys[i], found[i])
        return [found[i] for i in range(len(keys))]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate an answer to each context, up to the first of the task's stops."""
        found: dict[int, str] = {}
        ways: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            ways.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        for places in ways.values():
            contexts = [self.sink.first(self.tok_encode(str(requests[i].args[0]))) for i in places]
            lengths = [len(row) for row in contexts]
            for batch in self._batches(lengths, "generate_until", disable_tqdm):
                way = dict(requests[places[0]].args[1])
                written = self._generate([contexts[j] for j in batch], way)
                for j, text in zip(batch, written, strict=True):
                    found[places[j]] = text
                    self.cache_hook.add_partial("generate_until", requests[places[j]].args, text)
        return [found[i] for i in range(len(requests))]

    def _generate(self, contexts: list[list[int]], way: dict[str, Any]) -> list[str]:
        options: dict[str, Any] = dict(normalize_gen_kwargs(way, self.max_gen_toks))
        most, stops = options.pop("max_gen_toks"), list(options.pop("until"))
        if not options["do_sample"]:
            options.pop("temperature", None)
        if isinstance(self.policy, Recompute | KVzip):
            samples = options.pop("do_sample")
            known = {name: options.pop(name) for name in SAMPLING if name in options}
            if options:
                raise WeirError(
                    f"under {self.policy}, answers cannot be generated with "
                    f"{', '.join(sorted(options))}. Use {', '.join(SAMPLING)}, or another policy."
                )
            if samples:
                known.setdefault("temperature", 1.0)  # transformers' default
            return [
                generate_answer(self.stream(), self.tokenizer, row, most, stops, **known).text
                for row in contexts
            ]
        pad = self.tokenizer.pad_token_id
        pad = self.prefix_token_id if pad is None else pad
        ids, mask = pad_rows(contexts, pad, left=True)
        written = self.model.generate(  # type: ignore[operator]
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=most,
            pad_token_id=pad,
            **{CACHE: StreamingCache(self.model, self.policy, **self.options)},
            **({"stop_strings": stops, "tokenizer": self.tokenizer} if any(stops) else {}),
            **options,
        )
        new = written[:, ids.shape[1] :]
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return [cut_at_stop(text, stops) for text in texts]

    def _batches(self, lengths: list[int], what: str, quiet: bool) -> list[list[int]]:
        """Return batches of indices of requests of similar lengths, longest first."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        size = self.batch_size
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        return tqdm(batches, desc=what, disable=quiet)
