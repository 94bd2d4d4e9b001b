"""Which backend computes a model from files where nobody names one, and who says so."""

import logging
import re
import sys

import pytest

from hibachi import LLM, BackendNotFound, available_backends, load_backend, load_model
from hibachi.backend import discover
from hibachi.backend.discover import BEST, VARIABLE, best_and_why, best_backend
from hibachi.cli.main import main


@pytest.fixture(autouse=True)
def unnamed(monkeypatch):
    """As for a user: tests set the variable to NumPy."""
    monkeypatch.delenv(VARIABLE)


@pytest.fixture
def missing(monkeypatch):
    """missing(names): backends whose library is not there; or raises what is given as it is imported."""

    def make(**errors):
        there = discover.by_name

        def by_name(group):
            return there(group) | {name: Broken(error) for name, error in errors.items()}

        monkeypatch.setattr(discover, "by_name", by_name)

    return make


class Broken:
    """An entry point whose package does not import."""

    def __init__(self, error):
        self.error = error

    def load(self):
        raise self.error


NONE = ModuleNotFoundError("No module named 'torch'", name="torch")


def test_the_order():
    assert BEST == ("torch", "jax", "numpy")
    best, why = best_and_why()
    assert best == next(name for name in BEST if name in available_backends())
    assert why.startswith("the first of torch, jax, numpy that imports")


@pytest.mark.parametrize("error", [OSError("libtorch.so: cannot open"), NONE, RuntimeError("broken")])
def test_a_broken_library_does_not_stop_the_others(missing, error):
    missing(torch=error, jax=ImportError("jaxlib is too old"))
    best, why = best_and_why()
    assert best == "numpy"
    assert re.fullmatch(
        r"the first of torch, jax, numpy that imports; not torch: .+; not jax: .*jaxlib is too old", why
    )
    with LLM("tiny") as llm:
        assert llm.backend.fingerprint() == load_backend("numpy").fingerprint()
    assert load_model("tiny").backend.name == "numpy"


def test_the_second_best(missing):
    pytest.importorskip("jax")
    missing(torch=RuntimeError("broken"))
    assert best_and_why() == ("jax", "the first of torch, jax, numpy that imports; not torch: RuntimeError: broken")


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "hibachi_torch", None)
    _, why = best_and_why()
    assert "not torch: Backend 'torch' needs the module 'hibachi_torch', which is not installed" in why


def test_a_backend_that_no_package_registers_is_named(monkeypatch):
    found = discover.by_name(discover.GROUP)
    monkeypatch.setattr(discover, "by_name", lambda group: {"numpy": found["numpy"]})
    best, why = best_and_why()
    assert best == "numpy" and "not torch: no installed package registers it; not jax: no installed package" in why


@pytest.mark.parametrize("named", ["numpy", "torch"])
def test_the_variable_takes_precedence(monkeypatch, named):
    monkeypatch.setenv(VARIABLE, named)
    assert best_and_why() == (named, "the variable HIBACHI_DEFAULT_BACKEND names it")
    assert best_backend() == named


def test_the_argument_takes_precedence_over_the_variable(monkeypatch):
    monkeypatch.setenv(VARIABLE, "nosuch")
    with LLM("tiny", backend="numpy") as llm:
        assert llm.backend.name == "numpy"


def test_a_wrong_variable_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "nosuch")
    for call in (LLM, load_model):
        with pytest.raises(BackendNotFound, match=r"^HIBACHI_DEFAULT_BACKEND: 'nosuch' is neither a backend"):
            call("tiny")


def test_an_empty_variable_is_as_none(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    assert best_and_why()[1].startswith("the first of")


def test_the_log_says_which_and_why(caplog, missing):
    missing(torch=RuntimeError("broken"), jax=RuntimeError("too"))
    with caplog.at_level(logging.INFO, "hibachi"), LLM("tiny"):
        pass
    why = "the first of torch, jax, numpy that imports; not torch: RuntimeError: broken; not jax: RuntimeError: too"
    assert f"backend=numpy: {why}" in caplog.messages


def test_doctor_says_which_and_why(capsys, missing, monkeypatch):
    missing(torch=RuntimeError("broken"), jax=RuntimeError("too"))
    assert main(["doctor"]) in (0, 1)
    told = "default for models from files: numpy, the first of torch, jax, numpy that imports; not torch: RuntimeError"
    assert told in capsys.readouterr().out
    monkeypatch.setenv(VARIABLE, "torch")
    assert main(["doctor"]) in (0, 1)
    assert "default for models from files: torch, the variable HIBACHI_DEFAULT_BACKEND" in capsys.readouterr().out
