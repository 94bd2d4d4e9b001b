"""Who proposes tokens: the protocol of a drafter, and what is left of its proposals once they are checked.

A proposal decides about time only: a row keeps it if it is the token that the row draws anyhow. So a drafter may guess
as it likes. A package offers its own by an entry point: `hibachi.engine.speculation.find`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hibachi.errors import shown, text_of

Tokens: TypeAlias = "npt.NDArray[np.int32]"

NOTHING: Tokens = np.zeros(0, np.int32)


class Drafter(Protocol):
    """Proposes the tokens that may come next.

    Most need nothing but `propose`:

        class Again:
            def propose(self, keys, tokens, most):
                return [row[-1:].repeat(n) for row, n in zip(tokens, most)]

    A drafter that keeps something for each request has a method `forget(key)` as well, which is called once the request
    is over; one that was never proposed for may be named. All calls come from one thread, and the first one has no more
    time than others: a drafter is ready when it is made.
    """

    def propose(self, keys: Sequence[Hashable], tokens: Sequence[Tokens], most: Sequence[int]) -> Sequence[Any]:
        """Tokens for n rows, in their order: an array of integers [at most most[i]] for row i, empty for none.

        keys: which request each row is; the same from call to call. tokens: all tokens of each row so far, the prompt
        first, int32 [length]; they are not to be written to. From call to call they get more, or are cut at the end.
        most: how many tokens may be proposed, at least 1. A row is left out of calls where it gets none.

        What cannot be used is left out, and never harms a request: see `checked`.
        """
        ...


class Checked(NamedTuple):
    """Proposals that can be used, int32 arrays in the order of rows; what was wrong with the others, or None."""

    proposals: list[Tokens]
    wrong: str | None


def checked(found: Any, most: Sequence[int], vocab_size: int) -> Checked:
    """What a drafter returned for len(most) rows, made usable. Nothing is raised.

    A row's proposals end before the first token that is not in the vocabulary, and after most[i]: this is nothing
    wrong, as padding looks like that. A row has none if it did not get an array of integers in one dimension; no row
    has any if there are more or fewer arrays than rows.
    """
    try:
        rows = list(found)
    except Exception as e:
        return _none(most, f"expected a sequence of {len(most)} arrays, got {shown(found)}: {text_of(e)}")
    if len(rows) != len(most):
        return _none(most, f"expected {len(most)} arrays, one for each row, got {len(rows)}")
    proposals, wrong = [], None
    for i, (row, n) in enumerate(zip(rows, most, strict=True)):
        usable = _usable(row, n, vocab_size)
        if isinstance(usable, str):
            wrong = wrong or f"row {i}: {usable}"
            usable = NOTHING
        proposals.append(usable)
    return Checked(proposals, wrong)


def _none(most: Sequence[int], wrong: str) -> Checked:
    return Checked([NOTHING] * len(most), wrong)


def _usable(row: Any, most: int, vocab_size: int) -> Tokens | str:
    """The proposals of a row, or what is wrong with them."""
    try:
        given = np.asarray(row)
    except Exception as e:
        return f"expected an array of integers, got {shown(row)}: {text_of(e)}"
    if given.ndim != 1:
        return f"expected an array of integers [at most {most}], got the shape {list(given.shape)}"
    if not len(given):
        return NOTHING
    if given.dtype.kind not in "iu":
        return f"expected an array of integers, got the dtype {given.dtype}"
    given = given[:most]
    outside = np.flatnonzero((given < 0) | (given >= vocab_size))
    return given[: outside[0] if len(outside) else None].astype(np.int32)
