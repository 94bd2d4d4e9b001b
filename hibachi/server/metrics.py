"""Metrics for Prometheus at /metrics: results of requests, and the state of the engine."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import prometheus_client

from hibachi.common.installed import version
from hibachi.engine.guide.protocol import Counted
from hibachi.engine.health import Health
from hibachi.engine.runners.meters import Histogram, Meters, decades
from hibachi.engine.stats import Stats
from hibachi.errors import HibachiError
from hibachi.llm.dialects.dialects import key_of
from hibachi.llm.dialects.errors import Refused
from hibachi.server.openapi import TEXT
from hibachi.server.record import Record
from hibachi.server.routes import About, Route
from hibachi.server.series import NAMES, page
from hibachi.server.served import Served
from hibachi.server.web.exchange import Exchange

log: logging.Logger = logging.getLogger("hibachi.serve")
PATH = "/metrics"
PLAIN = b"text/plain; version=0.0.4; charset=utf-8"
WORK_ROUTES = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/v1/generate",
        "/generate",
        "/generate_stream",
        "/",
        "/invocations",
        "/v1/warm",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/classify",
    }
)  # of POST; a refusal elsewhere is no loss
WHOLE = ("stop", "length")

LATENCY = decades(5e-4, 300)
BETWEEN = decades(5e-5, 10)
SIZES = tuple(float(2**n) for n in range(18))  # to 131072 tokens
FEW = (1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 10.0, 16.0, 20.0, 32.0, 64.0, 128.0)


def is_work(method: str, route: str) -> bool:
    """Whether a request asks the engine for work. Only these count in the metrics of requests, and in the gate."""
    return method == "POST" and route in WORK_ROUTES


def metrics_for(served: Served, names: str = "hibachi") -> tuple[RequestMeter, tuple[Route, ...]]:
    """The counter (it is `served.meter` from now on), and the route that shows it, for `application(served,
    more=routes)`.

    names: the naming scheme of the series: "hibachi", "vllm" or "tgi"; series without an equal there keep our names.
    """
    assert names in NAMES, names
    began, about = time.monotonic(), _about(served)
    served.meter = meter = RequestMeter(sorted({name for _, name in served.tenants.keys}))
    # A thread of its own: it neither holds up the streams nor waits behind requests for vectors.
    reader = ThreadPoolExecutor(1, "hibachi-metrics")

    def text(named: bool) -> bytes:
        return page(View(served, meter, about, began, named), names).encode() + _others()

    async def metrics(_: Served, x: Exchange) -> None:
        """Metrics for Prometheus."""
        named = served.tenants.may_see_all(key_of(x.headers))
        await x.answer(await asyncio.get_running_loop().run_in_executor(reader, text, named), PLAIN)

    return meter, (Route("GET", PATH, metrics, keyed=False, about=About(writes={"text/plain": TEXT})),)


def _others() -> bytes:
    """Metrics of the process by prometheus-client, and of a user's own model."""
    try:
        return prometheus_client.generate_latest(prometheus_client.REGISTRY)
    except Exception:
        log.exception("a collector registered with prometheus_client failed")
        return b""


class View:
    """One snapshot of everything. It never waits: where the engine is another process, it shows what that last
    reported.
    """

    served: Served
    requests: RequestMeter
    about: dict[str, str]
    health: Health
    stats: Stats
    memory_free: int | None
    memory_size: int | None

    def __init__(
        self, served: Served, requests: RequestMeter, about: dict[str, str], began: float, named: bool = True
    ) -> None:
        """named: tenants are shown by name, which only admins may see."""
        self._named = named
        what, engine = served.what, served.what.engine
        self.served, self.requests, self.about = served, requests, about
        self.health, self.stats = what.health(), what.stats()
        self.engine: Meters = what.meters()
        self.forms: Counted = engine.forms.counted
        self.uptime: float = time.monotonic() - began
        self.restarts: int = self.health.restarts
        memory: tuple[int | None, int | None] = self.engine.memory or (None, None)
        self.memory_free, self.memory_size = memory
        pids = {"server": os.getpid()} | ({} if engine.pid is None else {"engine": engine.pid})
        sizes = {(name,): _resident(pid) for name, pid in pids.items()}
        self.resident: dict[tuple[str], int] = {key: size for key, size in sizes.items() if size is not None}

    def by_tenant(self, place: int) -> dict[tuple[str, ...], int]:
        return self.requests.by_tenant(place) if self._named else {}


def _about(served: Served) -> dict[str, str]:
    engine = served.what.engine
    facts = engine.facts
    library, device, *_ = facts.fingerprint.split("; ")
    return {
        "version": version(),
        "model": served.names[0],
        "backend": library,
        "device": device,
        "dtype": facts.dtype,
        "deterministic": str(facts.deterministic).lower(),
        "engine": "server" if engine.pid is None else "child",
    }


def _resident(pid: int) -> int | None:
    """Bytes of memory that a process holds; None means that this system does not tell, or there is no such process."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return None


class RequestMeter:
    """Counts on the event loop; read from another thread.

    tenants: names that may be labels. Times of whole answers count for requests that ended by themselves; the others
    ended when their clients left.
    """

    generated: int
    prompt_tokens: int
    cached_tokens: int
    arrived: int
    first: Histogram
    total: Histogram
    preparation: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram
    between: Histogram
    per_token: Histogram
    prompt_sizes: Histogram
    answer_sizes: Histogram
    cached_sizes: Histogram
    max_tokens: Histogram

    def __init__(self, tenants: list[str] | None = None) -> None:
        self.open: set[Record] = set()
        self.arrived = self.prompt_tokens = self.cached_tokens = self.generated = 0
        self.finished: dict[tuple[str], int] = {(reason,): 0 for reason in (*WHOLE, "cancelled", "error", "closed")}
        self.rejected: Counter[tuple[str, str]] = Counter()
        self.http: Counter[tuple[str, str, str]] = Counter()
        self.first, self.total, self.preparation, self.queue, self.prefill, self.decode, self.inference = (
            Histogram(LATENCY) for _ in range(7)
        )
        self.between, self.per_token = Histogram(BETWEEN), Histogram(BETWEEN)
        self.prompt_sizes, self.answer_sizes, self.cached_sizes, self.max_tokens = (Histogram(SIZES) for _ in range(4))
        self.n: Histogram = Histogram(FEW)
        self._tenants = {name: [0, 0, 0] for name in tenants or ()}

    @property
    def streams(self) -> int:
        return sum(record.stream for record in list(self.open))

    def by_tenant(self, place: int) -> dict[tuple[str, ...], int]:
        """Counters by tenant, by index: 0 requests, 1 prompt tokens, 2 generated tokens."""
        return {(name,): counts[place] for name, counts in self._tenants.items()}

    # ---- what records tell -------------------------------------------------------------------------------------

    def begun(self, record: Record) -> None:
        self.arrived += 1
        self.open.add(record)
        self.n.add(record.params.n)
        if record.params.max_tokens is not None:
            self.max_tokens.add(record.params.max_tokens)
        self.preparation.add(record.queued - record.arrival)

    def came(self, record: Record, tokens: int, now: float, since: float | None) -> None:
        self.generated += tokens
        if since is not None:
            self.between.add((now - since) / tokens, tokens)
            return
        if record.first is None:
            self._began(record, now)
        if tokens > 1:  # together with the first
            self.between.add(0.0, tokens - 1)

    def _began(self, record: Record, now: float) -> None:
        """The first token."""
        self.first.add(now - record.arrival)
        if (started := record.started) is not None:
            self.queue.add(max(started - record.queued, 0.0))
            self.prefill.add(now - started)
        cached = record.reused
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += cached
        self.cached_sizes.add(cached)

    def ended(self, record: Record) -> None:
        self.open.discard(record)
        if record.text is None:
            return  # refused: counted when it is answered
        assert record.end is not None
        reason = _reason(record)
        self.finished[reason,] += 1
        if (counts := self._tenants.get(record.tenant)) is not None:
            for place, n in enumerate((1, record.prompt_tokens, record.tokens)):
                counts[place] += n
        if reason not in WHOLE:
            return
        if record.first is None:  # its first token ended it, and was not sent
            self._began(record, record.end)
        self.total.add(record.end - record.arrival)
        if record.started is not None:
            self.inference.add(record.end - record.started)
        first = record.end if record.first is None else record.first
        decode = 0.0 if record.last is None else record.last - first
        self.decode.add(decode)
        self.prompt_sizes.add(record.prompt_tokens)
        self.answer_sizes.add(record.tokens)
        if (more := record.tokens - record.continuations) > 0:
            self.per_token.add(decode * record.continuations / more)

    def answered(self, method: str, route: str, status: int, refused: Refused | None, record: Record | None) -> None:
        self.http[method, route, str(status)] += 1
        if refused is None or not is_work(method, route) or (record is not None and record.text is not None):
            return
        self.rejected[refused.code or refused.kind, str(refused.status)] += 1
        self.arrived += record is None


def _reason(record: Record) -> str:
    """Why a request ended, with all its continuations."""
    reasons = set(record.reasons)
    if isinstance(record.error, HibachiError) or "error" in reasons:
        return "closed" if "closed" in reasons else "error"
    for reason in ("closed", "cancelled"):
        if reason in reasons:
            return reason
    if not reasons:
        return "cancelled"
    return "length" if "length" in reasons else "stop"
