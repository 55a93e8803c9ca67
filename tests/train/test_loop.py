"""Training: batches, schedule, losses, and runs that are interrupted and resumed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from roundings import close, off
from transformers import LlamaConfig

from weir.errors import WeirError
from weir.train import corpus, loop
from weir.train.log import read_log
from weir.train.loop import Lesson, TrainingRecipe
from weir.train.shapes import new_model

TINY = TrainingRecipe(
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
    return new_model(TINY, tokenizer)


@pytest.fixture
def lesson(tokenizer, tokens):
    return Lesson.of(TINY, tokenizer, tokens)


def of_sink(sink, tokenizer, tokens, **changes):
    """Return a recipe with a sink and text only, its tokenizer, its lesson and its model."""
    recipe = replace(TINY, sink=sink, exercise_rows=0, **changes)
    reader = corpus.with_sinks(tokenizer.backend_tokenizer, recipe.kind.count)
    return recipe, reader, Lesson.of(recipe, reader, tokens), new_model(recipe, reader)


def attention_on_start(model, ids):
    """Return the mean attention on the first token, over layers, heads and late queries."""
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
        ({"width": 30}, "width must be a multiple of 4, so that 2 heads have an even size, got 30"),
        ({"length": 191}, "samples of 191 tokens. Use 192 or more"),
        ({"length": 100, "exercise_rows": 0}, "cannot be taught on samples of 100 tokens"),
        ({"kv_heads": 3}, "2 heads cannot share 3 KV heads"),
        ({"optimizer": "sgd"}, "muon or adamw, got 'sgd'"),
        ({"exercise_rows": 4}, "4 of 4 samples are exercises"),
        ({"sink": "learnable:0"}, "1 to 64 tokens, got 0. Use none"),
        ({"sink": "learnable:x"}, "got 'learnable:x'"),
        ({"sink": "one"}, "none, zero, learnable, .*, got 'one'"),
        ({"sink": "none:2"}, "got 'none:2'"),
        ({"shape": "gpt"}, "shape of a recipe must be llama or qwen3 or alibi, got 'gpt'"),
        ({"shape": "alibi"}, "as many KV heads as heads, 2, got 1"),
        ({"shape": "alibi", "kv_heads": 2}, "no sink can be taught to them. Use learnable"),
        ({"shape": "alibi", "kv_heads": 2, "sink": "zero"}, "without softmax-off-by-one"),
        ({"tokens": 767}, "767 tokens are less than one step .* Use 768 or more"),
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


def test_a_batch_depends_on_nothing_but_its_arguments(lesson):
    first = loop.batch(TINY, lesson, 30)
    np.random.seed(5)
    torch.manual_seed(5)
    loop.batch(TINY, lesson, 7)
    again = loop.batch(TINY, lesson, 30)
    for name in ("ids", "weight", "text"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    for other in (
        loop.batch(TINY, lesson, 31),
        loop.batch(replace(TINY, seed=1), lesson, 30),
    ):
        assert (first.ids != other.ids).any(dim=1).all(), "all rows must differ"


def test_losses_are_averaged_apart_and_then_added(words, lesson):
    recipe = replace(TINY, rows=8, exercise_rows=3, exercise_weight=0.6)
    for step in (0, 25):
        given = loop.batch(recipe, lesson, step)
        assert given.ids.shape == given.weight.shape == given.text.shape == (8, 193)
        assert given.ids.dtype == torch.int64
        assert (given.ids == words.front[0]).nonzero()[:, 1].tolist() == [0] * 8
        wanted = torch.tensor([0.6 / 3] * 3 + [1 / 5] * 5)
        close(given.weight.sum(dim=1), wanted, terms=193)
        close(given.text.sum(dim=1), torch.tensor([0.0] * 3 + [1 / 5] * 5), terms=193)


@pytest.mark.parametrize(("sink", "front"), [("zero", 0), ("learnable", 1), ("learnable:3", 3)])
def test_every_sink_sees_the_same_passages_and_is_scored_on_the_same_tokens(
    tokenizer, tokens, sink, front
):
    recipe, _, plain, _ = of_sink("none", tokenizer, tokens)
    wanted = loop.batch(recipe, plain, 5)
    recipe, reader, lesson, _ = of_sink(sink, tokenizer, tokens)
    got = loop.batch(recipe, lesson, 5)
    assert lesson.front.tolist() == reader("")["input_ids"]
    assert got.ids.shape == (4, 192 + front)
    assert (got.ids[:, :front] == torch.from_numpy(lesson.front)).all()
    assert torch.equal(got.ids[:, front:], wanted.ids)
    assert torch.equal(got.text[:, front:], wanted.text)
    assert not wanted.text[:, 0].any() and (wanted.text[:, 1:] > 0).all()
    # The sink must predict the first word, but nothing must predict the sink.
    assert not got.weight[:, :front].any() and (got.weight[:, max(1, front) :] > 0).all()


@pytest.mark.parametrize("sink", ["zero", "learnable", "learnable:3"])
def test_every_sink_begins_from_the_same_weights(tokenizer, tokens, sink):
    plain = of_sink("none", tokenizer, tokens)[3].state_dict()
    other = of_sink(sink, tokenizer, tokens)[3].state_dict()
    assert plain.keys() == other.keys()
    for name, weight in plain.items():
        assert torch.equal(other[name][: len(weight)], weight), name


def test_exercises_are_segments_first_and_then_mostly_recall(words, lesson):
    recipe = replace(TINY, tokens=100 * 4 * 192, only_segments=0.4)
    digits = torch.from_numpy(words.digits)

    def recalls(step):
        given = loop.batch(recipe, lesson, step)
        answers = [given.ids[row][given.weight[row] > 0] for row in range(recipe.exercise_rows)]
        return np.mean([bool(torch.isin(answer, digits).all()) for answer in answers])

    assert not any(recalls(step) for step in range(40))
    assert 0.6 < np.mean([recalls(step) for step in range(40, 100)]) < 0.9


# --- losses


def test_the_losses_are_weighted_cross_entropies_of_the_next_token(model, lesson):
    given = loop.batch(TINY, lesson, 3)
    logits = model(input_ids=given.ids).logits.double()
    nll = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), given.ids[:, 1:].flatten(), reduction="none"
    )
    got = loop.losses(model, given.ids, given.weight, given.text)
    for loss, weight in zip(got, (given.weight, given.text), strict=True):
        wanted = (nll * weight[:, 1:].flatten()).sum().item()
        # The model runs in bfloat16, whose 8 bits give logits near 1 an error of 2^-8.
        assert loss.item() == pytest.approx(wanted, rel=2**-8)
    assert got[0].requires_grad and not got[1].requires_grad


def test_book_loss_of_a_model_that_knows_nothing_is_that_of_guessing(model, lesson):
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    # A float32 sum over 32 rows.
    wanted = pytest.approx(np.log(len(model.lm_head.weight)), rel=off(32 * 191))
    assert loop.book_loss(model, lesson) == wanted


def test_recall_counts_questions_of_which_every_digit_is_right(words, tokens):
    class Answers(torch.nn.Module):
        """Repeats the digits it is fed, but gets the last one wrong in every second row."""

        device = torch.device("cpu")
        config = LlamaConfig(max_position_embeddings=192, vocab_size=4096)

        def forward(self, input_ids, use_cache):
            guess = input_ids.roll(-1, dims=1)
            guess[::2, -2] += 1
            return type("Out", (), {"logits": torch.nn.functional.one_hot(guess, 4096).float()})

    assert loop.recall_accuracy(Answers(), words, tokens, questions=10) == 0.5


def test_sink_loss_is_how_many_nats_attention_stays_below_the_share(model, lesson):
    ids = loop.batch(TINY, lesson, 0).ids
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()  # attention is uniform: 1 / (i + 1) at query i
    even = 1 / torch.arange(65, 194, dtype=torch.float64)
    wanted = (np.log(0.8) - (even + 0.01).log()).mean().item()
    assert loop.sink_loss(model, ids, 0.8).item() == pytest.approx(wanted, rel=2**-8)
    assert loop.sink_loss(model, ids, 0.01).item() == 0
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_the_sink_loss_rests_attention_on_the_start_token(model, lesson):
    ids = loop.batch(TINY, lesson, 0).ids
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
    lesson = Lesson.of(recipe, tokenizer, tokens)
    return loop.train(recipe, tokenizer, lesson, out, compiled=False, **options)


@pytest.mark.slow
def test_training_lowers_the_loss_and_writes_it_down(model, tokenizer, lesson, tokens, tmp_path):
    before = loop.book_loss(model, lesson)
    told = []
    trained = train(
        TINY, tokenizer, tokens, tmp_path, look_every=20, on_step=lambda *step: told.append(step)
    )
    after = loop.book_loss(trained, lesson)
    assert after < before - 1
    assert [step[:2] for step in told] == [(n, 40) for n in range(1, 41)]
    log = read_log(tmp_path / "loss.csv")
    assert [facts["step"] for facts in log] == list(range(1, 41))
    assert [facts["tokens"] for facts in log] == [n * 768 for n in range(1, 41)]
    assert [facts["step"] for facts in log if facts["held_out_loss"]] == [20, 40]
    assert log[-1]["held_out_loss"] == after
    assert all(log[-1][name] == told[-1][2][name] for name in log[-1])
    assert all(facts["tokens_per_s"] > 0 for facts in log)


@pytest.mark.parametrize(
    "changes", [{"shape": "qwen3"}, {"shape": "alibi", "kv_heads": 2, "sink": "learnable"}]
)
@pytest.mark.slow
def test_every_shape_learns_and_is_looked_at_over_its_window(tokenizer, tokens, tmp_path, changes):
    recipe = replace(TINY, **changes)
    lesson = Lesson.of(recipe, tokenizer, tokens)
    before = loop.book_loss(new_model(recipe, tokenizer), lesson)
    asked = []
    trained = train(recipe, tokenizer, tokens, tmp_path)
    trained.register_forward_pre_hook(
        lambda module, given, named: asked.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    assert loop.book_loss(trained, lesson) < before - 1
    assert set(asked) == {193}


@pytest.mark.slow
def test_a_sink_can_be_taught_to_heads_with_qk_norm(tokenizer, lesson):
    recipe = replace(TINY, shape="qwen3")
    model = new_model(recipe, tokenizer)
    # Keys and queries have a fixed length. So until the norms' weights grow, logits are between -4
    # and 4 (the square root of head_dim), and the sink's weight is at most e^8 times another
    # token's.
    ids = loop.batch(recipe, lesson, 0).ids
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        loop.sink_loss(model, ids, 0.5).backward()
        stepper.step()
        stepper.zero_grad()
    assert attention_on_start(model, ids) > 0.3


def test_the_held_out_text_is_not_trained_on(tokens):
    for length in (192, 16):
        book, held_out = loop.split(tokens, length)
        np.testing.assert_array_equal(np.concatenate([book, held_out]), tokens)
        wanted = max(len(tokens) // 100, min(len(tokens) // 10, 8 * length))
        assert len(held_out) == wanted


@pytest.mark.slow
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
    # The first four steps are the same, and so is the loss at the start of the fifth.
    assert [left == right for left, right in zip(loss, free_loss, strict=True)] == [
        *[True] * 5,
        *[False] * 3,
    ]


@pytest.mark.parametrize(
    ("sink", "optimizer"), [("taught", "muon"), ("none", "adamw"), ("zero", "muon")]
)
@pytest.mark.slow
def test_a_run_that_was_broken_off_ends_as_one_that_was_not(
    tokenizer, tokens, tmp_path, sink, optimizer
):
    exercises = 2 if sink == "taught" else 0
    recipe = replace(
        TINY,
        tokens=12 * 768,
        sinks_after=0.5,
        sink=sink,
        optimizer=optimizer,
        exercise_rows=exercises,
    )
    whole = train(recipe, tokenizer, tokens, tmp_path / "whole", look_every=5)

    def break_off(step, steps, facts):
        if step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, tokenizer, tokens, tmp_path / "two", look_every=5, on_step=break_off)
    assert len(read_log(tmp_path / "two" / "loss.csv")) == 8
    with (tmp_path / "two" / "loss.csv").open("a") as log:
        log.write("9,6912,5.1")  # a line that was cut off by a power failure
    told = []
    second = train(
        recipe,
        tokenizer,
        tokens,
        tmp_path / "two",
        look_every=5,
        on_step=lambda step, steps, facts: told.append(step),
    )
    assert told == list(range(6, 13)), "it must continue after the last checkpoint"
    assert_same_weights(weights_of(second), weights_of(whole))
    logs = [read_log(tmp_path / name / "loss.csv") for name in ("whole", "two")]
    for left, right in zip(*logs, strict=True):
        del left["tokens_per_s"], right["tokens_per_s"]
        assert left == right
    assert [row["step"] for row in logs[1]] == list(range(1, 13))


@pytest.mark.slow
def test_a_step_in_parts_is_the_step(tokenizer, tokens, tmp_path, monkeypatch):
    recipe = replace(TINY, tokens=768)
    train(recipe, tokenizer, tokens, tmp_path / "whole")
    # Parts of three rows and of one row.
    monkeypatch.setattr(loop, "MOST_LOGITS", 3 * 193 * len(tokenizer))
    parts, losses_of = [], loop.losses
    monkeypatch.setattr(
        loop,
        "losses",
        lambda model, ids, *more: parts.append(len(ids)) or losses_of(model, ids, *more),
    )
    train(recipe, tokenizer, tokens, tmp_path / "parts")
    assert parts[:2] == [3, 1] and max(parts) == 3
    whole, in_parts = (read_log(tmp_path / name / "loss.csv")[0] for name in ("whole", "parts"))
    for name in ("loss", "objective"):  # sums of 4 x 192 float32 losses, in another order
        assert in_parts[name] == pytest.approx(whole[name], rel=off(4 * 192))


@pytest.mark.slow
def test_a_run_of_another_shape_is_not_taken_up(tokenizer, tokens, tmp_path):
    train(replace(TINY, tokens=768), tokenizer, tokens, tmp_path)
    for changes, sentence in (
        ({"inner": 96}, "begun with inner=64, got 96"),
        ({"sink": "learnable"}, "begun with sink=taught, got learnable"),
        ({"rate": 1e-3}, "begun with rate=0.02, got 0.001"),
        ({"seed": 4}, "begun with seed=0, got 4"),
    ):
        with pytest.raises(WeirError, match=sentence):
            train(replace(TINY, tokens=768, **changes), tokenizer, tokens, tmp_path)


def test_a_text_too_short_to_hold_some_of_it_out_is_refused(tokenizer, tokens, tmp_path):
    with pytest.raises(
        WeirError, match=(r"has 3,839 tokens, but samples of 192 need at least " r"3,840")
    ):
        train(TINY, tokenizer, tokens[:3839], tmp_path)


def test_a_loss_that_is_no_number_ends_the_run_by_name(tokenizer, tokens, tmp_path):
    with pytest.raises(WeirError, match=r"at step \d+ the loss is no longer a finite number"):
        train(replace(TINY, rate=1e38, sink="none", exercise_rows=0), tokenizer, tokens, tmp_path)
