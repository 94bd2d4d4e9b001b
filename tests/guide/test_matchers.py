"""Grammars are compiled once, and who used a matcher before decides nothing."""

import random

import pytest

from hibachi.engine.guide import llg, matchers
from hibachi.engine.guide.protocol import GuideFailed

from . import made

STATES = {"regex": "(a|b)*a(a|b){9}"}  # an answer of n tokens gets some 2 states a token


@pytest.fixture
def bytes_only():
    setting = made.Setting(made.of_bytes(ends=()))
    yield setting
    setting.guides.close()


@pytest.fixture
def compiled(bytes_only, monkeypatch):
    """The most states of each matcher that was compiled; None: as many as one may have."""
    found, make = [], bytes_only.guides.matcher

    def counting(source, most_states=None):
        found.append(most_states)
        return make(source, most_states)

    monkeypatch.setattr(bytes_only.guides, "matcher", counting)
    return found


def answer(setting, guide, n, seed):
    """The masks of an answer of n letters, as bytes."""
    chosen, found = random.Random(seed), []
    for _ in range(n):
        found.append(setting.masks(guide).tobytes())
        guide.advance([chosen.choice(b"ab")])
    return found


def test_a_grammar_is_compiled_once_for_guides_that_follow_each_other(bytes_only, compiled):
    grammar = bytes_only.check(**STATES)
    for seed in range(5):
        answer(bytes_only, bytes_only.guides.compile(grammar), 9, seed)
    assert compiled == [matchers.MOST_STATES]
    bytes_only.guide(regex="ab")
    assert len(compiled) == 2


def test_what_others_have_asked_for_takes_no_states_away(bytes_only, compiled, monkeypatch):
    """Each answer alone has states enough; together they would have too few."""
    monkeypatch.setattr(matchers, "MOST_STATES", 300)
    grammar = bytes_only.check(**STATES)
    want = {}
    for seed in range(4):
        fresh = made.Setting(bytes_only.vocabulary)
        want[seed] = answer(fresh, fresh.guide(**STATES), 120, seed)
        fresh.guides.close()
    for seed in range(4):
        guide = bytes_only.guides.compile(grammar)
        assert answer(bytes_only, guide, 120, seed) == want[seed]
        guide.take_back(60)
        fresh = bytes_only.guides.compile(grammar)
        chosen = random.Random(seed)
        fresh.advance([chosen.choice(b"ab") for _ in range(60)])
        assert bytes_only.allowed(guide) == bytes_only.allowed(fresh)
    assert None in compiled  # some have begun again


def test_what_is_too_much_for_a_matcher_of_its_own_fails(bytes_only, compiled, monkeypatch):
    monkeypatch.setattr(matchers, "MOST_STATES", 100)
    monkeypatch.setitem(llg.LIMITS, "max_lexer_states", 150)
    guide = bytes_only.guides.compile(bytes_only.check(**STATES))
    with pytest.raises(GuideFailed, match="too complex"):
        answer(bytes_only, guide, 500, 1)
    with pytest.raises(GuideFailed, match="too complex"):
        guide.advance(b"a")
    assert not guide.complete


def test_how_many_are_kept_is_bounded():
    class Matcher:
        def deep_copy(self):
            return self

    class User:
        pass

    made_, users = matchers.Matchers(), []
    for i in range(3 * matchers.MOST):
        users.append(User())
        made_.original(f"grammar {i // 2}", users[-1], lambda *_: Matcher())
    kept = made_._kept
    assert sum(map(len, kept.values())) == matchers.MOST
    assert list(kept)[-1] == f"grammar {len(users) // 2 - 1}"
    made_.original("x" * (matchers.MOST_BYTES - 5), users[0], lambda *_: Matcher())
    assert len(kept) == 1
    made_.original("y" * (matchers.MOST_BYTES + 1), users[0], lambda *_: Matcher())
    assert [source[0] for source in kept] == ["x"]  # what is too large takes the place of no other
