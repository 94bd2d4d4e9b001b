"""What tasks on an engine share: streams that are watched, rows that wait, an engine that hangs or is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from hibachi.engine.health import Health
from hibachi.engine.streams.stream import ItemStream
from hibachi.llm.gather import Feed, Gather
from hibachi.offline.tasks.task import Lost, Prepared, RowTask


class Serves(Protocol):
    """What computes, and can be lost."""

    def health(self) -> Health: ...
    def close(self, timeout: float | None = ...) -> None: ...


E = TypeVar("E", bound=Serves)


class EngineTask(RowTask, Generic[E]):
    """What tasks on an engine have of `RowTask` in common."""

    def __init__(self) -> None:
        self._gather = Gather()
        self._started: dict[int, tuple[Prepared, Sequence[ItemStream[Any]]]] = {}  # and not taken
        self._serving: E | None = None

    @property
    def serving(self) -> E:
        """What was opened last."""
        assert self._serving is not None
        return self._serving

    def _watch(
        self, number: int, prepared: Prepared, streams: Sequence[ItemStream[Any]], feed: Feed | None = None
    ) -> None:
        self._started[number] = prepared, streams
        self._gather.add(number, streams, feed)

    def wait(self, timeout: float) -> Sequence[int]:
        """Raises Lost if nothing is done and the engine has made no step for a while."""
        done: list[Any] = self._gather.wait(timeout)
        if not done and self._started and (how := self.serving.health()).state in ("stalled", "failed", "closed"):
            raise Lost(how.message)
        return done

    def wake(self) -> None:
        self._gather.wake()

    def withdraw(self) -> Sequence[int]:
        waiting = [n for n, (_, streams) in self._started.items() if all(_waits(s) for s in streams)]
        for number in waiting:
            for stream in self._started.pop(number)[1]:
                stream.close()
            self._gather.discard(number)
        return waiting

    def close(self) -> None:
        self._forget()
        if self._serving is not None:
            self._serving.close()

    def abandon(self) -> None:
        self._forget()
        if self._serving is not None:
            self._serving.close(0.0)

    def _forget(self) -> None:
        self._gather.close()
        self._started.clear()


def _waits(stream: ItemStream[Any]) -> bool:
    return stream.started is None and stream.finish_reason is None
