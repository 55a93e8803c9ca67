"""Keys and values as a cache holds them, keys without their rotation, and the section of `weir
inspect` on all of them."""

from __future__ import annotations

import sys
from itertools import combinations

import pytest
import torch
from reference.models import make, tokens
from torch import Tensor

import weir
from weir.errors import WeirError
from weir.evals.capture import capture_each
from weir.evals.inspect.keys import (
    KEYS,
    TURNED,
    VALUES,
    Covering,
    centers,
    chosen_layers,
    cover,
    covering_radii,
    doublings,
    kinds_of,
    measure,
    plane_of,
    section,
    shuffle_coordinates,
    some_of,
    spread,
)
from weir.evals.inspect.section import Inspection

TEXT = "All happy families are alike; each unhappy family is unhappy in its own way. " * 12


@pytest.fixture(scope="module")
def nano():
    return weir.load("nano")


def asked_of(model, **more):
    return Inspection(model, None, "a model", "", **more)


@pytest.mark.parametrize("family", ["llama", "llama-yarn", "falcon", "phi3", "bloom", "gemma3"])
def test_keys_are_those_that_a_cache_holds(family):
    model, text = make(family), tokens(1, 20)
    stream = weir.Stream(model, "dense", positions="original")
    stream.feed(text)
    for layer, kinds in capture_each(model, text[0], kinds_of).items():
        held = stream.slots(layer)
        torch.testing.assert_close(kinds[KEYS], held.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(kinds[VALUES], held.values, rtol=1e-4, atol=1e-4)


def test_turned_back_keys_are_those_before_rotation(llama, ids):
    text = ids(1, 30)[0]
    layer = llama.model.layers[0]
    with torch.no_grad():
        inner = layer.input_layernorm(llama.model.embed_tokens(text))
        wanted = layer.self_attn.k_proj(inner).view(30, 2, 16).transpose(0, 1)
    kinds = capture_each(llama, text, kinds_of, [0])[0]
    torch.testing.assert_close(kinds[TURNED][0], wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(kinds[KEYS][0], wanted, atol=0.1)


def test_keys_that_are_not_rotated_are_not_turned_back():
    kinds = capture_each(make("bloom"), tokens(1, 20)[0], kinds_of)
    assert all(list(of) == [KEYS, VALUES] for of in kinds.values())
    measured, _ = measure(asked_of(make("bloom")), tokens(1, 20), [0])
    assert {it["kind"] for it in measured} == {KEYS, VALUES}


def test_scores_are_of_the_chosen_layers_and_heads_without_the_first_token(llama, ids):
    texts = ids(2, 40)
    measured, vectors = measure(asked_of(llama, heads=(3,), seed=5), texts, [1])
    assert [(it["layer"], it["head"], it["kind"]) for it in measured] == [
        (1, 1, kind)
        for kind in (KEYS, TURNED, VALUES)  # query head 3 reads KV head 1
    ]
    for number, text in enumerate(texts):
        kinds = capture_each(llama, text, kinds_of, [1])[1]
        for it in measured:
            points = kinds[it["kind"]][0, [1], 1:]
            covering = cover(points, 5 + 1000 * number + 1)
            assert it["scores"][number] == float(covering.score)
            assert it["radius"][number] == covering.radius[0].tolist()
            assert it["control"][number] == covering.control[0].tolist()
    assert [(it.layer, it.head, it.kind) for it in vectors] == [(1, 1, KEYS), (1, 1, VALUES)]
    assert all(len(it.points) == 39 for it in vectors)


def test_layers_are_spread_from_the_first_to_the_last():
    assert some_of(range(32)) == (0, 8, 16, 23, 31)
    assert some_of(range(4)) == (0, 1, 2, 3)
    assert some_of(range(1)) == (0,)
    assert some_of((2, 7)) == (2, 7)
    assert chosen_layers(asked_of(make("llama"))) == (0, 1)
    assert chosen_layers(asked_of(make("llama"), layers=(1,))) == (1,)


def test_a_plane_keeps_neighbors_together_and_comes_again_with_its_seed():
    generator = torch.Generator().manual_seed(1)
    middles = 20 * torch.randn(3, 8, generator=generator)
    points = middles.repeat_interleave(12, dim=0) + torch.randn(36, 8, generator=generator)
    place, center = plane_of(points, seed=3)
    assert torch.equal(place, plane_of(points, seed=3)[0])
    nearest = torch.cdist(place, place).fill_diagonal_(torch.inf).argmin(dim=1)
    assert torch.equal(nearest // 12, torch.arange(36) // 12)
    assert int(center.sum()) == 16 and bool(center[0])
    # The centers are in all three clusters.
    assert len({int(n) // 12 for n in center.nonzero().flatten()}) == 3


def test_tokens_that_are_all_the_same_have_a_plane_too():
    place, center = plane_of(torch.ones(12, 4), seed=0)
    assert place.isfinite().all() and int(center.sum()) == 6


@pytest.mark.slow
def test_the_section_says_the_same_for_the_same_seed(nano):
    told, again = (section(Inspection(*nano, "nano", TEXT, tokens=48, seed=2)) for _ in range(2))
    assert told.facts == again.facts and told.text == again.text
    assert told.facts["passages"] == 5 and told.facts["tokens"] == 48
    assert len(told.facts["heads"]) == 4 * 2 * 3
    assert told.table is not None and len(told.table.rows) == 9
    assert [picture.name for picture in told.pictures] == [
        "keys-plane",
        "keys-covering",
        "keys-scores",
    ]
    plane, covering, scores = (picture.figure for picture in told.pictures)
    assert len(plane.axes) == 9 and plane.get_supxlabel() and plane.get_supylabel()
    for figure in (covering, scores):
        (axes,) = figure.axes
        assert axes.get_xlabel() and axes.get_ylabel()
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert labels == [KEYS, TURNED, VALUES]


def test_steps_are_told_up_to_the_last(nano):
    steps = []
    section(
        Inspection(
            *nano, "nano", TEXT, tokens=32, layers=(0, 2), on_step=lambda *s: steps.append(s)
        )
    )
    assert steps == [(n + 1, 14) for n in range(14)]  # 5 passages and 2 planes of 2 layers


def test_many_heads_share_rows_of_the_table():
    from weir.evals.inspect.keys import _table

    def measured(layer, head, kind, score):
        return {"layer": layer, "head": head, "kind": kind, "scores": [score]}

    few = [measured(layer, head, KEYS, 0.1 * layer) for layer in range(2) for head in range(3)]
    assert [row[0] for row in _table(few).rows][:2] == ["layer 0, head 0", "layer 0, head 1"]
    many = [measured(layer, head, KEYS, 0.1 * layer) for layer in range(2) for head in range(30)]
    assert _table(many).rows == (("layer 0", "0.00"), ("layer 1", "0.10"), ("all", "0.05"))


def test_without_scikit_learn_the_extra_is_named(nano, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(WeirError, match=r"pip install '\.\[inspect\]'"):
        section(Inspection(*nano, "nano", TEXT))


def test_a_short_text_is_one_passage_and_a_shorter_one_is_refused(nano):
    told = section(Inspection(*nano, "nano", "so it goes, and so it ends", layers=(0,)))
    assert told.facts["passages"] == 1 and told.facts["tokens"] < 30
    assert told.facts["heads"][0]["reach"] is None
    with pytest.raises(WeirError, match=r"3 tokens are too few\. Use a text of at least 9"):
        section(Inspection(*nano, "nano", "so it"))


# --- covering radii and clusterability: by brute force, by hand, on planted clusters


def draw(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def planted(sets: int, n: int, dim: int, clusters: int, width: float) -> Tensor:
    """Points around a few centers: point n is at center n modulo `clusters`."""
    middles = draw(sets, clusters, dim, seed=1)
    which = torch.arange(n) % clusters
    return middles[:, which] + width * draw(sets, n, dim, seed=2)


def naive_radius(points: list[list[float]], k: int) -> float:
    """Greedy k-center: pick the first point, then k - 1 times the point farthest from all picked.

    Returns the largest distance of a point to the nearest one that was picked.
    """

    def distance(x: list[float], y: list[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) ** 0.5

    picked = [points[0]]
    for _ in range(k - 1):
        picked.append(max(points, key=lambda x: min(distance(x, c) for c in picked)))
    return max(min(distance(x, c) for c in picked) for x in points)


def test_radii_are_those_of_the_greedy_loop_for_each_head():
    points = draw(3, 30, 5)
    counts = (1, 2, 3, 8, 15, 29)
    wanted = [[naive_radius(mine.double().tolist(), k) for k in counts] for mine in points]
    torch.testing.assert_close(covering_radii(points, counts), torch.tensor(wanted))


def test_radii_by_hand():
    line = torch.tensor([[[0.0], [1.0], [2.0], [10.0], [11.0], [12.0]]])
    # The first center is 0, and the farthest point from it is 12, the second center. Then every
    # point is within 2 of a center. The next centers are 2 and 10.
    assert covering_radii(line, (1, 2, 3, 4, 6)).tolist() == [[12.0, 2.0, 2.0, 1.0, 0.0]]
    assert centers(line, 3)[0].nonzero().flatten().tolist() == [0, 2, 5]


def test_no_choice_of_centers_has_less_than_half_the_radius():
    points = draw(1, 12, 3)
    got = float(covering_radii(points, (3,)))
    best = min(
        float(torch.cdist(points[0], points[0, list(chosen)]).amin(dim=1).max())
        for chosen in combinations(range(12), 3)
    )
    assert best <= got <= 2 * best


def test_the_control_keeps_every_coordinate_and_loses_what_they_have_in_common():
    x = draw(2, 500, 1)
    points = torch.cat([x, x, x], dim=2)  # three equal coordinates
    other = shuffle_coordinates(points, seed=3)
    for mine, its in zip(points.mT.flatten(0, 1), other.mT.flatten(0, 1), strict=True):
        assert not torch.equal(mine, its)
        assert torch.equal(mine.sort().values, its.sort().values)
    for its in other:
        correlated = torch.corrcoef(its.T) - torch.eye(3)
        assert correlated.abs().max() < 0.2  # the standard error is 0.045
    torch.testing.assert_close(spread(other), spread(points))
    assert torch.equal(other, shuffle_coordinates(points, seed=3))
    assert not torch.equal(other, shuffle_coordinates(points, seed=4))


def test_planted_clusters_score_far_apart_from_a_gaussian():
    clustered = cover(planted(4, 256, 16, clusters=8, width=0.05))
    gaussian = cover(draw(4, 256, 16, seed=9))
    assert clustered.counts == (1, 2, 4, 8, 16, 32, 64, 128)
    # A Gaussian with shuffled coordinates is still a Gaussian, so its score is near 0.
    assert gaussian.score.abs().max() < 0.1
    assert clustered.score.min() > 0.4
    # With at least as many centers as clusters, the radius is small.
    left = clustered.radius[:, 3:] / clustered.control[:, 3:]
    assert left.max() < 0.25


def test_the_score_knows_no_units_and_no_origin():
    points = planted(2, 64, 8, clusters=4, width=0.3)
    moved = cover(1000.0 * points + 5.0)
    torch.testing.assert_close(cover(points).score, moved.score, rtol=1e-3, atol=1e-3)


def test_a_set_of_two_different_points_leaves_nothing_to_compare():
    points = torch.tensor([[[0.0], [3.0], [3.0], [0.0], [3.0], [0.0], [0.0], [3.0]]])
    covering = cover(points)  # with one coordinate, shuffling changes nothing
    assert covering.counts == (1, 2, 4)
    assert covering.radius.tolist() == [[2.0, 0.0, 0.0]]  # a distance of 3 at a spread of 1.5
    assert covering.score.tolist() == [0.0]


def test_tokens_that_are_all_the_same_are_no_clusters():
    assert cover(torch.ones(1, 16, 4)).score.tolist() == [0.0]


def test_too_few_points_and_too_many_centers_are_refused():
    with pytest.raises(WeirError, match="7 tokens are too few to look for clusters"):
        cover(draw(1, 7, 2))
    assert doublings(8) == (1, 2, 4)
    assert doublings(512) == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    with pytest.raises(WeirError, match="17 centers cannot be picked from 16 tokens"):
        covering_radii(draw(1, 16, 2), (1, 17))
    with pytest.raises(WeirError, match="0 centers"):
        centers(draw(1, 16, 2), 0)


def test_one_center_measures_the_whole_and_counts_for_nothing():
    radius, control = torch.tensor([[3.0, 0.5, 1.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    # The mean of 1 - 0.5 for two centers, and 0 for four, where the control's radius is 0.
    assert Covering((1, 2, 4), radius, control).score.tolist() == [0.25]
