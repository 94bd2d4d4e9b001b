"""Prefix affinity: requests that begin alike go to the same server, which has their beginning cached, unless it is
overloaded.

No table of past requests is kept: the home of a beginning follows from its digest and the servers' names and weights.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from hashlib import sha256
from math import ceil

from hibachi.router.policies import Ask, Homes, preferred
from hibachi.router.upstreams import Upstream

STEP, FURTHEST = 1 << 10, 1 << 16  # bytes: from one piece to the next, and what is looked at in all
SPAN, COMMON = 128, 16  # a piece is common if more than 16 of the latest 128 requests for each server have it,
PARTING = 4  # and the common part ends where this many different pieces follow it
MORE, BESIDES = 1.25, 2  # a home has at most this many times its share of the requests, and this many more


def pieces_of(text: bytes) -> tuple[bytes, ...]:
    """A digest of the first KiB, of the first two, and so on to 64. What is left over has none, so that a text that
    goes on keeps the pieces that it had.
    """
    made, view = sha256(usedforsecurity=False), memoryview(text)  # many processors have instructions for it
    pieces = []
    for end in range(STEP, min(len(view), FURTHEST) + 1, STEP):
        made.update(view[end - STEP : end])
        pieces.append(made.copy().digest()[:8])
    return tuple(pieces)


class Latest:
    """How many of the latest requests have a piece, and how many different pieces follow it.

    Pieces are counted to twice the depth of those that are common: one of most requests, and soon enough of all.
    """

    def __init__(self) -> None:
        self._seen: Counter[bytes] = Counter()
        self._next: Counter[bytes] = Counter()
        self._latest: deque[tuple[bytes, ...]] = deque()

    def shared(self, pieces: Sequence[bytes]) -> int:
        """How many of the first pieces belong to a common beginning: all to the last one where requests part."""
        parting = (i for i in range(self._common(pieces), 0, -1) if self._next[pieces[i - 1]] >= PARTING)
        return next(parting, 0)

    def add(self, pieces: tuple[bytes, ...], most: int) -> None:
        """One more request; `most` of them are remembered."""
        known = pieces[: 2 * self._common(pieces) + 1]
        self._latest.append(known)
        for before, piece in zip((b"", *known), known, strict=False):
            if piece not in self._seen:
                self._next[before] += 1
            self._seen[piece] += 1
        while len(self._latest) > most:
            gone = self._latest.popleft()
            for before, piece in zip((b"", *gone)[-2::-1], gone[::-1], strict=True):  # what follows goes first
                self._seen[piece] -= 1
                if not self._seen[piece]:
                    del self._seen[piece], self._next[piece]  # a Counter: it need not be there
                    self._next[before] -= 1

    def _common(self, pieces: Sequence[bytes]) -> int:
        return next((i for i, piece in enumerate(pieces) if self._seen[piece] <= COMMON), len(pieces))


class PrefixAffine:
    """A request's home is that of its first piece, by rendezvous hashing: a conversation goes on where it began. Where
    the home has its share and more, the least busy server gets the request: consistent hashing with bounded loads
    (Mirrokni, Thorup & Zadimoghaddam 2018). It may have two besides, as with few requests chance alone makes a
    difference of more than a quarter.

    A beginning that very many have, such as a system prompt, would fill one server, and is in all caches anyway. So
    what is common among the latest requests for a model is passed over, and the piece after it counts; where nothing
    comes after it, the least busy server is as good as any. That much is remembered, and no more: routers that do not
    talk agree on it as far as they see the same mixture of requests, and on all other homes always.
    """

    pieces, loads = True, False

    def __init__(self) -> None:
        self._latest: defaultdict[str, Latest] = defaultdict(Latest)  # by model
        self._homes: defaultdict[str, Homes] = defaultdict(Homes)

    def home(self, ask: Ask, among: Sequence[Upstream]) -> Upstream | None:
        """Where it is at home, busy or not; None means nowhere. Changes nothing, and is right after `choose`, too."""
        own = ask.pieces[self._latest[ask.model].shared(ask.pieces) :]
        return self._homes[ask.model].of(own[0], among) if own and among else None

    def choose(self, free: Sequence[Upstream], ask: Ask, now: float) -> Upstream:
        everyone = ask.everyone or free
        if ask.pieces:
            self._latest[ask.model].add(ask.pieces, SPAN * len(everyone))
        home = self.home(ask, everyone)
        if home is None or home not in free:
            return preferred(free)
        if home.in_flight > BESIDES:
            share = home.place.weight / self._homes[ask.model].weight
            if home.in_flight >= ceil(MORE * share * (sum([u.in_flight for u in everyone]) + 1)) + BESIDES:
                return preferred(free)
        return home
