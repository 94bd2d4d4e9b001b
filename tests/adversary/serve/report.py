"""What a storm came to: answers that were looked at one by one, figures, and what was wrong."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from .wire import Answer, Broken, events

MIB = 2**20
LOST = ("engine_failed",)  # codes of what ends with the engine


@dataclass
class Report:
    """Times in seconds, memory in bytes."""

    seconds: float = 0.0
    equal: int = 0  # innocent requests that got what they get alone
    innocent: list[float] = field(default_factory=list)  # how long each took
    resent: int = 0  # as the engine was lost
    still: float = 0.0  # the longest that an innocent's stream stood
    answers: Counter[str] = field(default_factory=Counter)  # by status and code
    clients: Counter[str] = field(default_factory=Counter)  # what they did
    kills: list[float] = field(default_factory=list)  # seconds until the next engine served
    stops: int = 0
    health: float = 0.0  # the slowest /health
    health_net: float = 0.0  # without the time for which the machine gave the server no processor
    polls: int = 0
    log: Counter[str] = field(default_factory=Counter)
    resting: list[float] = field(default_factory=list)  # seconds until nothing ran in each pause
    held: list[dict[str, int]] = field(default_factory=list)  # in each pause
    end: tuple[int | None, float] = (None, 0.0)
    wrong: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.wrong and self.equal == len(self.innocent) > 0

    def __str__(self) -> str:
        times = sorted(self.innocent) or [0.0]
        rows: list[tuple[str, Any]] = [
            ("seconds", f"{self.seconds:.0f}"),
            ("innocent requests", len(self.innocent)),
            (
                "equal to their solo answers",
                f"{self.equal:,} ({100 * self.equal / max(len(times), 1):.4g} %)",
            ),
            ("the median, and the slowest of these", f"{statistics.median(times):.2f} s, {times[-1]:.2f} s"),
            ("the longest that a stream of these stood still", f"{self.still:.2f} s"),
            ("sent again, as the engine was killed", self.resent),
            ("kills of the engine; seconds until the next one served", _list(self.kills)),
            ("stops of the engine", self.stops),
            ("looks at /health", self.polls),
            ("the slowest; without the machine's own delays", f"{self.health:.2f} s, {self.health_net:.2f} s"),
            *((f"clients: {what}", n) for what, n in sorted(self.clients.items())),
            ("answers", sum(self.answers.values())),
            *((f"answers: {what}", n) for what, n in sorted(self.answers.items())),
            *((f"log: {what}", n) for what, n in sorted(self.log.items())),
            ("pauses; seconds until nothing ran any more", _list(self.resting)),
            *((f"{name}, in each pause", _held(name, self.held)) for name in self._names()),
            ("SIGTERM: the status, and how long it took", f"{self.end[0]}, {self.end[1]:.1f} s"),
            ("**wrong**", f"**{len(self.wrong)}**"),
        ]
        table = (f"| {what} | {f'{n:,}' if isinstance(n, int) else n} |" for what, n in rows)
        return "\n".join(["| storm | |\n|---|---|", *table])

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for held in self.held for name in held))

    def short(self) -> str:
        return (
            f"{len(self.innocent):,} innocent requests, {len(self.innocent) - self.equal} of them changed, "
            f"{sum(self.answers.values()):,} answers, {len(self.kills)} kills, {len(self.wrong)} wrong"
        )


def _list(seconds: list[float]) -> str:
    return f"{len(seconds)}" + (f"; {', '.join(f'{s:.1f}' for s in seconds)}" if seconds else "")


def _held(name: str, held: list[dict[str, int]]) -> str:
    figures = [each[name] for each in held if name in each]
    return ", ".join(f"{n / MIB:.0f}" if "memory" in name else str(n) for n in figures) + (
        " MiB" if "memory" in name else ""
    )


class Judge:
    """Looks at each answer, and keeps what is wrong."""

    def __init__(self) -> None:
        self.report = Report()
        self.lost: list[list[float]] = []  # [from, to] of times without an engine
        self.stopped: list[list[float]] = []  # likewise, of those when it stood still
        self.last: deque[str] = deque(maxlen=12)  # hostile requests

    def complain(self, what: str) -> None:
        if len(self.report.wrong) < 50:
            beside = "\n    ".join(self.last)
            self.report.wrong.append(f"{what}\n  The last of the hostile requests:\n    {beside}")

    def excused(self, since: float, *, stops: bool = False) -> bool:
        """Was the engine away at any time since? stops: or standing still."""
        now = time.monotonic()
        times = self.lost + (self.stopped if stops else [])
        return any(begin <= now and end >= since for begin, end in times)

    def answer(self, answer: Answer, said: str, since: float) -> str | None:
        """Of any request; returns the code of its error. since: when it was sent."""
        try:
            code = self._code(answer)
        except (Broken, ValueError, KeyError, TypeError) as e:
            self.report.answers[f"{answer.status}, broken"] += 1
            self.complain(f"{said}\n  got {answer.status} with a body that is wrong ({e!r}): {answer.body[:300]!r}")
            return None
        self.report.answers[f"{answer.status}{f' {code}' if code else ''}"] += 1
        at_fault = answer.status >= 500 or code in ("internal_error", "model_fault", "out_of_memory", *LOST)
        if at_fault and not (answer.status in (200, 503, 529) and self.excused(since)):
            self.complain(f"{said}\n  got {answer.status}, though no engine was killed: {answer.body[-300:]!r}")
        if answer.status in (429, 503, 529) and not answer.headers.get("retry-after", "").isdigit():
            self.complain(f"{said}\n  got {answer.status} without Retry-After")
        return code

    def _code(self, answer: Answer) -> str | None:
        """Raises what speaks of a broken body."""
        if answer.streamed:
            *_, last = events(answer.body)
            said = json.loads(last)
            if said.get("type", "").startswith("response."):
                failed = said["response"]["error"]
                return failed and str(failed["code"])
            if said.get("type") == "message_stop":
                return None
            return str(_error(said)["code"]) if "error" in said else None
        if answer.status < 400 or not answer.body:
            return None
        said = json.loads(answer.body)
        if said.keys() == {"status", "reason"} and answer.status == 503:
            return "unavailable"  # /health and /ready
        error = _error(said)
        return str(error["code"] or error["type"])


def _error(said: Any) -> dict[str, Any]:
    """Of OpenAI's shape, or of Anthropic's, or it raises."""
    error: dict[str, Any] = said["error"]
    if said.get("type") == "error":
        if said.keys() - {"request_id"} != {"type", "error"} or error.keys() - {"details"} != {"type", "message"}:
            raise ValueError("not Anthropic's error")
        return error | {"code": error.get("details", {}).get("error_code")}
    kinds = {"message": str, "type": str, "param": (str, type(None)), "code": (str, type(None))}
    if said.keys() != {"error"} or error.keys() != kinds.keys() or not error["message"]:
        raise ValueError("not OpenAI's error")
    if not all(isinstance(error[name], kind) for name, kind in kinds.items()):
        raise ValueError("not OpenAI's error")
    return error
