"""Optional libraries, imported when first needed."""

from __future__ import annotations

import importlib
from typing import Any

from hibachi.errors import MissingExtra


def need(module: str, what: str, extra: str = "text") -> Any:
    """The module, imported. Raises MissingExtra, which says that `what` needs it, and the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name != module:  # the library is there, but something below it is not
            raise
        raise MissingExtra(
            f"{what} needs the package {module!r}, which is not installed. "
            f"It is in the extra {extra!r}: pip install '.[{extra}]' in the checkout."
        ) from e


def panicked(error: BaseException) -> bool:
    """Is it what a library in Rust raises where its own code failed? It is no Exception, and has no name to catch."""
    return type(error).__name__ == "PanicException"
