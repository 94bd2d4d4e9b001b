"""One setup of an engine on one trace, and what came of it in numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from hibachi.common.settings.kinds import SWITCH, choice, integer, seconds, setting, text
from hibachi.engine.scheduler.policies import SHIPPED
from hibachi.engine.scheduler.policy import Policy
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.simulator.feed import ORDERS, WINDOW, Offline
from hibachi.engine.simulator.fleet import Placement, replay_fleet
from hibachi.engine.simulator.guesses import Guesses
from hibachi.engine.simulator.outcome import NEVER, SimOutcome
from hibachi.engine.simulator.replay import TraceReplay
from hibachi.engine.simulator.steptime import StepTime
from hibachi.engine.simulator.tiers import SimTiers
from hibachi.engine.simulator.trace import PICOSECONDS, Numbers, Trace
from hibachi.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
BINS = 300  # of what is shown over time
_OVER_TIME = ("waiting", "running", "blocks")
_COUNTS = (
    "max_num_seqs",
    "num_blocks",
    "block_size",
    "max_num_batched_tokens",
    "chunk",
    "max_model_len",
    "max_num_queued_reqs",
    "max_prefill_tokens",
    "replicas",
    "max_connections",
    "each",
    "window",
)


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine has, and in which order it serves.

    max_num_seqs: requests at once. blocks: of the cache, of block_size tokens each; None means as many as never to be
    short (and without shared prefixes the cache is not looked at, which is faster). budget: tokens of a step.
    max_model_len: tokens of a request; None means the trace's longest. The others are those of
    `hibachi.engine.scheduler.step.Limits`. cache: share prefixes. each: tokens that a row gets in a step. guesses:
    tokens are proposed. order: None means requests come when the trace says; "file" or "composed": a run offline,
    to which all are there at the start and which hands at most 2 x max_num_seqs to the scheduler at a time, in the
    order of the file, or as a `Composer` takes them from a rolling window of `window`. replicas: None means one engine
    that gets all requests; else so many behind a router, each with at most max_connections requests at a time.
    """

    scheduling_policy: str = setting(text("NAME"), "fcfs", f"{', '.join(SHIPPED)}; or with options: priority:age=30")
    max_num_seqs: int = setting(integer(1), 64, "most requests that run at once")
    num_blocks: int | None = setting(integer(1), None, "blocks in the cache", "enough for all")
    block_size: int | None = setting(integer(1), None, "tokens in a block", "16, or the trace's")
    max_num_batched_tokens: int = setting(integer(1), 1024, "most tokens computed in a step")
    max_prefill_tokens: int | None = setting(integer(1), None, "most prompt tokens in a step", "all")
    max_model_len: int | None = setting(integer(1), None, "most tokens of a request", "the trace's longest")
    max_num_queued_reqs: int | None = setting(integer(1), None, "requests that may wait", "any number")
    reserve_all: bool = setting(SWITCH, False, "reserve blocks for prompt and answer from the start")
    enable_prefix_caching: bool = setting(SWITCH, True, "let requests that begin alike share blocks")
    samples: int = setting(integer(1), 1, "continuations of each request, whose prompt is computed once")
    kv_host_blocks: int | None = setting(integer(1), None, "blocks that host memory keeps")
    kv_disk_blocks: int | None = setting(integer(1), None, "blocks that a disk keeps behind it")
    kv_host_load: float = setting(seconds(), 5e-6, "time to load a token's keys and values from host memory")
    kv_disk_load: float = setting(seconds(), 26e-6, "time to read them from disk into host memory")
    kv_eviction: str = setting(choice("lru", "frequency"), "lru", "what makes way in host memory")
    replicas: int | None = setting(
        integer(1, 65535), None, "engines like this one, behind a router", "one, without a router"
    )
    router: str | None = setting(
        text("POLICY"), None, "which replica gets a request: a policy of `hibachi route`", "least-connection"
    )
    max_connections: int | None = setting(integer(1), None, "most requests that a replica has at once", "64")
    chunk: int | None = None
    each: int = 1
    order: str | None = None
    window: int = WINDOW
    guesses: Guesses | None = None

    def limits(self, trace: Trace) -> Limits:
        """Raises ConfigError for what no engine can have."""
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1; got {value}.")
        if self.order is not None:
            self._check_offline()
        self._check_replicas()
        if self.guesses is not None:
            self._check_guesses(self.guesses)
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"A step must have a token for each row: expected max_num_batched_tokens of at least "
                f"{self.max_num_seqs}; got {self.max_num_batched_tokens}."
            )
        if self.kv_disk_blocks is not None and self.kv_host_blocks is None:
            raise ConfigError(
                f"What a disk keeps goes through host memory: expected kv_host_blocks with "
                f"kv_disk_blocks={self.kv_disk_blocks}; got none."
            )
        longest = self.max_model_len or int((trace.prompt + trace.output).max())
        shares = self.enable_prefix_caching and trace.keys is not None
        size = self.block_size or (trace.key_tokens if shares else 16)
        blocks = self.num_blocks
        if blocks is None:
            blocks = self.max_num_seqs * -(-longest // size) + self._kept(trace, size) if shares else 0
        return Limits(
            rows=self.max_num_seqs,
            budget=self.max_num_batched_tokens,
            chunk=self.chunk or self.max_num_batched_tokens,
            max_model_len=max(longest, 2),
            blocks=blocks + 1 if blocks else 0,
            block_size=size,
            max_num_queued_reqs=self.max_num_queued_reqs,
            prefill=self.max_prefill_tokens,
            reserve_all=self.reserve_all,
        )

    def _check_offline(self) -> None:
        if self.order not in ORDERS:
            raise ConfigError(f"order must be one of {', '.join(ORDERS)}, or None; got {self.order!r}.")
        if self.scheduling_policy != "fcfs":
            raise ConfigError(
                f"Offline the order decides which request is next: expected scheduling_policy='fcfs' with "
                f"order={self.order!r}; got {self.scheduling_policy!r}. Leave one of the two out."
            )
        if self.max_num_queued_reqs is not None:
            raise ConfigError(
                f"Offline at most 2 x max_num_seqs requests are in the scheduler, and none is refused: expected no "
                f"max_num_queued_reqs with order={self.order!r}; got {self.max_num_queued_reqs}."
            )

    def _check_replicas(self) -> None:
        for name in ("router", "max_connections"):
            if self.replicas is None and (value := getattr(self, name)) is not None:
                raise ConfigError(f"{name} is of a router: expected replicas with {name}={value!r}; got none.")
        if self.replicas is not None and (self.order is not None or self.samples > 1):
            raise ConfigError(
                f"Behind a router requests come at their time, and have one answer: expected no order and samples=1 "
                f"with replicas={self.replicas}; got order={self.order!r}, samples={self.samples}."
            )

    def _check_guesses(self, guesses: Guesses) -> None:
        if guesses.most < 1:
            raise ConfigError(f"Proposed tokens of a step must be at least 1; got {guesses.most}.")
        for what, value in (
            ("How likely a proposal is right", guesses.right),
            ("The share of requests", guesses.share),
        ):
            if not 0 <= value <= 1:
                raise ConfigError(f"{what} must be from 0 to 1; got {value}.")
        if self.each > 1:
            raise ConfigError(f"Tokens are proposed where each step brings one: expected each=1; got {self.each}.")

    def tiers(self, scheduler: Scheduler) -> SimTiers | None:
        if self.kv_host_blocks is None:
            return None
        host, disk, size = self.kv_host_blocks, self.kv_disk_blocks or 0, scheduler.limits.block_size
        return SimTiers(scheduler, host, disk, self.kv_host_load * size, self.kv_disk_load * size, self.kv_eviction)

    def _kept(self, trace: Trace, size: int) -> int:
        """Blocks for everything that the trace's requests might share."""
        groups = 1 if trace.group is None else len(np.unique(trace.group))
        return groups * len({key for keys in trace.keys or () for key in keys}) * -(-trace.key_tokens // size)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A replay that is over. limits: what the setup came to."""

    trace: Trace
    setup: Setup
    limits: Limits
    outcome: SimOutcome
    seconds: float  # on the wall

    @property
    def done(self) -> Any:
        """bool [n]: requests that were served."""
        return self.outcome.last != NEVER

    def times(self, what: str, of: Any = None) -> Numbers:
        """Seconds from arrival to "started", "first" (token) or "last" (token) of the requests served; of: bool [n]."""
        chosen = self.done if of is None else self.done & of
        return np.asarray((getattr(self.outcome, what) - self.trace.arrival)[chosen] / PICOSECONDS)

    def over_time(self, what: str) -> tuple[Numbers, Numbers]:
        """(middle of each bin in seconds, mean of "waiting", "running" or "blocks" in it)."""
        edges = np.linspace(0, max(self.outcome.clock, BINS), BINS + 1)
        return (edges[1:] + edges[:-1]) / 2 / PICOSECONDS, self.outcome.timeline.means(what, edges)

    def summary(self) -> dict[str, Any]:
        """All figures, as JSON can hold them. Times are seconds, virtual ones unless it says wall."""
        outcome, limits, trace = self.outcome, self.limits, self.trace
        span = outcome.clock / PICOSECONDS
        edges = np.array([0, max(outcome.clock, 1)])
        means = {what: float(outcome.timeline.means(what, edges)[0]) for what in _OVER_TIME}
        counted = max(outcome.prompt_tokens, 1)
        over_time = {what: _rounded(self.over_time(what)[1]) for what in _OVER_TIME}
        out: dict[str, Any] = {
            "setup": asdict(self.setup),
            "limits": asdict(limits),
            "requests": len(trace),
            "served": int(self.done.sum()),
            "refused": dict(outcome.refused),
            "virtual_seconds": span,
            "wall_seconds": self.seconds,
            "requests_per_wall_second": len(trace) / self.seconds,
            "steps": outcome.steps,
            "planned_steps": outcome.planned,
            "prompt_tokens": outcome.prompt_tokens,
            "computed_tokens": outcome.computed_tokens,
            "new_tokens": outcome.new_tokens,
            "new_tokens_per_second": outcome.new_tokens / span if span else 0.0,
            "hit_tokens": outcome.hit_tokens,
            "hit_rate": outcome.hit_tokens / counted,
            "host_hit_tokens": outcome.host_hit_tokens,
            "disk_hit_tokens": outcome.disk_hit_tokens,
            "loads": outcome.loads,
            "disk_loads": outcome.disk_loads,
            "proposed_tokens": outcome.proposed_tokens,
            "accepted_tokens": outcome.accepted_tokens,
            "evictions": outcome.evictions,
            "preemptions": outcome.preemptions,
            "ttft": _spread(self.times("first")),
            "itl": _percentiles(outcome.gaps.percentiles(PERCENTILES)),
            "latency": _spread(self.times("last")),
            "queued": _spread(self.times("started")),
            "mean_waiting": means["waiting"],
            "most_waiting": outcome.timeline.most("waiting"),
            "mean_rows": means["running"],
            "mean_blocks": means["blocks"],
            "over_time": {"seconds": _rounded(self.over_time("waiting")[0]), **over_time},
        }
        if trace.tenant is not None:
            out["tenants"] = self._groups(np.array(trace.tenant))
        if np.any(trace.priority != trace.priority[0]):
            out["priorities"] = self._groups(trace.priority)
        return out

    def _groups(self, label: Any) -> dict[str, Any]:
        return {str(name): _spread(self.times("first", label == name)) for name in np.unique(label).tolist()}


def _spread(seconds: Numbers) -> dict[str, Any]:
    if not len(seconds):
        return {"n": 0, "mean": None} | {f"p{p}": None for p in PERCENTILES}
    return {"n": len(seconds), "mean": float(seconds.mean()), **_percentiles(np.percentile(seconds, PERCENTILES))}


def _percentiles(values: Numbers) -> dict[str, float | None]:
    return {f"p{p}": None if v != v else float(v) for p, v in zip(PERCENTILES, values.tolist(), strict=True)}


def _rounded(values: Numbers) -> list[float]:
    return [float(f"{v:.5g}") for v in values.tolist()]


def simulate(
    trace: Trace,
    setup: Setup,
    time: StepTime,
    policy: Callable[[], Policy],
    *,
    fast: bool = True,
    router: Placement | None = None,
) -> Run:
    """Replay a trace. policy: makes a fresh one, of the name that the setup has. router: a fresh one, where the setup
    has replicas. Raises ConfigError, InvalidTrace.
    """
    limits = setup.limits(trace)
    feed = None
    if setup.order is not None:
        trace = trace.at_once()
        keys = trace.block_keys(limits.block_size) if setup.enable_prefix_caching and limits.blocks else lambda i: None
        feed = Offline(trace, 2 * setup.max_num_seqs, setup.order, setup.window, keys)
    how: dict[str, Any] = {"keys": setup.enable_prefix_caching, "each": setup.each, "guesses": setup.guesses}
    scheduler = Scheduler(limits, policy())
    how["samples"] = setup.samples
    replay = TraceReplay(trace, scheduler, time, **how)
    began = perf_counter()
    if router is None:
        replay.run(fast, feed, setup.tiers(scheduler))
    else:
        schedulers = [Scheduler(limits, policy()) for _ in range(setup.replicas or 1)]
        replay_fleet([replay.beside(each, setup.tiers(each)) for each in schedulers], router, fast)
    return Run(trace, setup, limits, replay.outcome, perf_counter() - began)
