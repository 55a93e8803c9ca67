"""Rows of a batch that end before the others: their padding never enters their stream."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from roundings import close_runs
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

import weir
from weir.models import CACHE
from weir.models.generate_calls import CRITERIA, PREPARE

PAD = 0
NEW = 14
"""Tokens that a turn writes at most."""
SIZES = {"vocab_size": 61, "hidden_size": 32}


def bloom() -> PreTrainedModel:
    """A model without position_ids."""
    config = BloomConfig(**SIZES, n_layer=2, n_head=4, initializer_range=0.3)
    return BloomForCausalLM(config)


def mpt() -> PreTrainedModel:
    """A model whose configuration says use_cache=False."""
    config = MptConfig(vocab_size=61, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)
    return MptForCausalLM(config)


def neox() -> PreTrainedModel:
    """A model that passes token ids by position."""
    more = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, **more, initializer_range=0.3))


MODELS = {"bloom": bloom, "mpt": mpt, "neox": neox}


def model_of(kind: str, fresh_llama: Any) -> PreTrainedModel:
    """A model of the given kind, whose own configuration has no end token."""
    if kind == "llama":
        model = fresh_llama()
    else:
        torch.manual_seed(0)
        model = MODELS[kind]().eval()
        for weight in model.parameters():  # so that answers do not repeat one token
            torch.nn.init.normal_(weight, std=0.3)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def cache_of(model: PreTrainedModel) -> weir.StreamingCache:
    """A cache that folds often."""
    return weir.StreamingCache(model, "sink(3) | recent(8)", chunk=4)


def ids(*shape: int, seed: int) -> Tensor:
    """Random ids without the padding token."""
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(seed))


def ways_to_end(way: str, end: int) -> dict[str, Any]:
    """Arguments with which `generate` ends rows at the token `end`, in each of several ways."""
    if way == "argument":
        return {"eos_token_id": end, "pad_token_id": PAD}
    if way == "argument without padding":
        return {"eos_token_id": [end]}
    if way == "tensors":
        return {"eos_token_id": torch.tensor([end]), "pad_token_id": torch.tensor(PAD)}
    if way == "configuration":
        config = GenerationConfig(eos_token_id=end, pad_token_id=PAD, do_sample=True)
        return {"generation_config": config}
    if way == "criterion":
        # An end token that never comes, so that ended rows are fed padding.
        class At(StoppingCriteria):
            def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
                return input_ids[:, -1] == end

        criteria = StoppingCriteriaList([At()])
        return {"stopping_criteria": criteria, "eos_token_id": 61, "pad_token_id": PAD}
    raise AssertionError(way)


def early_end(model: PreTrainedModel, cache: Any, asked: dict[str, Any], row: int) -> int:
    """A token that would end `row` early in this call, and no other row."""
    torch.manual_seed(0)
    held = copy.deepcopy(cache)
    plain = model.generate(**asked, **{CACHE: held}, max_new_tokens=NEW, do_sample=True)
    rows = plain[:, -NEW:].tolist()
    others = {token for n, other in enumerate(rows) if n != row for token in other}
    for place, token in enumerate(rows[row][: NEW - 3]):
        if token not in {PAD, *others, *rows[row][:place]} and place:
            return int(token)
    raise AssertionError("no such token: change the seed")


class Talk:
    """A conversation of several rows in one cache, and each row again in a separate cache."""

    def __init__(self, model: PreTrainedModel, rows: list[Tensor], masked: bool) -> None:
        self.model, self.masked = model, masked
        self.cache, self.alone = cache_of(model), [cache_of(model) for _ in rows]
        self.fed = [torch.zeros(0, dtype=torch.int64) for _ in rows]
        self.whole = torch.zeros(len(rows), 0, dtype=torch.int64)
        self.mask = torch.zeros_like(self.whole)
        self.said: list[Tensor] = list(rows)
        width = max(map(len, rows))
        self.new = torch.stack([torch.cat([r.new_full((width - len(r),), PAD), r]) for r in rows])
        self.new_mask = torch.stack(
            [torch.arange(width) >= width - len(row) for row in rows]
        ).long()

    def turn(self, way: str, row: int, form: str) -> None:
        """One turn, in which `row` ends early; checks what every row has read and answered."""
        whole = torch.cat([self.whole, self.new], dim=1)
        mask = torch.cat([self.mask, self.new_mask], dim=1)
        asked: dict[str, Any] = {"attention_mask": mask}
        start = self.cache.get_seq_length() if form.startswith("only") else 0
        name = "inputs_embeds" if form.endswith("embeddings") else "input_ids"
        look_up = self.model.get_input_embeddings()
        part = whole[:, start:]
        asked[name] = look_up(part).detach() if name == "inputs_embeds" else part
        end = early_end(self.model, self.cache, asked, row)
        more = ways_to_end(way, end)
        pad = end if way == "argument without padding" else PAD
        options = {"max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}
        if "generation_config" not in more:
            options["do_sample"] = True
        torch.manual_seed(0)
        out = self.model.generate(**asked, **more, **options, **{CACHE: self.cache})
        answers = out.sequences[:, -len(out.logits) :]
        real = torch.ones_like(answers)
        stop = answers[row].tolist().index(end) + 1
        assert stop < answers.shape[1] - 1 and answers[row, stop:].eq(pad).all()
        real[row, stop:] = 0
        logits = torch.stack(out.logits, dim=1)
        for n, cache in enumerate(self.alone):
            mine = torch.cat([self.said[n], answers[n][real[n] == 1]])
            with torch.no_grad():
                told = self.model(mine[None], **{CACHE: cache}, use_cache=True).logits[0]
            wrote = int(real[n].sum())
            wanted = told[len(self.said[n]) - 1 :][:wrote]
            close_runs(logits[n, :wrote], wanted, self.model)
            # The last token of an answer is fed with the next turn. Only in the row that ended
            # early has it been fed already.
            left = 0 if n == row else 1
            self.fed[n] = torch.cat([self.fed[n], mine])
            assert self.cache.seen[n] == len(self.fed[n]) - left
            self.alone[n] = cache_of(self.model)
            with torch.no_grad():
                read = self.fed[n][None, : len(self.fed[n]) - left]
                self.model(read, **{CACHE: self.alone[n]}, use_cache=True)
            self.said[n] = self.fed[n][len(self.fed[n]) - left :]
            self.fed[n] = self.fed[n][: len(self.fed[n]) - left]
        self.whole = torch.cat([whole, answers], dim=1)
        self.mask = torch.cat([mask, real if self.masked else torch.ones_like(real)], dim=1)

    def ask(self, question: Tensor) -> None:
        """Set the question that the next turn feeds to every row."""
        self.new, self.new_mask = question, torch.ones_like(question)
        self.said = [torch.cat([s, q]) for s, q in zip(self.said, question, strict=True)]


WAYS = ["argument", "argument without padding", "tensors", "configuration", "criterion"]
FORMS = ["the whole", "only what is new", "embeddings", "only new embeddings"]


@pytest.mark.parametrize("masked", [True, False], ids=["padding masked", "padding not masked"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "neox", "bloom", "mpt"])
@pytest.mark.thinned(16, least=8)
def test_a_row_may_end_early_in_every_turn(fresh_llama, kind, way, form, masked):
    model = model_of(kind, fresh_llama)
    talk = Talk(model, [ids(n, seed=n) for n in (9, 15)], masked)
    for turn, row in enumerate((0, 0, 1)):
        # All turns have the same form, as callers pass either token ids or embeddings throughout.
        talk.turn(way, row, form)
        talk.ask(ids(2, 5 + turn, seed=70 + turn))


def two_rows(model: PreTrainedModel, cache: Any, **more: Any) -> Tensor:
    """The answers to two prompts of 20 tokens, with up to 30 tokens each. Row 0 ends early if
    `more` has an end token for it.
    """
    options = {"max_new_tokens": 30, "do_sample": True, "pad_token_id": PAD}
    torch.manual_seed(0)
    return model.generate(ids(2, 20, seed=3), **options, **more, **{CACHE: cache})[:, 20:]


def test_what_each_row_has_seen_is_counted_without_padding(fresh_llama):
    model = model_of("llama", fresh_llama)
    cache = cache_of(model)
    rows = two_rows(model, cache).tolist()
    assert cache.seen == [49, 49]
    place = next(n for n in range(5, 25) if rows[0][n] not in rows[1] + rows[0][:n])
    two_rows(model, cache := cache_of(model), eos_token_id=rows[0][place])
    assert cache.seen == [20 + place + 1, 49]


@pytest.mark.parametrize("names", ["cache", "past_key_values"])
def test_either_name_of_the_cache_is_taken_without_a_warning(fresh_llama, names, recwarn):
    model = model_of("llama", fresh_llama)
    cache = cache_of(model)
    wanted = two_rows(model, cache_of(model))
    options = {"max_new_tokens": 30, "do_sample": True, "pad_token_id": PAD}
    torch.manual_seed(0)
    out = model.generate(ids(2, 20, seed=3), **options, **{names: cache})
    assert torch.equal(out[:, 20:], wanted) and cache.seen == [49, 49]
    assert not [one for one in recwarn if issubclass(one.category, FutureWarning)]


def test_rows_end_at_a_string_too() -> None:
    model, tokenizer = weir.load("nano")
    texts = ["Once there was a river", "The man said to the woman"]
    tokens = torch.tensor([tokenizer(text).input_ids[:4] for text in texts])
    # Without an end token, transformers goes on sampling in a row that has ended, instead of
    # padding it.
    never = model.config.vocab_size - 1
    asked = {"inputs": tokens, "max_new_tokens": 24, "do_sample": False}
    asked |= {"eos_token_id": never, "pad_token_id": never - 1}
    plain = model.generate(**asked, **{CACHE: weir.StreamingCache(model)})
    said = [tokenizer.decode(row[4:]) for row in plain]
    short, row = next(
        (part, row)
        for row in (0, 1)
        for part in said[row].split()[:8]
        if len(part) > 2 and part not in said[1 - row]
    )
    cache = weir.StreamingCache(model)
    more = {"stop_strings": [short], "tokenizer": tokenizer}
    model.generate(**asked, **more, **{CACHE: cache})
    assert cache.seen[row] < cache.seen[1 - row] == 4 + 23


def test_a_copy_of_a_cache_knows_which_rows_ended(fresh_llama):
    model = model_of("llama", fresh_llama)
    cache = cache_of(model)
    end = early_end(model, cache, {"inputs": ids(2, 20, seed=3)}, 0)
    out = two_rows(model, cache, eos_token_id=end)
    whole = torch.cat([ids(2, 20, seed=3), out, ids(2, 5, seed=4)], dim=1)
    seen, held = cache.seen, copy.deepcopy(cache)
    for each in (cache, held):
        model.generate(whole, max_new_tokens=1, eos_token_id=end, pad_token_id=PAD, **{CACHE: each})
        # In row 0, nothing of the last answer is left to feed. In row 1, its last token is.
        assert each.seen == [seen[0] + 5, seen[1] + 6]


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows padded on the left, and their mask."""
    width = max(map(len, rows))
    both = [torch.cat([row.new_full((width - len(row),), PAD), row]) for row in rows]
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()
    return torch.stack(both), mask


@pytest.mark.parametrize("masked", [True, False], ids=["padding masked", "padding not masked"])
def test_rows_that_are_padded_again_are_told_what_to_do_which_works(fresh_llama, masked: bool):
    """As the quick start does it, with questions of several lengths."""
    model = model_of("llama", fresh_llama)
    cache = cache_of(model)
    batch, mask = padded([ids(9, seed=1), ids(15, seed=2)])
    asked: dict[str, Any] = {"inputs": batch, "attention_mask": mask}
    end = early_end(model, cache, asked, 0)
    more: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "pad_token_id": PAD}
    torch.manual_seed(0)
    output = model.generate(**asked, **more, eos_token_id=end, **{CACHE: cache})
    answers = output[:, batch.shape[1] :]
    real = torch.ones_like(answers)
    real[0, answers[0].tolist().index(end) + 1 :] = 0
    assert not real.all()
    questions = [ids(40, seed=3), ids(7, seed=4)]
    told = torch.cat([mask, real], dim=1).bool()
    whole = [torch.cat([o[t], q]) for o, t, q in zip(output, told, questions, strict=True)]
    again, again_mask = padded(whole)
    seen = cache.seen
    with pytest.raises(
        weir.WeirError,
        match=(r"has seen \d+\. To continue, do not pad a row again: keep the columns"),
    ):
        model.generate(again, attention_mask=again_mask, **more, **{CACHE: cache})
    assert cache.seen == seen
    new, new_mask = padded(questions)
    parts = [mask, real if masked else torch.ones_like(real), new_mask]
    out = model.generate(
        torch.cat([output, new], dim=1),
        attention_mask=torch.cat(parts, dim=1),
        **{**more, "max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True},
        **{CACHE: cache},
    )
    assert cache.seen == list(map(len, whole))
    for row, tokens in enumerate(whole):
        with torch.no_grad():
            alone = model(tokens[None], **{CACHE: cache_of(model)}).logits[0, -1:]
        close_runs(out.logits[0][row : row + 1], alone, model)


@pytest.mark.parametrize("name", [PREPARE, CRITERIA])
def test_transformers_still_has_the_methods_that_weir_hooks(fresh_llama, name):
    model = model_of("llama", fresh_llama)
    assert callable(getattr(model, name, None)), f"transformers has renamed {name}"
    calls: list[Any] = []
    own = getattr(model, name)
    setattr(model, name, lambda *args, **kwargs: calls.append(kwargs) or own(*args, **kwargs))
    two_rows(model, cache_of(model))
    assert calls and (name == PREPARE or calls[0]["generation_config"].max_new_tokens == 30)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_that_is_made_among_the_arguments_is_served_too(fresh_llama, name):
    """Python looks up `model.generate` before it creates the cache, which installs the hooks."""
    model = model_of("llama", fresh_llama)
    model.generation_config.cache_implementation = "static"
    model.generation_config.use_cache = False
    rows = two_rows(model, cache_of(model)).tolist()
    place = next(n for n in range(5, 25) if rows[0][n] not in rows[1] + rows[0][:n])
    made: list[Any] = []
    gc.collect()
    assert "generate" not in vars(model)  # the hooks went with the last cache
    torch.manual_seed(0)
    options = {"max_new_tokens": 30, "do_sample": True, "pad_token_id": PAD}
    model.generate(
        ids(2, 20, seed=3),
        **options,
        eos_token_id=rows[0][place],
        **{name: made.append(cache_of(model)) or made[0]},
    )
    assert made[0].seen == [20 + place + 1, 49]


@pytest.mark.parametrize("which", ["CRITERIA", "PREPARE"])
def test_without_that_method_several_rows_are_refused(fresh_llama, monkeypatch, which):
    model = model_of("llama", fresh_llama)
    monkeypatch.setattr(f"weir.models.generate_calls.{which}", "_a_name_of_another_release")
    with pytest.raises(weir.WeirError, match="which weir needs to know which rows of a batch"):
        two_rows(model, cache_of(model))
    cache = cache_of(model)
    model.generate(ids(1, 20, seed=3), max_new_tokens=2, do_sample=False, **{CACHE: cache})
    assert cache.seen == [21]


@pytest.mark.parametrize("way", ["configuration", "call"])
@pytest.mark.parametrize("kind", ["static", "quantized"])
def test_a_configuration_that_asks_for_another_cache_is_overruled(fresh_llama, kind, way):
    model = model_of("llama", fresh_llama)
    wanted = two_rows(model, cache_of(model))
    more = {}
    if way == "configuration":
        model.generation_config.cache_implementation = kind
    else:
        more["generation_config"] = GenerationConfig(cache_implementation=kind)
    cache = cache_of(model)
    assert torch.equal(two_rows(model, cache, **more), wanted)
    assert cache.seen == [49, 49]
    before = model.generation_config.cache_implementation
    assert before == (kind if way == "configuration" else None)
    with pytest.raises(weir.WeirError, match=r"cache_implementation='paged' asks transformers"):
        two_rows(model, cache_of(model), cache_implementation="paged")


def test_a_cache_of_other_rows_names_the_method_that_repeats_them(fresh_llama):
    model = model_of("llama", fresh_llama)
    cache = cache_of(model)
    prompt = ids(1, 9, seed=1)
    with torch.no_grad():
        model(prompt[:, :6], **{CACHE: cache})
    more = {"max_new_tokens": 3, "pad_token_id": PAD, "do_sample": True, "num_return_sequences": 3}
    with pytest.raises(weir.WeirError, match=r"holds 1 row, but a batch of 3.*_interleave\(3\)"):
        model.generate(prompt, **more, **{CACHE: cache})
    cache.batch_repeat_interleave(3)
    assert model.generate(prompt, **more, **{CACHE: cache}).shape == (3, 12)


def test_new_embeddings_without_the_mask_of_everything_are_refused(fresh_llama):
    model = model_of("llama", fresh_llama)
    cache = cache_of(model)
    model.generate(ids(1, 20, seed=3), max_new_tokens=5, do_sample=False, **{CACHE: cache})
    for new in (3, 12, 24):
        vectors = model.get_input_embeddings()(ids(1, new, seed=2)).detach()
        with pytest.raises(weir.WeirError, match="an attention_mask that covers everything so far"):
            model.generate(inputs_embeds=vectors, max_new_tokens=5, **{CACHE: cache})
    assert cache.seen == [24]


@pytest.mark.parametrize("form", ["the whole", "embeddings"])
def test_a_second_turn_may_be_read_in_chunks(fresh_llama, form):
    model = model_of("llama", fresh_llama)
    cache, other = cache_of(model), cache_of(model)
    asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}
    first = [model.generate(ids(2, 20, seed=3), **asked, **{CACHE: c}) for c in (cache, other)]
    whole = torch.cat([first[0], ids(2, 9, seed=5)], dim=1)
    wanted = model.generate(whole, **asked, **{CACHE: other})[:, -5:]
    given = {"inputs": whole}
    if form == "embeddings":
        given = {"inputs_embeds": model.get_input_embeddings()(whole).detach()}
        given |= {"attention_mask": torch.ones_like(whole)}
    got = model.generate(**given, **asked, prefill_chunk_size=4, **{CACHE: cache})[:, -5:]
    assert torch.equal(got, wanted) and cache.seen == other.seen
