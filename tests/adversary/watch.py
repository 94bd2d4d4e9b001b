"""What a round looks at besides its requests: threads, descriptors, memory, logs, errors that nobody catches."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import re
import reprlib
import resource
import sys
import tempfile
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

MOST_MEMORY = 4 * 2**30  # bytes beyond what is there already: then memory runs out here, not in the whole machine


MALLOC = {"MALLOC_ARENA_MAX": (-8, 2), "MALLOC_MMAP_THRESHOLD_": (-3, 2**18)}
"""Settings of glibc, (parameter of mallopt, value), with which memory that is let go goes back to the system."""


_repr = reprlib.Repr()
_repr.maxstring, _repr.maxother, _repr.maxlong = 60, 80, 40
short = _repr.repr


def shown(value: Any) -> str:
    """Its repr, if it has one."""
    try:
        return repr(value)[:600]
    except BaseException as e:
        return f"a {type(value).__name__} whose repr raises {type(e).__name__}"


class _Heap(ctypes.Structure):
    """mallinfo2 of glibc."""

    _fields_: ClassVar = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")),
        *((name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def _in_use() -> int | None:
    """Bytes that are allocated, without what the allocators keep for later; None where that cannot be known."""
    try:
        mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo.restype = _Heap
    heap = mallinfo()
    return int(heap.uordblks + heap.hblkhd) + 64 * sys.getallocatedblocks()  # small objects of Python, at a mean size


NOTES = "HIBACHI_FUZZ_NOTES"  # in the environment of the engine's process: where it notes its memory in use
OWN_NOTES = Path(tempfile.gettempdir()) / f"hibachi-fuzz-{os.getpid()}"


def note_memory() -> None:
    if (file := os.environ.get(NOTES)) and (used := _in_use()) is not None:
        Path(file).write_text(str(used))


def tidy() -> None:
    """Let go of all memory that is not in use."""
    gc.collect()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def belongings(child: int | None = None) -> dict[str, Any]:
    """Threads, descriptors and memory of this process and of the engine's."""
    tidy()
    own: dict[str, Any] = {"threads": sorted(t.name for t in threading.enumerate())}
    own |= _process(os.getpid())
    if "memory" in own and (used := _in_use()) is not None:
        own["memory in use"] = used
    if child is not None:
        own |= {f"{name} of the engine's process": value for name, value in _process(child).items()}
        if OWN_NOTES.exists():
            own["memory in use of the engine's process"] = int(OWN_NOTES.read_text())
            OWN_NOTES.unlink()
        own["threads of the engine's process"] = os.listdir(f"/proc/{child}/task")
    return own


def _process(pid: int) -> dict[str, Any]:
    if not os.path.exists("/proc/self/statm"):  # not on Linux
        return {}
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    open_files = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            open_files.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return {"descriptors": sorted(open_files), "memory": pages * resource.getpagesize()}


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """What takes memory without a bound fails, and the machine lives."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with contextlib.suppress(OSError, ValueError):
        have = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
        resource.setrlimit(resource.RLIMIT_DATA, (have + MOST_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextlib.contextmanager
def watched(complain: Callable[[str], None], text: deque[str]) -> Iterator[None]:
    """Threads that die and errors in destructors count; what is logged is kept, and formatted as by any handler."""
    log = logging.getLogger("hibachi")
    handler = _Kept(text, complain)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    propagates, log.propagate = log.propagate, False  # pytest would keep every record, and all that hangs on it
    log.addHandler(handler)
    hooks = threading.excepthook, sys.unraisablehook

    def died(args: Any) -> None:
        said = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))[-2000:]
        complain(f"a thread died: {args.thread.name if args.thread else '?'}\n{said}")

    def unraisable(args: Any) -> None:
        complain(f"unraisable in {short(args.object)}: {shown(args.exc_value)} {args.err_msg or ''}")

    threading.excepthook, sys.unraisablehook = died, unraisable
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for parameter, wanted in MALLOC.values():
            libc.mallopt(parameter, wanted)
    gc.freeze()  # what is there already is not looked at again, or each collection takes long among other tests
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # models and processors overflow as they like
            yield
    finally:
        gc.unfreeze()
        threading.excepthook, sys.unraisablehook = hooks
        log.removeHandler(handler)
        log.propagate = propagates


class _Kept(logging.Handler):
    """Formats what is logged, as any handler does, and keeps the end of it."""

    def __init__(self, text: deque[str], complain: Callable[[str], None]) -> None:
        super().__init__()
        self._text, self._complain = text, complain

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._text.append(self.format(record)[-2000:])
        except Exception as e:
            self._complain(f"a log line cannot be made: {record.msg!r:.200}, {shown(e)}")


def stacks() -> str:
    """Where all threads stand, the engine's first."""
    names = {t.ident: t.name for t in threading.enumerate()}
    frames = [(names.get(ident, str(ident)), frame) for ident, frame in sys._current_frames().items()]
    frames.sort(key=lambda each: (not each[0].startswith("hibachi"), each[0]))
    return "\n".join(f"--- {name}\n{''.join(traceback.format_stack(frame)[-12:])}" for name, frame in frames)[:12_000]
