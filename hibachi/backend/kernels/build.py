"""Compiles the kernels: at installation, for a wheel, or once for a machine. Needs nothing but Python and a compiler.

A library is built for a variant, a set of instructions that processors have in common. All of them, compiled by
whatever compiler for whatever system, compute the same bits.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
# No C++ library is linked, as it would have to be the right one: so no exceptions, no types at run time, no guards.
# -ffp-contract=off: else compilers fuse products and sums as they like, and bits differ.
FLAGS = (
    *("-O3", "-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-g0", "-w"),
    *("-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"),
)
_PATIENCE = 900  # seconds for a compiler that takes some twenty


@dataclass(frozen=True)
class Variant:
    """flags: for gcc and clang. cpu: the same for zig. level: of `hibachi_level` in probe.c that it needs."""

    name: str
    flags: tuple[str, ...]
    cpu: str
    level: int = 0


_AVX512 = ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512")
X86 = (
    Variant("avx2", ("-march=x86-64-v3",), "x86_64_v3", 1),
    Variant("avx512", _AVX512, "x86_64_v4+avx512vnni", 2),
    Variant("avx512bf16", (*_AVX512, "-mavx512bf16"), "x86_64_v4+avx512vnni+avx512bf16", 3),
)
ARM = (Variant("neon", (), "generic"),)
M1 = (Variant("neon", (), "apple_m1"),)


def variants(machine: str | None = None) -> tuple[Variant, ...]:
    """Of a processor's family, the plainest first; () if there are none."""
    machine = (machine or platform.machine()).lower()
    return X86 if machine in ("x86_64", "amd64") else ARM if machine in ("aarch64", "arm64") else ()


class BuildFailed(Exception):
    """The kernels were not compiled; the message says why."""


def compiler(level: int = 2) -> str:
    """The C++ compiler: $CXX, else clang before g++ where registers are smaller than 64 bytes, as it is far better at
    that. Raises BuildFailed."""
    names = ("c++", "g++", "clang++") if level >= 2 else ("clang++", "c++", "g++")
    for name in (os.environ.get("CXX"), *names):
        if name and (found := shutil.which(name)):
            return found
    raise BuildFailed("no C++ compiler was found. Install g++ or clang++, or set CXX.")


def key(cxx: str, variant: Variant | None = None) -> str:
    """A name for what this compiler makes of the sources, for a variant or for any processor. Raises BuildFailed."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    for fact in (os.path.realpath(cxx), _said_by(cxx), *FLAGS, *(variant.flags if variant else ())):
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()[:16]


def build(variant: Variant, to: Path, cxx: str, told: Callable[[int], object] = lambda done: None) -> None:
    """The library of a variant for this machine, by this compiler. told: see `run`. Raises BuildFailed."""
    compile_to(to, [cxx, *variant.flags], [cxx, "-pthread"], told)


def compile_to(
    to: Path,
    compile_with: Sequence[str],
    link_with: Sequence[str],
    told: Callable[[int], object] = lambda done: None,
) -> None:
    """A library by these commands: it appears in its place whole, or not at all. Raises BuildFailed."""
    sources = files()
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=unfinished(to)) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        commands = [
            [*compile_with, *FLAGS, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        run(commands, told)
        made = Path(folder) / to.name
        run([[*link_with, "-shared", *map(str, objects), "-o", str(made)]])
        made.replace(to)


def files() -> list[Path]:
    """What a library is compiled from."""
    return sorted(SOURCES.glob("*.cpp"))


def unfinished(to: Path) -> str:
    """How the folders are called in which this library is built."""
    return f"building-{to.name}-"


def build_probe(to: Path, cc: Sequence[str]) -> None:
    """Raises BuildFailed."""
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=unfinished(to)) as folder:
        made = Path(folder) / to.name
        run([[*cc, "-x", "c", "-O2", "-fPIC", "-shared", str(SOURCES / "probe.c"), "-o", str(made)]])
        made.replace(to)


def run(commands: Iterable[list[str]], told: Callable[[int], object] = lambda done: None) -> None:
    """All commands at the same time. told: called with the number of those that have ended.

    None of them, and no process that they started, runs any more at the end. Raises BuildFailed with what a compiler
    says.
    """
    commands, running = list(commands), list[subprocess.Popen[str]]()
    with ThreadPoolExecutor(len(commands) or 1, "hibachi-compile") as readers:
        try:
            for c in commands:  # each leads a group of processes: g++ starts others, which would outlive it
                running.append(_started(c))
            said = [readers.submit(process.communicate) for process in running]
            for done, _ in enumerate(as_completed(said, _PATIENCE), 1):
                told(done)
        except TimeoutError as e:
            raise BuildFailed(f"the compiler took more than {_PATIENCE} s.") from e
        finally:
            for process in running:
                if process.poll() is None:
                    _kill(process)
                    process.wait()
    for process, each in zip(running, said, strict=True):
        if process.returncode:
            raise BuildFailed(f"they do not compile (status {process.returncode}):\n{each.result()[0][-2000:]}")


def _started(command: list[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0)
    except OSError as e:
        raise BuildFailed(f"the compiler {command[0]} does not start: {e.strerror or e}.") from e


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process and its group."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


@cache
def _said_by(cxx: str) -> str:
    try:
        return subprocess.run([cxx, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as e:
        raise BuildFailed(f"the compiler {cxx} does not answer: {e}.") from e
