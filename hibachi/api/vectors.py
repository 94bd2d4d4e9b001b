"""Vectors of texts, made shorter or brought to length 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hibachi.api.errors import Refused


def shortened(vectors: Sequence[Any], dimensions: int | None) -> list[Any]:
    """Vectors [hidden] by their first numbers, made unit length again; None means as they are. Raises Refused."""
    if dimensions is None:
        return list(vectors)
    if any(dimensions > len(v) for v in vectors):
        raise Refused(
            f"dimensions must be at most {min(map(len, vectors))}, as many as this model's vectors have; got "
            f"{dimensions}.",
            param="dimensions",
            code="invalid_value",
        )
    return [unit(v[:dimensions]).astype(v.dtype) for v in vectors]


def unit(v: Any) -> Any:
    """A vector by its length, in float64; of no length, as it is."""
    found = np.asarray(v, np.float64)
    length = np.sqrt(found @ found)
    return found / length if length > 0 else found
