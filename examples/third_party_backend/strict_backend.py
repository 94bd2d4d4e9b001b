"""array_api_strict as a backend of hibachi: all is derived from its namespace, one operation is native."""

from typing import Any

import array_api_strict

from hibachi import ArrayBackend


class StrictBackend(ArrayBackend):
    """device: one of the library's own, such as array_api_strict.Device("device1"); None: its CPU."""

    name = "array_api_strict"

    def __init__(self, device: Any = None) -> None:
        super().__init__(array_api_strict, device=device)

    def scatter_rows(self, dst: Any, idx: Any, src: Any) -> Any:
        for at, row in enumerate(self.get(idx)):
            dst[int(row), ...] = src[at, ...]
        return dst
