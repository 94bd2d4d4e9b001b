"""hibachi on a cluster of Ray: `Generate` puts the rows of a Dataset through a model, `app` serves one. See
docs/scale.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
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
from hibachi.offline.files import jsonl
from hibachi.offline.files.rows import Row
from hibachi.offline.settings import settings_of
from hibachi.offline.tasks.choose import task_of
from hibachi.offline.tasks.columns import Columns
from hibachi.offline.tasks.task import Full, RowError, RowTask

Block = Mapping[str, Any]


class Generate:
    """A model for `Dataset.map_batches`, of which Ray makes one in each of its actors. Rows of all blocks in flight are
    in one engine.

    model, settings: as for `hibachi.offline.run`; the engine runs in the actor's own process. columns, task, seed,
    token_ids, prefix: as of `hibachi.offline.Batch`. created: Unix time in seconds that chat templates take for the
    present; None means that at which the actor starts.

    What is computed of a row depends on the row alone, so that a block that was lost comes again as it was: a row
    without a seed gets one made of `seed` and of all its values, and rows that are equal have equal answers.

    Raises ConfigError and what loading the model raises.
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
        self._work.open()
        self._computing = _Computing(self._work)
        threading.Thread(target=self._computing.run, name="hibachi-rows", daemon=True).start()

    async def __call__(self, block: Block) -> dict[str, Any]:
        """block: columns by their names, NumPy arrays with an entry for each row. Returns them and the results' columns
        as `hibachi run-batch` writes them to Parquet, arrays of objects, [rows]: None where there is nothing, a text
        in `error` where a row failed.

        Raises ConfigError for columns that are missing, or have a result's name, and EngineFailed.
        """
        self._check(tuple(block))
        rows = [_row(values) for values in _rows_of(block)]
        done = await asyncio.gather(*[asyncio.wrap_future(self._computing.ask(row)) for row in rows])
        out = dict(block)
        for field in self._work.fields:
            column = np.empty(len(rows), object)
            for i, values in enumerate(done):
                value = values.get(field.name)
                column[i] = jsonl.text_of(value, Counter()) if field.kind == "json" and value is not None else value
            out[self._prefix + field.name] = column
        return out

    def close(self) -> None:
        """End the engine. Ray does without: it ends the process."""
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
        self._over: str | None = None
        self._lock = threading.Lock()  # of the three

    def ask(self, row: Row) -> Future[dict[str, Any]]:
        """The values of its results; one that is equal to a row in flight shares the other's."""
        with self._lock:
            if self._over is not None:
                raise EngineFailed(self._over)
            if (found := self._futures.get(row.number)) is None:
                found = self._futures[row.number] = Future()
                found.set_running_or_notify_cancel()  # a caller that leaves takes it from nobody else
                self._asked.append(row)
        self._work.wake()
        return found

    def run(self) -> None:
        try:
            while self._over is None:
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
            self._over = self._over or why
            left, self._futures = list(self._futures.values()), {}
        for future in left:
            future.set_exception(EngineFailed(why))


def _of_error(error: RowError) -> dict[str, Any]:
    return error.values or {"error": str(error)}


def _rows_of(block: Block) -> list[dict[str, Any]]:
    columns = [[_plain(value) for value in column] for column in block.values()]
    return [dict(zip(block, row, strict=True)) for row in zip(*columns, strict=True)]


def _row(values: dict[str, Any]) -> Row:
    """It has no place among all rows that would be the same if it was computed again: a digest is in its place."""
    said = repr(sorted(values.items())).encode(errors="surrogatepass")
    number = int.from_bytes(hashlib.blake2b(said, digest_size=7).digest())
    return Row(number, "", 0, values, size=len(said), arrow=(values, 0))


def _plain(value: Any) -> Any:
    """As JSON has it. Where a column of numbers has gaps, NumPy has NaN in them."""
    if isinstance(value, np.ndarray):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return (
        [_plain(each) for each in value]
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        else value
    )
