"""No engine's thread outlives its test, and no test writes into the user's home."""

import pytest

from ...engine.conftest import no_thread_is_left  # noqa: F401  # a fixture


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Where these tests keep what hibachi keeps."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    return home
