"""What the process that runs the promises tells the one that watches it: lines of JSON in a folder.

It writes what it begins and what came of it. If it hangs or dies, the watcher adds a line about the promise that it was
at, and starts another process. That one reports what was written, and goes on with the next promise.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

LINES, STACKS = "journal", "stacks"  # files in the folder
LOADING = 4  # a backend may take this many times as long to load as a promise may take


def parsed(text: str) -> Iterator[dict[str, Any]]:
    """The lines; not those that a process did not come to write to the end."""
    for line in text.splitlines():
        with suppress(ValueError):
            yield json.loads(line)


def facts(of: pytest.Item | pytest.TestReport) -> dict[str, Any]:
    """What the plugin has noted on a promise."""
    return dict(getattr(of, "user_properties", ()))  # a report of a file that was skipped has none


class KitJournal:
    """A plugin of pytest, in the process that is watched.

    folder: of the journal. Its last line is the watcher's: {"every": seconds}, after which the stacks of a promise that
    runs are written down, again and again; 0 means never.
    """

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        lines = list(parsed((folder / LINES).read_text(encoding="utf-8")))
        self.config = config
        self.every = float(lines[-1]["every"])
        self.resumed = len(lines) > 1
        self.lost: dict[str, Any] = {line["lost"]: line for line in lines if "lost" in line}  # backends
        self._cut: dict[str, Any] = {line["cut"]: line for line in lines if "cut" in line}
        self._reports: dict[str, list[Any]] = defaultdict(list)
        done = {line["done"] for line in lines if "done" in line}
        for line in lines:
            if "report" in line and line["report"]["nodeid"] in done:
                self._reports[line["report"]["nodeid"]].append(line["report"])
        self._past = {*self._reports, *self._cut}
        self._lines = (folder / LINES).open("a", encoding="utf-8")
        self._stacks = (folder / STACKS).open("a")  # to append, as it is emptied below the hands of faulthandler
        self._running = False
        if sys.platform == "linux":
            # PR_SET_PDEATHSIG, SIGKILL: a hanging process would stay if the watcher is gone
            ctypes.CDLL(None).prctl(1, 9)

    def write(self, **line: Any) -> None:
        self._lines.write(json.dumps({"at": time.time()} | line) + "\n")
        self._lines.flush()

    def _watch(self, times: int = 1) -> None:
        if self.every:
            faulthandler.dump_traceback_later(times * self.every, repeat=True, file=self._stacks)

    def loading(self, name: str) -> None:
        """The backend of this name is being loaded, or asked what it has, until the next one is, or all are."""
        self._stacks.truncate(0)
        self.write(load=name)
        self._watch(LOADING)

    def loaded(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.write(loaded=True)

    def pytest_sessionstart(self) -> None:
        faulthandler.enable(file=self._stacks)  # where a process that dies stands

    def pytest_collection_finish(self) -> None:
        self.loaded()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:
            self.write(finished=int(session.exitstatus))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.nodeid not in self._past)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if item.nodeid in self._past:
            return (yield)
        self._stacks.truncate(0)
        self.write(start=item.nodeid, backend=facts(item).get("promise", {}).get("backend"))
        self._running = True
        self._watch()
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._running = False
            self.write(done=item.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self) -> None:
        if self._running:
            self._watch()  # pytest has just stopped it, for those who debug

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._running:
            self.write(report=self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._lines.close()
        self._stacks.close()

    # ---- what was before ---------------------------------------------------------------------------------------

    def reports(self, item: pytest.Item) -> list[Any]:
        """What became of a promise in an earlier process; nothing, if it is still to be run."""
        if cut := self._cut.get(item.nodeid):
            return [_cut_off(item, cut)]
        load = self.config.hook.pytest_report_from_serializable
        return [load(config=self.config, data=data) for data in self._reports.get(item.nodeid, [])]

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """What was before is counted, and shown no more."""
        if report.nodeid not in self._past:
            return None
        expected = hasattr(report, "wasxfail")
        if report.nodeid in self._cut and not expected:
            return self._cut[report.nodeid]["how"], "", ""
        if report.when != "call":
            category = {"failed": "error", "passed": ""}.get(report.outcome, report.outcome)
        else:
            category = {"passed": "xpassed", "skipped": "xfailed"}.get(report.outcome, "") if expected else ""
            category = category or report.outcome
        return category, "", ""


class KitReplay:
    """A plugin of pytest beside a `KitJournal`: reports what was before, in place of running it again."""

    def __init__(self, journal: KitJournal) -> None:
        self._journal = journal

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        found = self._journal.reports(item)
        for report in found:
            item.ihook.pytest_runtest_logreport(report=report)
        return True if found else None


def _cut_off(item: pytest.Item, cut: dict[str, Any]) -> pytest.TestReport:
    """The report of a promise that hung, or whose process died."""
    known = facts(item).get("gap")
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={name: 1 for name in item.keywords},
        outcome="failed" if known is None else "skipped",
        longrepr=cut["text"],
        when="call",
        duration=cut["seconds"],
        user_properties=[*item.user_properties, ("cut", cut)],
    )
    if known is not None:
        report.wasxfail = known
    return report
