"""hibachi on a cluster of Ray: `Generate` puts the rows of a Dataset through a model, `app` serves one. See
docs/scale.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.common.installed import need
from hibachi.errors import ConfigError, EngineFailed, text_of
from hibachi.offline.batch import Batch, Task
from hibachi.offline.checks import check_names
from hibachi.offline.drive import LOOK
from hibachi.offline.files import arrow, jsonl
from hibachi.offline.files.rows import Row
from hibachi.offline.settings import settings_of
from hibachi.offline.tasks.choose import task_of
from hibachi.offline.tasks.columns import Columns
from hibachi.offline.tasks.task import Full, RowError, RowTask
from hibachi.server import asgi


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

    async def __call__(self, block: Any) -> Any:
        """block: columns by their names, each a NumPy array with an entry for each row; or a pyarrow.Table
        (batch_format="pyarrow"), which keeps integers where a column has gaps. Returns them with the results' columns,
        as `hibachi run-batch` writes them to Parquet; in a mapping they are arrays of objects, [rows]. Where a row
        failed, `error` has a text.

        Raises ConfigError for columns that are missing, or have a result's name, and EngineFailed.
        """
        names, columns = _columns_of(block)
        self._check(names)
        rows = [_row(dict(zip(names, values, strict=True))) for values in zip(*columns, strict=True)]
        done = await asyncio.gather(*[asyncio.wrap_future(self._computing.ask(row)) for row in rows])
        out = dict(block) if isinstance(block, Mapping) else block
        for field in self._work.fields:
            name, found = self._prefix + field.name, [values.get(field.name) for values in done]
            if field.kind == "json":
                found = [None if value is None else jsonl.text_of(value, Counter()) for value in found]
            if isinstance(out, dict):
                out[name] = np.fromiter(found, object, len(found))
            else:
                out = out.append_column(name, [arrow.arrow().array(found, arrow.type_of(field.kind))])
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


def _columns_of(block: Any) -> tuple[tuple[str, ...], list[list[Any]]]:
    """Their names and their values."""
    if isinstance(block, Mapping):
        return tuple(block), [[_plain(value) for value in column] for column in block.values()]
    return tuple(block.column_names), [arrow.values(column) for column in block.columns]


def _row(values: dict[str, Any]) -> Row:
    """It has no place among all rows that would be the same if it was computed again: a digest is in its place."""
    said = repr(sorted(_plain(values).items())).encode(errors="surrogatepass")
    number = int.from_bytes(hashlib.blake2b(said, digest_size=7).digest())
    return Row(number, "", 0, values, size=len(said), arrow=(values, 0))


def _plain(value: Any) -> Any:
    """As JSON has it. Where a column of integers has gaps, NumPy has floats, and NaN in the gaps."""
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


# ---- Ray Serve -------------------------------------------------------------------------------------------------------

OLDEST = (2, 55)  # before, an actor whose call is asynchronous does not start beside uvloop 0.22, and is waited for
CLOSING = 5.0  # seconds to close an engine when its requests have ended


def app(settings: Mapping[str, Any] | None = None) -> Any:
    """A model as an application of Ray Serve, with all routes of `hibachi serve`, for `serve.run`. In Serve's own files
    it is `import_path: hibachi.ray:app`, with the settings as `args`.

    settings: as of `hibachi.server.asgi`, and besides options of `serve.deployment` by their names, such as
    num_replicas and ray_actor_options. A replica has all processes of its model on its node: unless ray_actor_options
    say so, it asks for as many CPUs.

    Raises MissingExtra, and ConfigError for an old Ray and for settings that cannot be used.
    """
    serve = _serve()
    given = dict(settings or {})
    known = [*inspect.signature(serve.deployment).parameters][1:]
    options = {name: given.pop(name) for name in known if name in given}
    made = asgi(given)
    if not isinstance(ranks := made.settings.tensor_parallel_size, int):
        raise ConfigError("tensor_parallel_size auto: Ray must know before how many processes there are. Say a number.")

    def ingress() -> Any:
        made.open()  # here, as Ray tells of what the constructor raises
        return made

    class Replica:
        app: Any  # Serve's: what `ingress` made

        def check_health(self) -> None:
            if (why := self.app.served.why_not_live()) is not None:
                raise EngineFailed(why)

    defaults = {
        "name": "hibachi",
        "max_ongoing_requests": 2 * (made.settings.max_num_seqs + made.settings.max_num_queued_reqs),  # it says 429
        "graceful_shutdown_timeout_s": made.settings.drain_timeout + CLOSING,
        "max_constructor_retry_count": 1,
        "ray_actor_options": {"num_cpus": ranks * made.settings.pipeline_parallel_size},
    }
    return serve.deployment(**{**defaults, **options})(serve.ingress(ingress)(Replica)).bind()


def _serve() -> Any:
    """Ray Serve. Raises MissingExtra, ConfigError."""
    version = need("ray", "hibachi.ray.app", "ray").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"hibachi.ray.app needs Ray {oldest} or later; got {version}. pip install -U 'ray[serve]'.")
    return need("ray.serve", "hibachi.ray.app", "ray")
