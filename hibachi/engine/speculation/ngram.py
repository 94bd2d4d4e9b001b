"""Proposals from what a row has said before: when its last few tokens were there already, what followed them then."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

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
