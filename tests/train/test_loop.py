"""Training: batches, schedule, losses, and runs that are broken off and taken up again."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace

import numpy as np
import pytest
import torch
from roundings import close, off
from transformers import AutoModelForCausalLM

from weir.errors import WeirError
from weir.models.loading import load
from weir.train import loop
from weir.train.loop import Recipe

TINY = Recipe(
    tokens=40 * 4 * 192,
    rows=4,
    length=192,
    width=32,
    layers=2,
    heads=2,
    kv_heads=1,
    inner=64,
    rate=2e-2,
    exercise_rows=2,
)


@pytest.fixture
def model(tokenizer):
    return loop.new_model(TINY, tokenizer)


def attention_on_start(model, ids):
    """The mean share of attention on the first token, over layers, heads and late queries."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(input_ids=ids, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return torch.stack(attentions)[:, :, :, 64:, 0].mean()


def weights_of(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def assert_same_weights(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


# --- recipes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"width": 30}, "30 wide has no 2 heads of an even size: choose a multiple of 4"),
        ({"length": 191}, "samples of 191 tokens: choose 192 or more"),
        ({"tokens": 767}, "767 tokens are less than one step .* choose 768 or more"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(changes, sentence):
    with pytest.raises(WeirError, match=sentence):
        replace(TINY, **changes)


def test_the_rate_rises_is_held_and_falls_to_zero():
    recipe = replace(TINY, tokens=1000 * 4 * 192, rate=0.5, falling=0.3)
    rates = [loop.rate_at(recipe, step) for step in range(recipe.steps)]
    assert len(rates) == 1000
    assert rates[0] == pytest.approx(0.5 / 100)
    assert rates[49] == pytest.approx(0.5 / 2)
    assert set(rates[99:701]) == {0.5}
    assert rates[850] == pytest.approx(0.5 / 2)
    assert 0 < rates[-1] < 0.5 / 200
    np.testing.assert_allclose(np.diff(rates[700:]), -0.5 / 300)
    assert loop.rate_at(recipe, 1000) == 0


# --- batches


def test_a_batch_depends_on_nothing_but_its_arguments(words, tokens):
    first = loop.batch(TINY, words, tokens, 30)
    np.random.seed(5)
    torch.manual_seed(5)
    loop.batch(TINY, words, tokens, 7)
    for left, right in zip(first, loop.batch(TINY, words, tokens, 30), strict=True):
        assert torch.equal(left, right)
    for other in (
        loop.batch(TINY, words, tokens, 31),
        loop.batch(replace(TINY, seed=1), words, tokens, 30),
    ):
        assert (first[0] != other[0]).any(dim=1).all(), "every row must be another"


def test_losses_are_averaged_apart_and_then_added(words, tokens):
    recipe = replace(TINY, rows=8, exercise_rows=3, exercise_weight=0.6)
    for step in (0, 25):
        ids, weight = loop.batch(recipe, words, tokens, step)
        assert ids.shape == weight.shape == (8, 192)
        assert ids.dtype == torch.int64
        assert (ids == words.start).nonzero()[:, 1].tolist() == [0] * 8
        wanted = torch.tensor([0.6 / 3] * 3 + [1 / 5] * 5)
        close(weight.sum(dim=1), wanted, terms=192)


def test_exercises_are_segments_first_and_then_mostly_recall(words, tokens):
    recipe = replace(TINY, tokens=100 * 4 * 192, only_segments=0.4)
    digits = torch.from_numpy(words.digits)

    def recalls(step):
        ids, weight = loop.batch(recipe, words, tokens, step)
        answers = [ids[row][weight[row] > 0] for row in range(recipe.exercise_rows)]
        return np.mean([bool(torch.isin(answer, digits).all()) for answer in answers])

    assert not any(recalls(step) for step in range(40))
    assert 0.6 < np.mean([recalls(step) for step in range(40, 100)]) < 0.9


# --- losses


def test_the_loss_is_the_weighted_cross_entropy_of_the_next_token(model, words, tokens):
    ids, weight = loop.batch(TINY, words, tokens, 3)
    logits = model(input_ids=ids).logits.double()
    nll = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    wanted = (nll * weight[:, 1:].flatten()).sum().item()
    # The model runs in bfloat16, whose 8 bits leave logits near 1 an error of 2^-8.
    assert loop.weighted_loss(model, ids, weight).item() == pytest.approx(wanted, rel=2**-8)


def test_book_loss_of_a_model_that_knows_nothing_is_that_of_guessing(model, words, tokens):
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    # A sum in float32 over 32 rows.
    wanted = pytest.approx(np.log(len(model.lm_head.weight)), rel=off(32 * 191))
    assert loop.book_loss(model, words, tokens) == wanted


def test_recall_counts_questions_of_which_every_digit_is_right(words, tokens):
    class Answers(torch.nn.Module):
        """Repeats the digits it is fed, and in every second row gets the last one wrong."""

        device = torch.device("cpu")
        config = loop.LlamaConfig(max_position_embeddings=192)

        def forward(self, input_ids, use_cache):
            guess = input_ids.roll(-1, dims=1)
            guess[::2, -2] += 1
            return type("Out", (), {"logits": torch.nn.functional.one_hot(guess, 4096).float()})

    assert loop.recall_accuracy(Answers(), words, tokens, questions=10) == 0.5


def test_sink_loss_is_how_many_nats_attention_stays_below_the_share(model, words, tokens):
    ids, _ = loop.batch(TINY, words, tokens, 0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()  # attention is even: 1 / (i + 1) at query i
    even = 1 / torch.arange(65, 193, dtype=torch.float64)
    wanted = (np.log(0.8) - (even + 0.01).log()).mean().item()
    assert loop.sink_loss(model, ids, 0.8).item() == pytest.approx(wanted, rel=2**-8)
    assert loop.sink_loss(model, ids, 0.01).item() == 0
    assert model.config._attn_implementation == "sdpa"


def test_the_sink_loss_rests_attention_on_the_start_token(model, words, tokens):
    ids, _ = loop.batch(TINY, words, tokens, 0)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = attention_on_start(model, ids)
    for _ in range(40):
        loop.sink_loss(model, ids, 0.5).backward()
        stepper.step()
        stepper.zero_grad()
    assert before < 0.02
    assert attention_on_start(model, ids) > 0.3


# --- runs


def train(recipe, tokenizer, tokens, out, **options):
    out.mkdir(exist_ok=True)
    return loop.train(recipe, tokenizer, tokens, out, compiled=False, **options)


def test_training_lowers_the_loss_and_writes_it_down(model, tokenizer, words, tokens, tmp_path):
    before = loop.book_loss(model, words, loop.split(tokens)[1])
    told = []
    trained = train(
        TINY, tokenizer, tokens, tmp_path, look_every=20, on_step=lambda *step: told.append(step)
    )
    after = loop.book_loss(trained, words, loop.split(tokens)[1])
    assert after < before - 1
    assert [step[:2] for step in told] == [(n, 40) for n in range(1, 41)]
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [facts["step"] for facts in log] == [20, 40]
    assert [facts["tokens"] for facts in log] == [20 * 768, 40 * 768]
    assert log[-1]["book_loss"] == after
    assert log[-1] == told[-1][2]


def test_the_held_out_text_is_not_trained_on(tokens):
    book, held_out = loop.split(tokens)
    np.testing.assert_array_equal(np.concatenate([book, held_out]), tokens)
    assert len(held_out) == pytest.approx(len(tokens) / 100, abs=1)


def test_the_sink_loss_comes_in_when_the_recipe_says(tokenizer, tokens, tmp_path):
    def told(name, **changes):
        facts = []
        recipe = replace(TINY, tokens=8 * 768, sinks_after=0.5, **changes)
        train(
            recipe, tokenizer, tokens, tmp_path / name, on_step=lambda *step: facts.append(step[2])
        )
        return [f["loss"] for f in facts], [f["sink_loss"] for f in facts]

    loss, pull = told("rested")
    free_loss, free_pull = told("free", sink_weight=0.0)
    assert not any(free_pull)
    assert not any(pull[:4])
    assert all(pull[4:])
    # The first four steps are the same, and so is the loss from which the fifth begins.
    assert [left == right for left, right in zip(loss, free_loss, strict=True)] == [
        *[True] * 5,
        *[False] * 3,
    ]


def test_a_run_that_was_broken_off_ends_with_the_weights_of_one_that_was_not(
    tokenizer, tokens, tmp_path
):
    recipe = replace(TINY, tokens=12 * 768, sinks_after=0.5)
    whole = train(recipe, tokenizer, tokens, tmp_path / "whole", look_every=5)

    def break_off(step, steps, facts):
        if step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, tokenizer, tokens, tmp_path / "two", look_every=5, on_step=break_off)
    told = []
    second = train(
        recipe,
        tokenizer,
        tokens,
        tmp_path / "two",
        look_every=5,
        on_step=lambda step, steps, facts: told.append(step),
    )
    assert told == list(range(6, 13)), "it must go on after the last checkpoint"
    assert_same_weights(weights_of(second), weights_of(whole))


def test_a_run_of_another_shape_is_not_taken_up(tokenizer, tokens, tmp_path):
    train(replace(TINY, tokens=768), tokenizer, tokens, tmp_path)
    with pytest.raises(WeirError, match=r"begun with inner=64, not 96"):
        train(replace(TINY, inner=96), tokenizer, tokens, tmp_path)


def test_a_text_too_short_to_hold_some_of_it_out_is_refused(tokenizer, tokens, tmp_path):
    with pytest.raises(WeirError, match=r"makes 19,000 tokens; it takes 19,200"):
        train(TINY, tokenizer, tokens[:19_000], tmp_path)


def test_from_books_to_a_folder_with_a_model_and_its_figures(books, tokens, tmp_path):
    text, out = tmp_path / "books.txt.xz", tmp_path / "deep" / "out"
    text.write_bytes(lzma.compress("\n\0\n".join(books).encode()))
    recipe = replace(TINY, tokens=10 * 768)
    figures = loop.run(recipe, text, out, vocabulary=640, compiled=False)

    reader, tokenizer = load(str(out))
    assert len(tokenizer) == 640
    assert next(reader.parameters()).dtype == torch.bfloat16
    assert figures["parameters"] == sum(p.numel() for p in reader.parameters())
    np.testing.assert_array_equal(np.load(out / "tokens.npy"), tokens)
    saved = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert figures == loop.figures(saved, tokenizer, loop.split(tokens)[1])
    assert 1 < figures["book_ppl"] < 640
    assert 0 <= figures["recall"] <= 1

    told = []
    again = loop.run(recipe, text, out, compiled=False, on_step=lambda *step: told.append(step))
    assert again == figures
    assert told == [], "a run that is done must not be done again"
    longer = replace(recipe, tokens=12 * 768)
    loop.run(longer, text, out, compiled=False, on_step=lambda *step: told.append(step[:2]))
    assert told == [(11, 12), (12, 12)]


def test_a_folder_that_cannot_be_made_is_named(books, tmp_path):
    text, blocked = tmp_path / "books.txt", tmp_path / "blocked"
    text.write_text(books[0], "utf-8")
    blocked.write_text("a file, not a folder")
    with pytest.raises(WeirError, match=r"cannot write to .*blocked"):
        loop.run(TINY, text, blocked, compiled=False)
