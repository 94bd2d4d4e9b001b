"""Shortens vectors, and scales them to length 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hibachi.llm.dialects.errors import Refused


def shortened(vectors: Sequence[Any], dimensions: int | None) -> list[Any]:
    """The first numbers of vectors [hidden], scaled to length 1 again; None means unchanged. Raises Refused."""
    if dimensions is None:
        return list(vectors)
    if any(dimensions > len(v) for v in vectors):
        raise Refused.at(
            "dimensions",
            f" must be at most {min(map(len, vectors))}, as many as this model's vectors have; got {dimensions}.",
        )
    return [unit(v[:dimensions]).astype(v.dtype) for v in vectors]


def unit(v: Any) -> Any:
    """A vector divided by its length, in float64; a zero vector unchanged."""
    found = np.asarray(v, np.float64)
    length = np.sqrt(found @ found)
    return found / length if length > 0 else found
