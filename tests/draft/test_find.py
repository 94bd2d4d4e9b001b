"""Drafters of other packages: found by name, and what is none is refused by name."""

from importlib import metadata

import pytest

from hibachi.engine.speculation import find
from hibachi.engine.speculation.config import as_config
from hibachi.errors import ConfigError, MissingExtra


class Again:
    """Proposes each row's last token once more."""

    def __init__(self, vocab_size=0):
        self.vocab_size = vocab_size

    def propose(self, keys, tokens, most):
        return [row[-1:].repeat(n) for row, n in zip(tokens, most, strict=True)]


def raises(vocab_size):
    raise OSError("no table")


def makes_none(vocab_size):
    return None


@pytest.fixture
def installed(monkeypatch):
    names = {"again": "Again", "raises": "raises", "none": "makes_none", "lost": "nowhere"}
    found = {name: f"{__name__}:{of}" for name, of in names.items()} | {"away": "hibachi_is_not_here:x"}
    points = metadata.EntryPoints(metadata.EntryPoint(n, v, find.GROUP) for n, v in found.items())
    monkeypatch.setattr("hibachi.common.installed.entry_points", lambda group: points.select(group=group))


def test_an_installed_one_is_made_for_a_vocabulary(installed):
    config = as_config({"method": "again", "num_speculative_tokens": 3})
    assert (config.method, config.num_speculative_tokens, config.auto) == ("again", 3, False)
    first, second = (find.drafter_of(config.method, 50) for _ in range(2))
    assert type(first).__name__ == "Again" and first.vocab_size == 50 and second is not first


def test_an_object_is_taken_as_it_is():
    mine = Again()
    config = as_config({"method": mine, "num_speculative_tokens": 3, "auto": True})
    assert config.method is mine and config.auto and find.drafter_of(mine, 50) is mine


def test_unknown_names_are_refused_with_those_that_there_are(installed):
    with pytest.raises(ConfigError, match="again, away, lost, none, raises, or a drafter; got 'eagle'"):
        as_config({"method": "eagle", "num_speculative_tokens": 3})


@pytest.mark.parametrize("given", [Again, 3, None, ["ngram"], object()])
def test_what_is_no_drafter_is_refused(given):
    with pytest.raises(ConfigError, match="speculative_config: method must have the method propose"):
        as_config({"method": given, "num_speculative_tokens": 3})


@pytest.mark.parametrize(
    "name, error, said",
    [
        ("raises", ConfigError, "The drafter 'raises' cannot be made: .*:raises raised OSError: no table"),
        ("none", ConfigError, "The drafter 'none' must have the method propose.*got None"),
        ("lost", ConfigError, "The drafter 'lost' cannot be loaded: AttributeError"),
        ("away", MissingExtra, "The drafter 'away' needs what is not installed: .*hibachi_is_not_here"),
    ],
)
def test_one_that_cannot_be_made_is_named(installed, name, error, said):
    with pytest.raises(error, match=said):
        find.drafter_of(name, 50)
