"""A model named on the command line: what is made of it, and what is said if that fails."""

import sys
from functools import partial

import pytest

from hibachi import ConfigError, load
from hibachi.errors import BackendNotFound
from hibachi.lm.named import is_named, model_named

PROGRAM = """
from dataclasses import dataclass
from beside import ADDED

class Plain:
    def forward(self, tokens):
        return tokens[:, -1] + ADDED

class Outer:
    class Inner(Plain):
        pass

@dataclass
class Over:
    backend: object
    def forward(self, tokens):
        return tokens[:, -1]

def made():
    return Plain()

def made_over(*, backend):
    return Over(backend)

class Called(Plain):  # as a torch module is
    def __call__(self):
        raise AssertionError("a model that is there already is not made")

ready = Called()

class Needs(Plain):
    def __init__(self, weights):
        pass

class Breaks(Plain):
    def __init__(self):
        raise OSError("weights are missing")

class Logits:
    def logits(self, tokens, lengths):
        return tokens

nothing = object()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a program that we stand in; what is imported from it is forgotten."""
    (tmp_path / "own_program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("ADDED = 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("place", ["own_program", "own_program.py", "{folder}/own_program.py", "./own_program.py"])
@pytest.mark.parametrize("name", ["Plain", "Outer.Inner", "made", "ready", "Over", "made_over"])
def test_a_class_a_function_or_an_object_gives_the_model(folder, place, name):
    model = model_named(f"{place.format(folder=folder)}:{name}")
    assert callable(model.forward)
    assert type(model).__module__ == "own_program"


def test_a_file_is_imported_once(folder):
    assert model_named("own_program.py:ready") is model_named("own_program:ready") is model_named("own_program:ready")


def test_a_file_may_be_called_as_a_module_that_is_imported_already(folder):
    (folder / "json.py").write_text(PROGRAM)
    import json

    first, second = (model_named("json.py:ready") for _ in range(2))
    assert first is second and sys.modules["json"] is json


def test_who_takes_a_backend_gets_it(folder, monkeypatch):
    numpy = load("numpy")
    for name in ("Over", "made_over"):
        assert model_named(f"own_program:{name}", numpy).backend is numpy
        assert model_named(f"own_program:{name}", "numpy").backend.name == "numpy"
        assert model_named(f"own_program:{name}").backend.name == "numpy"
    with pytest.raises(BackendNotFound, match="numqy"):
        model_named("own_program:Over", "numqy")
    module = sys.modules["own_program"]
    monkeypatch.setattr(module, "later", partial(module.Over, backend=numpy), raising=False)
    assert model_named("own_program:later", "torch").backend.name == "torch"


@pytest.mark.parametrize(
    "name, message",
    [
        ("own_program", "got 'own_program'. Write the module, a colon and the name"),
        ("own_program:", "a colon and the name"),
        (":Plain", "a colon and the name"),
        ("no_such_program:Plain", "There is no module 'no_such_program'"),
        ("own_program.inner:Plain", "There is no module 'own_program.inner'"),
        ("no_such.py:Plain", "There is no file no_such.py"),
        ("own_program:Absent", "own_program has no 'Absent'. It defines Plain, Outer, Over, made"),
        ("own_program:Outer.Absent", "has no 'Outer.Absent'"),
        ("own_program:Needs", "could not be made: TypeError.*'weights'.*a function that returns the model"),
        ("own_program:Breaks", "could not be made: OSError: weights are missing"),
        ("own_program:nothing", "A model needs one of `forward"),
        ("own_program:ADDED", "int has none"),
        ("own_program:Logits", "also needs `vocab_size`"),
    ],
)
def test_what_is_wrong_is_said(folder, name, message):
    with pytest.raises(ConfigError, match=message):
        model_named(name)


def test_the_original_error_is_kept(folder):
    with pytest.raises(ConfigError) as caught:
        model_named("own_program:Breaks")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("source", ["import no_such_package", "1 / 0", "raise SystemExit(3)"])
@pytest.mark.parametrize("name", ["broken_program:Model", "broken_program.py:Model"])
def test_a_module_that_cannot_be_imported_is_named_with_its_error(folder, source, name):
    (folder / "broken_program.py").write_text(source)
    with pytest.raises(
        ConfigError, match=r"Importing .*broken_program.* raised (ModuleNotFound|ZeroDivision|SystemExit)"
    ):
        model_named(name)
    assert "broken_program" not in sys.modules


def test_which_names_are_meant_so():
    assert all(map(is_named, ["a:B", "a.b:C.D", "a.py:B", "dir/a.py:B", "./x y/a.py:B", "C:\\dir\\a.py:B"]))
    assert not any(map(is_named, ["a", "org/name", "dir/model.gguf", "tiny", "C:\\dir", "a:", ":B", "dir/a:B"]))
