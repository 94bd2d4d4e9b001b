"""Blocks of rows through one engine, for whoever cuts rows into blocks: Ray, Dask, Spark. See docs/dask-spark.md."""

from __future__ import annotations

import hashlib
import math
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.errors import EngineFailed, text_of
from hibachi.offline.batch import Batch, Task
from hibachi.offline.checks import check_names
from hibachi.offline.drive import LOOK
from hibachi.offline.files import arrow, jsonl
from hibachi.offline.files.rows import Row
from hibachi.offline.settings import settings_of
from hibachi.offline.tasks.choose import task_of
from hibachi.offline.tasks.columns import Columns
from hibachi.offline.tasks.task import Full, RowError, RowTask


def generate(block: Any, model: str | Path = "tiny", **options: Any) -> Any:
    """Put a block of rows through a model. The first call with rows makes the engine, which is this process's for all
    calls with equal arguments, from any thread, and ends with it. A forked process makes its own.

    block, model, options: as for `BlockRunner`, which says what it returns. A block without rows makes no engine.

    Raises ConfigError, and EngineFailed; after that, the next call makes an engine anew. What loading the model raises
    is raised by each call, which has tried it.
    """
    given = {"model": str(model), **options}
    with _lock:
        _made[:] = [each for each in _made if each[2].over is None]
        here = [runner for pid, known, runner in _made if pid == os.getpid() and known == given]
        if not here:
            here.append(BlockRunner(**given))
            _made.append((os.getpid(), given, here[0]))
    return here[0].answered(block, [row.result() for row in here[0].ask(block)])


# Of which process, of which arguments. A forked process keeps what its parent made, and does nothing with it.
_made: list[tuple[int, dict[str, Any], BlockRunner]] = []
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that is not here may have had it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class BlockRunner:
    """A model, and an engine for the rows of all blocks in flight, from any thread.

    model, settings: as for `hibachi.offline.run`; the engine runs in this process. columns, task, seed, token_ids,
    prefix: as of `hibachi.offline.Batch`. created: Unix time in seconds that chat templates take for the present; None
    means now.

    What is computed of a row depends on the row alone, so that a block that was lost comes again as it was: a row
    without a seed gets one made of `seed` and of all its values, and rows that are equal have equal answers.

    Raises ConfigError.
    """

    def __init__(
        self,
        model: str | Path = "tiny",
        *,
        columns: Columns | None = None,
        settings: Mapping[str, Any] | None = None,
        task: Task = "generate",
        seed: int = 0,
        token_ids: bool = False,
        prefix: str = "",
        created: int | None = None,
    ) -> None:
        batch = Batch(
            inputs=(),
            output="",
            settings=settings_of(model, {"engine": "own", **(settings or {})}),
            columns=columns or Columns(),
            task=task,
            seed=seed,
            token_ids=token_ids,
        )
        self._prefix, self._seen = prefix, set[tuple[str, ...]]()
        self._work = task_of(batch, int(time.time()) if created is None else created)
        self._computing = _Computing(self._work)
        self._opening = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def over(self) -> str | None:
        """Why nothing is computed any more."""
        return self._computing.over

    def open(self) -> None:
        """Load the model, if that was not done. Raises what loading it raises."""
        with self._opening:
            if self._thread is None:
                self._work.open()
                self._thread = threading.Thread(target=self._computing.run, name="hibachi-rows", daemon=True)
                self._thread.start()

    def ask(self, block: Any) -> list[Future[dict[str, Any]]]:
        """What is computed of each row, for `answered`.

        block: columns by their names, each a NumPy array with an entry for each row; or a pyarrow.Table or
        pyarrow.RecordBatch, which keep integers where a column has gaps; or a pandas.DataFrame.

        Raises ConfigError for columns that are missing, or have a result's name, what loading the model raises, and
        EngineFailed, as each of what it returns.
        """
        names, columns = _columns_of(block)
        self._check(names)
        rows = [_row(dict(zip(names, values, strict=True))) for values in zip(*columns, strict=True)]
        if rows:
            self.open()
        return [self._computing.ask(row) for row in rows]

    def answered(self, block: Any, done: Sequence[dict[str, Any]]) -> Any:
        """The block with the results' columns, as `hibachi run-batch` writes them to Parquet; in a mapping they are
        arrays of objects, [rows]; in a DataFrame they have Arrow's types. Where a row failed, `error` has a text.
        """
        out = dict(block) if isinstance(block, Mapping) else block
        for field in self._work.fields:
            name, found = self._prefix + field.name, [values.get(field.name) for values in done]
            if field.kind == "json":
                found = [None if value is None else jsonl.text_of(value, Counter()) for value in found]
            if isinstance(out, dict):
                out[name] = np.fromiter(found, object, len(found))
                continue
            column = arrow.arrow().array(found, arrow.type_of(field.kind))
            if (pandas := _pandas_of(block)) is not None:
                out = out.assign(**{name: pandas.arrays.ArrowExtensionArray(column)})
            else:
                out = out.append_column(name, column)
        return out

    def close(self) -> None:
        """End the engine. The end of the process does that, too."""
        self._computing.close()

    def _check(self, names: tuple[str, ...]) -> None:
        if names not in self._seen:
            self._work.check(names)
            check_names([self._prefix + field.name for field in self._work.fields], names)
            self._seen.add(names)


class _Computing:
    """Computes rows in a thread of its own, which alone calls the task."""

    def __init__(self, work: RowTask) -> None:
        self._work = work
        self._asked: deque[Row] = deque()
        self._futures: dict[int, Future[dict[str, Any]]] = {}
        self.over: str | None = None  # why it has ended
        self._lock = threading.Lock()  # of the three

    def ask(self, row: Row) -> Future[dict[str, Any]]:
        """The values of its results; one that is equal to a row in flight shares the other's."""
        with self._lock:
            if self.over is not None:
                raise EngineFailed(self.over)
            if (found := self._futures.get(row.number)) is None:
                found = self._futures[row.number] = Future()
                found.set_running_or_notify_cancel()  # a caller that leaves takes it from nobody else
                self._asked.append(row)
        self._work.wake()
        return found

    def run(self) -> None:
        try:
            while self.over is None:
                self._start()
                for number in self._work.wait(LOOK):
                    try:
                        values = self._work.take(number).values
                    except RowError as e:
                        values = _of_error(e)
                    self._told(number, values)
        except Exception as e:
            self._end(f"The engine is lost: {text_of(e)}")
        finally:
            self._work.close()

    def close(self) -> None:
        self._end("The engine was closed.")
        self._work.wake()

    def _start(self) -> None:
        while self._asked and len(self._futures) - len(self._asked) < self._work.places:
            row = self._asked.popleft()
            try:
                self._work.start(row.number, self._work.prepare(row))
            except RowError as e:
                self._told(row.number, _of_error(e))
            except Full:
                self._asked.appendleft(row)
                return

    def _told(self, number: int, values: dict[str, Any]) -> None:
        with self._lock:
            future = self._futures.pop(number)
        future.set_result(values)

    def _end(self, why: str) -> None:
        with self._lock:
            self.over = self.over or why
            left, self._futures = list(self._futures.values()), {}
        for future in left:
            future.set_exception(EngineFailed(why))


def _of_error(error: RowError) -> dict[str, Any]:
    return error.values or {"error": str(error)}


def _columns_of(block: Any) -> tuple[tuple[str, ...], list[list[Any]]]:
    """Their names and their values."""
    if isinstance(block, Mapping):
        return tuple(block), [[_plain(value) for value in column] for column in block.values()]
    if _pandas_of(block) is None:
        return tuple(block.schema.names), [arrow.values(column) for column in block.columns]
    table = arrow.arrow().Table.from_pandas(block, preserve_index=False)
    return tuple(table.column_names), [[_plain(value) for value in arrow.values(column)] for column in table.columns]


def _pandas_of(block: Any) -> Any:
    """The module, if this is a frame of it."""
    pandas = sys.modules.get("pandas")
    return pandas if pandas is not None and isinstance(block, pandas.DataFrame) else None


def _row(values: dict[str, Any]) -> Row:
    """It has no place among all rows that would be the same if it was computed again: a digest is in its place."""
    said = repr(sorted(_plain(values).items())).encode(errors="surrogatepass")
    number = int.from_bytes(hashlib.blake2b(said, digest_size=7).digest())
    return Row(number, "", 0, values, size=len(said), arrow=(values, 0))


def _plain(value: Any) -> Any:
    """As JSON has it. Where a column of integers has gaps, NumPy and pandas have floats, and NaN in the gaps."""
    if isinstance(value, np.ndarray):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and (math.isnan(value) or value.is_integer()):
        return None if math.isnan(value) else int(value)
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return (
        [_plain(each) for each in value]
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        else value
    )
