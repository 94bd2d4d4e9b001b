"""Metrics for Prometheus at /metrics, read from the records when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from hibachi.router.forward import Forwarder
from hibachi.router.outliers import suspect
from hibachi.router.upstreams import BOUNDS, Times, UpstreamState

PLAIN = b"text/plain; version=0.0.4; charset=utf-8"
EDGES = [f"{bound:g}" for bound in BOUNDS] + ["+Inf"]


class Page:
    def __init__(self, forwarder: Forwarder) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Records(forwarder))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Records:
    """A collector, as prometheus-client wants it."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder

    def collect(self) -> Iterator[Metric]:
        forwarder = self._forwarder
        meter, everyone = forwarder.meter, [*forwarder.fleet.upstreams, *forwarder.fleet.leaving]

        def gauge(name: str, about: str, value: Any) -> Metric:
            found = GaugeMetricFamily(f"hibachi_route_{name}", about, labels=["upstream"])
            for u in everyone:
                if (n := value(u)) is not None:
                    found.add_metric([u.name], n)
            return found

        def counter(name: str, about: str, value: Any) -> Metric:
            found = CounterMetricFamily(f"hibachi_route_{name}", about, labels=["upstream"])
            for u in everyone:
                found.add_metric([u.name], value(u))
            return found

        yield gauge("in_flight", "Requests that an upstream has.", lambda u: u.in_flight)
        yield gauge("slots", "Requests that it may have at once.", lambda u: u.place.limit)
        yield gauge("up", "1: it takes requests; 0.5: it is tried again; 0: it takes none.", _up)
        yield gauge(
            "latency_seconds", "To the first byte of its answers, of late (a moving average).", lambda u: u.latency
        )
        yield gauge("load", "Requests that wait there, as it says itself.", lambda u: u.load)
        yield counter("requests", "Requests that were sent to it.", lambda u: u.used)
        yield counter("retries", "Of these, those that had failed elsewhere.", lambda u: u.retries)
        yield counter("affine", "Of these, those whose prefix is at home there.", lambda u: u.affine)
        answers = CounterMetricFamily("hibachi_route_answers", "Answers of upstreams.", labels=["upstream", "status"])
        errors = CounterMetricFamily("hibachi_route_errors", "What broke at upstreams.", labels=["upstream", "kind"])
        times = HistogramMetricFamily(
            "hibachi_route_first_byte_seconds", "From a request to the first byte of its answer.", labels=["upstream"]
        )
        for u in everyone:
            for status, n in sorted(u.answers.items()):
                answers.add_metric([u.name, str(status)], n)
            for kind, n in sorted(u.errors.items()):
                errors.add_metric([u.name, kind], n)
            times.add_metric([u.name], *_buckets(u.times))
        yield from (answers, errors, times)
        yield HistogramMetricFamily(
            "hibachi_route_queue_seconds",
            "Of requests that had to wait for an upstream: for how long.",
            buckets=_buckets(meter.queued)[0],
            sum_value=meter.queued.total,
        )
        yield GaugeMetricFamily("hibachi_route_waiting", "Requests that wait.", value=forwarder.lines.waiting)
        yield GaugeMetricFamily("hibachi_route_running", "Requests that are open.", value=meter.running)
        given = CounterMetricFamily(
            "hibachi_route_client_answers", "Answers to clients, by kind of path.", labels=["kind", "status"]
        )
        for (kind, status), n in sorted(meter.answers.items()):
            given.add_metric([kind, str(status)], n)
        yield given
        yield CounterMetricFamily("hibachi_route_left", "Clients that left before their answer.", value=meter.left)
        yield CounterMetricFamily(
            "hibachi_route_poisonous", "Requests that failed on two upstreams.", value=meter.poisonous
        )


def _up(u: Any) -> float:
    return 0.0 if not u.takes else 0.5 if u.state is UpstreamState.TRIED or suspect(u) else 1.0


def _buckets(times: Times) -> tuple[list[tuple[str, float]], float]:
    return list(zip(EDGES, map(float, accumulate(times.counts)), strict=True)), times.total
