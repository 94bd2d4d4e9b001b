"""How many programs JAX has made in this process, and where it keeps them for the next one."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import threading
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from hibachi.common.cachefolder import cache_folder
from hibachi.common.phases import Phase, phase

SWITCH = "HIBACHI_JAX_CACHE"
"""The environment variable that turns our cache off with "0"."""
_ROOM = 1 << 20  # bytes that must be free
_log = logging.getLogger("hibachi.jax")
_EVENT = "/jax/core/compile/backend_compile_duration"
_made = 0
_now = threading.local()
"""phase: of the program that this thread compiles."""


def made() -> int:
    """Number of programs that JAX has compiled or read from its cache in this process since this was imported."""
    return _made


def _note(event: str, duration_secs: float, **about: str | int) -> None:
    global _made
    if event == _EVENT:
        _made += 1
        _end()


def _begin(event: str, value: float, **about: str | int) -> None:
    """JAX tells under the same name when it begins to compile, and when it has done so or failed."""
    if event == _EVENT:
        _end()
        _now.phase = phase(f"compiling a program of JAX ({about.get('fun_name', 'number')} {_made + 1})").__enter__()


def _end() -> None:
    begun: Phase | None = getattr(_now, "phase", None)
    if begun is not None:
        _now.phase = None
        begun.__exit__()


jax.monitoring.register_event_duration_secs_listener(_note)
if hasattr(jax.monitoring, "register_scalar_listener"):  # earlier versions tell the end only
    jax.monitoring.register_scalar_listener(_begin)


@cache
def keep() -> Path | None:
    """Have JAX keep what it compiles in the user's cache folder, from now on; returns the folder.

    None means that a cache of JAX is configured already, or HIBACHI_JAX_CACHE is 0, or the folder cannot be made.
    """
    if os.environ.get(SWITCH) == "0" or configured("jax_compilation_cache_dir") is not None:
        return None
    if not configured("jax_enable_compilation_cache"):
        return None
    try:
        folder = place()
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM))
    except OSError as e:  # not writable, or full
        _log.warning("What JAX compiles is not kept, so the next start compiles it again: %s", e)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)  # a step's parts take less than JAX's 1 s
    compilation_cache.reset_cache()  # JAX looks once, and something may have been compiled already
    return folder


def in_use() -> bool:
    """Does JAX keep programs, wherever?"""
    return bool(configured("jax_enable_compilation_cache") and configured("jax_compilation_cache_dir"))


def configured(name: str) -> Any:
    """One of JAX's settings. They are attributes that JAX's types do not list."""
    return getattr(jax.config, name)


def place() -> Path:
    """$XDG_CACHE_HOME/hibachi/jax (else ~/.cache), and in it a folder for this kind of processor. Raises OSError."""
    return cache_folder() / "jax" / _processor()


def _processor() -> str:
    """A short name for what code is compiled for: a home may be shared by machines with other processors."""
    facts = [platform.machine(), jax.__version__]
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        facts += [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    except OSError:
        facts.append(platform.processor())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
