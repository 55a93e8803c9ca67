"""Cells on Ray: several at a time, on this machine or on many.

A cell is a task of Ray's: if the worker it runs on dies, that cell is run again elsewhere, and no
other. A cell is run with as many threads as this process would use for it, so its figures are the
same to the last bit; to run more cells side by side, start with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import torch

from weir.errors import WeirError
from weir.evals.data import needed
from weir.evals.grid.grid import Cell
from weir.evals.grid.runner import Numbered, Told, Worker, failed, measure
from weir.evals.results import CellRecord

LOCAL = "local"
TRIES = 4
"""How often a cell is begun, if its worker dies each time."""
PATIENCE = 5.0
"""Seconds in which a cluster must answer."""


def on_ray(address: str) -> Worker:
    """What runs cells on a cluster.

    Args:
        address: `local` for a cluster of this machine's own, for as long as it is needed; or
            `host:port` of a cluster's head, or `ray://host:port` of one that takes clients.

    Raises:
        WeirError: Ray is not installed, or nothing answers at this address.
    """
    # Ray's own log says at length, on standard error, what is told in one line here.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    # Its workers would step back behind everything else on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray = needed("ray", "--cluster", extra="ray")
    if address != LOCAL:
        _check_reachable(address)
    return lambda cells, told: _run(ray, address, cells, told)


def _run(ray: Any, address: str, cells: list[Numbered], told: Told) -> Iterator[CellRecord]:
    if not cells:
        return
    threads = torch.get_num_threads()
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address, threads)
    try:
        most = max(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
        # Such a cell must fit somewhere, or Ray would wait for a larger machine for ever.
        remote = ray.remote(num_cpus=min(threads, most), max_retries=TRIES - 1)(_measure)
        # As a dictionary: a `Cell` would have the worker import all of weir to read it.
        waiting = {
            remote.remote(number, cell.as_json(), threads): (number, cell) for number, cell in cells
        }
        while waiting:
            (ended, *_), _ = ray.wait(list(waiting))
            number, cell = waiting.pop(ended)
            try:
                yield ray.get(ended)
            except ray.exceptions.WorkerCrashedError:
                yield failed(number, cell, f"its worker died {TRIES} times")
            except ray.exceptions.RayError as error:
                said = str(error).strip().splitlines() or [type(error).__name__]
                yield failed(number, cell, f"its worker could not run it: {said[-1].strip()}")
    finally:
        if ours:
            ray.shutdown()


def _measure(number: int, cell: dict[str, Any], threads: int) -> CellRecord:
    """A cell, given by its fields, in a worker."""
    torch.set_num_threads(threads)
    return measure(number, Cell.of(cell))


def _connect(ray: Any, address: str, threads: int) -> None:
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address == LOCAL:
            ray.init(address=LOCAL, include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeirError(f"the cluster {address} cannot be used: {reason}") from None


def _check_reachable(address: str) -> None:
    """Ray itself would try for a minute, and then end the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise WeirError(
            f"--cluster takes 'local', 'host:port' or 'ray://host:port', not {address!r}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WeirError(f"no cluster answers at {address}: {reason}") from None
