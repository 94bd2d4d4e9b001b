"""Proposals from what a row has said before: when its last few tokens were there already, what followed them then.

What a caller expects of an output is looked up likewise.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hibachi.engine.speculation.protocol import NOTHING, Tokens
from hibachi.errors import ConfigError

LENGTH = 5  # of the n-grams that are looked for, unless told otherwise; vLLM's default
_WORD = 0xFFFFFFFF
# Odd, and another one in each process: nobody can write a prompt whose n-grams all fall into one slot.
_FACTOR = (random.SystemRandom().getrandbits(32) & ~7) | 5
_BY_ONE = 64  # so many new tokens are put into the tables one by one; of more, the tables are made anew


def ngram(tokens: Sequence[int], least: int, most: int, k: int, max_len: int | None = None) -> list[int]:
    """The definition, slow: take the longest n-gram at the end of `tokens` that occurs before as well, with a length
    from least to most; go to its earliest place; return the tokens that follow there.

    At most k of them, and no more than lead to max_len tokens in all.
    """
    tokens = list(tokens)
    n = len(tokens)
    if max_len is not None:
        k = min(k, max_len - n)
    if k > 0:
        for m in range(min(most, n - 1), least - 1, -1):
            for first in range(n - m):
                if tokens[first : first + m] == tokens[n - m :]:
                    return tokens[first + m : first + m + k]
    return []


class NgramIndex:
    """The tokens of one row, and where its n-grams are: `find` equals `ngram` of these tokens.

    Tokens are any int32. `append` and `find` take 1 to 2 µs, whatever the number of tokens; 8,192 of them take 0.17 MB
    with n-grams of one length, and 0.13 MB more for each further length. Raises ConfigError unless 1 <= least <= most.
    """

    def __init__(self, least: int = LENGTH, most: int = LENGTH) -> None:
        if not 1 <= least <= most:
            raise ConfigError(f"The lengths of n-grams must be 1 <= least <= most; got least={least}, most={most}.")
        self._tokens = array("i")
        self._tables = [_Table(m) for m in range(most, least - 1, -1)]  # the longest first
        self._next = -1  # the place behind what was found; -1 if nothing was

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return 4 * (len(self._tokens) + sum(table.size for table in self._tables))

    def append(self, token: int) -> None:
        """This token has come."""
        tokens, behind = self._tokens, -1
        tokens.append(token)
        for table in self._tables:
            behind = table.add(tokens, token, behind)
        self._next = behind

    def extend(self, more: Iterable[int]) -> None:
        """These tokens have come."""
        new = array("i", more)
        if len(new) > _BY_ONE:
            self._tokens.extend(new[:-1])
            self._fill()
            new = new[-1:]
        for token in new:
            self.append(token)

    def cut(self, n: int) -> None:
        """All but the first n tokens have not come."""
        if n < len(self._tokens):
            last = self._tokens[max(0, n - 1) : n]
            del self._tokens[max(0, n - 1) :]
            self._fill()
            self.extend(last)

    def find(self, k: int, max_len: int | None = None) -> Tokens:
        """The proposals, int32 [at most k]."""
        if max_len is not None:
            k = min(k, max_len - len(self._tokens))
        at = self._next
        if k <= 0 or at < 0:
            return NOTHING
        return np.frombuffer(self._tokens[at : at + k], np.int32)

    def _fill(self) -> None:
        self._next = -1
        for table in self._tables:
            table.fill(self._tokens)


class _Table:
    """The first place of each n-gram of m tokens: a hash table whose slots hold places alone, as the tokens are known.

    A slot is -1 while it is empty. No more than half of them are taken.
    """

    def __init__(self, m: int) -> None:
        self.m = m
        self._out = pow(_FACTOR, m + 1, _WORD + 1)  # what a token counts once it is no longer among the last m
        self._hash = 0  # of the last m tokens, or of all while they are fewer
        self.fill(array("i"))

    @property
    def size(self) -> int:
        return len(self._slots)

    def add(self, tokens: array[int], token: int, behind: int) -> int:
        """This token is the newest one. Returns the place behind the last m tokens where they were for the first time;
        -1 if they are new, and from now on they are not.

        behind: what a table of longer n-grams returned. If it is a place, that is returned: the end of an n-gram that
        was there before was there before as well, so there is nothing to look for.
        """
        m, start = self.m, len(tokens) - self.m
        gone = tokens[start - 1] * self._out if start > 0 else 0
        value = ((self._hash + token) * _FACTOR - gone) & _WORD
        self._hash = value
        if start < 0 or behind >= 0:
            return behind
        slots, at = self._slots, value >> self._shift
        while (place := slots[at]) >= 0:
            if tokens[place : place + m] == tokens[start:]:
                return place + m
            at = (at + 1) & self._mask
        slots[at] = start
        self._taken += 1
        if 2 * self._taken > len(slots):
            self.fill(tokens)
        return -1

    def fill(self, tokens: array[int]) -> None:
        """Make the table of these tokens, all n-grams at once."""
        m, count = self.m, max(0, len(tokens) - self.m + 1)
        bits = max(6, (3 * count).bit_length())
        self._slots, self._mask, self._shift = array("i", [-1]) * (1 << bits), (1 << bits) - 1, 32 - bits
        self._taken = 0
        self._hash = 0
        for token in tokens[-m:]:
            self._hash = (self._hash + token) * _FACTOR & _WORD
        if not count:
            return
        words, slots = np.frombuffer(tokens, np.uint32), np.frombuffer(self._slots, np.int32)
        hashes = np.zeros(count, np.uint32)
        for i in range(m):
            hashes = (hashes + words[i : i + count]) * np.uint32(_FACTOR)
        start, at = np.arange(count, dtype=np.int32), (hashes >> np.uint32(self._shift)).astype(np.int64)
        while len(start):
            empty = np.flatnonzero(slots[at] < 0)[::-1]
            slots[at[empty]] = start[empty]  # of several for one slot the last stays, which is the earliest place
            place = slots[at]
            other = np.zeros(len(start), bool)
            for i in range(m):
                other |= words[place + i] != words[start + i]
            start, at = start[other], (at[other] + 1) & self._mask
        self._taken = int((slots >= 0).sum())


class NgramDrafter:
    """Proposes by n-grams. It keeps an index for each request until that is forgotten, and costs a few µs a row: it
    needs no thread of its own, and its proposals need no check.
    """

    def __init__(self, least: int = LENGTH, most: int = LENGTH) -> None:
        self._least, self._most = least, most
        self._indices: dict[Hashable, NgramIndex] = {}
        NgramIndex(least, most)  # raises if they are wrong

    def propose(self, keys: Sequence[Hashable], tokens: Sequence[Tokens], most: Sequence[int]) -> list[Tokens]:
        """As `Drafter.propose`."""
        each = zip(keys, tokens, most, strict=True)
        return [self.guess(key, len(row), partial(_from, row), k) for key, row, k in each]

    def guess(self, key: Hashable, length: int, read: Callable[[int], Tokens], k: int) -> Tokens:
        """At most k proposals for one row of so many tokens. read: those from a place on."""
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = NgramIndex(self._least, self._most)
        known = len(index)
        if known > length:
            index.cut(known := length)
        if known == length - 1:
            index.append(read(known).item())
        elif known < length:
            index.extend(read(known).tolist())
        return index.find(k)

    def forget(self, key: Hashable) -> None:
        self._indices.pop(key, None)


def _from(row: Tokens, start: int) -> Tokens:
    return row[start:]


LONG = 3  # an answer that has left the prediction is found again by so many last tokens, anywhere, ...
NEAR = 64  # ... or by its last one, so near behind the place where it left
_BITS = 31
_MASK = (1 << _BITS) - 1
# Odd, and others in each process: nobody can write a text whose n-grams all look alike.
_FACTORS = [random.SystemRandom().getrandbits(_BITS) | 1 for _ in range(LONG)]


def predicted(prediction: Sequence[int], answer: Sequence[int], k: int) -> list[int]:
    """The definition, slow: where the answer stands in the prediction, and the at most k tokens that follow there.

    It begins at the start, and goes on for as long as the same tokens come. After another one it is looked for: by its
    last `LONG` tokens at the first place behind the one where it left, else at the first of all; else by its last
    token, at most `NEAR` tokens behind. It has left where it last followed for two tokens or more.
    """
    p, at, left, run = list(prediction), 0, 0, 0
    for n, token in enumerate(answer, 1):
        if 0 <= at < len(p) and p[at] == token:
            at, run = at + 1, run + 1
        else:
            tail, run = list(answer[max(0, n - LONG) : n]), 0
            long = [i for i in range(len(p) - LONG + 1) if p[i : i + LONG] == tail]
            near = [i for i in range(left, min(left + NEAR, len(p))) if p[i] == token]
            behind = [i for i in long if i >= left]
            if long:
                at, run = (behind or long)[0] + LONG, LONG
            else:
                at, run = (near[0] + 1, 1) if near else (-1, 0)
        if run > 1:
            left = at
    return p[at : at + k] if at >= 0 else []


class ExpectedTokens:
    """What one answer may be, int32 [m], and where the answer stands in it. `find` equals `predicted`.

    `find` takes some µs for a new token, whatever m is. 8,192 tokens take 0.2 MB, and 1 ms when it is made.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._proposals = tokens.astype(np.int32)
        self._proposals.flags.writeable = False
        self._tokens = array("i", self._proposals.tobytes())
        places = np.arange(len(tokens), dtype=np.int64)
        self._ones = _sorted(tokens.astype(np.int64), places)
        self._threes = _sorted(_hashes(tokens), places[: max(0, len(tokens) - LONG + 1)])
        self._begin()

    def _begin(self) -> None:
        self._seen = self._at = self._left = self._run = 0
        self._tail = array("i")  # the last tokens of the answer

    def find(self, answer: Tokens, k: int) -> Tokens:
        """The proposals, int32 [at most k]. answer: all of its tokens so far, int32 [n]."""
        if len(answer) < self._seen:  # some were taken back
            self._begin()
        if len(answer) == self._seen + 1:
            self._came(answer.item(self._seen))
        else:
            for token in answer[self._seen :].tolist():
                self._came(token)
        self._seen, at = len(answer), self._at
        return NOTHING if at < 0 else self._proposals[at : at + k]

    def _came(self, token: int) -> None:
        tail, at = self._tail, self._at
        tail.append(token)
        if len(tail) > LONG:
            del tail[0]
        if 0 <= at < len(self._tokens) and self._tokens[at] == token:
            self._at, self._run = at + 1, self._run + 1
        else:
            self._look(token)
        if self._run > 1:
            self._left = self._at

    def _look(self, token: int) -> None:
        """Find the place behind the last tokens."""
        if len(self._tail) == LONG:
            (a, b, c), (x, y, z) = _FACTORS, self._tail
            key = (a * x + b * y + c * z) & _MASK
            earliest = _at(self._threes, key, 0)  # mostly there is none
            behind = _at(self._threes, key, self._left) if 0 <= earliest < self._left else earliest
            for place in (behind, earliest):
                if place >= 0 and self._tokens[place : place + LONG] == self._tail:
                    self._at, self._run = place + LONG, LONG
                    return
        place = _at(self._ones, token, self._left)
        self._at, self._run = (place + 1, 1) if 0 <= place < self._left + NEAR else (-1, 0)


def _hashes(tokens: Tokens) -> Any:
    """Of each `LONG` tokens: int64."""
    n = max(0, len(tokens) - LONG + 1)
    found = np.zeros(n, np.int64)
    for i, factor in enumerate(_FACTORS):
        found += factor * tokens[i : i + n].astype(np.int64) & _MASK
    return found & _MASK


def _sorted(keys: Any, places: Any) -> array[int]:
    """Keys with their places, (key << 32) + place, in order."""
    return array("q", np.sort((keys << 32) + places).tobytes())


def _at(index: array[int], key: int, first: int) -> int:
    """The first place with this key that is not before `first`; -1 if there is none."""
    i = bisect_left(index, (key << 32) + first)
    if i < len(index) and index[i] >> 32 == key:
        return index[i] & 0xFFFFFFFF
    return -1
