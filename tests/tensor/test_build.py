"""Native kernels are compiled into the user's cache folder, once for a source, a compiler and a processor."""

import ctypes
import dataclasses
import logging

import pytest

from hibachi.tensor.native import build
from hibachi.tensor.native.build import NativeLibrary, NativeUnavailable

SOURCES = {"one.cpp": 'int two();\nextern "C" int sum() { return 1 + two(); }', "two.cpp": "int two() { return 2; }"}


@pytest.fixture
def library(tmp_path, monkeypatch):
    """library(facts): two small files, and what they become."""
    try:
        build.compiler()
    except NativeUnavailable as e:
        pytest.skip(str(e))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "sources").mkdir()
    for name, text in SOURCES.items():
        (tmp_path / "sources" / name).write_text(text)
    return lambda *facts: NativeLibrary("small", tmp_path / "sources", "here", lambda: ([], []), facts)


def test_all_files_become_one_library(library, tmp_path, caplog):
    made = library("a")
    assert "to be compiled" in made.state()
    with caplog.at_level(logging.INFO):
        assert made.why_missing() is None and made.loaded.sum() == 3
    assert caplog.text.count("Compiling native kernels") == 1
    place = made.place()
    assert place.parent == tmp_path / "cache" / "hibachi" and place.exists() and str(place) in made.state()
    assert [p.name for p in place.parent.iterdir()] == [place.name]  # nothing is left of the work
    caplog.clear()
    again = library("a")
    assert again.why_not_yet() is None and again.loaded.sum() == 3 and "Compiling" not in caplog.text


def test_whatever_it_depends_on_makes_another(library, tmp_path):
    places = {library("a").place(), library("b").place()}
    (tmp_path / "sources" / "two.cpp").write_text("int two() { return 3; }")
    places.add(library("a").place())
    assert len(places) == 3
    assert library("a").loaded.sum() == 4


def test_a_struct_that_is_not_the_same_in_python_and_in_c_is_named(library, tmp_path):
    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int64), ("b", ctypes.c_int32))

    for size in (16, 24):
        (tmp_path / "sources" / "one.cpp").write_text(f'extern "C" long hibachi_sizeof_Pair() {{ return {size}; }}')
        made = dataclasses.replace(library(), structs=(Pair,))
        if size == 16:
            assert made.loaded
        else:
            with pytest.raises(TypeError, match=r"struct Pair has 24 bytes in C\+\+ and 16 in .*test_build"):
                made.why_missing()


def test_what_does_not_compile_or_load_is_told(library, tmp_path, monkeypatch):
    made = library()
    (tmp_path / "sources" / "two.cpp").write_text("int two() { return nothing; }")
    assert "do not compile" in made.why_missing() and "nothing" in made.why_missing()
    (tmp_path / "sources" / "two.cpp").unlink()  # what is missing is missed at once
    assert "do not load" in made.why_missing() and "two" in made.why_missing()
    made.place().write_bytes(b"no library")
    assert "Delete the file" in library().why_missing()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "No C++ compiler" in library().why_missing() and "No C++ compiler" in library().why_not_yet()
    monkeypatch.setattr(build.platform, "system", lambda: "Darwin")
    assert "Linux only" in library().state()
