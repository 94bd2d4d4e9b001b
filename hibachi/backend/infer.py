"""Which backend's arrays a model gets: one rule, wherever a model is run; and whether it is in training mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import MethodType, ModuleType
from typing import Any

import numpy as np

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.discover import backend_for, resolve, resolve_any
from hibachi.backend.nine import NineBackend, as_backend
from hibachi.errors import BackendError, ConfigError

MOST_LOOKED_AT = 10_000  # objects inside a model
DEEPEST = 6  # of objects that hold objects


def named_backend(backend: Any, model: Any) -> ArrayBackend | NineBackend | None:
    """The backend that was passed, by name or as it is, else the model's own `backend`; None means there is neither.

    Raises BackendNotFound, BackendNotInstalled, ConfigError.
    """
    if backend is None:
        backend = getattr(model, "backend", None)
    if isinstance(backend, str):
        return as_backend(resolve_any(backend))
    return None if backend is None else as_backend(backend)


def backend_of(backend: Any, model: Any, *arrays: Any) -> ArrayBackend | NineBackend | None:
    """`named_backend`, else the library of the model's parameters, of its buffers, of arrays that it holds, and of
    `arrays`, in this order; None means that of the first prompt decides.

    NumPy's arrays say nothing, as models of all libraries hold some. The model is settled. Raises ConfigError for
    weights without data.
    """
    if (found := named_backend(backend, model)) is not None:
        settle_model(model, found)
        return found
    for array in chain(_registered(model, "parameters"), _registered(model, "buffers"), held(model), held(arrays)):
        if isinstance(array, np.ndarray):
            continue
        try:
            library = backend_for(array)
        except BackendError:
            continue
        if (why := library.unfit(array)) == "without data":
            raise ConfigError(
                f"{type(model).__name__} must have its weights on a device; got arrays {why} ({library!r}). Load the "
                f"weights, or move the model to where they can be computed with."
            )
        settle_model(model, library)
        return library
    return None


def prompt_backend(prompt: Any, model: Any) -> ArrayBackend:
    """Where nothing else tells: the library of a prompt, NumPy for lists. The model is settled. Raises
    BackendNotFound."""
    found = backend_for(prompt) if hasattr(prompt, "dtype") else resolve("numpy")
    settle_model(model, found)
    return found


def settle_model(model: Any, backend: ArrayBackend | NineBackend) -> None:
    """What a lazy library has put off of a model's arrays is computed here: the engine's thread may not be able to."""
    if isinstance(backend, ArrayBackend) and type(backend).settle is not ArrayBackend.settle:
        backend.settle([array for array in held([model]) if backend.owns(array)])


def _registered(model: Any, name: str) -> Iterator[Any]:
    """What a module of PyTorch, or one like it, lists by a method."""
    listed = getattr(model, name, None)
    if callable(listed) and not isinstance(model, type):
        try:
            yield from listed()
        except TypeError:  # a method of another meaning
            return


def held(thing: Any) -> Iterator[Any]:
    """Arrays inside an object: in its attributes, and in lists and dictionaries there, however deep."""
    seen, layer = {id(thing)}, [thing]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for each in layer:
            for inside in _inside(each):
                if id(inside) in seen or isinstance(inside, _DULL):
                    continue
                if len(seen) >= MOST_LOOKED_AT:
                    return
                seen.add(id(inside))
                if hasattr(type(inside), "dtype") and hasattr(type(inside), "shape"):
                    yield inside
                below.append(inside)
        layer = below


_DULL = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, np.generic)


def _inside(thing: Any) -> Iterator[Any]:
    if isinstance(thing, Mapping):
        yield from list(thing.values())
        yield from list(getattr(thing, "__dict__", {}).values())
    elif isinstance(thing, (list, tuple, set, frozenset)):
        yield from list(thing)
    elif isinstance(thing, MethodType):
        yield thing.__self__
    elif isinstance(own := getattr(thing, "__dict__", None), dict):  # not properties, which may compute
        yield from _registered(thing, "parameters")
        yield from list(own.values())


def leaves(tree: Any) -> list[Any]:
    """What stands in lists, tuples and dictionaries, however deep."""
    if isinstance(tree, Mapping):
        return [leaf for v in tree.values() for leaf in leaves(v)]
    if isinstance(tree, (list, tuple)):
        return [leaf for v in tree for leaf in leaves(v)]
    return [tree]


def mapped(make: Callable[[str, Any], Any], tree: Any, name: str = "") -> Any:
    """The same lists, tuples and dictionaries, however deep, of what `make(name, leaf)` returns. name: says where."""
    if isinstance(tree, Mapping):
        return {key: mapped(make, value, f"{name}[{key!r}]") for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        found = [mapped(make, value, f"{name}[{i}]") for i, value in enumerate(tree)]
        return found if isinstance(tree, list) else tuple(found)
    return make(name, tree)


def training(model: Any) -> list[str]:
    """Names of the kinds of layers that are in training mode and behave differently there, as PyTorch's do.

    Where a model is in training mode and has none of these, its own name: it may ask for the mode itself.
    """
    found: dict[str, None] = {}
    for root in (model, *getattr(model, "__dict__", {}).values()):
        try:
            modules, mode = getattr(root, "modules", None), getattr(root, "training", None)
        except Exception:  # an attribute of its own may raise what it likes
            continue
        if isinstance(root, type) or not callable(modules) or not isinstance(mode, bool):
            continue
        layers = [m for m in modules() if getattr(m, "training", False) and not list(m.children())]
        kinds = [type(m).__name__ for m in layers]
        special = [k for k in kinds if "batchnorm" in k.lower() or "dropout" in k.lower()]
        for kind in special or ([type(root).__name__] if root.training else []):
            found[kind] = None
    return list(found)
