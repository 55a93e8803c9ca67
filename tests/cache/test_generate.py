"""`model.generate(..., past_key_values=cache)`, the way in which most people use transformers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from roundings import close_runs, nll_off, within
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

import weir
from weir.errors import WeirError

pytestmark = pytest.mark.thinned(3, least=2)

TEXT = "sink(3) | recent(8)"
PAD = 0


def cache_of(model: PreTrainedModel, text: str = TEXT, **options: Any) -> weir.StreamingCache:
    """A cache that folds often."""
    return weir.StreamingCache(model, text, **{"chunk": 4, **options})


def generated(
    model: PreTrainedModel, cache: Any, tokens: Tensor, n: int = 20, **options: Any
) -> Any:
    """Greedy continuation with its logits: `sequences`, and `logits` [batch, n, vocabulary]."""
    options = {"do_sample": False, "output_logits": True, **options}
    if "attention_mask" in options:
        # Without a mask, generate() would take a pad_token_id inside a prompt for padding.
        options.setdefault("pad_token_id", PAD)
    out = model.generate(
        tokens, past_key_values=cache, max_new_tokens=n, return_dict_in_generate=True, **options
    )
    if out.get("logits") is not None:
        out.logits = torch.stack(out.logits, dim=1)
    return out


@torch.no_grad()
def by_hand(
    model: PreTrainedModel, cache: Any, tokens: Tensor, n: int = 20
) -> tuple[Tensor, Tensor]:
    """Greedy decoding as a loop: (all tokens, logits [batch, n, vocabulary])."""
    logits = []
    new = tokens
    for _ in range(n):
        logits.append(model(new, past_key_values=cache).logits[:, -1])
        new = logits[-1].argmax(dim=-1, keepdim=True)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens, torch.stack(logits, dim=1)


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of different lengths, padded on the left, and their mask."""
    width = max(len(row) for row in rows)
    tokens, mask = torch.full((2, len(rows), width), PAD)
    mask = torch.zeros_like(tokens)
    for n, row in enumerate(rows):
        tokens[n, width - len(row) :] = row
        mask[n, width - len(row) :] = 1
    return tokens, mask


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a word (w0, w1, …) for each token of the small models."""
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(61)}, unk_token="w60"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")


# --- plain decoding


@pytest.mark.parametrize("options", [{}, {"prefill": "full"}, {"positions": "original"}])
def test_greedy_decoding_is_a_loop_of_calls(llama, ids, options):
    tokens = ids(2, 30)
    wanted, logits = by_hand(llama, cache_of(llama, **options), tokens)
    got = generated(llama, cache_of(llama, **options), tokens)
    assert torch.equal(got.sequences, wanted)
    close_runs(got.logits, logits, llama)


def test_the_cache_comes_back_from_generate(llama, ids):
    cache = cache_of(llama)
    got = generated(llama, cache, ids(1, 30))
    assert got.past_key_values is cache
    # The last sampled token was never fed.
    assert cache.seen == [49]


def test_sampling_with_a_seed_repeats_itself(llama, ids):
    def sample(cache: Any) -> Tensor:
        torch.manual_seed(7)
        return generated(
            llama, cache, ids(2, 30), do_sample=True, temperature=0.8, top_k=20, top_p=0.95
        ).sequences

    assert torch.equal(sample(cache_of(llama)), sample(cache_of(llama)))
    roomy = cache_of(llama, "sink(3) | recent(97)")
    assert torch.equal(sample(roomy), sample(DynamicCache()))


def test_a_prompt_fed_in_pieces_gives_the_same(llama, ids):
    tokens = ids(2, 31)
    wanted = generated(llama, cache_of(llama), tokens)
    got = generated(llama, cache_of(llama), tokens, prefill_chunk_size=7)
    assert torch.equal(got.sequences, wanted.sequences)
    close_runs(got.logits, wanted.logits, llama)


@pytest.mark.slow
def test_three_thousand_tokens_take_no_more_than_the_first(shallow, ids):
    cache = cache_of(shallow, "sink(4) | recent(28)", chunk=16)
    generated(shallow, cache, ids(1, 5), 1, output_logits=False)
    bytes_before = cache.nbytes
    tokens = ids(1, 5)
    out = generated(shallow, cache_of(shallow, "sink(4) | recent(28)", chunk=16), tokens, 3000)
    assert out.sequences.shape == (1, 3005)
    assert out.past_key_values.nbytes == bytes_before
    assert out.past_key_values.seen == [3004]
    assert out.logits.isfinite().all()
    again = cache_of(shallow, "sink(4) | recent(28)", chunk=16)
    with torch.no_grad():
        logits = shallow(out.sequences[:, :-1], past_key_values=again).logits
    close_runs(logits[:, 4:], out.logits, shallow)


def test_a_streamer_hears_every_token(llama, ids, tokenizer, capsys):
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    out = generated(llama, cache_of(llama), ids(1, 30), streamer=streamer)
    assert capsys.readouterr().out.strip() == tokenizer.decode(out.sequences[0, 30:])
    later = TextIteratorStreamer(tokenizer, skip_prompt=True)
    generated(llama, cache_of(llama), ids(1, 30), streamer=later)
    assert "".join(later).strip() == tokenizer.decode(out.sequences[0, 30:])


def test_stopping_criteria_stop(llama, ids):
    class EighthToken(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 38)

    cache = cache_of(llama)
    criteria = StoppingCriteriaList([EighthToken()])
    out = generated(llama, cache, ids(1, 30), stopping_criteria=criteria)
    assert (out.sequences.shape[1], cache.seen) == (38, [37])


def test_guidance_of_an_unconditional_stream_is_untouched(llama, ids):
    # The guidance processor calls the model itself, with a separate cache.
    tokens = ids(1, 20)
    wanted = generated(llama, DynamicCache(), tokens, guidance_scale=1.5)
    got = generated(llama, cache_of(llama, "sink(3) | recent(97)"), tokens, guidance_scale=1.5)
    assert torch.equal(got.sequences, wanted.sequences)
    close_runs(got.logits, wanted.logits, llama)


# --- batches


def test_left_padded_rows_give_what_they_would_give_alone(llama, ids):
    rows = [ids(1, n, seed=n)[0] for n in (31, 9, 20)]
    tokens, mask = padded(rows)
    got = generated(llama, cache_of(llama), tokens, attention_mask=mask)
    for n, row in enumerate(rows):
        wanted, logits = by_hand(llama, cache_of(llama), row[None])
        assert torch.equal(got.sequences[n, tokens.shape[1] :], wanted[0, len(row) :])
        close_runs(got.logits[n], logits[0], llama)


def test_padding_on_the_right_is_refused_with_the_word_left_before_anything_is_fed(llama, ids):
    cache = cache_of(llama)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 9:] = 0
    with pytest.raises(WeirError, match=r"row 1 is padded on the right.*padding_side = 'left'"):
        generated(llama, cache, ids(2, 12), attention_mask=mask)
    assert not cache.is_initialized
    generated(llama, cache, ids(2, 12), attention_mask=mask.flip(1))
    assert cache.seen[0] == cache.seen[1] + 3


def test_several_sequences_of_one_prompt_are_rows(llama, ids):
    def sample(cache: Any, tokens: Tensor, **options: Any) -> Tensor:
        torch.manual_seed(3)
        return generated(llama, cache, tokens, do_sample=True, **options).sequences

    cache = cache_of(llama)
    got = sample(cache, ids(2, 30), num_return_sequences=3)
    wanted = sample(cache_of(llama), ids(2, 30).repeat_interleave(3, dim=0))
    assert torch.equal(got, wanted)
    assert cache.batch == 6 and len({tuple(row) for row in got.tolist()}) > 2


def test_one_prompt_may_be_read_once_for_many_answers(llama, ids):
    prefix = ids(1, 30)
    read = cache_of(llama)
    with torch.no_grad():
        llama(prefix, past_key_values=read)
    for seed in range(2):
        tokens = torch.cat([prefix, ids(1, 5, seed=seed)], dim=1)
        got = generated(llama, copy.deepcopy(read), tokens)
        assert torch.equal(got.sequences, by_hand(llama, cache_of(llama), tokens)[0])


# --- several turns on one cache


@pytest.mark.parametrize("way", ["the whole conversation", "only what is new"])
@pytest.mark.parametrize("options", [{}, {"prefill": "full"}])
def test_turns_continue_one_stream(llama, ids, way, options):
    rows = [ids(1, n, seed=n)[0] for n in (17, 6)]
    tokens, mask = padded(rows)
    cache = cache_of(llama, **options)
    alone = [cache_of(llama, **options) for _ in rows]
    said = [row[None] for row in rows]
    for turn in range(3):
        fed = tokens
        if way == "only what is new":
            fed = tokens[:, cache.get_seq_length() :]
        got = generated(llama, cache, fed, 10, attention_mask=mask)
        for n, mine in enumerate(alone):
            with torch.no_grad():
                out, logits = by_hand(llama, mine, said[n][:, mine.get_seq_length() :], 10)
            close_runs(got.logits[n], logits[0], llama)
            new = out[:, -10:]
            assert torch.equal(got.sequences[n, -10:], new[0])
            said[n] = torch.cat([said[n], new], dim=1)
        answer, question = got.sequences[:, -10:], ids(2, 5 + turn, seed=50 + turn)
        tokens = torch.cat([tokens, answer, question], dim=1)
        mask = torch.cat([mask, mask.new_ones(2, 15 + turn)], dim=1)
        said = [torch.cat([s, question[n : n + 1]], dim=1) for n, s in enumerate(said)]


@pytest.mark.parametrize("new", [1, 2, 13, 14, 25, 26])
def test_only_what_is_new_without_its_mask_is_refused(llama, ids, new):
    # generate() drops the first 26 tokens of its input, because the stream has seen 26. Input that
    # is longer looks like the whole conversation, and no cache can tell the difference.
    cache = cache_of(llama)
    generated(llama, cache, ids(1, 17), 10)
    with pytest.raises(WeirError, match="only the new tokens with an attention_mask that covers"):
        generated(llama, cache, ids(1, new, seed=5))
    assert cache.seen == [26]


def test_a_conversation_that_ends_where_the_stream_is_cannot_be_fed_again(llama, ids):
    cache = cache_of(llama)
    out = generated(llama, cache, ids(1, 17), 10).sequences
    with pytest.raises(WeirError, match="has seen 26"):
        generated(llama, cache, out[:, :-1])


def ending(model: PreTrainedModel, tokens: Tensor, mask: Tensor, n: int) -> int:
    """A token that would end one row of greedy decoding early, and not the others."""
    plain = generated(model, cache_of(model), tokens, n, attention_mask=mask).sequences
    rows = plain[:, tokens.shape[1] :].tolist()
    for place in range(3, n - 3):
        token = rows[1][place]
        if token not in rows[1][:place] and not any(token in rows[m] for m in (0, 2)):
            return int(token)
    raise AssertionError("no such token: change the seed")


@pytest.mark.parametrize("way", ["the whole conversation", "only what is new"])
@pytest.mark.parametrize("padding", ["a token of its own", "the end token", "not said"])
def test_a_row_that_ended_early_is_not_polluted(fresh_llama, ids, way, padding):
    model = fresh_llama()
    rows = [ids(1, n, seed=n + 1)[0] for n in (11, 19, 6)]
    tokens, mask = padded(rows)
    end = ending(model, tokens, mask, 20)
    # A second end token, which never comes, and which would be the first in a set of the two.
    other = next(t for t in range(61) if list({end, t}) == [t, end])
    model.generation_config.eos_token_id = [end, other]
    pad = PAD if padding == "a token of its own" else end
    model.generation_config.pad_token_id = said = None if padding == "not said" else pad
    options = {"pad_token_id": said, "output_logits": True}
    cache = cache_of(model)
    first = generated(model, cache, tokens, 20, attention_mask=mask, **options).sequences
    answers = first[:, tokens.shape[1] :]
    stop = answers[1].tolist().index(end) + 1
    assert 3 < stop < 18 and answers[1, stop:].eq(pad).all()
    question = ids(3, 7, seed=9)
    whole = torch.cat([first, question], dim=1)
    # The mask that a padding tokenizer returns: tokens after the end of row 1 are masked.
    spoken = torch.cat([mask, torch.ones_like(answers), torch.ones_like(question)], dim=1)
    spoken[1, tokens.shape[1] + stop : first.shape[1]] = 0
    fed = whole[:, cache.get_seq_length() :] if way == "only what is new" else whole
    second = generated(model, cache, fed, 8, attention_mask=spoken, **options)
    for n, row in enumerate(rows):
        alone = cache_of(model)
        mine = answers[n, : stop if n == 1 else None]
        said_alone = torch.cat([row, mine, question[n]])[None]
        wanted = by_hand(model, alone, said_alone, second.logits.shape[1])[1]
        upto = [*second.sequences[n, whole.shape[1] :].tolist(), end].index(end) + 1
        close_runs(second.logits[n, :upto], wanted[0, :upto], model)


# --- beam search


def test_beam_search_is_that_of_a_dynamic_cache_below_the_budget(llama, ids):
    rows = [ids(1, n, seed=n)[0] for n in (15, 9)]
    tokens, mask = padded(rows)
    options = {"num_beams": 3, "num_return_sequences": 2, "attention_mask": mask}
    options |= {"output_scores": True, "output_logits": False, "length_penalty": 0.5}
    wanted = generated(llama, DynamicCache(), tokens, **options)
    got = generated(llama, cache_of(llama, "sink(3) | recent(60)"), tokens, **options)
    assert torch.equal(got.sequences, wanted.sequences)
    # A score is a sum of at most 20 log-probabilities, divided by the square root of their number.
    bound = 20 * nll_off(llama, 20) / math.sqrt(20)
    within(got.sequences_scores, wanted.sequences_scores, bound)


@pytest.mark.slow
def test_beam_search_above_the_budget_is_that_of_beams_read_anew(llama, ids):
    class Anew(LogitsProcessor):
        """Replace the scores by those of every whole beam, read again in a separate cache."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            caches = [cache_of(llama) for _ in input_ids]
            rows = zip(input_ids, caches, strict=True)
            logits = [llama(row[None], past_key_values=cache).logits[0, -1] for row, cache in rows]
            return torch.stack(logits).log_softmax(dim=-1)

    tokens = ids(2, 25)
    options = {"num_beams": 3, "num_return_sequences": 3, "output_scores": True}
    options |= {"output_logits": False}
    anew = LogitsProcessorList([Anew()])
    wanted = generated(llama, DynamicCache(), tokens, 12, logits_processor=anew, **options)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = generated(llama, cache_of(llama), tokens, 12, **options)
        assert torch.equal(got.sequences, wanted.sequences)
        # A score is a mean of 12 log-probabilities.
        within(got.sequences_scores, wanted.sequences_scores, nll_off(llama, 12))


# --- what cannot work is refused


def refused(model: PreTrainedModel, tokens: Tensor, match: str, **options: Any) -> None:
    """Check that generate() fails with one clear line, and that the cache works on afterwards."""
    cache = cache_of(model)
    with pytest.raises((WeirError, ValueError), match=match):
        model.generate(tokens, past_key_values=cache, max_new_tokens=5, **options)
    if hasattr(Cache, "activate_past_recording"):
        assert cache.seen == []
    else:  # an older transformers feeds the prompt first, and fails at the assistant later
        cache.reset()
    assert torch.equal(
        generated(model, cache, tokens).sequences, by_hand(model, cache_of(model), tokens)[0]
    )


def test_assisted_decoding_is_refused(llama, shallow, ids):
    refused(llama, ids(1, 20), "assisted and prompt-lookup", assistant_model=shallow)


def test_prompt_lookup_is_refused(llama, ids):
    refused(llama, ids(1, 20), "assisted and prompt-lookup", prompt_lookup_num_tokens=3)


def test_no_use_of_the_cache_is_refused(llama, ids):
    refused(llama, ids(1, 20), "use_cache=False", use_cache=False)


def test_a_cache_and_a_kind_of_cache_are_refused(llama, ids):
    refused(llama, ids(1, 20), "cache_implementation", cache_implementation="static")


def test_a_prompt_of_zero_tokens_is_refused(llama):
    with pytest.raises((WeirError, ValueError), match=r"at least one token|empty|`input_ids`"):
        generated(llama, cache_of(llama), torch.zeros(1, 0, dtype=torch.int64))


@pytest.mark.parametrize(
    "options",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
        {"num_beams": 2, "force_words_ids": [[5]]},
    ],
)
def test_modes_that_transformers_gave_away_do_no_silent_harm(llama, ids, options):
    # These modes are repositories on the Hub now. Without trust_remote_code they fail, and the
    # cache is unchanged.
    cache = cache_of(llama)
    with pytest.raises(Exception, match=r"trust_remote_code|hub|Hub|custom_generate|connect"):
        llama.generate(ids(1, 20), past_key_values=cache, max_new_tokens=5, **options)
    assert cache.seen == []


# --- pipelines, embeddings and other models


def test_a_pipeline_can_use_a_cache(llama, tokenizer, ids):
    writer = pipeline("text-generation", model=llama, tokenizer=tokenizer)
    prompt = tokenizer.decode(ids(1, 30)[0])
    cache = cache_of(llama)
    options = {"max_new_tokens": 20, "do_sample": False, "return_tensors": True}
    out = writer(prompt, past_key_values=cache, **options)
    wanted, _ = by_hand(llama, cache_of(llama), ids(1, 30))
    assert out[0]["generated_token_ids"] == wanted[0].tolist()
    assert cache.seen == [49]


def test_a_second_text_in_a_pipeline_needs_a_cache_of_its_own(llama, tokenizer, ids):
    writer = pipeline("text-generation", model=llama, tokenizer=tokenizer)
    texts = [tokenizer.decode(ids(1, n, seed=n)[0]) for n in (30, 21)]
    options = {"max_new_tokens": 20, "do_sample": False, "return_tensors": True}
    with pytest.raises(WeirError):
        writer(texts, past_key_values=cache_of(llama), **options)
    # In one batch, the two texts can share a cache.
    out = writer(texts, past_key_values=cache_of(llama), batch_size=2, **options)
    for (answer,), n in zip(out, (30, 21), strict=True):
        wanted, _ = by_hand(llama, cache_of(llama), ids(1, n, seed=n))
        assert answer["generated_token_ids"][-20:] == wanted[0, -20:].tolist()


@pytest.mark.parametrize("pads", [0, 6])
def test_a_prompt_may_be_given_as_embeddings(llama, ids, pads):
    tokens = ids(2, 30)
    mask = torch.ones_like(tokens)
    mask[1, :pads] = 0
    embedded = llama.get_input_embeddings()(tokens).detach()
    out = llama.generate(
        inputs_embeds=embedded,
        attention_mask=mask,
        past_key_values=cache_of(llama),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=PAD,
    )
    for row, start in ((0, 0), (1, pads)):
        wanted, _ = by_hand(llama, cache_of(llama), tokens[row : row + 1, start:])
        assert torch.equal(out[row], wanted[0, -20:])


def test_a_generation_of_another_model_is_refused(llama, shallow, ids):
    with pytest.raises(WeirError, match="another model"):
        generated(shallow, cache_of(llama), ids(1, 20))


FREE: list[Callable[..., Any]] = [torch.inference_mode, torch.no_grad, torch.enable_grad]


@pytest.mark.parametrize("mode", FREE)
def test_generate_works_in_every_mode_of_autograd(llama, ids, mode):
    wanted, _ = by_hand(llama, cache_of(llama), ids(2, 30))
    cache = cache_of(llama)
    with mode():
        out = generated(llama, cache, ids(2, 30), 10).sequences
    full = generated(llama, cache, out, 10).sequences
    assert torch.equal(full, wanted)
