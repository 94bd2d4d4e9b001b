"""Whose guides serve."""

import sys
from importlib import metadata

import pytest

from hibachi.engine.guide import find
from hibachi.engine.guide.llg import LlguidanceGuides
from hibachi.errors import ConfigError, MissingExtra

from . import made


def points(**named: str) -> object:
    return lambda group: metadata.EntryPoints(metadata.EntryPoint(n, v, find.GROUP) for n, v in named.items())


def of_others(vocabulary):
    return ("theirs", vocabulary)


def test_llguidance_serves_unless_the_variable_names_another(monkeypatch):
    monkeypatch.delenv(find.VARIABLE, raising=False)
    assert isinstance(find.guides_for(made.tiny()), LlguidanceGuides)
    monkeypatch.setattr("hibachi.common.installed.entry_points", points(other=f"{__name__}:of_others"))
    monkeypatch.setenv(find.VARIABLE, "other")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    assert find.guides_for(made.tiny()) == ("theirs", made.tiny())
    monkeypatch.setenv(find.VARIABLE, "llguidance")
    assert isinstance(find.guides_for(made.tiny()), LlguidanceGuides)


def test_a_name_that_nobody_has_is_refused_with_those_that_there_are(monkeypatch):
    monkeypatch.setattr("hibachi.common.installed.entry_points", points(other="nowhere:x"))
    monkeypatch.setenv(find.VARIABLE, "xgrammar")
    with pytest.raises(ConfigError, match="HIBACHI_GUIDES must be one of llguidance, other; got 'xgrammar'"):
        find.guides_for(made.tiny())
    monkeypatch.setenv(find.VARIABLE, "other")
    with pytest.raises(MissingExtra, match="nowhere"):
        find.guides_for(made.tiny())


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match="'guided'"):
        find.guides_for(made.tiny())
