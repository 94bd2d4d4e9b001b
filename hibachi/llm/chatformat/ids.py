"""Ids of calls."""

from __future__ import annotations

import hashlib

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def call_id(answer: str, choice: int, number: int, *, nine: bool = False) -> str:
    """The id of call `number` of a continuation: "call_" and 24 letters, or nine letters. The same for the same answer,
    so that a run that is done again writes the same bytes.

    answer: the id of the answer, or another text that is its own. nine: see `ChatFormat.nine`.
    """
    left = int.from_bytes(hashlib.sha256(f"{answer} {choice} {number}".encode(errors="replace")).digest())
    letters = []
    for _ in range(9 if nine else 24):
        left, one = divmod(left, len(_LETTERS))
        letters.append(_LETTERS[one])
    return ("" if nine else "call_") + "".join(letters)
