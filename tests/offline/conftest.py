from __future__ import annotations

import pytest

from . import ran


@pytest.fixture(scope="session", autouse=True)
def _closed():
    yield
    ran.end()


@pytest.fixture
def runs(tmp_path, capsys, monkeypatch):
    """`hibachi run-batch` in this process, and with one engine for all."""
    found = ran.Runs(tmp_path, capsys)
    ran.share(monkeypatch, found)
    return found


@pytest.fixture
def server(runs, monkeypatch):
    """The address of a server of the shipped model, with a template and a format of calls."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "99")  # answers tell when the run began
    pytest.importorskip("starlette"), pytest.importorskip("uvicorn"), pytest.importorskip("msgspec")
    from ..serve.conftest import site

    with site(runs.texts, chat_template=ran.TEMPLATE, tool_call_parser="generic") as here:
        yield here.url
