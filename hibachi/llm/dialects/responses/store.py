"""Keeps responses for a while, so that a request need not send again what came before. One store for each tenant."""

from __future__ import annotations

import secrets
import string
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TypeAlias

from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.responses.items import PREFIXES, Given, Item, ItemReference, as_kept, kept

MOST, BYTES, SECONDS = 1000, 64 << 20, 3600.0
OVERHEAD = 256  # bytes that an item or a response takes besides its text
HELD = 128  # bytes that are counted for each item of each response: more than it takes, as forgetting it takes time
AT_ONCE = 1 << 13  # items of responses that are forgotten at a time, as others wait
_LETTERS = 8


def new_tag() -> str:
    """What the ids of a server have in them: eight letters."""
    return "".join(secrets.choice(string.ascii_lowercase) for _ in range(_LETTERS))


@dataclass(slots=True)
class KeptResponse:
    """A response. answer: as it was sent, as JSON. items: ids of the whole conversation, the first `inputs` of which
    are its input. size: bytes, without its items. used: when it was last asked for. part: of the tenant, whose it is.
    """

    id: str
    answer: bytes
    items: tuple[str, ...]
    inputs: int
    size: int
    used: float
    part: str = ""


Stored: TypeAlias = tuple[str, bytes]
"""Id and JSON of an item that is kept."""


@dataclass(frozen=True, slots=True)
class KnownItems:
    """A conversation that is kept, as it was when it was asked for. each: its items."""

    each: Sequence[Stored] = ()


@dataclass(slots=True)
class _Size:
    bytes: int = 0


class Store:
    """The responses of one tenant: at most `most`, of `limit` bytes, for `seconds` after they were last used. Those
    used least recently go first. Items that several responses have are kept, and counted, once.

    tag: of the server, for new ids.
    """

    part: str

    def __init__(
        self,
        tag: str,
        limit: int = BYTES,
        most: int = MOST,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tag, self._limit, self._most, self._seconds, self._clock = tag, limit, most, seconds, clock
        self._responses: OrderedDict[str, KeptResponse] = OrderedDict()  # least recently used first
        self._items: dict[str, bytes] = {}
        self._holders: dict[str, list[str]] = {}  # responses that have an item
        self._size = _Size()
        self.part = ""

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def keeps(self) -> bool:
        """Whether anything can be kept."""
        return self._limit > 0

    @property
    def size(self) -> int:
        """Bytes that are counted, of all parts."""
        return self._size.bytes

    def for_part(self, name: str) -> Store:
        """This store as one part of its tenant sees it, which finds only what it kept itself; "" is a part as well. All
        parts together keep to the store's bounds.
        """
        if name == self.part:
            return self
        same = copy(self)
        same.part = name
        return same

    # ---- reading -----------------------------------------------------------------------------------------------

    def find(self, id: str) -> KeptResponse | None:
        """A response, which counts as used now. None means it is not there, or not any more."""
        self.expire()
        found = self._responses.get(id)
        if found is None or found.part != self.part or self._old(found):
            return None
        self._use(found)
        return found

    def item(self, id: str) -> Stored | None:
        """An item. The response that it is of counts as used."""
        self.expire()
        data = self._items.get(id)
        if data is None or not self._has(id):
            return None
        for holder in reversed(self._holders[id]):
            if not self._old(self._responses[holder]):
                self._use(self._responses[holder])
                return id, data
        return None

    def data(self, ids: Sequence[str]) -> list[bytes]:
        """Items of a response that was found, as JSON."""
        return [self._items[id] for id in ids]

    def conversation(self, found: KeptResponse) -> KnownItems:
        """A response's input and output."""
        return KnownItems(list(zip(found.items, self.data(found.items), strict=True)))

    # ---- writing -----------------------------------------------------------------------------------------------

    def keep(
        self, id: str, answer: bytes, before: KnownItems, given: Sequence[Item | Stored], output: Sequence[Item]
    ) -> bool:
        """Keep a response. given: its input, behind what came before. An item without an id that is known, or whose
        text is another than that of the one with this id, gets an id of its own, as does one that comes again. False
        means that it is too large.
        """
        self.expire()
        items, names = list(before.each), {name for name, _ in before.each}
        for one in given:
            items.append(one if isinstance(one, tuple) else self._named(one, names))
            names.add(items[-1][0])
        inputs = len(items)
        items += [(str(item.id), as_kept(item, str(item.id))) for item in output]
        size = len(answer) + OVERHEAD + HELD * len(items)
        if size + sum(len(data) + OVERHEAD for _, data in items) > self._limit:
            return False
        self._responses[id] = KeptResponse(
            id, answer, tuple(i for i, _ in items), inputs, size, self._clock(), self.part
        )
        self._size.bytes += size
        for item, data in items:
            if item not in self._items:
                self._items[item], self._holders[item] = data, []
                self._size.bytes += len(data) + OVERHEAD
            self._holders[item].append(id)
        while self.size > self._limit or len(self._responses) > self._most:
            self._drop(next(iter(self._responses)))
        return True

    def _named(self, item: Item, others: Container[str]) -> Stored:
        """others: ids that it must not have."""
        if isinstance(item.id, str) and item.id not in others:
            data = as_kept(item, item.id)
            if self._items.get(item.id) == data and self._has(item.id):
                return item.id, data
        own = f"{PREFIXES[type(item)]}_{self.tag}_{secrets.token_hex(12)}"
        return own, as_kept(item, own)

    def forget(self, id: str) -> bool:
        """Whether it was there."""
        self.expire()
        if id not in self._responses or self._responses[id].part != self.part:
            return False
        self._drop(id)
        return True

    def expire(self, most: int = AT_ONCE) -> int:
        """Forget what has not been used for too long, until it had `most` items. Returns how many it had."""
        gone = 0
        while gone < most and self._responses and self._old(first := next(iter(self._responses.values()))):
            gone += len(first.items)
            self._drop(first.id)
        return gone

    def _has(self, item: str) -> bool:
        """Whether an item that is there is of this part: responses of two parts have none in common."""
        return self._responses[self._holders[item][0]].part == self.part

    def _old(self, found: KeptResponse) -> bool:
        return found.used < self._clock() - self._seconds

    def _use(self, found: KeptResponse) -> None:
        found.used = self._clock()
        self._responses.move_to_end(found.id)

    def _drop(self, id: str) -> None:
        gone = self._responses.pop(id)
        self._size.bytes -= gone.size
        for item in gone.items:
            holders = self._holders[item]
            holders.remove(id)
            if not holders:
                del self._holders[item]
                self._size.bytes -= len(self._items.pop(item)) + OVERHEAD


class Stores:
    """The stores of all tenants. limit: bytes of each; 0 means that nothing is kept. tag: of this server."""

    tag: str

    def __init__(self, limit: int = BYTES, tag: str | None = None) -> None:
        self.limit, self.tag = limit, tag or new_tag()
        self._of: dict[str, Store] = {}

    def of(self, tenant: str, part: str = "") -> Store:
        """The store of a tenant, or of a part of it. Some of what has expired in any of them is forgotten then."""
        left = AT_ONCE
        for store in self._of.values():
            left -= store.expire(left)
        return self._of.setdefault(tenant, Store(self.tag, self.limit)).for_part(part)

    @property
    def keeps(self) -> bool:
        return self.limit > 0


def no_response(id: str, param: str | None = None) -> Refused:
    """A response is not there: never was, was another tenant's, or is kept no longer. param: the field that named it;
    None means the path did.
    """
    shown = id[:100]
    if param is None:
        return Refused(f"Response with id {shown!r} not found.", status=404, code="response_not_found")
    return Refused(
        f"Previous response with id {shown!r} not found: it was not stored, or is kept no longer. Send the whole "
        f"conversation as input.",
        status=404,
        param=param,
        code="previous_response_not_found",
    )


def no_item(id: str, param: str) -> Refused:
    return Refused(
        f"Item with id {id[:100]!r} not found: it was not stored, or is kept no longer. Send the item itself.",
        status=404,
        param=param,
        code="item_not_found",
    )


def as_items(items: Sequence[Item | Stored]) -> list[Item]:
    """Items to be shown to a model."""
    return [kept(item[1]) if isinstance(item, tuple) else item for item in items]


def resolved(own: Sequence[Given], before: KnownItems, store: Store) -> list[Item | Stored]:
    """The items of an input, with those that it refers to. Raises Refused."""
    found = list[Item | Stored]()
    known_before = {id for id, _ in before.each}
    seen = set(known_before)
    for i, item in enumerate(own):
        place, refers = f"input[{i}].id", isinstance(item, ItemReference)
        if isinstance(item.id, str) and item.id in (seen if refers else known_before):
            what = "reference" if refers else "item"
            raise Refused.at(place, f": the conversation has the item {item.id[:100]!r} already. Leave the {what} out.")
        if not isinstance(item, ItemReference):
            found.append(item)
            continue
        known = store.item(item.id)
        if known is None:
            raise no_item(item.id, place)
        seen.add(item.id)
        found.append(known)
    return found
