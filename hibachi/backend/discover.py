"""Finding backends: by name, by array, by entry point in the group `hibachi.backends`."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from functools import partial
from typing import Any

from hibachi.backend.array_backend import ArrayBackend
from hibachi.common.installed import by_name
from hibachi.common.named import object_named
from hibachi.errors import BackendNotFound, BackendNotInstalled, ConfigError, HibachiError

GROUP = "hibachi.backends"
VARIABLE = "HIBACHI_DEFAULT_BACKEND"
BEST = ("torch", "jax", "numpy")  # for a model from files, the fastest first

log: logging.Logger = logging.getLogger("hibachi.tensor")


def _class(name: str) -> Any:
    try:
        return by_name(GROUP)[name].load()
    except ModuleNotFoundError as e:
        raise BackendNotInstalled(
            f"Backend {name!r} needs the module {e.name!r}, which is not installed. "
            f"From the checkout: pip install '.[{name}]'."
        ) from e


def known() -> list[str]:
    """Names of all registered backends, installed or not."""
    return list(by_name(GROUP))


def load_backend(name: str, *, device: Any = None) -> ArrayBackend:
    """The backend called `name`, on `device` (the library's own notation; None means its default).

    Raises BackendNotFound for an unknown name, BackendNotInstalled if the library below it is missing, ConfigError if
    it does not start, for example on a device that is not there.
    """
    if name not in by_name(GROUP):
        raise BackendNotFound(
            f"No backend is called {name!r}. Known: {', '.join(known()) or 'none'}. "
            f"A package adds one by an entry point in the group {GROUP!r}."
        )
    return _start(name, _class(name), device)


def _start(name: str, make: Any, device: Any) -> ArrayBackend:
    """The backend that `make(device=device)` returns; `make()` without a device."""
    backend = _made(name, make, device)
    if isinstance(backend, ArrayBackend):
        return backend
    raise BackendNotFound(f"{name!r} must give a hibachi.ArrayBackend; got {type(backend).__qualname__}.")


def _made(name: str, make: Any, device: Any) -> Any:
    try:
        backend = make() if device is None else make(device=device)
        if isinstance(backend, ArrayBackend) and device is not None:
            backend.zeros((1,), "float32")  # some libraries look for a device when they first use it
        return backend
    except HibachiError:
        raise
    except Exception as e:
        where = "" if device is None else f" on device {device!r}"
        raise ConfigError(
            f"Backend {name!r} does not start{where}: {type(e).__name__}: {e}. "
            f"{'Look into its installation' if device is None else 'Leave the device out, or name one that is there'}."
        ) from e


def available_backends() -> list[str]:
    """Names of the backends that load on this machine."""
    return [name for name in known() if why_missing(name) is None]


def best_backend() -> str:
    """Name of the backend for a model from files where the caller names none. The log says which, and why."""
    name, why = best_and_why()
    log.info("backend=%s: %s", name, why)
    return name


def best_and_why() -> tuple[str, str]:
    """The backend that the variable HIBACHI_DEFAULT_BACKEND names, else the first of `BEST` that imports; and why that
    one.
    """
    if named := os.environ.get(VARIABLE):
        return named, f"the variable {VARIABLE} names it"
    missing = {}
    for name in BEST:
        if (why := why_missing(name)) is None:
            break
        missing[name] = why
    others = "".join(f"; not {other}: {why.rstrip('.')}" for other, why in missing.items())
    return name, f"the first of {', '.join(BEST)} that imports{others}"


def resolve_or_best(name: str | None, *, device: Any = None) -> ArrayBackend:
    """`resolve` for a model from files: None means `best_backend`. Raises like `resolve`, and names the variable
    HIBACHI_DEFAULT_BACKEND if the name is its.
    """
    try:
        return resolve(name or best_backend(), device=device)
    except HibachiError as e:
        if name or not os.environ.get(VARIABLE):
            raise
        raise type(e)(f"{VARIABLE}: {e}") from e


def why_missing(name: str) -> str | None:
    """Why a backend does not load, or None if it does."""
    if name not in by_name(GROUP):
        return "no installed package registers it"
    try:
        _class(name)
    except Exception as e:  # a broken library must not take the working ones with it
        return str(e) if isinstance(e, BackendNotInstalled) else f"{type(e).__name__}: {e}"
    return None


def backend_for(array: Any) -> ArrayBackend:
    """The backend for this array's library and device.

    An entry point is asked if a module of its name is imported (without it no array of that library can exist), so
    backends are named after their library. Any other array that follows the array API is served through its own
    namespace. Raises BackendNotFound.
    """
    library = type(array).__module__.split(".")[0]
    for name in sorted(known(), key=lambda n: not library.startswith(n)):
        if name in sys.modules and why_missing(name) is None:
            backend: ArrayBackend | None = _class(name).for_array(array)
            if backend is not None:
                return backend
    if hasattr(array, "__array_namespace__"):
        return ArrayBackend(array.__array_namespace__(), name=library)
    raise BackendNotFound(
        f"No backend knows {type(array).__module__}.{type(array).__qualname__}. Known: {', '.join(known())}. "
        f"Pass backend=NAME or a Backend object."
    )


def resolve(spec: str, *, device: Any = None) -> ArrayBackend:
    """A backend from NAME, `package:object` or `file.py:object` (a backend, its class or factory), or the name of an
    array-API module.

    Raises like `load_backend`.
    """
    if spec in by_name(GROUP):
        return load_backend(spec, device=device)
    found, named = _object(spec)
    if named:
        return _start(spec, found if callable(found) else lambda: found, device)
    if not hasattr(found, "__array_api_version__") and not hasattr(found, "permute_dims"):
        raise BackendNotFound(f"Module {spec!r} does not follow the array API. Known backends: {', '.join(known())}.")
    return _start(spec, partial(ArrayBackend, found), device)


def resolve_any(spec: str) -> Any:
    """Like `resolve`, but an object by name may be anything, such as one with the nine operations only."""
    if spec not in by_name(GROUP) and ":" in spec:
        found, _ = _object(spec)
        return _made(spec, found, None) if callable(found) else found
    return resolve(spec)


def _object(spec: str) -> tuple[Any, bool]:
    """A module, or an object in one, and which of the two."""
    module, _, attribute = spec.rpartition(":") if ":" in spec else (spec, "", "")
    if module.endswith(".py"):
        return object_named(spec), True
    try:
        found: Any = importlib.import_module(module)
    except (ImportError, TypeError, ValueError) as e:  # the others: a name like ".x" or ""
        raise BackendNotFound(
            f"{spec!r} is neither a backend (known: {', '.join(known())}) nor a module that can be imported ({e})."
            f"{f' For a GPU: a backend with device={spec!r}.' if spec in ('cuda', 'gpu', 'mps', 'tpu', 'cpu') else ''}"
        ) from e
    for part in filter(None, attribute.split(".")):
        if not hasattr(found, part):
            raise BackendNotFound(f"Module {module!r} has no attribute {attribute!r}.")
        found = getattr(found, part)
    return found, bool(attribute)
