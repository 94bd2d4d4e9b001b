"""A user's own model by name: `package.module:Name`, or `path/to/file.py:Name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from hibachi.engine.build import level_of
from hibachi.errors import ConfigError
from hibachi.tensor.array_backend import ArrayBackend
from hibachi.tensor.discover import resolve

_NAME = re.compile(r"(?:[\w.]+|.*\.py):[\w.]+")


def is_named(spec: str) -> bool:
    """Does it have the form of such a name? The path of a folder, a GGUF file and a name on the Hub do not."""
    return _NAME.fullmatch(spec) is not None


def model_named(spec: str, backend: str | ArrayBackend | None = None) -> Any:
    """The model called `spec`, an object on some rung of the ladder.

    A class is instantiated and a function called: with `backend=` (None: NumPy) if it has a parameter of that name,
    else without arguments. Any other object is used as it is.

    Raises ConfigError if there is no such name, if making the model raises (the original is in `__cause__`), or if it
    has the methods of no rung; BackendNotFound or BackendNotInstalled.
    """
    found = object_named(spec)
    if inspect.isclass(found) or inspect.isroutine(found) or isinstance(found, partial):
        found = _make(spec, found, backend)
    level_of(found)
    return found


def object_named(spec: str) -> Any:
    """What `package.module:Name` or `path/to/file.py:Name` names; dots in Name go into classes. Raises ConfigError."""
    module_name, colon, attribute = spec.rpartition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"An object is named as package.module:Name or path/to/file.py:Name; got {spec!r}. Write the module, a "
            f"colon and the name in it."
        )
    module = _file(Path(module_name)) if module_name.endswith(".py") else _module(module_name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [n for n, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__]
            raise ConfigError(
                f"{module_name} has no {attribute!r}. It defines {', '.join(public) or 'nothing'}: name one of these."
            )
        found = getattr(found, part)
    return found


def _see(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last, so that it hides nothing


def _module(name: str) -> ModuleType:
    _see(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and (name == e.name or name.startswith(f"{e.name}.")):
            raise ConfigError(
                f"There is no module {name!r} (no {e.name!r} to import). Install its package, start where it lies, or "
                f"name its file: path/to/file.py:Name."
            ) from e
        raise _failed(name, e) from e
    except (Exception, SystemExit) as e:
        raise _failed(name, e) from e


def _file(path: Path) -> ModuleType:
    """The module in a file, imported once; it finds what lies beside it."""
    if not path.is_file():
        raise ConfigError(f"There is no file {path}. Check the path, or name a module: package.module:Name.")
    path = path.resolve()
    for name in (path.stem, str(path)):
        if (known := sys.modules.get(name)) is None:
            break
        if getattr(known, "__file__", None) == str(path):
            return known
    _see(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # the latter: a program without `if __name__ == "__main__"`
        del sys.modules[name]
        raise _failed(str(path), e) from e
    return module


def _failed(name: str, e: BaseException) -> ConfigError:
    return ConfigError(f"Importing {name} raised {type(e).__name__}: {e}. Import it in Python to see where.")


def _make(spec: str, make: Any, backend: str | ArrayBackend | None) -> Any:
    try:
        takes = "backend" in inspect.signature(make).parameters
    except (TypeError, ValueError):  # some classes and functions in C have no signature
        takes = False
    given = {"backend": resolve(backend) if isinstance(backend, str) else backend or resolve("numpy")} if takes else {}
    try:
        return make(**given)
    except Exception as e:
        raise ConfigError(
            f"{spec} could not be made: {type(e).__name__}: {e}. A class or function is called with backend= if it has "
            f"such a parameter, and with nothing else; name a function that returns the model ready to run."
        ) from e
