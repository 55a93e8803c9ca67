"""Cells on Ray: the same results, only one cell lost with a killed worker, and clear errors."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from weir.errors import WeirError
from weir.evals.grid import runner as cluster
from weir.evals.grid.grid import make_grid
from weir.evals.grid.runner import on_ray, run


def without_times(path: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def local():
    """A cluster on this machine, started once for all tests."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    on_ray("local")  # sets the environment of Ray's workers
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_cells_on_ray_give_what_they_give_without(tmp_path, local):
    grid = make_grid(["nano", "./none"], "ppl(tokens=300)", "h2o(64)")
    run(grid, tmp_path / "here.jsonl")
    run(grid, tmp_path / "there.jsonl", work=on_ray("local"))
    assert without_times(tmp_path / "here.jsonl") == without_times(tmp_path / "there.jsonl")


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_own_cell_which_is_run_again(
    tmp_path, monkeypatch, local
):
    marks = tmp_path / "marks"
    marks.mkdir()

    def killed_once(number, cell, threads):
        # This runs in a worker, which kills itself the first time that it gets cell 1.
        import os
        import signal
        import tempfile

        tempfile.mkstemp(prefix=f"{number}-", dir=marks)
        if number == 1 and len(list(marks.glob("1-*"))) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"cell": number, "status": "done"}

    monkeypatch.setattr(cluster, "_measure_on_worker", killed_once)
    grid = make_grid(["nano"], "ppl(tokens=300)", "h2o(64), dense, window(9)")
    records = run(grid, tmp_path / "r.jsonl", work=on_ray("local"))
    assert records == [{"cell": number, "status": "done"} for number in range(3)]
    begun = sorted(mark.name.split("-")[0] for mark in marks.iterdir())
    assert begun == ["0", "1", "1", "2"]


@pytest.mark.slow
def test_a_worker_that_always_dies_is_given_up(tmp_path, monkeypatch, local):
    def killed(number, cell, threads):
        # This worker measures nothing, so it does not import weir, which would take a while.
        import os
        import signal

        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"cell": number, "status": "done"}

    monkeypatch.setattr(cluster, "_measure_on_worker", killed)
    monkeypatch.setattr(cluster, "TRIES", 2)
    records = run(
        make_grid(["nano"], "ppl", "dense, window"), tmp_path / "r.jsonl", work=on_ray("local")
    )
    assert records[0]["reason"] == "its worker died 2 times"
    assert records[1]["status"] == "done"


@pytest.mark.parametrize("address", ["nowhere", "host", ":99", "a:b", "ray://x"])
def test_what_is_no_address_is_refused(address):
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    with pytest.raises(WeirError, match=r"--cluster must be 'local', 'host:port'"):
        on_ray(address)


def test_a_cluster_that_does_not_answer_is_one_clear_line():
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        port = taken.getsockname()[1]
        with pytest.raises(WeirError, match=f"no cluster answers at 127.0.0.1:{port}: "):
            on_ray(f"127.0.0.1:{port}")


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(WeirError, match=r"needs ray.*pip install '\.\[ray\]'"):
        on_ray("local")
