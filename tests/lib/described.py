"""Data as others describe it: schemas of their documents of OpenAPI, which lie in tests/data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data"


def description(file: str) -> Callable[[str, Any], None]:
    """check(name, data): the data is what the document calls by this name. file: within tests/data."""
    jsonschema = pytest.importorskip("jsonschema")

    def plain(node: Any) -> Any:
        """`nullable` is a word of OpenAPI 3.0, which jsonschema does not know."""
        if isinstance(node, list):
            return [plain(item) for item in node]
        if not isinstance(node, dict):
            return node
        found = {name: plain(value) for name, value in node.items()}
        return {"anyOf": [found, {"type": "null"}]} if found.pop("nullable", False) is True else found

    components = plain(json.loads((DATA / file).read_text())["components"])
    kinds: dict[str, Any] = {}

    def check(name: str, data: Any) -> None:
        if name not in kinds:
            schema = {"$ref": f"#/components/schemas/{name}", "components": components}
            kinds[name] = jsonschema.Draft202012Validator(schema)
        kinds[name].validate(data)

    name = next(name for name, schema in components["schemas"].items() if schema.get("required"))
    with pytest.raises(jsonschema.ValidationError):  # it looks
        check(name, {})
    return check
