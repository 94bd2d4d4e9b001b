"""The fixture `backend`, one test run per backend, and the table of promises kept."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from hibachi.errors import HibachiError
from hibachi.tensor.array_backend import ArrayBackend
from hibachi.tensor.discover import available, known, resolve, why_missing

BACKENDS = pytest.StashKey[dict[str, ArrayBackend]]()
WIDTH = 80


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("hibachi").addoption(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="backend to test: a registered name, package:object, or an array-API module; repeatable. "
        "Default: those of the ini option `hibachi_backends`, or every registered backend that loads.",
    )
    parser.addini("hibachi_backends", "backends to test unless --backend names others", type="args")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "promise(group): a promise of the conformance suite; one row per group")
    config.pluginmanager.register(Promises(config))
    if config.getoption("backend"):
        try:
            backends(config)
        except HibachiError as e:
            raise pytest.UsageError(str(e)) from None


def backends(config: pytest.Config) -> dict[str, ArrayBackend]:
    """The backends of this run by the name they were asked for; loaded when a test wants them, not before."""
    if BACKENDS not in config.stash:
        asked = config.getoption("backend") or config.getini("hibachi_backends") or available()
        config.stash[BACKENDS] = {name: resolve(name) for name in asked}
    return config.stash[BACKENDS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test that takes `backend` runs on every backend. None is an error: nothing would be tested."""
    if "backend" not in metafunc.fixturenames:
        return
    found = backends(metafunc.config)
    if not found:
        why = " ".join(str(why_missing(name)) for name in known()) or "None is registered: is hibachi installed?"
        raise pytest.Collector.CollectError(f"No backend loads. {why}")
    metafunc.parametrize("backend", list(found.values()), ids=list(found), indirect=True)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> ArrayBackend:
    """The backend under test."""
    return request.param


def describe(config: pytest.Config) -> Iterator[str]:
    """One line per backend in use: its library and version."""
    found = config.stash.get(BACKENDS, {})
    for name, backend in found.items():
        yield f"{name:{max(map(len, found))}}  {', '.join(getattr(backend, 'versions', dict)().values())}"


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return [f"backend {line}" for line in describe(config)]


class Promises:
    """Counts the promises kept and broken, and prints them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.kept: dict[tuple[str, str], dict[str, bool]] = defaultdict(dict)  # (group, backend) -> {test: kept}
        self.broken: list[tuple[str, str, str]] = []  # backend, test, why
        self.skipped: set[str] = set()

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if mark := item.get_closest_marker("promise"):
            used = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
            names = [name for name, backend in self.config.stash.get(BACKENDS, {}).items() if backend is used]
            item.user_properties.append(("promise", (mark.args[0], names[0] if names else "any")))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        group = dict(report.user_properties).get("promise")
        if report.skipped:
            self.skipped.add(report.nodeid)
        if group is None or report.nodeid in self.skipped:
            if group is not None:
                self.kept.get(tuple(group), {}).pop(report.nodeid, None)  # that its setup passed means nothing
            return
        tests = self.kept[tuple(group)]
        tests[report.nodeid] = tests.get(report.nodeid, True) and report.passed
        if report.failed:
            self.broken.append((group[1], report.nodeid, reason(report)))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.kept:
            return
        out = terminalreporter
        out.section("promises kept")
        for line in table(self.kept):
            out.line(line)
        for name, test, why in self.broken:
            out.line("")
            out.line(f"BROKEN on {name}: {title(test)}", red=True)
            out.line(textwrap.fill(why, WIDTH, max_lines=4, initial_indent="  ", subsequent_indent="  "))
            out.line(f"  {test}")


def title(test: str) -> str:
    """conformance/test_x.py::test_pop_removes_one[numpy] -> pop removes one"""
    return test.split("::")[-1].split("[")[0].removeprefix("test_").replace("_", " ")


def reason(report: pytest.TestReport) -> str:
    """First line of what the failing test said."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).removeprefix("AssertionError: ").strip().split("\n")[0]


def table(kept: dict[tuple[str, str], dict[str, bool]]) -> Iterator[str]:
    """A row per group, a column per backend, no wider than a terminal: many backends make several tables."""
    groups = list(dict.fromkeys(group for group, _ in kept))
    names = list(dict.fromkeys(name for _, name in kept))
    label, cell = max(map(len, groups)), max(8, *map(len, names))
    columns = max(1, (WIDTH - label) // (cell + 2))
    for first in range(0, len(names), columns):
        some = names[first : first + columns]
        yield ""
        yield " " * label + "".join(f"  {name:>{cell}}" for name in some)
        for group in groups:
            counts = [list(kept.get((group, name), {}).values()) for name in some]
            cells = [f"{sum(c)}/{len(c)}" if c else "-" for c in counts]
            yield f"{group:{label}}" + "".join(f"  {text:>{cell}}" for text in cells)
