"""The fixture `own`, a user's model on each backend asked for, and the verdict on every promise."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from hibachi.errors import ConfigError, HibachiError
from hibachi.lm.named import model_named, object_named
from hibachi.tensor.discover import resolve
from hibachi.testing.options import OPTIONS, add_to, ids, token
from hibachi.testing.own import Own
from hibachi.testing.plugin import WIDTH, reason, table, title

MODELS = pytest.StashKey[dict[str, Own]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_to(parser.getgroup("hibachi").addoption, OPTIONS)


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.stash[MODELS] = models(config)
    except HibachiError as e:
        raise pytest.UsageError(str(e)) from None
    config.pluginmanager.register(Verdicts(config))


def pytest_unconfigure(config: pytest.Config) -> None:
    for own in config.stash.get(MODELS, {}).values():
        own.close()


def models(config: pytest.Config) -> dict[str, Own]:
    """The model of this run on each backend, by the backend's name. Raises ConfigError, BackendNotFound, ..."""
    option = config.getoption
    name, examples = option("model"), option("examples")
    if option("prompt") and examples:
        raise ConfigError("Pass --prompt or --examples; got both.")
    settings = {
        "name": name,
        "examples": object_named(examples) if examples else [ids(p) for p in option("prompt")] or None,
        "vocab_size": option("vocab_size"),
        "feedforward": option("feedforward") or None,
        "padding": not option("no_padding"),
        "padding_token": token(option("padding_token")),
        "max_model_len": option("max_model_len"),
        "tolerance": option("tolerance"),
    }
    backends = [(asked, resolve(asked)) for asked in option("backend")]
    if backends:
        return {asked: Own(model_named(name, backend), backend, **settings) for asked, backend in backends}
    own = Own(model_named(name), **settings)
    return {own.backend.name: own}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "own" in metafunc.fixturenames:
        metafunc.parametrize("own", list(metafunc.config.stash[MODELS]), indirect=True)


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Iterator[Own]:
    """The model under test; what a test did to its calls is undone."""
    model = request.config.stash[MODELS][request.param]
    yield model
    model.spy.undo()


def pytest_itemcollected(item: pytest.Item) -> None:
    if hasattr(item, "callspec"):
        item.user_properties.append(("own", item.callspec.params.get("own")))


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    lines = [line for own in config.stash[MODELS].values() for line in own.describe()]
    return [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in dict.fromkeys(lines)]


class Verdicts:
    """Which promises were kept, and why not the others."""

    def __init__(self, config: pytest.Config) -> None:
        self.name = config.getoption("model")
        self.kept: dict[tuple[str, str], dict[str, bool]] = {}  # (promise, backend) -> {test: kept}; {}: not judged
        self.broken: list[tuple[str, str, str]] = []  # promise, backend, why
        self.skipped: dict[str, dict[str, None]] = {}  # why -> promises

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        backend, promise = dict(report.user_properties).get("own"), title(report.nodeid)
        if backend is None:
            return
        tests = self.kept.setdefault((promise, backend), {})
        if report.skipped:
            because = str(report.longrepr[-1]).removeprefix("Skipped: ")  # type: ignore[index]
            self.skipped.setdefault(because, {})[promise] = None
        elif report.when == "call" or report.failed:
            tests[report.nodeid] = report.passed
        if report.failed:
            self.broken.append((promise, backend, why(report)))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.kept:
            return
        out = terminalreporter
        out.section(f"promises of {self.name}")
        for line in table(self.kept, lambda tests: "kept" if all(tests) else "BROKEN"):
            out.line(line)
        for promise, backend, told in self.broken:
            out.line("")
            out.line(f"BROKEN on {backend}: {promise}", red=True)
            for line in told.splitlines():
                out.line(textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent=" " * 12))
        if len(self.broken) > 1:
            out.line("")
            out.line("Mend the first one first: the others may follow from it.")
        if self.skipped:
            out.line("")
        for because, promises in self.skipped.items():
            those = "; ".join(promises) if len(promises) < 4 else f"{len(promises)} promises"
            out.line(textwrap.fill(f"-  {because}: {those}", WIDTH, subsequent_indent="   "))


def why(report: pytest.TestReport) -> str:
    """What the failing test said: three lines, or the error that it stumbled over."""
    message = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
    if message.startswith("Failed: expected"):
        return message.removeprefix("Failed: ")
    return f"got       {reason(report)} (--tb=short says where)"
