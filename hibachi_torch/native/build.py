"""Compiles the kernels of this folder once for a machine, its PyTorch and its compiler, and loads them.

They know PyTorch only by its thread pool, so no Python is in them and a build takes seconds. The library is kept in
the user's cache folder ($XDG_CACHE_HOME, else ~/.cache) under a name that is made of all that it depends on.
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
from functools import cache
from pathlib import Path

import torch

from hibachi.errors import HibachiError

_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-std=c++20", "-fPIC")
_THREADS = "-fopenmp"  # to compile only: linked is the OpenMP that libtorch_cpu brings, so that there is one pool
_log = logging.getLogger("hibachi.torch")


class NativeUnavailable(HibachiError):
    """The native kernels cannot be had here; the message says why."""


@cache
def library() -> ctypes.CDLL:
    """The compiled kernels, built now if they are not there yet. Raises NativeUnavailable."""
    path = _place()
    if not path.exists():
        _build(path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        raise NativeUnavailable(f"The native kernels in {path} do not load: {e}. Delete the file to build anew.") from e


def why_missing() -> str | None:
    """Why there are no native kernels, or None if there are. Builds them if need be."""
    try:
        library()
    except NativeUnavailable as e:
        return str(e)
    return None


def why_not_yet() -> str | None:
    """`why_missing` for those who do not want to wait: kernels that are not there yet are compiled by a process in the
    background, once, and are there at the next start."""
    try:
        if _place().exists():
            return why_missing()
    except NativeUnavailable as e:
        return str(e)
    _build_later()
    return "being compiled in the background, for the next start"


@cache
def _build_later() -> None:
    _log.info("Native kernels are being compiled in the background; the next start can use them.")
    # Whoever measures and loads a model now comes first.
    script = "import os, time; os.nice(19); time.sleep(5); from hibachi_torch.native.build import library; library()"
    command = [sys.executable, "-c", script]
    # It may outlive us, and an interrupt of ours is none of its.
    quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    subprocess.Popen(command, start_new_session=True, **quiet)


def state() -> str:
    """Are there kernels for this machine? In words, without building any."""
    try:
        path = _place()
    except NativeUnavailable as e:
        return str(e)
    return f"compiled: {path}" if path.exists() else f"to be compiled by {_compiler()} when they are first asked for"


def sources() -> list[Path]:
    return sorted(_HERE.glob("*.cpp"))


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise NativeUnavailable("No C++ compiler was found. Install g++ or clang++, or set CXX.")


def _place() -> Path:
    """Where the library of this machine is, or would be."""
    if platform.system() != "Linux":  # elsewhere the flags below have not been tried
        raise NativeUnavailable(f"Native kernels are built on Linux only, this is {platform.system()}.")
    compiler = _compiler()
    key = hashlib.sha256()
    for path in [*sources(), *sorted(_HERE.glob("*.h"))]:
        key.update(path.read_bytes())
    for fact in (
        torch.__version__,
        torch.__file__,
        os.path.realpath(compiler),
        _said_by(compiler),
        *_FLAGS,
        _THREADS,
        _processor(),
    ):
        key.update(fact.encode() + b"\0")
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "hibachi" / f"torch-native-{key.hexdigest()[:16]}.so"


def _said_by(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as e:
        raise NativeUnavailable(f"The compiler {compiler} does not answer: {e}.") from e


def _processor() -> str:
    """What -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    wanted = ("model name", "flags", "Features", "cpu family", "model\t", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _build(path: Path) -> None:
    """Compile into a folder of our own and move the result, so that processes may build at the same time."""
    from torch.utils.cpp_extension import include_paths, library_paths  # slow to import

    compiler = _compiler()
    _log.info("Compiling native kernels, once for this machine, into %s", path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
            includes = [f"-isystem{p}" for p in include_paths()]
            objects = [Path(folder) / f"{source.stem}.o" for source in sources()]
            commands = [
                [compiler, *_FLAGS, _THREADS, abi, *includes, "-c", str(source), "-o", str(to)]
                for source, to in zip(sources(), objects, strict=True)
            ]
            _run(commands)
            libraries = [part for p in library_paths() for part in (f"-L{p}", f"-Wl,-rpath,{p}")]
            made = Path(folder) / "kernels.so"
            libraries += ["-ltorch_cpu", "-lc10", "-Wl,-z,now"]  # what is missing is missed at loading, not at a call
            _run([[compiler, "-shared", *map(str, objects), *libraries, "-o", str(made)]])
            os.replace(made, path)
    except OSError as e:
        raise NativeUnavailable(f"The native kernels were not built: {e}.") from e


def _run(commands: list[list[str]]) -> None:
    """All commands at the same time. Raises NativeUnavailable with what a compiler says."""
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    said = [p.communicate()[0] for p in running]
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            raise NativeUnavailable(f"The native kernels do not compile (status {process.returncode}):\n{text[-2000:]}")
