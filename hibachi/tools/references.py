"""What a `$ref` in the schema of a tool means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def referred(ref: Any, root: Any) -> Any:
    """The part of the schema `root` that a reference such as "#/$defs/city" names. Nothing is fetched.

    Raises LookupError if there is no such part.
    """
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise LookupError(ref)
    found = root
    for step in ref.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and len(name) < 9 and int(name) < len(found):
            found = found[int(name)]
        else:
            raise LookupError(ref)
    return found
