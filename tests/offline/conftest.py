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
