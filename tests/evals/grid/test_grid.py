"""The grid: every combination once, budgets for policies that take them, and a fingerprint."""

from __future__ import annotations

from dataclasses import replace

import pytest

import weir
from weir.cache import size_of
from weir.errors import WeirError
from weir.evals.fitting import budget_in
from weir.evals.grid import grid as grid_of
from weir.evals.grid.grid import Grid, make_grid, named_pools
from weir.evals.notation import with_budget
from weir.loading import skeleton
from weir.policies.registry import NAMED
from weir.pools import CounterRNG


def test_cells_are_all_combinations_in_order():
    grid = make_grid(
        ["nano", "other"],
        "recall(samples=1), recall(samples=2)",
        "dense, h2o, streaming_llm(sinks=1), recent(9)",
        budgets=[64, 128],
        seeds=[0, 7],
    )
    assert len(grid.cells) == 2 * 2 * (1 + 2 + 2 + 1) * 2
    of_first = [cell for cell in grid.cells if cell.model == "nano" and "samples=1," in cell.task]
    assert [(cell.policy, cell.budget, cell.seed) for cell in of_first] == [
        (policy, budget, seed)
        for policy, budget in [
            ("dense", None),
            ("h2o(budget=64)", 64),
            ("h2o(budget=128)", 128),
            ("streaming_llm(sinks=1, budget=64)", 64),
            ("streaming_llm(sinks=1, budget=128)", 128),
            ("recent(9)", None),
        ]
        for seed in (0, 7)
    ]
    assert [cell.model for cell in grid.cells[:24]] == ["nano"] * 24
    assert grid.cells[0].the_task().samples == 1


def test_what_has_no_chance_in_it_is_run_with_the_first_seed_alone():
    grid = make_grid(
        ["nano"], "ppl, recall", "streaming_llm, kcenter, sink(4) | reservoir(8), recompute",
        budgets=[64], seeds=[3, 4],
    )  # fmt: skip
    several = {(cell.task.partition("(")[0], cell.policy) for cell in grid.cells if cell.seed == 4}
    assert ("ppl", "sink(4) | reservoir(8)") in several
    assert ("ppl", "streaming_llm(budget=64)") not in several
    assert ("ppl", "kcenter(budget=64)") not in several
    assert len([cell for cell in grid.cells if cell.task.startswith("recall")]) == 8


@pytest.mark.parametrize("name", ["sink", "recent", "kcenter", "hive", "heavy", "snap"])
def test_a_pool_that_says_it_draws_nothing_draws_nothing(name, llama, ids, monkeypatch):
    policy = weir.policy(f"sink(1) | {name}(34)" if name != "sink" else "sink(4) | recent(4)")
    assert not any(pool.is_stochastic for pool in policy.for_layer(0, 1).pools)
    assert weir.policy("sink(1) | reservoir(8)").for_layer(0, 1).pools[1].is_stochastic

    def refuse(*given, **more):
        raise AssertionError("it draws")

    for method in ("uniform", "uniforms", "of_layer"):
        monkeypatch.setattr(CounterRNG, method, refuse)
    weir.Stream(llama, policy, chunk=4).feed(ids(1, 80))


def test_all_is_every_named_policy_but_those_that_are_no_stream_and_the_wrappers():
    grid = make_grid(["nano"], "ppl", "all, recompute", budgets=[128])
    names = [cell.policy.partition("(")[0] for cell in grid.cells]
    assert sorted(names) == sorted(set(NAMED) - {"kvzip", "pinned", "pyramid", "quantized"})
    assert names[-1] == "recompute"


def test_the_fingerprint_tells_grids_apart_and_nothing_else_does():
    def made(**changes: object) -> Grid:
        settings = {"models": ["nano"], "tasks": "ppl", "policies": "dense, h2o", **changes}
        return make_grid(**settings)  # type: ignore[arg-type]

    same = made(policies=" dense,h2o ", tasks="ppl(tokens=20000)")
    assert made().fingerprint == same.fingerprint
    others = [
        made(models=["a"]), made(tasks="ppl(block=5)"), made(policies="h2o, dense"),
        made(budgets=[64]), made(seeds=[1]), made(chunk=1), made(positions="original"),
        made(paper="streaming_llm"),
    ]  # fmt: skip
    assert len({made().fingerprint, *(grid.fingerprint for grid in others)}) == 9


def test_a_protocol_sets_chunk_positions_and_where_budgets_come_from():
    cell = make_grid(["nano"], "ppl", "h2o", paper="streaming_llm").cells[0]
    assert (cell.chunk, cell.positions, cell.protocol) == (1, "rolling", "streaming_llm")
    cell = make_grid(["nano"], "ppl", "h2o", paper="balancekv").cells[0]
    assert (cell.chunk, cell.positions, cell.policy) == (64, "original", "h2o")
    assert make_grid(["nano"], "ppl", "h2o", paper="streaming_llm", chunk=8).cells[0].chunk == 8
    with pytest.raises(WeirError, match=r"every budget is 0\.25 of the prompt's length\. Leave"):
        make_grid(["nano"], "ppl", "h2o", paper="balancekv", budgets=[64])
    with pytest.raises(WeirError, match="unknown protocol 'balancekw', did you mean"):
        make_grid(["nano"], "ppl", "h2o", paper="balancekw")


@pytest.mark.parametrize(
    "twice",
    [{"models": ["nano", "nano"]}, {"seeds": [3, 3]}, {"tasks": "ppl, ppl(tokens=20000)"}],
)
def test_the_same_cell_twice_is_refused(twice):
    with pytest.raises(WeirError, match="is in this grid twice"):
        make_grid(**{"models": ["nano"], "tasks": "ppl", "policies": "dense", **twice})


@pytest.mark.parametrize("none", [{"models": []}, {"seeds": []}])
def test_a_grid_of_nothing_is_refused(none):
    with pytest.raises(WeirError, match="needs at least one"):
        make_grid(**{"models": ["nano"], "tasks": "ppl", "policies": "dense", **none})


def test_the_first_line_names_every_cell():
    grid = make_grid(["nano"], "ppl", "dense, h2o")
    facts = grid.as_json()
    assert facts["grid"] == grid.fingerprint
    assert [cell["policy"] for cell in facts["cells"]] == ["dense", "h2o"]
    assert replace(grid, cells=grid.cells[::-1]).fingerprint != grid.fingerprint


def test_budgets_may_be_bytes_and_every_policy_has_the_largest_that_fits():
    shape, rooms = skeleton("nano"), [900_000, 1_200_000]
    fitting = {
        name: {room: budget_in(shape, name, room) for room in rooms} for name in ("h2o", "kcenter")
    }
    assert fitting["h2o"][900_000] < fitting["kcenter"][900_000] < fitting["kcenter"][1_200_000]
    grid = make_grid(["nano"], "recall", "dense, h2o, kcenter, recent(9)", memory=rooms)
    assert [(cell.policy, cell.budget, cell.memory) for cell in grid.cells] == [
        ("dense", None, None),
        *((f"h2o(budget={budget})", budget, room) for room, budget in fitting["h2o"].items()),
        *(
            (f"kcenter(budget={budget})", budget, room)
            for room, budget in fitting["kcenter"].items()
        ),
        ("recent(9)", None, None),
    ]
    both = make_grid(["nano"], "recall", "kcenter", budgets=[64], memory=[900_000])
    assert [cell.budget for cell in both.cells] == [64, fitting["kcenter"][900_000]]
    assert [cell["memory"] for cell in both.as_json()["cells"] if "memory" in cell] == [900_000]
    with pytest.raises(
        WeirError, match=r"300,000 bytes are too few for h2o on nano: h2o\(budget=2\)"
    ):
        make_grid(["nano"], "recall", "h2o", memory=[300_000])
    with pytest.raises(WeirError, match="Leave out the memory or the protocol"):
        make_grid(["nano"], "needle", "h2o", paper="balancekv", memory=[900_000])


def test_policies_are_compared_at_equal_slots_bytes_or_keys_and_values():
    shape, asked = skeleton("nano"), {"models": ["nano"], "tasks": "recall", "budgets": [256]}
    names = "streaming_llm, h2o, kcenter"
    slots = make_grid(**asked, policies=names, equal="slots").cells
    assert [cell.budget for cell in slots] == [256] * 3
    assert make_grid(**asked, policies=names).cells == slots  # the default if budgets are given
    yardstick = size_of(shape, "streaming_llm(budget=256)")
    whole = make_grid(**asked, policies=names, equal="bytes").cells
    for cell in whole:
        assert (cell.memory, cell.equal) == (yardstick.stream, None)
        larger = with_budget(cell.policy.partition("(")[0], cell.budget + 1)
        assert size_of(shape, cell.policy).stream <= yardstick.stream
        assert size_of(shape, larger).stream > yardstick.stream
    assert whole[0].budget == 256
    # h2o has fewer slots at equal bytes, because it also stores a second copy of keys, and queries.
    assert whole[1].budget < 200
    kv = make_grid(**asked, policies=names, equal="kv").cells
    assert [cell.budget for cell in kv] == [256] * 3
    assert {(cell.memory, cell.equal) for cell in kv} == {(yardstick.step_stream, "kv")}
    assert kv[0].as_json()["equal"] == "kv" and "equal" not in whole[0].as_json()
    given = {"models": ["nano"], "tasks": "recall", "policies": "h2o"}
    counted = make_grid(**given, memory=[400_000], equal="kv").cells[0]
    assert size_of(shape, counted.policy).step_stream <= 400_000 < yardstick.step_stream
    assert make_grid(**given, memory=[900_000], equal="bytes") == make_grid(
        **given, memory=[900_000]
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory": [900_000], "equal": "slots"}, "given as budgets, not as memory"),
        ({"memory": [900_000], "budgets": [64], "equal": "kv"}, "equal kv takes either budgets"),
        ({"equal": "bytes"}, "needs sizes. Use budgets or memory"),
        ({"paper": "balancekv", "equal": "bytes"}, "Leave out equal or the protocol"),
        (
            {"budgets": [64], "equal": "slots", "policies": "sink(4) | recent(61)"},
            "has 65 slots written in it, more than the 64",
        ),
        (
            {"budgets": [64], "equal": "bytes", "policies": "sink(4) | recent(61)"},
            r"recent\(61\) on nano takes",
        ),
    ],
)
def test_sizes_that_cannot_be_equal_are_refused(given, message):
    with pytest.raises(WeirError, match=message):
        make_grid(**{"models": ["nano"], "tasks": "needle", "policies": "h2o", **given})


def test_quantized_policies_have_the_budgets_of_those_inside():
    cells = make_grid(
        ["nano"], "recall", "kcenter, h2o(budget=20)", budgets=[64], slots="int8"
    ).cells
    assert [(cell.policy, cell.budget) for cell in cells] == [
        ("quantized(kcenter(budget=64), slots=int8)", 64),
        ("quantized(h2o(budget=20), slots=int8)", None),
    ]
    (cell,) = make_grid(["nano"], "recall", "quantized(h2o, newest=4)", memory=[900_000]).cells
    assert cell.policy == f"quantized(h2o(budget={cell.budget}), newest=4)"
    with pytest.raises(WeirError, match="first and newest tokens"):
        make_grid(["nano"], "recall", "streaming_llm", budgets=[64], slots="int8")


@pytest.mark.parametrize(
    ("policy", "pools"),
    [
        ("sink(4)|recent(252)", None),
        ("sink(n=4) | recent(10)", None),
        ("[sink(4)|recent(10), sink(4)|recent(20)]", None),
        ("streaming_llm(10)", "sink(4) | recent(6)"),
        ("[streaming_llm(10), sink(4)|recent(10)]", "[sink(4) | recent(6), sink(4) | recent(10)]"),
    ],
)
def test_only_a_name_stands_for_pools_however_pools_are_spelled(policy, pools):
    assert named_pools(policy) == pools


def test_a_pipe_that_is_larger_than_the_memory_is_refused_by_name():
    pipe, asked = "sink(4) | recent(300)", {"models": ["nano"], "tasks": "recall"}
    takes = size_of(skeleton("nano"), pipe).stream
    cells = make_grid(**asked, policies=f"{pipe}, h2o", memory=[900_000, takes]).cells
    assert cells[0].policy == pipe
    with pytest.raises(WeirError, match=r"^sink\(4\) \| recent\(300\) on nano takes"):
        make_grid(**asked, policies=f"h2o, {pipe}", memory=[takes - 1])
    with pytest.raises(WeirError, match=r"^weir\(budget=448, slots=exact\) on nano takes"):
        make_grid(**asked, policies="weir(budget=448, slots=exact)", memory=[900_000])


@pytest.mark.parametrize(
    ("loading", "recorded"),
    [({}, "gguf"), ({"dtype": "float32"}, None), ({"weights": "q4_0"}, "q4_0")],
)
def test_the_weights_that_a_gguf_file_is_loaded_with_are_recorded(loading, recorded, monkeypatch):
    def of_a_file(name: str, **given: str) -> object:
        default = {} if given else {"weights": "q8_0"}
        return skeleton(name, **given, **default)

    monkeypatch.setattr(grid_of, "is_gguf", lambda name: True)
    monkeypatch.setattr(grid_of, "skeleton", of_a_file)
    (cell,) = make_grid(["nano"], "recall(samples=1)", "recent(9)", loading=loading).cells
    assert dict(cell.loading).get("weights") == recorded
