"""Proposals from what a caller expects a request to answer, such as the text that it is to change."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from hibachi.engine.speculation.protocol import NOTHING, Tokens

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


class Prediction:
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
