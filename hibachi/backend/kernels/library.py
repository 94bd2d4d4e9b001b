"""The kernels' library for this machine: the one that was installed with us, else one that is compiled now.

$HIBACHI_VARIANT: the name of a variant takes that one instead of the best; "none" goes without.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hibachi.backend.kernels.abi import Kernels, WrongLibrary
from hibachi.backend.kernels.build import (
    BuildFailed,
    Variant,
    build,
    build_probe,
    compiler,
    files,
    key,
    unfinished,
    variants,
)
from hibachi.backend.kernels.threads import why_so_many
from hibachi.backend.kernels.trial import Choice, cpuinfo, settled, use
from hibachi.common.cachefolder import cache_folder
from hibachi.common.locks import locked
from hibachi.common.phases import phase, phases_shown
from hibachi.errors import HibachiError

SWITCH = "HIBACHI_VARIANT"
NUMERICS = "cpu-2"
"""The name of the bits that come out: equal names, equal bits. A new one when a bit changes; CHANGELOG says so."""
INSTALLED = Path(__file__).parent / "lib"
_SUFFIX = {"Windows": ".dll", "Darwin": ".dylib"}.get(platform.system(), ".so")
_log = logging.getLogger("hibachi.kernels")
_said: set[str] = set()


class NativeUnavailable(HibachiError):
    """The kernels cannot be had here; the message says why."""


@dataclass(frozen=True)
class KernelLibrary:
    """The kernels that are used, where they come from ("installed" or "compiled"), and what a trial says of them."""

    kernels: Kernels
    variant: Variant
    path: Path
    origin: str
    choice: Choice

    def __str__(self) -> str:
        return f"{self.variant.name}, {self.origin}: {self.path}; {self.choice}"


def library() -> KernelLibrary:
    """The library, compiled now if need be. Raises NativeUnavailable."""
    found = _library(os.environ.get(SWITCH, "auto"))
    if isinstance(found, str):
        raise NativeUnavailable(found)
    return found


def why_missing() -> str | None:
    """Why there are no kernels, or None if there are. Compiles them if need be."""
    found = _library(os.environ.get(SWITCH, "auto"))
    return found if isinstance(found, str) else None


def possible() -> tuple[str, ...]:
    """The numerics that can be computed in here, the default first; () without kernels. Compiles them if need be."""
    return () if why_missing() else (NUMERICS,)


def state() -> str:
    """Which kernels are used here, or why none. In words; nothing is compiled."""
    asked = os.environ.get(SWITCH, "auto")
    if asked == "none":
        return f"not used, as {SWITCH}=none is set"
    if (INSTALLED / "manifest.json").exists() or _known():
        found = _library(asked)
        if isinstance(found, str):
            return found
        return "; ".join(filter(None, (str(found), why_so_many(), unused())))
    try:
        return f"to be compiled by {compiler()} when they are first asked for"
    except BuildFailed as e:
        return f"there are none: {e}"


def unused(root: Path = Path("/")) -> str | None:
    """What this processor has and the kernels do not use, in words; None means nothing. root: where /proc is."""
    if not {"amx_tile", "amx_bf16"} <= {*cpuinfo(root).get("flags", "").split()}:
        return None
    return "this processor has AMX, which hibachi does not use yet: another order of sums, so other bits"


def _known() -> bool:
    try:
        return any(_place(v, compiler()).exists() for v in variants())
    except (OSError, BuildFailed):
        return False


@cache
def _library(asked: str) -> KernelLibrary | str:
    """What was asked for, or why it cannot be had. Decided once, and said once."""
    try:
        if asked == "none":
            raise NativeUnavailable(f"{SWITCH}=none is set")
        installed = _installed(asked)
        found = installed or _compiled(asked)
        if idle := unused():
            _log.info("%s", idle)
        return found
    except (NativeUnavailable, BuildFailed, WrongLibrary, OSError) as e:
        if asked not in ("auto", "none"):
            raise NativeUnavailable(str(e)) from e
        why = str(e)
        if asked != "none" and why not in _said:
            _said.add(why)
            _log.warning("There are no kernels for this machine: %s Models compute the same, many times slower.", why)
        return why


def choose(asked: str, there: tuple[Variant, ...], level: int) -> tuple[Variant, ...]:
    """Of the variants that are there the one that is asked for, or those that may be the fastest, the likeliest first:
    the best, and with instructions that not all processors gain by the one without. Raises NativeUnavailable."""
    names = ", ".join(v.name for v in there)
    fitting = [v for v in there if v.level <= level]
    if asked != "auto":
        named = next((v for v in there if v.name == asked), None)
        if named is None:
            raise NativeUnavailable(f"{SWITCH} must be auto, none or one of {names}; got {asked!r}")
        if named not in fitting:
            raise NativeUnavailable(
                f"{SWITCH}={asked} needs instructions that this processor or its system does not have; it can use "
                f"{', '.join(v.name for v in fitting) or 'none of the variants'}"
            )
        return (named,)
    if not fitting:
        raise NativeUnavailable(
            f"this processor has none of the sets of instructions that they are built for ({names or 'x86-64, ARM'})"
        )
    return tuple(v for v in reversed(fitting) if v.level >= min(2, fitting[-1].level))


# ---- installed -------------------------------------------------------------------------------------------------------


def _installed(asked: str) -> KernelLibrary | None:
    """From the wheel; None means it brought none. Raises NativeUnavailable, WrongLibrary, OSError."""
    try:
        manifest = json.loads((INSTALLED / "manifest.json").read_text())
        if not isinstance(manifest, dict):
            raise ValueError("expected an object")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as e:
        raise NativeUnavailable(f"{INSTALLED / 'manifest.json'} is damaged: {e}. Install hibachi anew") from e
    there = tuple(v for v in variants() if f"{v.name}{_SUFFIX}" in manifest)
    level = 0
    if there and there[0].level:
        level = _level(_whole(INSTALLED / f"probe{_SUFFIX}", manifest))
    paths = {v: _whole(INSTALLED / f"{v.name}{_SUFFIX}", manifest) for v in choose(asked, there, level)}
    return _fastest(paths, {v: manifest[path.name][:16] for v, path in paths.items()}, "installed")


def _whole(path: Path, manifest: dict[str, str]) -> Path:
    """The path of a file that is as it was built: a damaged library may end the process. Raises NativeUnavailable."""
    if hashlib.sha256(path.read_bytes()).hexdigest() != manifest.get(path.name):
        raise NativeUnavailable(f"{path} is damaged. Install hibachi anew")
    return path


def _level(probe: Path) -> int:
    return int(ctypes.CDLL(str(probe)).hibachi_level())


# ---- compiled --------------------------------------------------------------------------------------------------------


def _compiled(asked: str) -> KernelLibrary:
    """Compiled once for this machine. Raises NativeUnavailable, BuildFailed, WrongLibrary, OSError."""
    if platform.system() not in ("Linux", "Darwin"):
        raise NativeUnavailable(f"no wheel has kernels for {platform.system()} on {platform.machine()}")
    there, level, folder = variants(), 0, cache_folder() / "kernels"
    if not there:
        raise NativeUnavailable(f"they are for x86-64 and ARM; this is {platform.machine()}")
    if there[0].level:
        level = _level(_made(folder / f"probe-{key(compiler())}{_SUFFIX}", lambda to: build_probe(to, [compiler()])))
    cxx, paths = compiler(level), dict[Variant, Path]()
    for variant in choose(asked, there, level):
        path = _place(variant, cxx)

        def make(to: Path, variant: Variant = variant) -> None:
            if not phases_shown():
                _log.warning("Compiling kernels, once for this machine, in ten to thirty seconds: %s", to)
            with phase(f"compiling kernels, once for this machine ({variant.name})", len(files()), "files") as p:
                build(variant, to, cxx, p.update)

        try:
            paths[variant] = _made(path, make)
        except BuildFailed as e:
            if not paths and variant.level < 3:
                raise
            _log.warning("%s goes without the variant %s: %s", cxx, variant.name, e)  # an older compiler
    return _fastest(paths, {v: path.stem for v, path in paths.items()}, "compiled")


def _place(variant: Variant, cxx: str) -> Path:
    return cache_folder() / "kernels" / f"{variant.name}-{key(cxx, variant)}{_SUFFIX}"


def _fastest(paths: dict[Variant, Path], contents: dict[Variant, str], origin: str) -> KernelLibrary:
    """The fastest of libraries that compute the same. Raises WrongLibrary, OSError."""
    there = {v.name: Kernels(str(path)) for v, path in paths.items()}
    try:
        folder = cache_folder() / "kernels"
    except OSError:  # nothing is kept
        folder = Path(os.devnull)
    choice = settled(there, {v.name: named for v, named in contents.items()}, folder)
    [variant] = [v for v in paths if v.name == choice.variant]
    use(there[variant.name], choice)
    return KernelLibrary(there[variant.name], variant, paths[variant], origin, choice)


def _made(path: Path, make: Callable[[Path], object]) -> Path:
    """A file that is there whole, made now if it is not. One process makes it, others wait for it.

    Raises NativeUnavailable for a folder that cannot be written, and what `make` raises.
    """
    seal = path.with_suffix(f"{path.suffix}.sha256")

    def whole() -> bool:
        try:
            return seal.read_bytes() == hashlib.sha256(path.read_bytes()).hexdigest().encode()
        except OSError:
            return False

    if not whole():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _alone(path.with_suffix(".lock")) as mine:
                if not whole():
                    for left in path.parent.glob(f"{unfinished(path)}*") if mine else ():
                        shutil.rmtree(left, ignore_errors=True)  # by a process that was killed
                    if path.exists():
                        _log.warning("%s is damaged, as after a full disk; it is made anew.", path)
                    make(path)
                    seal.write_text(hashlib.sha256(path.read_bytes()).hexdigest())
        except OSError as e:
            raise NativeUnavailable(
                f"{path.parent}, where they are kept, cannot be written ({e.strerror or e}). Set XDG_CACHE_HOME to a "
                f"folder that can be written"
            ) from e
    return path


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """No other process does the same meanwhile. The lock ends with the process that holds it, however that ends.

    False means there are no locks here.
    """
    with path.open("w") as file:
        if (mine := locked(file.fileno())) is False:
            if not phases_shown():
                _log.warning("Waiting for another process, which compiles kernels")
            with phase("waiting for another process, which compiles kernels"):
                while (mine := locked(file.fileno())) is False:
                    time.sleep(0.1)
        if mine is None:  # then the work is perhaps done twice
            _log.info("%s cannot be locked", path)
        yield bool(mine)
