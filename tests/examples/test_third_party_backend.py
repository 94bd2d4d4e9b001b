"""A backend in a distribution of its own: installed, found by its entry point, and judged like ours."""

from pathlib import Path

import pytest

from .installed import python_with

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_backend"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return python_with(EXAMPLE, tmp_path_factory.mktemp("site"))


def test_it_is_found_by_its_entry_point(python):
    name = "array_api_strict"
    code = f"import hibachi as h; print({name!r} in h.available_backends(), h.load_backend({name!r}))"
    assert python("-c", code).startswith("True StrictBackend(")


def test_it_is_found_by_its_arrays(python):
    code = "import hibachi, array_api_strict as xp; print(hibachi.backend_for(xp.ones(3)))"
    assert python("-c", code).startswith("StrictBackend(")


@pytest.mark.slow
def test_it_keeps_every_promise(python):
    said = python("-m", "hibachi.testing.run", "--backend", "array_api_strict").splitlines()
    rows = [line.rsplit(maxsplit=1) for line in said if line.count("/") == 1]
    assert {"nine operations", "continuous batching", "paged and recurrent cache"} <= {group for group, _ in rows}
    for group, count in rows:
        kept, promises = count.split("/")
        assert kept == promises, group
