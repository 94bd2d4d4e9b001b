"""The store of responses: what is kept, for how long, and what goes first."""

from __future__ import annotations

import json
from functools import partial

import pytest

pytest.importorskip("msgspec")

from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.responses.items import FunctionCallOutput, ItemReference, Message, as_kept, given
from hibachi.llm.dialects.responses.store import OVERHEAD, KnownItems, Store, Stores, as_items, resolved


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def said(text, id=None, role="user"):
    return Message(role=role, content=text, **({} if id is None else {"id": id}))


def keep(store, name, own, answer=b"{}", before=None):
    output = [said(f"to {name}", f"msg_{name}", "assistant")]
    return store.keep(name, answer, before or KnownItems(), own, output)


def conversation(store, name):
    """Its items, as a client sends them again."""
    return [given(json.loads(data), "input") for _, data in store.conversation(store.find(name)).each]


def texts(items):
    return [item.content if isinstance(item.content, str) else item.content[0].text for item in items]


def test_a_conversation_is_found_again():
    store = Store("abcdefgh")
    assert store.find("a") is None
    assert keep(store, "a", [said("one"), FunctionCallOutput(call_id="c", output="two")], b'{"id": "a"}')
    found = store.find("a")
    assert found.answer == b'{"id": "a"}'
    first, second, third = conversation(store, "a")
    assert (first.role, texts([first]), second.output, texts([third])) == ("user", ["one"], "two", ["to a"])
    assert first.id.startswith("msg_abcdefgh_") and second.id.startswith("fco_abcdefgh_") and third.id == "msg_a"
    assert [json.loads(data)["id"] for data in store.data(found.items)] == [first.id, second.id, third.id]
    assert texts(as_items([store.item(first.id)])) == ["one"] and store.item("msg_other") is None


def test_items_that_several_responses_have_are_counted_once():
    """Also where a client sends them again as they are; what was changed is another item."""
    store = Store("abcdefgh")
    keep(store, "a", [said("one" * 1000)])
    size, before = store.size, conversation(store, "a")
    keep(store, "b", [*before, said("two")])
    assert store.size - size < 1500 + 3 * OVERHEAD
    assert store.find("b").items[:2] == store.find("a").items
    changed = [said("won", before[0].id), before[1]]
    keep(store, "c", changed)
    new, same, _ = store.find("c").items
    assert (new == before[0].id, same) == (False, "msg_a")
    assert texts(as_items([store.item(before[0].id), store.item(new)])) == ["one" * 1000, "won"]


def test_what_came_before_is_kept_as_it_was():
    """Also if it was driven out meanwhile."""
    store = Store("abcdefgh")
    keep(store, "a", [said("one")])
    before = store.conversation(store.find("a"))
    for gone in (False, True):
        if gone:
            store.forget("a")
        keep(store, f"b{gone}", [said("two")], before=before)
        assert texts(conversation(store, f"b{gone}")) == ["one", "to a", "two", f"to b{gone}"]
        assert store.find(f"b{gone}").inputs == 3
        assert store.find(f"b{gone}").items[:2] == tuple(id for id, _ in before.each)


def test_what_is_forgotten_leaves_nothing_behind():
    store = Store("abcdefgh")
    keep(store, "a", [said("one"), said("one")])
    both = [*conversation(store, "a"), *conversation(store, "a")]  # an item may come twice
    keep(store, "b", both)
    assert store.forget("a") and not store.forget("a")
    assert store.find("a") is None
    assert texts(conversation(store, "b")) == ["one", "one", "to a"] * 2 + ["to b"]
    assert store.forget("b")
    assert (store.size, len(store)) == (0, 0)


def test_at_most_so_many_the_least_recently_used_go_first():
    store = Store("abcdefgh", most=3)
    for name in "abc":
        keep(store, name, [said(name)])
    store.find("a")
    store.item("msg_b")
    keep(store, "d", [])
    assert [store.find(name) is not None for name in "abcd"] == [True, True, False, True]
    assert len(store) == 3


def test_at_most_so_many_bytes():
    one = len(as_kept(said("a" * 1000), "msg_abcdefgh_" + "0" * 24)) + OVERHEAD
    store = Store("abcdefgh", limit=4 * one)
    for name in "abcdefghij":
        keep(store, name, [said("a" * 1000)])
        assert store.size <= 4 * one
    assert store.find("j") is not None and store.find("a") is None and len(store) == 2


def test_one_that_is_too_large_drives_nothing_out():
    store = Store("abcdefgh", limit=10_000)
    keep(store, "a", [said("a")])
    size = store.size
    assert not keep(store, "b", [said("b" * 10_000)])
    assert not keep(store, "b", [], b"b" * 10_000)
    assert (store.find("b"), store.size) == (None, size) and store.find("a") is not None


def test_what_is_not_used_for_long_is_forgotten(clock):
    store = Store("abcdefgh", seconds=60, clock=clock)
    for name in "ab":
        keep(store, name, [said(name)])
    clock.now = 50
    assert store.item("msg_b") is not None
    clock.now = 61
    assert store.find("a") is None and store.item("msg_a") is None and store.find("b") is not None
    clock.now = 122
    assert store.find("b") is None and store.size == 0


def test_what_others_have_not_used_is_gone_as_well(clock, monkeypatch):
    made = partial(Store, clock=clock)
    monkeypatch.setattr("hibachi.llm.dialects.responses.store.Store", made)
    stores = Stores()
    store = stores.of("a")
    keep(store, "x", [said("one")])
    clock.now = 1e6
    stores.of("b")
    assert store.size == 0


def test_each_tenant_has_its_own():
    stores = Stores(tag="abcdefgh")
    keep(stores.of("a"), "x", [said("one")])
    assert stores.of("a").find("x") is not None and stores.of("b").find("x") is None
    assert stores.of("b").item("msg_x") is None
    assert (Stores().keeps, Stores(0).keeps) == (True, False)
    assert len({Stores().tag for _ in range(9)}) == 9 and len(Stores().tag) == 8


def test_parts_of_a_tenant_find_only_what_is_theirs():
    """Also where one sends what another keeps, word for word: it would learn that it is there."""
    stores = Stores(tag="abcdefgh")
    whole, one, two = (stores.of("a", part) for part in ("", "one", "two"))
    keep(one, "x", [said("hers")])
    ids = one.find("x").items
    for other in (whole, two, stores.of("b", "one")):
        assert other.find("x") is None and other.item("msg_x") is None and not other.forget("x")
        keep(other, "y", conversation(one, "x"))
        assert not set(ids) & set(other.find("y").items)
        assert other.forget("y")
    keep(stores.of("a", "one"), "z", conversation(one, "x"))
    assert stores.of("a", "one").find("z").items[:2] == ids
    assert one.forget("x") and one.forget("z") and whole.size == two.size == 0


def test_all_parts_of_a_tenant_keep_to_the_bounds_of_one_store(clock):
    store = Store("abcdefgh", limit=10_000, most=3, seconds=60, clock=clock)
    for i in range(9):
        keep(store.for_part(f"{i}"), f"{i}", [said("a")])
    there = [i for i in range(9) if store.for_part(f"{i}").find(f"{i}") is not None]
    assert there == [6, 7, 8] and len(store) == 3
    keep(store.for_part("x"), "x", [said("a" * 5000)])
    keep(store.for_part("y"), "y", [said("a" * 5000)])
    assert store.for_part("x").find("x") is None and store.size == store.for_part("x").size <= 10_000
    clock.now = 61.0
    assert store.for_part("z").expire() and (len(store), store.size) == (0, 0)


def test_references_are_resolved_in_their_places():
    store = Store("abcdefgh")
    keep(store, "a", [said("one")])
    before = store.conversation(store.find("a"))
    keep(store, "b", [said("two")])
    found = resolved([said("three"), ItemReference("msg_b"), said("four")], before, store)
    assert texts(as_items(found)) == ["three", "to b", "four"]


@pytest.mark.parametrize(
    ("own", "status", "param", "code"),
    [
        ([ItemReference("msg_z")], 404, "input[0].id", "item_not_found"),
        ([said("b"), ItemReference("msg_a")], 400, "input[1].id", "invalid_value"),
        ([ItemReference("msg_b"), ItemReference("msg_b")], 400, "input[1].id", "invalid_value"),
        ([said("to a", "msg_a", "assistant")], 400, "input[0].id", "invalid_value"),
    ],
)
def test_references_that_cannot_be(own, status, param, code):
    store = Store("abcdefgh")
    for name in "ab":
        keep(store, name, [said(name)])
    with pytest.raises(Refused) as found:
        resolved(own, store.conversation(store.find("a")), store)
    assert (found.value.status, found.value.param, found.value.code) == (status, param, code)


def test_what_is_forgotten_is_forgotten_in_parts(clock):
    """A thousand responses with thousands of items each would take seconds, in which all others wait."""
    store = Store("abcdefgh", clock=clock)
    keep(store, "0", [said("x") for _ in range(3000)])
    for i in range(1, 9):
        keep(store, str(i), [], before=store.conversation(store.find(str(i - 1))))
    assert len(store) == 9
    clock.now = 3601.0
    assert store.find("8") is None and store.item("msg_0") is None
    assert 3 <= len(store) <= 6
    while len(store):
        assert store.expire()
    assert store.size == 0


def test_items_that_many_responses_have_are_bounded():
    store = Store("abcdefgh", limit=1 << 21)
    keep(store, "0", [said("x") for _ in range(1000)])
    for i in range(1, 100):
        keep(store, str(i), [], before=store.conversation(store.find(str(i - 1))))
    assert 5 < len(store) < 16 and store.size <= 1 << 21
