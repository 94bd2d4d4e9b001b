"""Every promise of the conformance suite catches the backends that break it, and lets NumPy pass."""

import importlib
import inspect
from pathlib import Path

import pytest

from hibachi import InvalidTensorOperation, NumpyBackend

from .mutants import MUTANTS

SUITE = Path(__file__).parents[2] / "conformance"
PROMISES = {
    name: test
    for path in sorted(SUITE.glob("test_*.py"))
    for name, test in vars(importlib.import_module(f"conformance.{path.stem}")).items()
    if name.startswith("test_")
}
HONEST = {"backend": NumpyBackend}


def run(promise, fixtures=()):
    """Call the test as pytest would, with honest fixtures where no others are given."""
    given = {name: make() for name, make in HONEST.items()} | dict(fixtures)
    PROMISES[promise](**{name: given[name] for name in inspect.signature(PROMISES[promise]).parameters})


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.promise.removeprefix('test_')}: {m.breaks}")
def test_a_broken_backend_is_caught_by_the_promise_it_breaks(mutant):
    with pytest.raises((AssertionError, InvalidTensorOperation)):  # anything else is a bug of the mutant
        run(mutant.promise, mutant.fixtures)


@pytest.mark.parametrize("promise", PROMISES)
def test_numpy_keeps_the_promise(promise):
    run(promise)


def test_every_promise_has_a_mutant():
    assert PROMISES.keys() - {mutant.promise for mutant in MUTANTS} == set()
    assert {mutant.promise for mutant in MUTANTS} - PROMISES.keys() == set()
