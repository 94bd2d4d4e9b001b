"""A model named on the command line: what is made of it, and what is said if that fails."""

import json
import pickle
import sys
from functools import partial
from pathlib import Path

import pytest

from hibachi import ConfigError, load_backend
from hibachi.backend import discover
from hibachi.backend import infer as whose
from hibachi.common.named import is_named, object_named, place
from hibachi.engine.kinds import kind_of
from hibachi.engine.ladder import ModelKind
from hibachi.errors import BackendNotFound
from hibachi.llm.users_model import model_named

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

class Short:
    vocab_size = 3
    def logits(self, tokens):
        return tokens

class Long:
    def cache_spec(self):
        return []
    def step(self, params, cache, x, more):
        return tokens

class Bare:
    def forward(self):
        return 0

class Everything(Logits):  # of three rungs
    vocab_size = 3
    def forward(self, tokens):
        return tokens[:, -1]
    def step(self, params, cache, x):
        return x, cache
    def cache_spec(self):
        return []

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


@pytest.mark.parametrize("where", ["own_program", "own_program.py", "{folder}/own_program.py", "./own_program.py"])
@pytest.mark.parametrize("name", ["Plain", "Outer.Inner", "made", "ready", "Over", "made_over"])
def test_a_class_a_function_or_an_object_gives_the_model(folder, where, name):
    model = model_named(f"{where.format(folder=folder)}:{name}")
    assert callable(model.forward)
    assert place(type(model).__module__) == (str(folder / "own_program.py") if ".py" in where else "own_program")


def test_a_module_and_a_file_are_imported_once(folder):
    assert model_named("own_program:ready") is model_named("own_program:ready")
    names = "own_program.py:ready", "./own_program.py:ready", f"{folder}/own_program.py:ready"
    first, *others = map(model_named, names)
    assert all(other is first for other in others)


@pytest.mark.parametrize("name", ["json.py", "queue.py", "token.py", "numpy.py", "a.b%c _é.py"])
def test_a_file_hides_no_module_whatever_it_is_called(folder, name):
    (folder / name).write_text(PROGRAM)
    before, stem = list(sys.path), name.removesuffix(".py")
    known = sys.modules.get(stem)
    first, second = (model_named(f"{name}:ready") for _ in range(2))
    assert first is second and sys.modules.get(stem) is known and json.dumps({}) == "{}"
    assert sys.path[: len(before)] == before  # nothing in front
    assert place(type(first).__module__) == str(folder / name) and type(first).__module__.isidentifier()


def test_pickle_finds_the_classes_of_a_file_that_was_not_imported_yet(folder):
    model = model_named("own_program.py:Plain")
    there = pickle.dumps(model)
    del sys.modules[type(model).__module__]
    back = pickle.loads(there)
    assert type(back).__name__ == "Plain" and type(back) is object_named("own_program.py:Plain")
    Path("own_program.py").unlink()
    del sys.modules[type(model).__module__]
    with pytest.raises(ModuleNotFoundError, match="own_5f_program"):
        pickle.loads(there)


def test_the_highest_rung_is_used(folder):
    assert kind_of(model_named("own_program.py:Everything")) is ModelKind.PAGED


def test_no_library_is_imported_to_look_whose_an_attribute_is(monkeypatch):
    """An object that is like an array and is none."""

    class Like:
        dtype, shape = "float32", (1,)

    def missing(name):
        raise AssertionError(f"{name} would be imported")

    monkeypatch.setattr(discover, "why_missing", missing)
    for name in discover.known():
        monkeypatch.delitem(sys.modules, name, raising=False)
    model = type("Model", (), {"like": Like()})()
    model.own = Like()
    assert whose.backend_of(None, model) is None
    with pytest.raises(BackendNotFound, match=r"Known: .*numpy.*Pass backend="):
        discover.backend_for(Like())


def test_who_takes_a_backend_gets_it(folder, monkeypatch):
    numpy = load_backend("numpy")
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
        ("own_program:plane", "own_program has no 'plane'. It defines Plain, "),
        ("own_program.py:Neds", "own_program.py has no 'Neds'. It defines Needs, .*: name one of these"),
        ("own_program:Outer.Absent", "has no 'Outer.Absent'. It defines Inner: name"),
        (
            "own_program.py",
            "Write own_program.py:Plain; its classes with a method `forward`, `logits` or `step` are Plain, Over, "
            "Called, Needs, Breaks, Logits, Short, Long, Bare, Everything",
        ),
        ("own_program:Needs", "could not be made: TypeError.*'weights'.*a function that returns the model"),
        ("own_program:Breaks", "could not be made: OSError: weights are missing. That is what it raised itself"),
        ("own_program:nothing", "A model needs one of `forward"),
        ("own_program:ADDED", "int has none"),
        ("own_program:Logits", "also needs `vocab_size`"),
        (
            "own_program:Short",
            r"Short.logits is called as `logits\(tokens, lengths\)`; got a method `logits\(tokens\)`",
        ),
        ("own_program:Long", r"called as `step\(params, cache, x\)`.*: missing a required argument: 'more'. Add what"),
        ("own_program:Bare", r"Bare.forward is called as `forward\(tokens\)`; got a method `forward\(\)`"),
    ],
)
def test_what_is_wrong_is_said(folder, name, message):
    with pytest.raises(ConfigError, match=message):
        model_named(name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise SystemExit('it was run')\nclass One:\n    def step(self): pass", "Write program.py:One."),
        ("class None_: pass", "Write program.py:Name."),
        ("class Broken(:", "Write program.py:Name."),
    ],
)
def test_a_file_without_a_name_is_not_run(folder, source, message):
    """N-16."""
    (folder / "program.py").write_text(source)
    with pytest.raises(ConfigError) as caught:
        model_named("program.py")
    assert str(caught.value).endswith(message)


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


def test_which_names_are_meant_so(folder):
    assert all(map(is_named, ["a:B", "a.b:C.D", "a.py:B", "dir/a.py:B", "./x y/a.py:B", "C:\\dir\\a.py:B"]))
    assert not any(map(is_named, ["a", "org/name", "dir/model.gguf", "tiny", "C:\\dir", "a:", ":B", "dir/a:B"]))
    assert not any(map(is_named, ["org/name:Q8_0", "org/name.py"]))  # on the Hub
    assert is_named("own_program.py")  # the name in it is missing, which is said
    (folder / "a:B").mkdir()
    (folder / "folder.py").mkdir()
    assert not is_named("a:B") and not is_named("folder.py")
