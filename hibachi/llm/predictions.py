"""What callers expect texts to be: one for all prompts, or one for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hibachi.errors import InvalidRequest
from hibachi.llm.tokenizers.prompts import is_id

Predictions: TypeAlias = str | Sequence[int] | Sequence[str | Sequence[int] | None] | None


def for_each(given: Predictions, n: int, read: Callable[[str], list[int]] | None) -> list[Any]:
    """The prediction of each of n texts, as token ids; None for none. read: makes ids of a text; None: of no use.

    Raises InvalidRequest for another number of them; what is no ids is left to the engine, which refuses it.
    """
    each: Sequence[Any] = [given] * n
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)) and not all(map(is_id, given)):
        each = given
    if len(each) != n:
        raise InvalidRequest(f"Expected one prediction, or one for each of {n} prompts; got {len(each)}.")
    known = {text: None if read is None else read(text) for text in each if isinstance(text, str)}
    return [known[one] if isinstance(one, str) else one for one in each]
