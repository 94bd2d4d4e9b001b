"""Offline inference: `run` puts files of rows through a model, into a file; `hibachi run-batch` is its command.

An interrupted run can be resumed. See docs/offline.md. `generate` does it with a block of rows, for workers of Dask and
Spark: see docs/dask-spark.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hibachi.errors import ConfigError
from hibachi.offline.batch import Batch
from hibachi.offline.blocks import generate
from hibachi.offline.drive import Counts
from hibachi.offline.runs import Done, Watcher, run_batch
from hibachi.offline.settings import settings_of
from hibachi.offline.tasks.columns import Columns

__all__ = ["Batch", "Columns", "Counts", "Done", "Watcher", "generate", "run", "run_batch"]


def run(
    inputs: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    model: str | Path = "tiny",
    columns: Columns | None = None,
    settings: Mapping[str, Any] | None = None,
    watcher: Watcher | None = None,
    **options: Any,
) -> Done:
    """Put the rows of files through a model, and write them with its answers. The same call resumes an interrupted run.

    inputs: files, globs, folders.
    model: as for `LLM`, or pkg:Class.
    settings: of the engine, by the names of `hibachi run-batch`'s flags: {"max_num_seqs": 64, "backend": "torch"}.
    watcher: an object that is told of the progress.
    options: fields of `Batch`, such as task, url, limit or overwrite.

    Raises ConfigError for errors that concern all rows, before a model is loaded; GivenUp, InvalidInput or OSError if
    the run ends early and the same call can resume it; and what loading the model raises. An error of one row is
    written in its line.
    """
    known = [*Batch.__dataclass_fields__]
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(f"There is no option {unknown[0]!r}. There are: {', '.join(known)}.")
    named = [inputs] if isinstance(inputs, (str, Path)) else inputs
    batch = Batch(
        inputs=[os.fspath(name) for name in named],
        output=os.fspath(output),
        settings=settings_of(model, settings or {}),
        columns=columns or Columns(),
        **options,
    )
    return run_batch(batch, watcher)
