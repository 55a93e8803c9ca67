"""Routes for operators: `/health`, `/openapi.json`, and `/metrics` for Prometheus."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import JSONResponse, PlainTextResponse, Response

from weir.cache import Folded
from weir.serve.api.dependencies import Client
from weir.serve.api.openapi import describe_app
from weir.serve.client import EngineClient

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

router = APIRouter()
public = APIRouter()


class Metrics:
    """Counts and times of a server, in a separate registry."""

    def __init__(self, client: EngineClient) -> None:
        self.registry = CollectorRegistry()
        own = self.registry
        self.requests = Counter(
            "weir_requests", "Requests by route and status.", ["route", "status"], registry=own
        )
        self.turns = Counter("weir_turns", "Answers, by how they ended.", ["ended"], registry=own)
        self.tokens = Counter(
            "weir_tokens", "Tokens read, generated, and reused.", ["kind"], registry=own
        )
        self.first = Histogram(
            "weir_time_to_first_token_seconds",
            "Time to the first token of an answer, from when its request has been read and "
            "tokenized.",
            buckets=SECONDS,
            registry=own,
        )
        self.between = Histogram(
            "weir_between_tokens_seconds", "Time from token to token.", buckets=GAPS, registry=own
        )
        self._folds, self._folding = 0, 0.0
        self._lock = threading.Lock()
        self._client = client
        client.engine.cache.on_fold = self._folded
        self.registry.register(self)

    def _folded(self, folded: Folded) -> None:
        with self._lock:
            self._folds += len(folded.rows)
            self._folding += folded.seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read from the engine only when somebody asks for them."""
        engine = self._client.engine
        load, cache = engine.load(), engine.cache
        yield GaugeMetricFamily("weir_queue", "Turns that wait for a row.", load.waiting)
        rows = GaugeMetricFamily("weir_rows", "Rows by state.", labels=["state"])
        rows.add_metric(["busy"], load.busy)
        rows.add_metric(["resting"], load.resting)
        rows.add_metric(["free"], load.rows - load.busy - load.resting)
        yield rows
        yield CounterMetricFamily("weir_decode_calls", "Decode calls so far.", load.calls)
        with self._lock:
            folds, folding = self._folds, self._folding
        yield CounterMetricFamily(
            "weir_folds", "Calls of the model in which a row folded, counted once per row.", folds
        )
        yield CounterMetricFamily("weir_fold_seconds", "Time spent in folds.", folding)
        yield GaugeMetricFamily("weir_cache_bytes", "Bytes of all rows.", cache.nbytes)


@public.get("/health")
@public.head("/health", include_in_schema=False)  # some load balancers ask for headers only
async def health(client: Client) -> Response:
    """Check whether the server can answer. Needs no key."""
    if client.failure is not None:
        return JSONResponse({"status": "failed"}, 503)
    if await asyncio.to_thread(client.store.is_full):
        return JSONResponse({"status": "storage_full", "message": client.store.describe_full()})
    return JSONResponse({"status": "ok"})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format."""
    found = generate_latest(request.app.state.metrics.registry)
    return Response(found, media_type=CONTENT_TYPE_LATEST)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> dict[str, Any]:
    """The OpenAPI description of this server."""
    return describe_app(request.app)
