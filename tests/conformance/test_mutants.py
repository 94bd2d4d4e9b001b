"""Every promise of the conformance suite catches the backends and engines that break it, and lets NumPy's pass."""

import importlib
import inspect
from contextlib import ExitStack
from pathlib import Path

import pytest

from conformance.nine import Nine
from conformance.serving import Serving
from hibachi import HibachiError, NumpyBackend

from .engine_mutants import ENGINES
from .mutants import MUTANTS as BACKENDS
from .own_mutants import OWN

MUTANTS = [*BACKENDS, *ENGINES, *OWN]
SUITE = Path(__file__).parents[2] / "conformance"
PROMISES = {
    name: test
    for path in sorted(SUITE.glob("test_*.py"))
    for name, test in vars(importlib.import_module(f"conformance.{path.stem}")).items()
    if name.startswith("test_")
}
HONEST = {"backend": NumpyBackend, "serve": lambda: Serving(NumpyBackend())}
BROKEN = AssertionError, pytest.fail.Exception, HibachiError, TimeoutError  # anything else is a bug of the mutant


def run(promise, fixtures=()):
    """Call the test as pytest would, with honest fixtures where no others are given."""
    with ExitStack() as stack:
        given = {name: make() for name, make in HONEST.items()} | dict(fixtures)
        stack.enter_context(given["serve"])
        given["nine"] = Nine(given["serve"])
        PROMISES[promise](**{name: given[name] for name in inspect.signature(PROMISES[promise]).parameters})


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.promise.removeprefix('test_')}: {m.breaks}")
def test_what_is_broken_is_caught_by_the_promise_that_it_breaks(mutant):
    with pytest.raises(BROKEN):
        run(mutant.promise, mutant.fixtures)


@pytest.mark.parametrize("promise", PROMISES)
def test_numpy_keeps_the_promise(promise):
    run(promise)


def test_every_promise_has_a_mutant():
    assert PROMISES.keys() - {mutant.promise for mutant in MUTANTS} == set()
    assert {mutant.promise for mutant in MUTANTS} - PROMISES.keys() == set()
