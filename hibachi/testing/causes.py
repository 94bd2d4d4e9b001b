"""Why a promise is broken: what failed, in words that are the same wherever the same thing fails, and where."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hibachi.backend.array_backend import ArrayBackend

FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+),? in (?P<name>.*)')
HOME = Path(__file__).parents[2]  # of the package, and of the suite in a checkout
OURS = str(HOME / "hibachi") + os.sep
SUITE = [str(HOME / "conformance") + os.sep, str(HOME / "hibachi" / "conformance") + os.sep]
MOST_LINES, MOST_TEXT = 3, 400  # of a message


class Frame(NamedTuple):
    file: str
    line: int
    name: str

    def __str__(self) -> str:
        path = Path(self.file)
        base = next((base for base in (Path.cwd(), HOME) if path.is_relative_to(base)), path.anchor)
        return f"{path.relative_to(base) if base != path.anchor else path}:{self.line} in {self.name}"

    def within(self, places: list[str]) -> bool:
        """Is it in one of these files or folders? Paths of folders end with a separator."""
        return any(self.file == place or (place.endswith(os.sep) and self.file.startswith(place)) for place in places)


class Cause(NamedTuple):
    """Equal for two promises that fail alike: by `key`, which has neither numbers nor addresses in it."""

    key: str
    text: str  # of the first promise, as it was raised
    where: list[str]  # frames, the innermost first


def places(backend: ArrayBackend) -> list[str]:
    """The files of a backend: its module, or the folder of the package that it is in."""
    cls: Any = type(backend)
    source: Any = inspect.getmodule(backend.xp if cls is ArrayBackend else cls)
    file = getattr(source, "__file__", None)
    if file is None:
        return []
    return [str(Path(file).parent) + os.sep if getattr(source, "__package__", "") else str(file)]


def cause_of(error: BaseException, own: list[str]) -> Cause:
    """own: the backend's files. What counts is the innermost of the errors that led to this one."""
    chain = list(_chain(error))
    root = chain[-1]
    stacks = [stack for e in chain for stack in _stacks(e)]
    inside = [f for stack in stacks for f in stack if f.within(own)]
    kit = [f for stack in stacks for f in stack if f.within([OURS, *SUITE])]
    at = (inside or kit)[-1:]
    says = getattr(root, "cause", None) or normal(str(root))
    text = short(str(error)) if isinstance(error, AssertionError) else f"{type(error).__name__}: {short(str(error))}"
    if (raised := root_of(error)) not in text and short(str(root)) not in text:
        text = f"{text} (from {raised})"
    key = "; ".join([type(root).__name__, says, *map(str, at)])
    return Cause(key, text.strip().rstrip(":"), list(map(str, inside[-1:])))


def root_of(error: BaseException) -> str:
    """Type and text of the innermost of the errors that led to this one: the array library's or the model's own."""
    root = list(_chain(error))[-1]
    return f"{type(root).__name__}: {short(str(root))}".rstrip(": ")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        yield now
        seen.add(id(now))
        now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)


def _stacks(error: BaseException) -> Iterator[list[Frame]]:
    """Of its traceback, and of the notes in which the engine keeps the words of one; the innermost frame last."""
    yield [Frame(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    for note in getattr(error, "__notes__", ()):
        yield frames(note)


def frames(text: str) -> list[Frame]:
    """Those that a traceback in words names, in its order."""
    return [Frame(m["file"], int(m["line"]), m["name"]) for m in FRAME.finditer(text)]


def normal(text: str) -> str:
    """Without what differs between two failures of the same kind: numbers, addresses, what stands in brackets."""
    text, before = re.sub(r"0x[0-9a-fA-F]+", "#", short(text)), ""
    while text != before:
        text, before = re.sub(r"\([^()]*\)|\[[^][]*\]|\{[^{}]*\}", "<>", text), text
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?|\b(nan|inf)\b", "#", text)


def short(text: str) -> str:
    """The first lines of a message, as one; not what pytest adds to an assertion that has words of its own."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("Use -v")]
    ends = (i for i, line in enumerate(lines) if i and line.startswith("assert "))
    text = "; ".join(lines[: min(next(ends, MOST_LINES), MOST_LINES)])
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 3] + "..."


def hung_at(dump: str, own: list[str]) -> tuple[list[Frame], bool]:
    """Where a process stands, from what `faulthandler` wrote: frames, the innermost first, of the thread that matters.

    That is one that is inside the backend; else one that steps an engine; else one that runs a promise. The second:
    is it inside the backend?
    """
    stepping = [OURS + room + os.sep for room in ("runners", "decode", "plan")]
    threads = [frames(part) for part in re.split(r"^(?=Thread |Current thread )", dump, flags=re.MULTILINE)]
    for wanted in (own, stepping, SUITE, [OURS]):
        for stack in threads:
            if any(f.within(wanted) for f in stack):
                ours = [f for f in stack[1:] if f.within([*own, *SUITE, OURS])]
                return [*stack[:1], *ours[:3]], wanted is own
    return [], False
