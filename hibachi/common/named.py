"""Finds the object that `package.module:Name` or `path/to/file.py:Name` names."""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.util
import re
import sys
from collections.abc import Sequence
from difflib import SequenceMatcher
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hibachi.errors import ConfigError

_NAME = re.compile(r"(?:[\w.]+|.*\.py):[\w.]+")
_FILE = "_hibachi_file"
_METHODS = {"forward", "logits", "step"}


def is_named(spec: str) -> bool:
    """Whether a text has the form of such a name. A folder, a GGUF file and a name on the Hub do not.

    The path of a Python file counts although the name in it is missing: `object_named` then says which names there are.
    """
    if spec.endswith(".py"):
        return Path(spec).is_file()
    return _NAME.fullmatch(spec) is not None and not Path(spec).exists()


def source_of(spec: str) -> Path | None:
    """The file of the module that such a name begins with, which is not imported for that; None: it has none."""
    module = spec.rpartition(":")[0] or spec
    if module.endswith(".py"):
        return Path(module)
    look_here()
    name, *rest = module.split(".")
    try:
        found = importlib.util.find_spec(name)
        for part in rest:
            if found is None:
                return None
            name = f"{name}.{part}"
            found = PathFinder.find_spec(name, found.submodule_search_locations)
    except (ImportError, ValueError):
        return None
    return None if found is None or not found.has_location or found.origin is None else Path(found.origin)


def object_named(spec: str) -> Any:
    """The object that `package.module:Name` or `path/to/file.py:Name` names; dots in Name go into classes. Raises
    ConfigError.
    """
    module_name, colon, attribute = ("", "", "") if spec.endswith(".py") else spec.rpartition(":")
    if not colon or not module_name or not attribute:
        if is_named(spec):
            there = _models(Path(spec)) or ["Name"]
            raise ConfigError(
                f"{spec} is a Python file: expected the name of a model in it as well. Write {spec}:{there[0]}"
                + (
                    f"; its classes with a method `forward`, `logits` or `step` are {', '.join(there)}."
                    if there[1:]
                    else "."
                )
            )
        raise ConfigError(
            f"An object is named as package.module:Name or path/to/file.py:Name; got {spec!r}. Write the module, a "
            f"colon and the name in it."
        )
    found: Any = _file(Path(module_name)) if module_name.endswith(".py") else _module(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"{module_name} has no {attribute!r}. It defines {_offered(found, part)}: name one of these."
            )
        found = getattr(found, part)
    return found


def place(module: str) -> str:
    """Where an object is defined: the path of its file if it came from a file, else its module."""
    return str(_path(module) or module)


def look_here() -> None:
    """Make modules in the working directory importable where no other module has their name."""
    _see(Path.cwd())


def look_beside(spec: str) -> None:
    """`look_here`, and of `path/to/file.py:Name` the folder of the file: what `object_named` makes importable."""
    look_here()
    module = spec.rpartition(":")[0]
    if module.endswith(".py"):
        _see(Path(module).resolve().parent)


def _models(path: Path) -> list[str]:
    """The classes in a file that have a method of a model, possibly from a base class in the same file. Nothing is
    run.
    """
    try:
        found = [node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.ClassDef)]
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # importing the file says what it is
        return []
    models: list[str] = []
    for node in found:
        own = {n.name for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
        if own & _METHODS or bases & {*models}:
            models.append(node.name)
    return models


def _offered(inside: Any, wanted: str = "") -> str:
    """The classes, functions and objects that are defined in a module or class, the nearest name first."""
    home = inside.__name__ if isinstance(inside, ModuleType) else getattr(inside, "__module__", None)
    own = {n: x for n, x in getattr(inside, "__dict__", {}).items() if not n.startswith("_")}
    names = [n for n, x in own.items() if getattr(x, "__module__", None) == home]
    near = {n: SequenceMatcher(None, n.lower(), wanted.lower()).ratio() for n in names}
    return ", ".join(sorted(names, key=lambda n: -near[n])) or "nothing"


# ---- modules ---------------------------------------------------------------------------------------------------------


def _see(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last, so that it hides nothing


def _module(name: str) -> ModuleType:
    look_here()
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
    """The module in a file, imported once."""
    if not path.is_file():
        raise ConfigError(f"There is no file {path}. Check the path, or name a module: package.module:Name.")
    path = path.resolve()
    try:
        return importlib.import_module(_private(path))
    except (Exception, SystemExit) as e:  # the latter: a program without `if __name__ == "__main__"`
        raise _failed(str(path), e) from e


def _private(path: Path) -> str:
    """The name of a file's module: an identifier that no other module has, made from the path."""
    return _FILE + re.sub("[^a-zA-Z0-9]", lambda m: f"_{ord(m[0]):x}_", str(path))


def _path(module: str) -> Path | None:
    """The file whose module has this name; None means the name is not one of ours."""
    if not module.startswith(_FILE):
        return None
    return Path(re.sub("_([0-9a-f]+)_", lambda m: chr(int(m[1], 16)), module.removeprefix(_FILE)))


class _Files(importlib.abc.MetaPathFinder):
    """Import finder for files behind private names, so that pickle finds them in another process too."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = _path(fullname)
        if file is None or not file.is_file():
            return None
        _see(file.parent)  # it finds what lies beside it
        return importlib.util.spec_from_file_location(fullname, file)


sys.meta_path.append(_Files())


def _failed(name: str, e: BaseException) -> ConfigError:
    return ConfigError(f"Importing {name} raised {type(e).__name__}: {e}. Import it in Python to see where.")
