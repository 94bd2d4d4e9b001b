"""Compiles a backend's kernels once for a machine, its library and its compiler, and loads them.

They know the array library only by its thread pool, so no Python is in them and a build takes seconds. What is built is
kept in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache) under a name that is made of all that it depends on.
It ends with a seal, the hash of what is in front of it, as the loader of a truncated library ends the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from hibachi.errors import HibachiError
from hibachi.tensor.cachefolder import cache_folder, move

HEADERS = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-std=c++20", "-fPIC")
_ROOM = 1 << 20  # bytes of a library, and of what is made on the way
_said: set[Path] = set()  # where nothing can be kept, once each
_PATIENCE = 600  # seconds for a compiler that takes some ten
_log = logging.getLogger("hibachi.native")


class NativeUnavailable(HibachiError):
    """The native kernels cannot be had here; the message says why."""


@dataclass
class NativeLibrary:
    """The compiled kernels of one backend.

    name: of the file. folder: whose *.cpp are compiled; they include what is in it and beside us. here: where this
    object is, "package.module.name", for a process that builds it. flags: to compile and to link, asked for when
    something is built, as they may take an import. facts: what else the result depends on. structs: twins in Python of
    structs in C++; for one called X the library has a function hibachi_sizeof_X.
    """

    name: str
    folder: Path
    here: str
    flags: Callable[[], tuple[list[str], list[str]]]
    facts: tuple[str, ...]
    structs: tuple[type[ctypes.Structure], ...] = ()
    _later: bool = field(default=False, init=False)
    _failed: dict[Path, str] = field(default_factory=dict, init=False)  # a compiler that failed is not asked again

    @cached_property
    def loaded(self) -> ctypes.CDLL:
        """The kernels, built now if they are not there yet, or damaged. Raises NativeUnavailable, and TypeError for a
        struct that is not the same in Python and in C++."""
        path = self.place()
        if not _whole(path):
            if path in self._failed:
                raise NativeUnavailable(self._failed[path])
            try:
                self.build(path)
            except NativeUnavailable as e:
                self._failed[path] = str(e)
                raise
        try:
            library = ctypes.CDLL(str(path))
        except OSError as e:
            raise NativeUnavailable(
                f"The native kernels in {path} do not load: {e}. Delete the file to build anew."
            ) from e
        for twin in self.structs:
            _check_size(twin, library)
        return library

    def why_missing(self) -> str | None:
        """Why there are no native kernels, or None if there are. Builds them if need be."""
        try:
            _ = self.loaded
        except NativeUnavailable as e:
            return str(e)
        return None

    def why_not_yet(self) -> str | None:
        """`why_missing` for those who do not want to wait: kernels that are not there yet are compiled by a process in
        the background, once, and are there at the next start."""
        try:
            path = self.place()
            if "loaded" in vars(self) or _whole(path):
                return self.why_missing()
            _try_folder(path.parent)
        except NativeUnavailable as e:
            return str(e)
        self._build_later()
        return "being compiled in the background, for the next start"

    def state(self) -> str:
        """Are there kernels for this machine? In words, without building any."""
        try:
            path = self.place()
        except NativeUnavailable as e:
            return str(e)
        if _whole(path):
            return f"compiled: {path}"
        return f"to be compiled by {compiler()} when they are first asked for"

    def sources(self) -> list[Path]:
        return sorted(self.folder.glob("*.cpp"))

    def place(self) -> Path:
        """Where the library of this machine is, or would be. Raises NativeUnavailable."""
        if platform.system() != "Linux":  # elsewhere the flags have not been tried
            raise NativeUnavailable(f"Native kernels are built on Linux only, this is {platform.system()}.")
        key = hashlib.sha256()
        for path in [*self.sources(), *sorted(self.folder.glob("*.h")), *sorted(HEADERS.glob("*.h"))]:
            key.update(path.read_bytes())
        cxx = compiler()
        for fact in ("sealed", *self.facts, os.path.realpath(cxx), _said_by(cxx), *FLAGS, _processor()):
            key.update(fact.encode() + b"\0")
        try:
            return cache_folder() / f"{self.name}-{key.hexdigest()[:16]}.so"
        except OSError as e:
            raise NativeUnavailable(f"Native kernels have no place: {e}.") from e

    def build(self, path: Path) -> None:
        """Compile into a folder of our own and move the result, so that processes may build at the same time.

        Raises NativeUnavailable.
        """
        cxx = compiler()
        _log.info("Compiling native kernels, once for this machine, into %s", path)
        to_compile, to_link = self.flags()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
                objects = [Path(folder) / f"{source.stem}.o" for source in self.sources()]
                _run(
                    [cxx, *FLAGS, f"-I{HEADERS}", *to_compile, "-c", str(source), "-o", str(to)]
                    for source, to in zip(self.sources(), objects, strict=True)
                )
                made = Path(folder) / "kernels.so"
                now = "-Wl,-z,now"  # what is missing is missed at loading, not at a call
                _run([[cxx, "-shared", *map(str, objects), *to_link, now, "-o", str(made)]])
                made.write_bytes((data := made.read_bytes()) + _seal(data))
                move(made, path)
        except OSError as e:
            raise NativeUnavailable(f"The native kernels were not built for {path}: {e}.") from e

    def _build_later(self) -> None:
        if self._later:
            return
        self._later = True
        _log.info("Native kernels are being compiled in the background; the next start can use them.")
        module = self.here.rpartition(".")[0]
        # Whoever measures and loads a model now comes first.
        script = f"import os, time; os.nice(19); time.sleep(5); import {module}; {self.here}.why_missing()"
        # It may outlive us, and an interrupt of ours is none of its.
        nowhere = subprocess.DEVNULL
        try:
            subprocess.Popen(
                [sys.executable, "-c", script], start_new_session=True, stdin=nowhere, stdout=nowhere, stderr=nowhere
            )
        except OSError as e:
            _log.warning("Native kernels are not being compiled: %s", e)


def _check_size(twin: type[ctypes.Structure], library: ctypes.CDLL) -> None:
    name = twin.__name__
    size = library[f"hibachi_sizeof_{name}"]
    size.restype = ctypes.c_int64
    if size() != ctypes.sizeof(twin):
        raise TypeError(
            f"The struct {name} has {size()} bytes in C++ and {ctypes.sizeof(twin)} in {twin.__module__}. Give both "
            f"the same fields, in the same order."
        )


def _seal(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _try_folder(folder: Path) -> None:
    """Is there room for a library? A compiler in the background could not say. Raises NativeUnavailable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM))
    except OSError as e:
        if folder not in _said:
            _said.add(folder)
            _log.warning("Native kernels cannot be kept in %s, so there are none: %s", folder, e)
        raise NativeUnavailable(f"Native kernels cannot be kept in {folder}: {e}.") from e


def _whole(path: Path) -> bool:
    """Is there a library, and all of it?"""
    try:
        data = path.read_bytes()
    except OSError:  # mostly as there is none yet; else building one says why
        return False
    if data[-32:] == _seal(data[:-32]):
        return True
    _log.warning("The native kernels in %s are damaged, as after a full disk; they are compiled anew.", path)
    return False


def compiler() -> str:
    """The C++ compiler. Raises NativeUnavailable."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise NativeUnavailable("No C++ compiler was found. Install g++ or clang++, or set CXX.")


@cache
def _said_by(cxx: str) -> str:
    try:
        return subprocess.run([cxx, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as e:
        raise NativeUnavailable(f"The compiler {cxx} does not answer: {e}.") from e


@cache
def _processor() -> str:
    """What -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    wanted = ("model name", "flags", "Features", "cpu family", "model\t", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _run(commands: Iterable[list[str]]) -> None:
    """All commands at the same time. Raises NativeUnavailable with what a compiler says."""
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    try:
        end = time.monotonic() + _PATIENCE
        said = [p.communicate(timeout=max(end - time.monotonic(), 0.1))[0] for p in running]
    except subprocess.TimeoutExpired as e:
        raise NativeUnavailable(f"The compiler took more than {_PATIENCE} s for the native kernels.") from e
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            raise NativeUnavailable(f"The native kernels do not compile (status {process.returncode}):\n{text[-2000:]}")
