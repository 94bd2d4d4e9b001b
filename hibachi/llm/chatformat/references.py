"""What a `$ref` in the schema of a tool means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_CODED = re.compile(r"(?:%[0-9a-fA-F]{2})+")


def referred(ref: Any, root: Any) -> Any:
    """The part of the schema `root` that a reference such as "#/$defs/city" names. Nothing is fetched.

    Raises LookupError if there is no such part.
    """
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise LookupError(ref)
    found = root
    for step in ref.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name not in found:
            step = _CODED.sub(_decoded, step)  # a reference is a URI: "List%3Ccity%3E"
            name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and len(name) < 9 and int(name) < len(found):
            found = found[int(name)]
        else:
            raise LookupError(ref)
    return found


def _decoded(codes: re.Match[str]) -> str:
    return bytes.fromhex(codes[0].replace("%", "")).decode(errors="replace")
