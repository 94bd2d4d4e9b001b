"""What the kit says in the end: a table of promises, each cause once, and the same as JSON."""

from __future__ import annotations

import platform
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hibachi.common.installed import version
from hibachi.testing.causes import Cause, normal, short
from hibachi.testing.gaps import Gap

WIDTH = 80
NAMED = 3  # promises that are named, of those with one cause


@dataclass
class KitResult:
    """One promise on one backend.

    parts: groups of promises about what this one is made of. look: what to look at, of a promise of the smoke stage.
    """

    test: str
    group: str
    backend: str
    parts: Sequence[str] = ()
    look: str = ""
    status: str = ""  # kept, broken, hung, crashed, known, skipped, not run; "": nothing has come yet
    message: str = ""
    cause: Cause | None = None
    gap: str | None = None  # the reason, of a known gap
    seconds: float = 0.0

    @property
    def title(self) -> str:
        return title(self.test)

    def take(self, report: Any) -> None:
        """What one phase of the promise's test came to: a `pytest.TestReport`."""
        self.seconds += report.duration
        facts = dict(report.user_properties)
        self.gap = facts.get("gap")
        status = {"passed": "kept", "failed": "broken", "skipped": "skipped"}[report.outcome]
        if report.skipped and hasattr(report, "wasxfail"):
            status = "known"
        if report.skipped and "unrun" in facts:
            status, self.message = "not run", facts["unrun"]
        if status == "kept" and (self.status or report.when != "call"):
            return  # what was before counts; that the setup passed means nothing
        if self.status not in ("", "kept"):
            return
        self.status = status
        if cut := facts.get("cut"):
            self.status = status if status == "known" else cut["how"]
            at = cut["where"][0] if cut["where"] else "an unknown place"
            self.message, self.cause = cut["text"], Cause(f"{cut['how']} at {at}", cut["text"], cut["where"])
        elif status in ("broken", "known"):
            self.cause = Cause(*facts["cause"]) if "cause" in facts else _said(report)
            self.message = self.cause.text
        elif status == "skipped" and isinstance(report.longrepr, (tuple, list)):
            self.message = str(report.longrepr[-1])


def _said(report: Any) -> Cause:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = short(str(crash.message if crash else report.longrepr))
    return Cause(normal(text), text, [])


def title(test: str) -> str:
    """conformance/test_x.py::test_pop_removes_one[numpy] -> pop removes one"""
    return test.split("::")[-1].split("[")[0].removeprefix("test_").replace("_", " ")


# ---- the table -----------------------------------------------------------------------------------------------------


def table(kept: dict[tuple[str, str], list[str]]) -> Iterator[str]:
    """A row per group, a column per backend, no wider than a terminal: many backends make several tables.

    kept: {(group, backend): the status of each promise}.
    """
    groups = list(dict.fromkeys(group for group, _ in kept))
    names = list(dict.fromkeys(name for _, name in kept))
    cells = {at: _cell(found) for at, found in kept.items()}
    label, cell = max(map(len, groups)), max(8, *map(len, names), *map(len, cells.values()))
    columns = max(1, (WIDTH - label) // (cell + 2))
    for first in range(0, len(names), columns):
        some = names[first : first + columns]
        yield ""
        yield " " * label + "".join(f"  {name:>{cell}}" for name in some)
        for group in groups:
            yield f"{group:{label}}" + "".join(f"  {cells.get((group, name), '-'):>{cell}}" for name in some)


def _cell(found: list[str]) -> str:
    """18/22, 1 HUNG, 2 known"""
    ran = [status for status in found if status not in ("skipped", "not run", "")]
    if not ran:
        return "not run" if "not run" in found else "-"
    more = [(shown, ran.count(status)) for status, shown in (("hung", "HUNG"), ("crashed", "CRASHED"))]
    more.append(("known", ran.count("known")))
    return ", ".join([f"{ran.count('kept')}/{len(ran)}", *(f"{n} {shown}" for shown, n in more if n)])


# ---- causes --------------------------------------------------------------------------------------------------------


@dataclass
class ReportLines:
    """red: the first of them."""

    lines: list[str]
    red: bool = True


def told(results: Sequence[KitResult], smoke: str) -> Iterator[ReportLines]:
    """What is broken on one backend, each cause once. smoke: the group of the smoke stage."""
    bad = [r for r in results if r.status in ("broken", "hung", "crashed")]
    stages = {r.cause.key if r.cause is not None else r.test: r for r in reversed(bad) if r.group == smoke}
    for r in reversed(stages.values()):
        yield ReportLines([_smoke(r, any(other.status == "not run" for other in results))])
    causes: dict[str, list[KitResult]] = defaultdict(list)
    for r in bad:
        if r.group != smoke and r.cause is not None:
            causes[r.cause.key].append(r)
    groups = {r.group for r in bad}
    later = []
    for found in causes.values():
        cause = found[0].cause
        assert cause is not None
        if found[0].status == "broken" and not cause.where and all(groups.intersection(r.parts) for r in found):
            later.append(found)
        else:
            yield ReportLines([f"{found[0].status.upper()} on {found[0].backend}: {_names(found, 1)}", *_block(found)])
    if later:
        n = sum(map(len, later))
        yield ReportLines(
            [
                f"MAY FOLLOW on {later[0][0].backend}: {n} {'promise is' if n == 1 else 'promises are'} broken whose "
                "parts break those above",
                *(line for found in later for line in (f"  {found[0].message}", *_wrapped(f"{len(found)}: ", found))),
            ]
        )


def _smoke(result: KitResult, ended: bool) -> str:
    """One line: which stage, what error, what to look at."""
    where = f" at {result.cause.where[0]}" if result.cause is not None and result.cause.where else ""
    message = result.message.rstrip(".")
    said = f"{message}{where}" if result.status == "broken" else f"{result.status.upper()}: {message}{where}"
    rest = " The rest was not run (--no-smoke runs it)." if ended else ""
    return f"SMOKE failed on {result.backend} at {result.title!r}: {said}. Look at {result.look or result.test}.{rest}"


def _block(found: list[KitResult]) -> Iterator[str]:
    first = found[0]
    assert first.cause is not None
    yield f"  {first.message}"
    for i, frame in enumerate(first.cause.where):
        yield f"  {'at' if not i else '  <-'} {frame}"
    if len(found) > 1:
        yield from _wrapped("Also: ", found[1:])
    yield f"  {first.test}"


def _wrapped(first: str, found: Sequence[KitResult]) -> list[str]:
    return textwrap.wrap(
        first + _names(found, NAMED), WIDTH, initial_indent="    ", subsequent_indent="      ", break_long_words=False
    )


def _names(found: Sequence[KitResult], n: int) -> str:
    named = ", ".join(r.title for r in found[:n])
    return named if len(found) <= n else f"{named} and {len(found) - n} more"


def gaps_told(gaps: Sequence[Gap], results: Sequence[KitResult]) -> Iterator[ReportLines]:
    """Which known gaps are gaps still, which are none any more, and which lines are about no promise of this run."""
    for gap in gaps:
        about = [r for r in results if r.status and gap.about(title(r.test))]
        for name in dict.fromkeys(r.backend for r in about):
            still = [r for r in about if r.backend == name and r.status == "known"]
            kept = [r for r in about if r.backend == name and r.status == "kept"]
            if still:
                others = f"; of line {gap.line}, {len(kept)} more are kept" if kept else ""
                yield ReportLines([f"KNOWN on {name}: {_names(still, NAMED)} ({gap.reason}{others})"], red=False)
            elif kept:
                yield ReportLines([f"NO LONGER A GAP on {name}: {_names(kept, NAMED)} (line {gap.line})"], red=False)
        if not about:
            yield ReportLines(
                [f"Known gaps, line {gap.line}: {gap.pattern!r} is about no promise of this run"], red=False
            )


# ---- JSON ----------------------------------------------------------------------------------------------------------


def as_json(results: Sequence[KitResult], backends: dict[str, Any], lost: dict[str, str]) -> dict[str, Any]:
    """backends: by name; lost: why those that did not load are missing."""
    out: dict[str, Any] = {"versions": versions(), "backends": {}}
    for name in dict.fromkeys([*backends, *lost, *(r.backend for r in results)]):
        mine = [r for r in results if r.backend == name and r.status]
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for r in mine:
            groups[r.group].append(
                {
                    "promise": r.title,
                    "test": r.test,
                    "status": r.status,
                    "message": r.message or None,
                    "where": r.cause.where if r.cause is not None else [],
                    "cause": r.cause.key if r.cause is not None else None,
                    "known_gap": r.gap,
                    "seconds": round(r.seconds, 4),
                }
            )
        counts = {status: sum(r.status == status for r in mine) for status in dict.fromkeys(r.status for r in mine)}
        out["backends"][name] = {
            "versions": facts_of(backends.get(name)),
            "lost": lost.get(name),
            "counts": counts,
            "groups": groups,
        }
    return out


def facts_of(backend: Any) -> dict[str, str]:
    """What it says of its library and device; nothing, if it cannot."""
    try:
        return {str(name): str(value) for name, value in backend.versions().items()}
    except Exception:
        return {}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    found |= {package: version(package) for package in ("hibachi", "numpy", "pytest")}
    return found
