"""The fixture `backend`, one test run per backend, and the report of promises kept."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.discover import available_backends, known, resolve_any, why_missing
from hibachi.backend.nine import NineBackend
from hibachi.errors import HibachiError
from hibachi.testing.causes import cause_of, places
from hibachi.testing.gaps import Gap, read_gaps
from hibachi.testing.journal import KitJournal, KitReplay, facts
from hibachi.testing.nine import NineHandle, besides
from hibachi.testing.report import KitResult, as_json, facts_of, gaps_told, table, told

WIDTH = 80
OF_NINE = "test_tensors", "test_invalid", "test_nine"
BACKENDS = pytest.StashKey[dict[str, ArrayBackend]]()
JOURNAL = pytest.StashKey[KitJournal]()
SMOKE = "smoke"  # the group whose promises come first: where one is broken, the rest of the backend is not run


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hibachi")
    group.addoption(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="backend to test: a registered name, package:object, or an array-API module; repeatable. "
        "Default: those of the ini option `hibachi_backends`, or every registered backend that loads.",
    )
    group.addoption("--no-smoke", action="store_true", help="run everything, also where the smoke stage fails")
    group.addoption("--known-gaps", metavar="FILE", help="promises that need not be kept: `name or glob # reason`")
    group.addoption(
        "--json", metavar="FILE", help="write what became of each promise as JSON; -: at the end of the run"
    )
    group.addoption("--hibachi-journal", metavar="FOLDER", help=argparse.SUPPRESS)  # see `watch`
    parser.addini("hibachi_backends", "backends to test unless --backend names others", type="args")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "promise(group, parts=(), look=''): a promise of the conformance suite; one row per group. parts: groups about "
        "what this one is made of. look: what to look at if it is broken, of the group 'smoke'",
    )
    try:
        gaps = read_gaps(Path(file)) if (file := config.getoption("known_gaps")) else []
    except HibachiError as e:
        raise pytest.UsageError(str(e)) from None
    folder = config.getoption("hibachi_journal")
    if folder and not hasattr(config, "workerinput") and not config.getoption("numprocesses", None):
        journal = config.stash[JOURNAL] = KitJournal(config, Path(folder))
        config.pluginmanager.register(journal, "hibachi-journal")
        config.pluginmanager.register(KitReplay(journal))
    config.pluginmanager.register(Promises(config, gaps))
    if config.getoption("backend"):
        try:
            backends(config)
        except HibachiError as e:
            raise pytest.UsageError(str(e)) from None


def backends(config: pytest.Config) -> dict[str, ArrayBackend]:
    """The backends of this run by the name they were asked for; loaded when a test wants them, not before.

    Not those that an earlier process could not load, see `lost`.
    """
    if BACKENDS not in config.stash:
        asked = config.getoption("backend") or config.getini("hibachi_backends") or available_backends()
        journal = config.stash.get(JOURNAL, None)
        found: dict[str, ArrayBackend] = {}
        for name in asked:
            if journal is not None:
                if name in journal.lost:
                    continue
                journal.loading(name)
            found[name] = _judged(name)
        if journal is not None:
            journal.write(own={name: places(backend) for name, backend in found.items()})
            journal.loaded()
        config.stash[BACKENDS] = found
    return config.stash[BACKENDS]


def _judged(name: str) -> Any:
    found = resolve_any(name)
    return found if isinstance(found, ArrayBackend) else NineHandle(NineBackend(found))


def lost(config: pytest.Config) -> dict[str, str]:
    """{backend: what became of the process that loaded it}."""
    journal = config.stash.get(JOURNAL, None)
    return {} if journal is None else {name: _lost(line) for name, line in journal.lost.items()}


def _lost(line: dict[str, Any]) -> str:
    return f"{line['how'].upper()} while it was loaded: {line['text']}" + "".join(
        f", at {at}" for at in line["where"][:1]
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test that takes `backend` runs on every backend. None is an error: nothing would be tested."""
    if "backend" not in metafunc.fixturenames:
        return
    found = backends(metafunc.config)
    if not found and not lost(metafunc.config):
        why = " ".join(str(why_missing(name)) for name in known()) or "None is registered: is hibachi installed?"
        raise pytest.Collector.CollectError(f"No backend loads. {why}")
    metafunc.parametrize("backend", list(found.values()), ids=list(found), indirect=True)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> ArrayBackend:
    """The backend under test."""
    found: ArrayBackend = request.param
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a backend with the nine operations, what they can promise is judged."""
    mine: list[pytest.Item] = []
    gone: list[pytest.Item] = []
    for item in items:
        held = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        (gone if isinstance(held, NineHandle) and item.path.stem not in OF_NINE else mine).append(item)
    if gone:
        items[:] = mine
        config.hook.pytest_deselected(items=gone)


def describe(config: pytest.Config) -> Iterator[str]:
    """One line per backend in use: its library and version."""
    found = config.stash.get(BACKENDS, {})
    for name, backend in found.items():
        yield f"{name:{max(map(len, found))}}  {', '.join(facts_of(backend).values())}"


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    journal = config.stash.get(JOURNAL, None)
    return [] if journal is not None and journal.resumed else [f"backend {line}" for line in describe(config)]


class Promises:
    """Notes the promises kept and broken, and reports them.

    gaps: promises that are known not to be kept; they are run, and do not fail.
    """

    def __init__(self, config: pytest.Config, gaps: list[Gap]) -> None:
        self.config, self.gaps = config, gaps
        self.results: dict[str, KitResult] = {}
        self.unfit: dict[str, str] = {}  # backends that failed the smoke stage -> the stage
        self.uncollected: dict[str, None] = {}  # what was said, each once, though every file fails alike

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if mark := item.get_closest_marker("promise"):
            used = _backend_of(item)
            names = [name for name, backend in self.config.stash.get(BACKENDS, {}).items() if backend is used]
            about = {"group": mark.args[0], "backend": names[0] if names else "any", **mark.kwargs}
            item.user_properties.append(("promise", about))
            for gap in self.gaps:
                if gap.about(item.name.split("[")[0]):
                    item.add_marker(pytest.mark.xfail(reason=gap.reason, strict=False))
                    item.user_properties.append(("gap", gap.reason))
                    break

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.uncollected[str(report.longrepr)] = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: _group(item) != SMOKE)
        if lost(self.config) and not self.config.stash.get(BACKENDS, {}):
            items.clear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        name = facts(item).get("promise", {}).get("backend")
        if (stage := self.unfit.get(name)) and not self.config.getoption("no_smoke"):
            why = f"{name} fails in the smoke stage: {stage}"
            item.user_properties.append(("unrun", why))
            pytest.skip(why)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.excinfo is not None and (report.failed or hasattr(report, "wasxfail")) and _group(item) is not None:
            used = _backend_of(item)
            cause = cause_of(call.excinfo.value, [] if used is None else places(used))
            report.user_properties.append(("cause", list(cause)))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return ("not run", "", "") if report.skipped and "unrun" in facts(report) else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        about = facts(report).get("promise")
        if about is None:
            return
        result = self.results.setdefault(report.nodeid, KitResult(report.nodeid, **about))
        result.take(report)
        if result.group == SMOKE and result.status in ("broken", "hung", "crashed"):
            self.unfit.setdefault(result.backend, result.title)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if lost(self.config) and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if (file := self.config.getoption("json")) and file != "-" and not hasattr(self.config, "workerinput"):
            Path(file).write_text(self._json() + "\n", encoding="utf-8")

    def _json(self) -> str:
        found = self.config.stash.get(BACKENDS, None)
        return json.dumps(as_json(list(self.results.values()), found or {}, lost(self.config)), indent=1)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        out, results = terminalreporter, [r for r in self.results.values() if r.status]
        if self.config.getoption("tbstyle") == "no":  # pytest keeps silent about these as well
            for said in self.uncollected:
                out.line(said, red=True)
        if results or lost(self.config):
            out.section("promises kept")
        if results:
            kept: dict[tuple[str, str], list[str]] = defaultdict(list)
            for r in results:
                kept[r.group, r.backend].append(r.status)
            for line in table(kept):
                out.line(line)
        for name, held in self.config.stash.get(BACKENDS, {}).items():
            if isinstance(held, NineHandle):
                out.line("")
                out.line(textwrap.fill(f"{name} has the nine operations, {besides()}", WIDTH))
        for name, why in lost(self.config).items():
            out.line("")
            out.line(f"LOST {name}: {why}", red=True)
        names = dict.fromkeys(r.backend for r in results)
        blocks = [block for name in names for block in told([r for r in results if r.backend == name], SMOKE)]
        for block in [*blocks, *gaps_told(self.gaps, results)]:
            out.line("")
            out.line(block.lines[0], red=block.red)
            for line in block.lines[1:]:
                out.line(line)
        if self.config.getoption("json") == "-":
            out.line(self._json())


def _backend_of(item: pytest.Item) -> ArrayBackend | None:
    callspec: Any = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("backend")


def _group(item: pytest.Item) -> str | None:
    found: str | None = facts(item).get("promise", {}).get("group")
    return found
