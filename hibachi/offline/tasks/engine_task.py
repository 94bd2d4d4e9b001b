"""What works on an engine share: streams that are watched, rows that wait, an engine that hangs or is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from hibachi.engine.health import Health
from hibachi.engine.streams.stream import ItemStream
from hibachi.errors import EngineClosed, EngineFailed, HibachiError, QueueFull
from hibachi.llm.gather import Gather
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.task import Full, Lost, Prepared, RowError

Feed = Callable[[int, list[Any]], object]


def plain(error: HibachiError) -> RowError:
    return RowError(str(error))


@contextmanager
def judged(failed: Callable[[HibachiError], RowError] = plain) -> Iterator[None]:
    """Errors become those that a `RowTask` raises. failed: makes the error of a row."""
    try:
        yield
    except (EngineFailed, EngineClosed) as e:  # the whole engine, and not this request
        raise Lost(str(e)) from e
    except QueueFull as e:
        raise Full(str(e)) from e
    except HibachiError as e:
        raise failed(e) from e


class RowStreams:
    """The streams of the rows that were started."""

    def __init__(self) -> None:
        self._gather = Gather()
        self._streams: dict[int, Sequence[ItemStream[Any]]] = {}

    def add(self, number: int, streams: Sequence[ItemStream[Any]], feed: Feed | None = None) -> None:
        self._streams[number] = streams
        self._gather.add(number, streams, feed)

    def wait(self, timeout: float, health: Callable[[], Health]) -> list[int]:
        """Raises Lost if nothing is done and the engine has made no step for a while."""
        done: list[Any] = self._gather.wait(timeout)
        if not done and self._streams and (how := health()).state in ("stalled", "failed", "closed"):
            raise Lost(how.message)
        return done

    def wake(self) -> None:
        self._gather.wake()

    def drop(self, number: int) -> None:
        """It was taken."""
        del self._streams[number]

    def withdraw(self) -> list[int]:
        """Cancel the rows that wait; returns them."""
        waiting = [n for n, streams in self._streams.items() if all(_waits(s) for s in streams)]
        for number in waiting:
            for stream in self._streams.pop(number):
                stream.close()
            self._gather.discard(number)
        return waiting

    def abandon(self) -> None:
        self._gather.close()
        self._streams.clear()


class Serves(Protocol):
    """What computes, and can be lost."""

    def health(self) -> Health: ...
    def close(self, timeout: float | None = ...) -> None: ...


E = TypeVar("E", bound=Serves)


class EngineTask(Generic[E]):
    """What the works on an engine have of `RowTask` in common."""

    def __init__(self) -> None:
        self._watched = RowStreams()
        self._started: dict[int, Any] = {}  # what is known of each row that was started and not taken
        self._serving: E | None = None

    @property
    def serving(self) -> E:
        """What was opened last."""
        assert self._serving is not None
        return self._serving

    def wait(self, timeout: float) -> Sequence[int]:
        return self._watched.wait(timeout, self.serving.health)

    def wake(self) -> None:
        self._watched.wake()

    def withdraw(self) -> Sequence[int]:
        found = self._watched.withdraw()
        for number in found:
            del self._started[number]
        return found

    def lost(self, number: int, prepared: Prepared, message: str) -> RowError:
        return RowError(message)

    def close(self) -> None:
        self._watched.abandon()
        if self._serving is not None:
            self._serving.close()

    def abandon(self) -> None:
        self._watched.abandon()
        self._started.clear()
        if self._serving is not None:
            self._serving.close(0.0)


def _waits(stream: ItemStream[Any]) -> bool:
    return stream.started is None and stream.finish_reason is None


def why_not(row: Row, read: Callable[[], object]) -> str | None:
    """For `RowTask.wrong`. read: raises the error of the row."""
    try:
        read()
    except HibachiError as e:
        return f"{row.place}: {e}"
    return None
