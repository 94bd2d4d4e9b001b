"""What hibachi uses of the array-API namespace `xp` of a library, with no class of its own for it.

    python tools/namespace.py      the table in docs/backends.md

tests/testing/test_contract.py holds the table with what is here, and with what is really called.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = (
    "hibachi/tensor/array_backend.py",
    "hibachi/tensor/masks.py",
    "hibachi/tensor/terms.py",
    "hibachi/decode",
    "hibachi/model",
    "hibachi/runners",
)
KIT = ("hibachi/testing/toys.py", "conformance")
DTYPES = ("bool", "int8", "int32", "int64", "uint32", "float16", "bfloat16", "float32", "float64")
SHOWN = {"tensor": "backend", "decode": "decode", "model": "model", "runners": "runners"}  # rooms in the table


def files(places: Iterable[str] = PLACES) -> list[Path]:
    return [
        file
        for place in places
        for file in ([ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py")))
    ]


def is_namespace(node: ast.expr) -> bool:
    """`xp`, `self.xp`, `backend.xp`, ..."""
    return (isinstance(node, ast.Name) and node.id == "xp") or (isinstance(node, ast.Attribute) and node.attr == "xp")


def used(source: str) -> dict[str, set[str]]:
    """{name: its keywords} of all that a module takes from a namespace. Called with `**`: the keyword "**"."""
    tree, found = ast.parse(source), defaultdict[str, set[str]](set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_namespace(node.value):
            found[node.attr] |= set()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_namespace(node.func.value):
            found[node.func.attr] |= {keyword.arg or "**" for keyword in node.keywords}
    return dict(found)


def table(places: Iterable[str] = PLACES) -> dict[str, tuple[set[str], set[str]]]:
    """{name: (its keywords, the rooms that use it)}, without dtypes and dunders."""
    out: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for file in files(places):
        for name, keywords in used(file.read_text()).items():
            if name not in DTYPES and not name.startswith("__"):
                out[name][0].update(keywords)
                out[name][1].add(file.relative_to(ROOT).parts[1])
    return dict(out)


def lines() -> list[str]:
    """The table of docs/backends.md."""
    out = ["| function | keywords | for |", "|---|---|---|"]
    for name, (keywords, rooms) in sorted(table().items()):
        words = ", ".join(f"`{keyword}`" for keyword in sorted(keywords))
        out.append(f"| `{name}` | {words} | {', '.join(SHOWN[room] for room in sorted(rooms))} |")
    return out


if __name__ == "__main__":
    print("\n".join(lines()))
