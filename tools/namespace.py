"""What hibachi uses of the array-API namespace `xp` of a library, with no class of its own for it.

    python tools/namespace.py      write the tables in docs/backends.md

tests/testing/test_contract.py holds the tables with what is here, and with what is really called. What the levels of
models call is recorded: small models of each level run on `Spy`.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import array_api_strict
import numpy as np

from hibachi import ArrayBackend, AutoregressiveBatchInference, FeedforwardBatchInference, SamplingParams
from hibachi.testing import toys

ROOT = Path(__file__).parents[1]
PLACES = (
    "hibachi/backend/array_backend.py",
    "hibachi/backend/masks.py",
    "hibachi/backend/attention_terms.py",
    "hibachi/engine/sampling",
    "hibachi/llm/model",
    "hibachi/engine/runners",
)
KIT = ("hibachi/testing/toys.py", "conformance")
DTYPES = ("bool", "int8", "int32", "int64", "uint32", "float16", "bfloat16", "float32", "float64")


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


def room_of(file: Path) -> str:
    """Its storey, or its room in one that has many."""
    _, storey, room, *_ = file.relative_to(ROOT).parts
    return storey if storey == "backend" else room


def table(places: Iterable[str] = PLACES) -> dict[str, tuple[set[str], set[str]]]:
    """{name: (its keywords, the rooms that use it)}, without dtypes and dunders."""
    out: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    for file in files(places):
        for name, keywords in used(file.read_text()).items():
            if name not in DTYPES and not name.startswith("__"):
                out[name][0].update(keywords)
                out[name][1].add(room_of(file))
    return dict(out)


class Spy:
    """A namespace that notes what is called: {function: its keywords}. own: a file whose calls do not count."""

    def __init__(self, own: str | None = None) -> None:
        self.own, self.calls = own, dict[str, set[str]]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(array_api_strict, name)
        if name.startswith("__") or sys._getframe(1).f_code.co_filename == self.own:
            return found
        keywords = self.calls.setdefault(name, set())
        if not callable(found) or isinstance(found, type):
            return found
        return functools.wraps(found)(lambda *a, **k: (keywords.update(k), found(*a, **k))[1])


class Twice:
    def forward(self, x: Any) -> Any:
        return x + x


MODELS = {
    "feed-forward": (Twice,),
    "0": (toys.Count, toys.Halve, toys.SumTokens),
    "1": (toys.SumLogits,),
    "own cache": (toys.SumOwn, toys.SumOwnState),
    "2 `Paged`": (toys.SumPaged,),
    "2 `State`": (toys.SumState,),
}
ASKED = (  # of models whose tokens are sampled
    {"temperature": 0, "logprobs": 2},
    {"seed": 1, "top_k": 3, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 1, "min_tokens": 2},
    {"top_p": 0.9},
    {"typical_p": 0.9},
    {"seed": 2, "repetition_penalty": 1.5, "frequency_penalty": 1, "logit_bias": {3: 1.0}, "stop_token_ids": [9]},
    {"allowed_token_ids": [1, 2, 3]},
)


def recorded() -> dict[str, tuple[set[str], set[str]]]:
    """{level: (the functions of the namespace, the methods of the backend)} that engines call for its models. What
    the models call by themselves is left out, but for `attend`.
    """
    return {level: _called(kinds) for level, kinds in MODELS.items()}


def _called(kinds: Iterable[Any]) -> tuple[set[str], set[str]]:
    methods, spy = set[str](), Spy(toys.__file__)

    class Watched(ArrayBackend):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            caller = sys._getframe(1).f_globals["__name__"]
            if callable(found) and not name.startswith("_") and not caller.startswith("hibachi.backend."):
                methods.add(name)
            return found

    backend, models = Watched(spy, name="spy"), ArrayBackend(array_api_strict)
    models.attend = lambda *args, **special: backend.attend(*args, **special)  # what models of level 2 must call
    for kind in kinds:
        if kind is Twice:
            with FeedforwardBatchInference(Twice(), backend=backend) as single:
                single.run(np.ones(3)).result(60)
            continue
        model = kind(models)
        prompts: list[Any] = [[1, 2], [3, 1, 4, 1, 5], [1, 2]]
        prompts = [np.array(p, float) for p in prompts] if kind is toys.Halve else prompts
        asked = [SamplingParams(**each) for each in ASKED] if hasattr(kind, "vocab_size") else [None]
        options = {"max_model_len": 32, "max_num_seqs": 2, "padding_token": prompts[0][0]}
        with AutoregressiveBatchInference(model, backend=backend, **options) as engine:
            streams = [engine.run(prompt, params, max_tokens=4) for params in asked for prompt in prompts]
            for stream in streams:
                stream.collect()
    return set(spy.calls) - {*DTYPES}, methods


def _levels(name: str, found: dict[str, set[str]]) -> str:
    levels = [level for level, names in found.items() if name in names]
    return "all" if len(levels) == len(found) else ", ".join(levels)


def lines() -> list[str]:
    """The tables of docs/backends.md: functions of the namespace, and methods."""
    found = recorded()
    functions, methods = ({level: both[i] for level, both in found.items()} for i in (0, 1))
    out = ["| function | keywords | for | levels |", "|---|---|---|---|"]
    for name, (keywords, rooms) in sorted(table().items()):
        words, used_by = ", ".join(f"`{k}`" for k in sorted(keywords)), ", ".join(sorted(rooms))
        out.append(f"| `{name}` | {words} | {used_by} | {_levels(name, functions)} |")
    out += ["", "| method | levels |", "|---|---|"]
    return out + [f"| `{name}` | {_levels(name, methods)} |" for name in sorted(set().union(*methods.values()))]


if __name__ == "__main__":
    page = ROOT / "docs" / "backends.md"
    tables = re.compile(r"\| function \| keywords .*?\| method \| levels.*?\n\n", re.DOTALL)
    page.write_text(tables.sub(lambda _: "\n".join(lines()) + "\n\n", page.read_text()))
