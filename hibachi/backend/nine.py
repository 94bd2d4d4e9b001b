"""Backends that have the crate's nine operations and no more: what serves levels 0 and feed-forward."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.library import Library
from hibachi.backend.protocol import Backend
from hibachi.errors import ConfigError

OPERATIONS = ("shape", "cat", "eq", "vectorize_dim", "slice", "idx_where_all_true", "pop", "repeat", "unsqueeze")
ALSO = ("out_of_memory", "fatal", "guard", "memory", "versions")  # of `Library`, used where the object has them


class NineBackend(Library):
    """An object with the nine operations, as the engine sees it. What else it has of `Library` is used.

    Raises ConfigError for an object that lacks an operation or the name.
    """

    ops: Backend[Any]
    name: str

    def __init__(self, ops: Any) -> None:
        lacking = [name for name in OPERATIONS if not callable(getattr(ops, name, None))]
        if lacking or not isinstance(getattr(ops, "name", None), str):
            one = f"{len(OPERATIONS) - len(lacking)} of the nine operations: it lacks {', '.join(lacking)}"
            raise ConfigError(
                f"backend must be a name, an ArrayBackend or an object with the nine operations of hibachi.Backend and "
                f"a name; got {type(ops).__qualname__} {f'with {one}' if lacking else 'without a name, a string'}. "
                f"Add what is missing (docs/backends.md)."
            )
        self.ops, self.name = ops, ops.name
        for name in ALSO:
            if callable(own := getattr(ops, name, None)):
                setattr(self, name, own)

    def owns(self, t: Any) -> bool:
        """Is this an array of this library? One whose shape it tells."""
        try:
            return self.ops.shape(t) is not None
        except Exception:  # of the library, or InvalidTensorOperation
            return False

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.ops!r})"


def as_backend(given: Any) -> ArrayBackend | NineBackend:
    """An object that was passed as `backend=`. Raises ConfigError."""
    return given if isinstance(given, (ArrayBackend, NineBackend)) else NineBackend(given)
