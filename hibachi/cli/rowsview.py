"""Progress of `hibachi run-batch` on the terminal."""

from __future__ import annotations

import os
import sys
import time
from typing import Self

from hibachi.common.progress import Progress
from hibachi.errors import printable
from hibachi.offline.batch import PIPE, Batch
from hibachi.offline.drive import Counts, Drive
from hibachi.offline.files.sources import Sources
from hibachi.offline.input import LARGE
from hibachi.offline.journal import Journal
from hibachi.offline.report import Course
from hibachi.offline.runs import Watcher


class RowsView(Watcher):
    """On standard error: a bar where that is a terminal, else a line a minute. drive: once the model is loaded."""

    drive: Drive | None
    course: Course

    def __init__(self, live: bool | None = None) -> None:
        self._live = live
        self.drive, self.course = None, Course()
        self._progress: Progress | None = None
        self._stopping = False

    def says(self, line: str) -> None:
        line = printable(line, lines=True)
        if self._progress is not None:
            self._progress.say(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def loaded(self, batch: Batch, about: str) -> None:
        if batch.url is not None:
            self.says(f"Model: {about}")
            return
        model = batch.settings.model
        name = "tiny, the model that ships with hibachi (--model names another)" if model == "tiny" else model
        self.says(f"Model: {name}; {about}")

    def begins(self, batch: Batch, drive: Drive, journal: Journal, sources: Sources) -> None:
        self.drive, self._before = drive, journal.done
        self._batch, self._journal, self._sources = batch, journal, sources
        self._began = time.monotonic()
        i, n = batch.shard
        total = sources.count()
        if total is not None:
            total = len(range(i - 1, total if batch.limit is None else min(total, batch.limit), n))
        self._progress = Progress(total, "rows", live=self._live, before=self._before)

    def turn(self, counts: Counts) -> None:
        self.course.see(counts)
        if self.drive is not None and self.drive.stopping and not self._stopping:
            self._stopping = True
            self.says("Finishing what runs ... (once more ends it at once)")
        if self._progress is not None:
            seconds = max(time.monotonic() - self._began, 1e-9)
            told: dict[str, float | str] = {"new tokens/s": counts.new_tokens / seconds} if counts.new_tokens else {}
            if counts.cached_tokens:
                told["of prompts cached"] = f"{counts.cached_tokens / counts.prompt_tokens:.0%}"
            if counts.failed:
                told["failed"] = counts.failed
            self._progress.update(self._before + counts.rows, **told)

    def writes(self) -> None:
        if self._progress is not None:
            self._progress.close(whole=True)  # lines were counted, and blank ones are no rows
        size = self._journal.size + sum(os.path.getsize(file.path) for file in self._sources.files)
        if size > LARGE and self._batch.output != PIPE:
            self.says(f"Writing {self._batch.output} ...")

    def stops(self) -> None:
        """From a signal's handler, which may have come in the midst of a line that is written."""
        assert self.drive is not None
        self.drive.stop()

    def end(self) -> None:
        if self._progress is not None:
            self._progress.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
