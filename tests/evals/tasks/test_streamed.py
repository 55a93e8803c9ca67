"""The streamed tasks on nano: what they ask; exact attention answers as a plain loop does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from roundings import nll_off, run_off

import weir
from weir.errors import WeirError
from weir.evals.attention_error import measure_error, set_up, size_policies
from weir.evals.task import Subject
from weir.evals.tasks.attention_error import AttentionError
from weir.evals.tasks.efficiency import Efficiency
from weir.evals.tasks.exercises import (
    Material,
    Recall,
    StreamFacts,
    StreamLayout,
    distances_to,
    draw_facts,
    draw_layout,
    fill_in,
)
from weir.evals.tasks.ppl import Perplexity
from weir.evals.tasks.streameval import ExerciseLines, StreamEval, TextLines, make_schedule
from weir.stream.text import BOOK, read_stream, read_text
from weir.train.exercises import Words

pytestmark = pytest.mark.thinned(3, least=2)


@pytest.fixture(scope="module")
def nano():
    return weir.load("nano")


def subject(nano, policy: str = "dense", **more) -> Subject:
    return Subject("nano", *nano, policy=weir.policy(policy), **more)


def silent(share: float) -> None:
    """Ignore progress."""


@pytest.fixture(scope="module")
def two_books(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "books.txt"
    words = read_text(BOOK)
    path.write_text(words[:900] + "\n\0\n" + words[5000:5700])
    return str(path)


# --- texts


def test_books_are_one_stream_with_one_start_token(nano, two_books):
    tokenizer = nano[1]
    books = read_stream(tokenizer, two_books)
    begin, middle, end = books.edges
    assert (begin, end) == (0, len(books.ids))
    assert books.ids.tolist().count(tokenizer.bos_token_id) == 1
    words = read_text(BOOK)
    assert tokenizer.decode(books.ids[1:middle]) == words[:900].strip("\n")
    assert tokenizer.decode(books.ids[middle:]) == "\n\n" + words[5000:5700].strip("\n")
    pieces = list(books.pieces(100))
    assert torch.equal(torch.cat(pieces), books.ids)
    assert middle in np.cumsum([len(piece) for piece in pieces])
    short = read_stream(tokenizer, two_books, most=middle + 5)
    assert short.edges == (0, middle, middle + 5)
    assert read_stream(tokenizer, two_books, most=middle).edges == (0, middle)
    with pytest.raises(WeirError, match="no text was given"):
        read_stream(tokenizer, "")


# --- ppl


def test_perplexity_is_that_of_a_plain_forward_over_all_and_by_book(nano, two_books):
    model, tokenizer = nano
    books = read_stream(tokenizer, two_books, most=500)
    assert books.edges[1] < 450
    with torch.no_grad():
        logits = model(books.ids[None]).logits[0, :-1].double()
    nll = torch.nn.functional.cross_entropy(logits, books.ids[1:], reduction="none")
    told: list[float] = []
    task = Perplexity(tokens=500, text=two_books, block=128)
    found = task.run(subject(nano), told.append)
    middle = books.edges[1]
    assert found["ppl"] == pytest.approx(float(nll.mean().exp()), rel=nll_off(model, 499, 500))
    assert found["nll"] == pytest.approx(float(nll.mean()), abs=nll_off(model, 499, 500))
    assert [book["tokens"] for book in found["by_book"]] == [middle, 500 - middle]
    books = [float(part.mean().exp()) for part in (nll[: middle - 1], nll[middle - 1 :])]
    least = min(middle - 1, 500 - middle)
    assert [book["ppl"] for book in found["by_book"]] == pytest.approx(
        books, rel=nll_off(model, least, 500)
    )
    blocks = [nll[max(0, b - 1) : b + 127].mean().exp() for b in range(0, 500, 128)]
    wanted = pytest.approx([float(b) for b in blocks], rel=nll_off(model, 500 % 128, 500))
    assert found["ppl_by_block"] == wanted
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_perplexity_of_cache_configurations_is_in_the_order_of_table_1(nano):
    found = {
        policy: Perplexity(tokens=1500).run(subject(nano, policy), silent)["ppl"]
        for policy in ("dense", "window(128)", "streaming_llm(128, sinks=4)")
    }
    assert found["streaming_llm(128, sinks=4)"] < 60 < found["window(128)"]
    assert found["dense"] > 60


@pytest.mark.parametrize("wrong", [{"tokens": 1}, {"block": 0}])
def test_perplexity_of_nothing_is_refused(wrong):
    with pytest.raises(WeirError, match=r"of ppl must be a whole number of at least \d"):
        Perplexity(**wrong)


def test_a_missing_text_is_the_reason(nano, tmp_path):
    with pytest.raises(WeirError, match="cannot read"):
        Perplexity(text=str(tmp_path / "none.txt")).run(subject(nano), silent)


# --- recall


def sample(material: Material, layout: StreamLayout) -> tuple[StreamFacts, np.ndarray]:
    facts = draw_facts(material, len(layout.answers), distinct=False)
    return facts, fill_in(material, facts, layout)


@pytest.mark.parametrize("seed", range(20))
def test_every_answer_is_due_its_distance_after_its_number(nano, seed):
    words = Words.of(nano[1])
    rng = np.random.default_rng(seed)
    distances = distances_to(600)
    assert distances == [16, 32, 64, 128, 256, 512, 600]
    layout = draw_layout(distances, 40, rng)
    book = read_stream(nano[1], most=5000).ids.numpy()
    facts, row = sample(Material(words, book, rng), layout)
    numbers = [fact.answer for (fact,) in facts]
    assert len(row) == layout.length
    assert row[0] == words.front[0]
    assert (row[1:] != words.front[0]).all()
    for distance, number, place in zip(distances, numbers, layout.answers, strict=True):
        assert row[place : place + 3].tolist() == number.tolist()
        assert row[place - distance : place - distance + 3].tolist() == number.tolist()
        # The number and its question are both in statements about the same name.
        name, verb = row[place - 3], words.verb
        said = np.flatnonzero((row[:-1] == name) & (row[1:] == verb))
        assert {place - 3, place - distance - 3} <= set(said.tolist())


@pytest.mark.slow
def test_recall_inside_the_window_is_that_of_a_plain_loop_answer_for_answer(nano):
    model, tokenizer = nano
    task = Recall(samples=6, farthest=200, before=20)
    found = task.run(subject(nano, seed=3), silent)
    # The same streams, and a greedy loop of transformers over each.
    words, rng = Words.of(tokenizer), np.random.default_rng(3)
    book = read_stream(tokenizer, most=200_000).ids.numpy()
    layout = draw_layout(distances_to(200), 20, rng)
    rows = [sample(Material(words, book, rng), layout) for _ in range(6)]
    hits = []
    for question, place in enumerate(layout.answers):
        right = 0
        for facts, row in rows:
            prompt = torch.from_numpy(row[:place])[None]
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False
            )
            right += out[0, place:].tolist() == facts[question][0].answer.tolist()
        hits.append(right)
    assert [row["right"] for row in found["by_distance"]] == hits
    assert found["right"] == sum(hits) >= 0.9 * found["asked"]
    assert (found["asked"], found["recall"]) == (30, sum(hits) / 30)


@pytest.mark.slow
def test_recall_falls_where_the_number_has_left_the_cache(nano):
    found = Recall(samples=8, farthest=256).run(subject(nano, "streaming_llm(80)"), silent)
    by = {row["distance"]: row["accuracy"] for row in found["by_distance"]}
    assert by[16] == by[32] == by[64] == 1.0
    assert by[256] == 0.0
    alone = subject(nano, "streaming_llm(80)").stream()
    alone.feed([1] * 9)
    assert found["kv_bytes"] == alone.nbytes  # of one stream, not of all


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"farthest": 15}, {"before": 0}])
def test_recall_of_nothing_is_refused(wrong):
    with pytest.raises(WeirError, match="recall"):
        Recall(**wrong)


# --- streameval


@pytest.mark.parametrize("seed", range(5))
def test_each_distance_is_asked_so_often_and_no_line_twice(seed):
    schedule = make_schedule((20, 40, 100), 7, 10, np.random.default_rng(seed))
    places = [place for place, _ in schedule]
    assert places == sorted(set(places))
    assert all(place % 10 == 0 and place >= 100 for place in places)
    assert sorted(d for _, d in schedule) == sorted([20, 40, 100] * 7)
    asked = [place - distance for place, distance in schedule]
    assert len(set(asked)) == len(asked)
    assert min(asked) >= 0


def test_streameval_with_exact_attention_is_a_plain_loop_answer_for_answer(nano):
    model, tokenizer = nano
    task = StreamEval(distance=10, samples=3, queries=3, every=10)
    found = task.run(subject(nano, seed=1), silent)
    rng = np.random.default_rng(1)
    schedule = make_schedule((10,), 3, 10, rng)
    lines = ExerciseLines(tokenizer, 3, schedule[-1][0], rng)
    right = 0
    for row in range(3):
        ids: list[int] = []
        fed = 0
        for place, distance in schedule:
            for number in range(fed, place):
                ids += lines.line(number)[row].tolist()
            fed = place
            ids += lines.question(place - distance)[row].tolist()
            prompt = torch.tensor([ids])
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False
            )[0, len(ids) :].tolist()
            right += out == lines.numbers[row, place - distance].tolist()
            ids += [*out, int(lines.words.stop)]
    assert found["right"] == right >= 6
    assert found["asked"] == 9
    assert found["tokens"] == len(ids) - 1  # nothing follows the last answer


@pytest.mark.slow
def test_streameval_holds_inside_the_cache_and_falls_to_chance_beyond(nano):
    it = subject(nano, "streaming_llm(256)")
    inside, beyond = (
        StreamEval(distance=d, samples=8, queries=3).run(it, silent) for d in (20, 60)
    )
    assert inside["accuracy"] >= 0.9
    assert beyond["right"] == 0
    assert inside["by_distance"][0]["tokens"] == 140


def test_the_papers_lines_are_for_other_models_and_read_one_stream_at_a_time(nano, monkeypatch):
    model, tokenizer = nano
    lines = TextLines(tokenizer, 1, 5, np.random.default_rng(0))
    assert tokenizer.decode(lines.line(1)[0]) == (
        f"line {lines.names[1]}: REGISTER_CONTENT is <{lines.numbers[1]}>\n"
    )
    assert tokenizer.decode(lines.question(2)[0]).endswith(
        f"line {lines.names[2]}: REGISTER_CONTENT is <"
    )
    answer = tokenizer(f"{lines.numbers[2]}>", add_special_tokens=False, return_tensors="pt")
    assert lines.answer_length(2) == answer.input_ids.shape[1]
    assert lines.right(2, answer.input_ids) == 1
    wrong = tokenizer(f"{lines.numbers[2]}0>", add_special_tokens=False, return_tensors="pt")
    assert lines.right(2, wrong.input_ids) == 0
    it = Subject("other", model, tokenizer, weir.policy("streaming_llm(64)"))
    task = StreamEval(distance=2, samples=2, queries=2, every=3)
    # Whatever the model's name is, nano is asked in the format of the exercises of its training.
    assert task.run(it, silent)["format"] == "exercises"
    monkeypatch.delattr(model.config, "weir_exercises")
    found = task.run(it, silent)
    assert (found["format"], found["asked"]) == ("text", 4)


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"queries": 0}, {"every": 0}, {"distance": 0}, {"format": "prose"}]
)
def test_streameval_of_nothing_is_refused(wrong):
    with pytest.raises(WeirError, match="streameval"):
        StreamEval(**wrong)


# --- efficiency


def test_efficiency_times_all_rivals_and_compares_with_each(nano):
    found = Efficiency(prompt=100, tokens=3, repeats=1).run(
        subject(nano, "streaming_llm(32)"), silent
    )
    rows = {row["rival"]: row for row in found["rivals"]}
    assert set(rows) == {"streaming_llm(32)", "exact", "recompute"}
    mine = rows["streaming_llm(32)"]
    assert found["decode_over_exact"] == mine["decode_s"] / rows["exact"]["decode_s"]
    assert found["decode_over_recompute"] == mine["decode_s"] / rows["recompute"]["decode_s"]
    assert found["prefill_over_exact"] == mine["prefill_s"] / rows["exact"]["prefill_s"]
    assert found["kv_bytes"] == mine["kv_bytes"] < rows["exact"]["kv_bytes"]
    assert rows["recompute"]["kv_bytes"] == 32 * 8  # the ids of its window


@pytest.mark.parametrize("policy", ["dense", "recompute(32)"])
def test_efficiency_leaves_out_what_cannot_be_recomputed(nano, policy):
    found = Efficiency(prompt=40, tokens=1, repeats=1).run(subject(nano, policy), silent)
    assert found["decode_over_recompute"] is None
    assert math.isfinite(found["decode_over_exact"])


# --- attention-error


@pytest.mark.slow
def test_the_attention_error_is_that_of_its_command_and_none_where_all_is_kept(nano):
    model, tokenizer = nano
    ids = read_stream(tokenizer, most=512).ids
    setup = set_up(model, 512)
    for policy, rate in (("h2o(budget=100)", None), ("uniform", 0.25)):
        sized, _ = size_policies([policy], setup, [rate] if rate else [])
        rows = measure_error(model, ids, sized, setup, seeds=(3,))
        found = AttentionError(rate=rate).run(subject(nano, policy, seed=3), silent)
        assert [row["error"] for row in found["by_layer"]] == [row.error for row in rows]
        assert found["error"] == pytest.approx(np.mean([row.error for row in rows]))
    assert AttentionError().run(subject(nano, "window(500)"), silent)["error"] < run_off(model, 512)
    with pytest.raises(WeirError, match="recompute caches no keys"):
        AttentionError().run(subject(nano, "recompute(64)"), silent)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.5])
def test_a_rate_that_is_no_share_is_refused(rate):
    with pytest.raises(WeirError, match="between 0 and 1"):
        AttentionError(rate=rate)


# --- all of them


@pytest.mark.parametrize(
    "task", [Perplexity(tokens=300), Recall(samples=2, farthest=64), StreamEval(5, 2, 2)]
)
def test_the_same_seed_gives_the_same_figures_and_another_other_ones(nano, task):
    once, again = (task.run(subject(nano, "reservoir(64)", seed=4), silent) for _ in range(2))
    assert once == again
    assert set(task.metrics) <= set(once)
    if not isinstance(task, Perplexity):
        rngs = [np.random.default_rng(seed) for seed in (4, 5)]
        a, b = (draw_layout([16, 64], 256, rng) for rng in rngs)
        assert a != b
