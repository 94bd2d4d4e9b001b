"""The ids in a tokenizer's files: one for every token, and every one only once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hibachi.errors import InvalidModelFiles
from hibachi.llm.model.fields import MOST_VOCABULARY, read_text


def read_unique(file: Path) -> dict[str, Any]:
    """The object in a JSON file, in which no object has a key twice. Raises InvalidModelFiles."""
    try:
        value = json.loads(read_text(file, MOST_VOCABULARY), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as e:
        raise InvalidModelFiles(f"{file} cannot be read: {e}. Copy or download the file again.") from e
    if not isinstance(value, dict):
        raise InvalidModelFiles(f"{file}: expected a JSON object; got {type(value).__name__}. Download it again.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise ValueError(f"{twice!r:.80} is in it twice")
    return out


def check_ids(file: Path, vocab: Mapping[str, Any]) -> None:
    """Raises InvalidModelFiles unless every token has an id of its own."""
    owners: dict[int, str] = {}
    for token, i in vocab.items():
        if type(i) is not int or not 0 <= i < 2**32:
            raise InvalidModelFiles(f"{file}: expected an id for the token {token!r:.80}; got {i!r:.40}.")
        if i in owners:
            raise InvalidModelFiles(
                f"{file}: expected an id of its own for every token; got {i} for {owners[i]!r:.80} and {token!r:.80}. "
                f"Copy or download the file again."
            )
        owners[i] = token
