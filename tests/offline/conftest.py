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
    """A server of the shipped model, with the same template and fingerprint as the runs; an address."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "99")  # answers tell when the run began
    pytest.importorskip("starlette"), pytest.importorskip("uvicorn"), pytest.importorskip("msgspec")
    from hibachi.llm.chatformat.templates.choosing import Parsers
    from hibachi.llm.remote.identity import system_fingerprint

    from ..serve.conftest import site

    fingerprint, parsers = system_fingerprint(runs.texts.engine.facts, "tiny"), Parsers("generic")
    with site(runs.texts, chat_template=ran.TEMPLATE, fingerprint=fingerprint, parsers=parsers) as here:
        yield here.url
