"""Replicas on Ray Serve: join a cluster, deploy, and wait for the end."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray import serve
from ray.serve.config import DeploymentActorConfig, HTTPOptions, RequestRouterConfig

from weir.errors import WeirError
from weir.serve.cluster.leases import LeaseTable
from weir.serve.cluster.replica import Replica, Settings
from weir.serve.cluster.router import TABLE

LOCAL = "local"
ROUTERS = {
    "leases": "weir.serve.cluster.router.LeaseRouter",
    "hash": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
}
"""Routers by their names on the command line."""
PATIENCE = 5.0
"""Seconds in which a cluster must answer."""


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Join a cluster for a `with` block; on exit, finish answers under way and remove all replicas.

    SIGTERM works like SIGINT inside the block.

    Args:
        address: `local` for a cluster of this machine alone that ends with this process, or
            `host:port` of a cluster's head.

    Raises:
        WeirError: no cluster answers there, or it lets anybody in.
    """
    _connect(address)
    # Ray has installed its own handler, which aborts the process.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)


def _connect(address: str) -> None:
    # One line of ours replaces Ray's long logs; workers keep the usual priority.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_worker_niceness", "0")
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        if address == LOCAL:
            ray.init(address=LOCAL, include_dashboard=False, **quiet)
        else:
            _check(address)
            ray.init(address=address, **quiet)
    except WeirError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeirError(f"the cluster {address} cannot be used: {reason}") from None


def _check(address: str) -> None:
    """Refuse an address without a cluster, and one that runs anybody's code (CVE-2023-48022)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise WeirError(f"--cluster takes 'local' or 'host:port', not {address!r}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PATIENCE) as there:
            name = str(there.getpeername()[0])
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WeirError(f"no cluster answers at {address}: {reason}") from None
    if not ipaddress.ip_address(name).is_loopback and os.environ.get("RAY_AUTH_MODE") != "token":
        raise WeirError(
            f"{address} is another machine, and whoever reaches a Ray cluster without tokens can "
            "run anything there; start it with RAY_AUTH_MODE=token, and set that here too"
        )


def deploy(settings: Settings, replicas: int, host: str, port: int, routing: str) -> None:
    """Deploy replicas at an address, and wait until all of them answer.

    Raises:
        WeirError: the replicas do not start.
    """
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= replicas else 0
    limits = settings.limits
    deployment = serve.deployment(
        Replica,
        name="weir",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        max_ongoing_requests=limits.open,
        graceful_shutdown_timeout_s=limits.drain,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2,
        request_router_config=RequestRouterConfig(request_router_class=ROUTERS[routing]),
        deployment_actors=[
            DeploymentActorConfig(
                name=TABLE, actor_class=ray.remote(LeaseTable), actor_options={"num_cpus": 0}
            )
        ],
    )
    where = "HeadOnly" if len(ray.nodes()) == 1 else "EveryNode"
    try:
        serve.start(proxy_location=where, http_options=HTTPOptions(host=host, port=port))
        serve.run(deployment.bind(settings), name="weir", route_prefix="/")
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeirError(f"the replicas do not come up: {reason}") from None


def until_ended() -> None:
    """Wait for SIGTERM or SIGINT."""
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
