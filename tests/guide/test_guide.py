"""A guide goes on, goes back and is forked."""

import random

import pytest

from hibachi.engine.guide.protocol import GuideFailed

SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "string"}}},
}
FORMS = [
    {"json": SCHEMA},
    {"regex": "(ab?c|[0-9]{2,5}|é)*"},
    {"choice": ["one", "only", "on", "two"]},
    {"grammar": 'start: pair ("," pair)*\npair: /[a-z]+/ "=" (/[0-9]+/ | "(" start ")")'},
    {"grammar": 'start: x "b"\nx[stop="c"]: /[a-c]*/'},  # the library cannot go back in it
    {"grammar": "start[max_tokens=9]: /[a-z]*/"},  # nor here
]


def go(tiny, guide, n: int, seed: int) -> list[int]:
    """Up to n tokens that it allows, short ones rather than long."""
    chosen, taken = random.Random(seed), []
    while len(taken) < n and not guide.complete and (open_ := sorted(tiny.allowed(guide) - tiny.ends)):
        token = min(chosen.sample(open_, min(3, len(open_))), key=lambda i: len(tiny.vocabulary.tokens[i]))
        guide.advance([token])
        taken.append(token)
    return taken


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_going_back_and_forks_equal_a_fresh_guide(tiny, form, seed):
    guide = tiny.guide(**form)
    taken = go(tiny, guide, 12, seed)
    for back in (0, 1, len(taken) // 2, len(taken)):
        fork = guide.fork()
        fork.take_back(back)
        fresh = tiny.guide(**form)
        fresh.advance(taken[: len(taken) - back])
        assert tiny.allowed(fork) == tiny.allowed(fresh) and fork.complete == fresh.complete
        again = go(tiny, fork, 5, seed + 1)
        fresh.advance(again)
        assert tiny.allowed(fork) == tiny.allowed(fresh)
    fresh = tiny.guide(**form)
    fresh.advance(taken)
    assert tiny.allowed(guide) == tiny.allowed(fresh)  # what forks do is theirs


def test_it_goes_back_from_the_end(tiny):
    guide = tiny.guide(choice=["on", "only"])
    guide.advance(tiny.cut("on"))
    assert not guide.complete and 0 in tiny.allowed(guide)
    guide.advance([0])
    assert guide.complete and tiny.allowed(guide) == {0}
    guide.advance([0, 0])
    guide.take_back(1)
    assert guide.complete
    guide.take_back(2)
    assert not guide.complete and {"l", "ly"} & tiny.texts(guide)
    guide.advance(tiny.cut("ly"))
    assert guide.complete
    guide.advance([0])
    guide.take_back(2)
    assert tiny.texts(guide) >= {"l"} or tiny.texts(guide) >= {"y"}


@pytest.mark.parametrize("rest", ["x", "y}", ""])
def test_after_a_token_that_is_forbidden_it_is_as_before(tiny, rest):
    guide = tiny.guide(json={"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False})
    guide.advance(tiny.cut('{"a": 1'))
    before = tiny.allowed(guide)
    for wrong in ([*tiny.cut("23" + rest), 0], [2048], [-1], [10**12]):
        with pytest.raises(GuideFailed, match="forbids"):
            guide.advance(wrong)
        assert tiny.allowed(guide) == before
    guide.advance(tiny.cut("23}"))
    assert guide.complete
    with pytest.raises(GuideFailed, match="forbids"):
        guide.advance([0, 5])
    assert guide.complete
    guide.take_back(1)
    assert not guide.complete


@pytest.mark.parametrize("n", [-1, 4])
def test_it_goes_back_no_further_than_it_came(tiny, n):
    guide = tiny.guide(regex="aaaaaa")
    guide.advance(tiny.cut("a") * 3)
    with pytest.raises(GuideFailed, match=f"take back 0 to 3 tokens; got {n}"):
        guide.take_back(n)
    guide.take_back(3)
    assert tiny.fits(guide, "aaaaaa")


def test_forced_tokens_are_those_that_must_come(tiny):
    guide = tiny.guide(grammar="start: <[5]> <[7]> <[9]> (<[11]> | <[12]>)")
    assert guide.forced(9) == ([5, 7, 9], 3) and guide.forced(2) == ([5, 7], 2) and guide.forced(0) == ([], 0)
    guide.advance([5])
    assert guide.forced(9) == ([7, 9], 2)
    guide.advance([7, 9, 12])
    assert guide.complete and guide.forced(9) == ([], 0)
    assert tiny.guide(regex="[ab]+").forced(9) == ([], 0)


@pytest.mark.parametrize(
    "form", [{"choice": ["one two three", "one two four", "on"]}, {"regex": "(x=[0-9]{3};|y[0-9]==;|z+)+"}]
)
@pytest.mark.parametrize("seed", range(4))
def test_looking_for_forced_tokens_changes_no_mask(tiny, form, seed):
    """Also where fewer of them come than were found, or others come after going back."""
    random_, guide, taken = random.Random(seed), tiny.guide(**form), list[int]()
    for _ in range(40):
        if random_.random() < 0.5:
            tiny.guides.prepare([guide, tiny.guide(**form)])
        found, sure = guide.forced(random_.randrange(6))
        assert sure <= len(found) <= 5
        del found[sure:]
        fresh = tiny.guide(**form)
        fresh.advance([*taken, *found])
        here = tiny.guide(**form)
        here.advance(taken)
        assert tiny.allowed(guide) == tiny.allowed(here)
        new = found[: random_.randrange(len(found) + 1)] or go(tiny, here, 1, seed)
        guide.advance(new)
        taken += new
        back = random_.choice([0, 0, 1, len(taken)])
        if back and back <= len(taken):
            guide.take_back(back)
            del taken[-back:]
        here = tiny.guide(**form)
        here.advance(taken)
        assert tiny.allowed(guide) == tiny.allowed(here)
        if guide.complete:
            break
    assert taken


def test_behind_certain_tokens_come_those_that_the_text_is_mostly_cut_into(tiny):
    """The grammar forces the text, but not in which tokens it comes."""
    guide = tiny.guide(json={"type": "object", "properties": {"name": {"const": 1}}, "required": ["name"]})
    text, found, sure = b"", *guide.forced(20)
    assert sure < len(found)
    text = b"".join(tiny.vocabulary.tokens[i] for i in found)
    assert text.startswith(b'{"name"') and all(i not in tiny.ends for i in found)
    before = tiny.allowed(guide)
    guide.advance(found)
    guide.take_back(len(found))
    assert tiny.allowed(guide) == before
    assert guide.forced(2)[0] == found[:2]
