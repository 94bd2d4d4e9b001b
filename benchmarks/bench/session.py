"""A benchmark: the same work through several engines, turn by turn, so that what disturbs one disturbs all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.bench import roofline, work
from benchmarks.bench.figures import figures, record
from benchmarks.bench.process import EngineSetup, Process
from benchmarks.bench.watch import Watch
from hibachi.backend.candidates import candidates, compose
from hibachi.backend.discover import resolve
from hibachi.common.installed import version
from hibachi.errors import ConfigError, EngineFailed, HibachiError
from hibachi.llm.model.arch import Arch
from hibachi.llm.model.describe import describe
from hibachi.testing.bench.machine import machine
from hibachi.testing.bench.report import Slo
from hibachi.testing.bench.work import TimedRequest

_WARM_UP = 0  # the turn that is not measured; the others are 1, 2, ...


@dataclass(frozen=True)
class Session:
    """How engines are measured side by side.

    engines: how each is set up; rows, max_model_len and enable_prefix_caching are filled in for each work.
    context: the longest sequence that the model takes; None means unknown.
    repeat: how often each work is measured. rates: requests a second, for W3 and for files with arrivals.
    cached: files run with prefix caches. told: called with a line of text for each run.
    """

    engines: Sequence[EngineSetup]
    vocab_size: int
    context: int | None = None
    rows: int = 64
    repeat: int = 3
    seed: int = 0
    requests: int = 64
    rates: Sequence[float] = ()
    slo: Slo = field(default_factory=Slo)
    cached: bool = False
    timeout: float = 600.0
    told: Callable[[str], Any] = lambda line: None

    def run(self, works: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Records of all runs as they end; those of an engine that fails say why. Raises ConfigError, OSError for a bad
        work, before anything starts."""
        all_work = {name: self.make(name, _WARM_UP) for name in works}
        for name, requests in all_work.items():
            if not self.fits(requests):
                raise ConfigError(
                    f"{name} has requests of {work.longest(requests)} tokens; the model takes {self.context}. Take "
                    f"another work, or another model, such as one of `benchmarks.bench model`."
                )
            if any(r.arrival for r in requests) and not self.rates:
                raise ConfigError(f"{name} has times of arrival, so a rate is needed. Measure it with `latency`.")
        for name, requests in all_work.items():
            for cached in (True, False) if name == "W2" else (self.cached and name not in work.NAMES,):
                yield from self._measure(name, requests, cached)

    def fits(self, requests: Sequence[TimedRequest]) -> bool:
        return self.context is None or work.longest(requests) <= self.context

    def make(self, name: str, turn: int) -> list[TimedRequest]:
        """The work of that name, or of that file."""
        if name in work.NAMES:
            return work.make(name, self.vocab_size, seed=self.seed, turn=turn, requests=self.requests)
        if not Path(name).exists():
            raise ConfigError(f"A work is one of {', '.join(work.NAMES)}, or a file; got {name!r}.")
        return work.read(name, self.vocab_size)

    def _measure(self, name: str, requests: list[TimedRequest], cached: bool) -> Iterator[dict[str, Any]]:
        online = any(r.arrival for r in requests)
        with ExitStack() as stack:
            processes: list[Process] = []
            for setup in self.engines:
                try:
                    process = stack.enter_context(Process(self._sized(setup, requests, cached), self.timeout))
                    process.run(work.at_rate(requests, None))
                    processes.append(process)
                except HibachiError as e:
                    yield self._failed(setup, name, e)
            for rate in self.rates if online else (None,):
                for turn in range(1, self.repeat + 1):
                    for process in list(processes):
                        try:
                            yield from self._turn(process, name, turn, rate, cached)
                        except EngineFailed as e:
                            processes.remove(process)
                            yield self._failed(process.setup, name, e)

    def _sized(self, setup: EngineSetup, requests: Sequence[TimedRequest], cached: bool) -> EngineSetup:
        rows = min(self.rows, len(requests))
        return replace(setup, rows=rows, max_model_len=work.longest(requests), enable_prefix_caching=cached)

    def _turn(
        self, process: Process, name: str, turn: int, rate: float | None, cached: bool
    ) -> Iterator[dict[str, Any]]:
        requests = work.at_rate(self.make(name, turn), rate)
        titles = [name if name in work.NAMES else Path(name).stem]
        if name == "W2":
            titles = ["W2 cold", "W2 warm"] if cached else ["W2 off"]
        for title in titles:
            ran = process.run(requests)
            found = figures(requests, ran, self.slo if rate else None)
            out = record(process, title, turn, found, rate)
            if ran.more.get("profile"):
                out["profile"] = ran.more["profile"]
            self.told(_line(out, self.repeat))
            yield out

    def _failed(self, setup: EngineSetup, name: str, e: Exception) -> dict[str, Any]:
        self.told(f"{name:12} {setup.label:20} failed: {str(e).splitlines()[0]}")
        return {
            "engine": setup.label,
            "version": "",
            "model": setup.title or Path(setup.model).name,
            "dtype": setup.dtype,
            "threads": setup.threads,
            "work": name,
            "rate": None,
            "failed": str(e).splitlines()[0].removeprefix(f"{setup.label}: "),
            "said": str(e).splitlines()[1:],
        }


def _line(run: dict[str, Any], repeat: int) -> str:
    at = f" {run['rate']:g}/s" if run["rate"] else ""
    line = f"{run['work'] + at:12} {run['engine']:20} {run['turn']}/{repeat} {run['tokens_per_second']:9,.1f} tokens/s"
    if run["ttft"]:
        line += f"  TTFT p50 {1e3 * run['ttft']['p50']:,.0f} ms"
    if run["itl"]:
        line += f"  ITL p50 {1e3 * run['itl']['p50']:,.1f} ms"
    if not run["complete"]:
        line += "  INCOMPLETE"
    if run["contended"]:
        line += f"  contended: others had {run['others']:.0%} of the machine"
    return line


def document(runs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """What is written as JSON."""
    return {
        "hibachi": version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "runs": runs,
        **more,
    }


def ceilings(backend: str, dtype: str, arch: Arch, quantization: str | None = None) -> dict[str, Any]:
    """The measured ceilings of this machine as JSON, with the load by other processes. quantization: "int8" or "int4",
    of such weights.

    Raises UnsupportedOperation where there are none.
    """
    watch = Watch(os.getpid())
    size = (2 * arch.intermediate, arch.hidden_size)
    plain = resolve(backend)
    if quantization is not None:
        plain = plain.quantized(quantization)
    found = roofline.measure(plain, dtype, size)
    for c in candidates(plain):  # the best that any of its kernels reaches
        if c.operation == "linear" and c.why_not is None and not c.rounds:
            more = roofline.measure(compose(plain, {"linear": c}), dtype, size)
            for rows, rate in more.products.items():
                found.products[rows] = max(found.products[rows], rate)
    use = watch.use()
    named = {"dtype": quantization or dtype, "computes": dtype, "backend": backend}
    return {**found.as_json(), **named, "others": use.others, "contended": use.contended}


def bounds(session: Session, works: Sequence[str], arch: Arch, limits: dict[str, Any]) -> dict[str, float]:
    """The most tokens a second of each work that arrives at once, at the measured ceilings."""
    found = roofline.Ceilings(limits["bandwidth"], {int(n): rate for n, rate in limits["products"].items()})
    out = {}
    for name in works:
        requests = session.make(name, _WARM_UP)
        if any(r.arrival for r in requests):
            continue
        rows = min(session.rows, len(requests))
        titles = {name if name in work.NAMES else Path(name).stem: (0, 0)}
        if name == "W2":
            titles = {"W2 cold": (512, 0), "W2 warm": (512, 512), "W2 off": (0, 0)}
        for title, (shared, known) in titles.items():
            limit = roofline.bound(
                arch, requests, found, limits["computes"], rows, shared=shared, known=known, weights=limits["dtype"]
            )
            out[title] = limit.tokens_per_second
    return out


def decoder_of(path: Path) -> Arch | None:
    """The model's numbers, if it is a decoder that a roofline can be computed for."""
    arch = describe(path).arch
    return arch if arch is not None and arch.experts is None else None
