"""No engine's thread outlives its test, and no test writes into the user's home."""

import resource
from contextlib import contextmanager

import pytest

from hibachi.common.cachefolder import cache_folder

from ...engine.conftest import no_thread_is_left  # noqa: F401  # a fixture

KERNELS = cache_folder() / "kernels"


@pytest.fixture
def kernels_of_the_user(own_home):
    """What the user has compiled already: else each process here would compile it anew."""
    if KERNELS.exists():
        (own_home / "cache" / "hibachi").mkdir(parents=True)
        (own_home / "cache" / "hibachi" / "kernels").symlink_to(KERNELS)


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Where these tests keep what hibachi keeps."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    return home


@pytest.fixture
def small_disk():
    """`with small_disk(n):` files of this process may not grow beyond n bytes, as on a disk that is full.

    No longer than that, as pytest's own output may go to a file.
    """

    @contextmanager
    def limited(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited
