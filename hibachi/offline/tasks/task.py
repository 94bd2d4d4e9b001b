"""What computes rows: an engine here, one in another process, or a server."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hibachi.errors import EngineClosed, EngineFailed, HibachiError, QueueFull
from hibachi.llm.dialects.errors import SERVER, Refused
from hibachi.offline.files.format import Field
from hibachi.offline.files.rows import Row


@dataclass(slots=True)
class Prepared:
    """A row that can be computed. key: the beginning of its prompt, in blocks, for rows that share it. longest: tokens
    of prompt and answer, as far as known. size: about how many bytes it holds. what: for the `RowTask` that made it.
    about: of the row, what its errors repeat.

    For a plan, as far as a tokenizer here tells: prompt_tokens, of all its prompts; new_tokens, of all its answers, at
    most; longest_answer, of one of them.
    """

    key: Any
    longest: int
    size: int
    what: Any
    prompt_tokens: int = 0
    new_tokens: int = 0
    longest_answer: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Result:
    """The result of a row. values: by the names of `RowTask.fields`, as JSON holds them. Tokens: of the prompt, of
    these those found in the cache, and new ones.
    """

    values: dict[str, Any]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0


class RowError(HibachiError):
    """A row that has no result. values: what stands in its columns nevertheless."""

    values: dict[str, Any]

    def __init__(self, message: str, values: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.values = values or {}


class Lost(HibachiError):
    """The engine is gone, and with it what it computed: nothing is known of the rows that it had."""


class Full(HibachiError):
    """There is no room for this row now: start it again when others have ended."""


@dataclass(slots=True)
class Told:
    """What a work tells of itself, for the journal's head and for people."""

    about: str
    facts: dict[str, Any] = field(default_factory=dict)


def id_of(seed: int, number: int, what: str) -> str:
    """An id of row `number`, the same in every run with this seed. what: it is of."""
    return hashlib.blake2b(f"{seed} {number} {what}".encode(), digest_size=12).hexdigest()


class RowTask(ABC):
    """Computes rows, several at a time. Called by one thread.

    fields: the columns of its results. places: rows that may be started and not taken. carries: an output row has the
    columns of its input row as well. compares: a row is compared with those before it, so `seen` must see all. _seed:
    of the run. _created: Unix time in seconds of its start.

    What stands in a row is a matter of `ColumnRows` and `LineRows`, who computes it one of `EngineTask` and `UrlTask`.
    """

    fields: Sequence[Field]
    places: int
    carries: bool
    compares: bool
    _seed: int
    _created: int

    # ---- what stands in a row ------------------------------------------------------------------------------------

    @abstractmethod
    def check(self, columns: Sequence[str] | None) -> None:
        """What concerns all rows, before a model is loaded. columns: of the input, as far as they are known. Raises
        ConfigError."""

    @abstractmethod
    def seen(self, row: Row) -> None:
        """It was computed by an earlier run."""

    @abstractmethod
    def refused(self, row: Row, message: str) -> dict[str, Any]:
        """The values of a row that cannot be read."""

    @abstractmethod
    def _failed(self, number: int, about: Mapping[str, Any], error: HibachiError) -> RowError:
        """about: of the row, what is to be repeated."""

    @abstractmethod
    def _judge(self, row: Row) -> object:
        """Raises any HibachiError for what is wrong with a row, as far as that is known without a model."""

    @abstractmethod
    def _read(self, row: Row) -> Prepared:
        """Raises any HibachiError."""

    def _values(self, number: int, about: Mapping[str, Any], answer: Any) -> dict[str, Any]:
        """Of a row that was answered so."""
        found: dict[str, Any] = answer
        return found

    def _id_of(self, number: int, what: str) -> str:
        return id_of(self._seed, number, what)

    def prepare(self, row: Row) -> Prepared:
        """Raises RowError."""
        with self._judging(row.number, row.values):
            return self._read(row)

    def wrong(self, row: Row) -> str | None:
        """Why a row cannot be computed, as far as that is known before a model is loaded; None means it can."""
        try:
            self._judge(row)
        except HibachiError as e:
            return f"{row.place}: {e}"
        return None

    def lost(self, number: int, prepared: Prepared, message: str) -> RowError:
        """The error of a row with which the engine was lost again and again, or for which there is never room."""
        why = Refused(message, status=500, kind=SERVER, code="engine_failed")
        return self._failed(number, prepared.about, why)

    @contextmanager
    def _judging(self, number: int, about: Mapping[str, Any]) -> Iterator[None]:
        """Errors become RowError, Full and Lost."""
        try:
            yield
        except (RowError, Lost):
            raise
        except (EngineFailed, EngineClosed) as e:  # the whole engine, and not this request
            raise Lost(str(e)) from e
        except QueueFull as e:
            raise Full(str(e)) from e
        except HibachiError as e:
            raise self._failed(number, about, e) from e

    # ---- who computes it -----------------------------------------------------------------------------------------

    @abstractmethod
    def open(self) -> Told:
        """Load the model, or reach the server. After a loss: again."""

    @abstractmethod
    def start(self, number: int, prepared: Prepared) -> None:
        """Raises RowError, Full, Lost."""

    @abstractmethod
    def wait(self, timeout: float) -> Sequence[int]:
        """The rows that are done, after at most this many seconds. Raises Lost if the engine hangs."""

    @abstractmethod
    def wake(self) -> None:
        """End `wait`; from any thread, and from a signal's handler."""

    @abstractmethod
    def take(self, number: int) -> Result:
        """Of a row that is done. Raises RowError, Lost."""

    @abstractmethod
    def withdraw(self) -> Sequence[int]:
        """Take back the rows that wait, as far as that is known; returns them."""

    @abstractmethod
    def abandon(self) -> None:
        """The engine is lost, or to be ended at once: nothing of what it has is waited for."""

    @abstractmethod
    def close(self) -> None: ...
