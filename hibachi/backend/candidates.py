"""Kernels by name: for each operation of a backend the ways that there are to compute it, and backends made of them.

A package adds its own by an entry point in the group `hibachi.kernels`: a function of a backend that returns a list of
`Candidate`. Which of them are taken is measured, see `hibachi.llm.tune.autotune`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from inspect import getattr_static
from typing import Any

from hibachi.backend.array_backend import ArrayBackend
from hibachi.common.installed import entry_points
from hibachi.common.shapes import CallShapes

GROUP = "hibachi.kernels"
OPERATIONS = {
    "linear": ("put_weight", "put_rows", "put_vocabulary", "put_precise", "weight_rows", "linear", "logits"),
    "attention": ("make_cache", "attend"),
    "activations": ("rms_norm", "layer_norm", "rope", "silu", "gelu", "gelu_tanh", "gated", "softmax"),
    "sampling": ("best", "best_on_host", "draw", "mass"),
}
"""The methods of a backend that must come from one candidate, as they share a layout or are timed together."""
LADDERS = {"powers": (1, 1), "halves": (2, 1), "quarters": (4, 2), "eighths": (8, 4)}
"""Sizes that steps are padded to, see `hibachi.common.shapes`."""


@dataclass(frozen=True)
class Candidate:
    """A way to compute an operation.

    source: a class that has its methods: of the backend's own family, of which source(device) makes an object, or a
    plain one whose methods need nothing but those of an ArrayBackend. invariant: no result depends on the batch.
    rounds: weights lose digits, so it is taken only where that is allowed. why_not: why it cannot be had here; None
    means it can. needs: the module of a library without which it cannot be had. bits: the name of its numerics
    (`hibachi.backend.kernels.library`): those of one name compute the same bits.
    """

    operation: str
    name: str
    source: type
    invariant: bool = False
    rounds: bool = False
    why_not: str | None = None
    needs: str | None = None
    bits: str | None = None


def candidates(backend: ArrayBackend) -> list[Candidate]:
    """All candidates for this backend, its own first. A package that fails is one that cannot be had, and says why."""
    found = list(backend.candidates())
    for entry in entry_points(group=GROUP):
        try:
            found += entry.load()(backend)
        except Exception as e:  # a broken package must not take the working ones with it
            why = f"{type(e).__name__}: {e}"
            found += [Candidate(op, entry.name, ArrayBackend, why_not=why) for op in OPERATIONS]
    return [without_library(c) for c in found]


def without_library(c: Candidate) -> Candidate:
    """The candidate, with a reason if the library that it needs is missing. Nothing is imported."""
    if c.why_not is not None or c.needs is None:
        return c
    try:
        there = find_spec(c.needs) is not None
    except (ImportError, ValueError):  # of a package whose parent is not there, or is broken
        there = False
    return c if there else replace(c, why_not=f"{c.needs} is not installed")


def own(backend: ArrayBackend, operation: str) -> Candidate:
    """How this backend computes an operation that it has no candidates for."""
    name = backend.name if backend.kernels == "default" else backend.kernels
    return Candidate(operation, name, type(backend), invariant=backend.deterministic)


def ladders(backend: ArrayBackend) -> list[Candidate]:
    """The sizes that this backend's steps may be padded to, as candidates of the operation `buckets`: names in LADDERS,
    without a source."""
    why = None if backend.shapes.compiled else "shapes are not padded"
    if backend.shapes.sizes:
        why = f"steps have fixed sizes: {', '.join(map(str, backend.shapes.sizes))} tokens"
    elif backend.shapes.few == "decode":
        why = "single tokens alone are padded, to powers of two"
    return [Candidate("buckets", name, object, invariant=True, why_not=why) for name in LADDERS]


def compose(backend: ArrayBackend, chosen: Mapping[str, Candidate]) -> ArrayBackend:
    """A backend like this one that takes each operation from its candidate; the others stay as they are.

    One object is the base, of the class among backend and sources that knows the most. What it does not compute as
    chosen, it hands on to objects of the candidates' classes: their methods take the place of its own.
    """
    if (ladder := chosen.get("buckets")) is not None:
        plain = compose(backend, {op: c for op, c in chosen.items() if op != "buckets"})
        if LADDERS[ladder.name] == plain.shapes.parts:
            return plain
        padded = copy.copy(plain)
        padded.shapes = replace(plain.shapes, ladder=LADDERS[ladder.name])
        return padded
    kind = type(backend)
    family = [c.source for c in chosen.values() if issubclass(c.source, kind)]
    base = max([kind, *family], key=lambda cls: len(cls.__mro__))
    others = {op: c.source for op, c in chosen.items() if not _same(c.source, base, op)}
    if not others:
        return backend if base is kind else _made(base, backend.device)
    mixed = copy.copy(backend) if base is kind else _made(base, backend.device)
    methods: dict[str, Callable[..., Any]] = {"fuse": lambda decoder: None}  # the base's would run its own kernels
    for operation, source in others.items():
        methods |= _methods(backend, mixed, source, operation)
    for name, method in methods.items():
        setattr(mixed, name, method)
    mixed.draws = getattr(chosen["sampling"].source if "sampling" in chosen else base, "draws", False)
    mixed.numerics = None
    mixed.deterministic = all(c.invariant for c in chosen.values())
    mixed.prefers_invariant = False
    wanted = [
        getattr(source, "shapes", CallShapes()).multiple for source in [base, *(c.source for c in chosen.values())]
    ]
    mixed.shapes = replace(mixed.shapes, multiple=max(wanted))
    mixed.kernels = ", ".join(f"{operation} {c.name}" for operation, c in chosen.items())
    return mixed


def _made(cls: Any, device: Any) -> ArrayBackend:
    """An object of just this class: a library's plain one would make one with hibachi's kernels."""
    made: ArrayBackend = cls(device, native=False) if getattr(cls, "native", None) is False else cls(device)
    return made


def _same(source: type, base: type[ArrayBackend], operation: str) -> bool:
    """Does the base compute an operation as the source does? What a source does not have is the base's."""
    return all(getattr(source, name, own) is own for name in OPERATIONS[operation] if (own := getattr(base, name)))


def _methods(backend: ArrayBackend, mixed: ArrayBackend, source: type, operation: str) -> dict[str, Callable[..., Any]]:
    """The methods of an operation by name: of an object of the source if it is of the backend's family, else bound to
    `mixed`, as they need nothing but the methods of an ArrayBackend."""
    there = [name for name in OPERATIONS[operation] if hasattr(source, name)]
    if not issubclass(source, type(backend)):
        found = {name: getattr_static(source, name).__get__(mixed) for name in there}
        if "put_weight" in there and "put_rows" not in there:  # the base's would go past it
            found["put_rows"] = partial(ArrayBackend.put_rows, mixed)
        return found
    part = backend if source is type(backend) else _made(source, backend.device)
    return {name: getattr(part, name) for name in there}


@dataclass(frozen=True, slots=True)
class AllowedKernels:
    """Which candidates may be chosen. deterministic: those alone that do not depend on the batch. rounding: also those
    in which weights lose digits.
    """

    deterministic: bool
    rounding: bool = False

    def why_not(self, c: Candidate) -> str | None:
        """Why this one may not be chosen; None means it may."""
        if c.why_not is not None:
            return c.why_not
        if self.deterministic and not c.invariant:
            return "depends on the batch"
        return "weights lose digits; --quantization auto" if c.rounds and not self.rounding else None


def fitting(found: Sequence[Candidate], allowed: AllowedKernels) -> dict[str, list[Candidate]]:
    """By operation, those that may be chosen; operations without any are left out."""
    out: dict[str, list[Candidate]] = {}
    for c in found:
        if allowed.why_not(c) is None:
            out.setdefault(c.operation, []).append(c)
    return out
