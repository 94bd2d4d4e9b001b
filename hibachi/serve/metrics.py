"""Figures for Prometheus at /metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import TypeAlias

from hibachi.serve.exchange import Exchange
from hibachi.serve.record import Meter, NoMeter
from hibachi.serve.state import Served

NAMES = ("hibachi", "vllm", "tgi")
PLAIN = b"text/plain; version=0.0.4; charset=utf-8"
Routes: TypeAlias = "tuple[tuple[str, str, Callable[[Served, Exchange], Awaitable[None]], bool], ...]"


def metrics_for(served: Served, names: str = "hibachi") -> tuple[Meter, Routes]:
    """What counts (it is `served.meter` from now on), and the route that tells, for `application(served, more=routes)`.

    names: whose names the series bear, one of `NAMES`.
    """
    meter, began = NoMeter(), time.monotonic()
    served.meter = meter

    async def metrics(served: Served, x: Exchange) -> None:
        text = (
            "# HELP hibachi_info The version.\n# TYPE hibachi_info gauge\n"
            f'hibachi_info{{version="{version("hibachi")}"}} 1\n'
            "# HELP hibachi_uptime_seconds Seconds since the server began.\n# TYPE hibachi_uptime_seconds gauge\n"
            f"hibachi_uptime_seconds {time.monotonic() - began:.3f}\n"
        )
        await x.answer(text.encode(), PLAIN)

    return meter, (("GET", "/metrics", metrics, False),)
