"""A run: files in, a file out, and a journal beside it, from which an interrupted run goes on."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from hibachi.errors import ConfigError, HibachiError
from hibachi.offline.batch import PIPE, Batch
from hibachi.offline.checks import check_columns, check_form, check_names, validate
from hibachi.offline.drive import Counts, Drive
from hibachi.offline.files.format import Field
from hibachi.offline.files.rows import InvalidInput
from hibachi.offline.files.sources import Sources
from hibachi.offline.files.table import FileForm, form_of, open_writer
from hibachi.offline.input import RowInput, same_input
from hibachi.offline.journal import Journal
from hibachi.offline.output import CHANGED, Output, write_errors
from hibachi.offline.place import ERRORS, OUTPUT, RunPlace, check_places
from hibachi.offline.tasks import fingerprint as told
from hibachi.offline.tasks.choose import resolve_lines, task_of
from hibachi.offline.tasks.task import RowTask
from hibachi.offline.whole import part_of

RETRY = "retry"  # a note: bytes of the journal when errors were to be computed again


@dataclass(slots=True)
class Done:
    """The result of a run.

    status: "done"; "done before", if there was nothing to do; "interrupted". rows: of the whole run, earlier starts
    included; failed: of these, errors. resumed: rows that were done before. counts: of this start. remarks: what was
    changed in writing, and how often. created: Unix time in seconds of the run's first start.
    """

    status: str
    rows: int
    failed: int
    resumed: int
    counts: Counts
    seconds: float
    about: str = ""
    remarks: dict[str, int] = field(default_factory=dict)
    damaged: int = 0
    created: int = 0
    failure: str | None = None  # the first error of a row, where that ended the run


class Watcher:
    """Base class of objects that follow a run. All methods do nothing."""

    def says(self, line: str) -> None:
        """A message for the user."""

    def loaded(self, batch: Batch, about: str) -> None:
        """The model is loaded, or the server found. about: what it is, and where it runs, in a few words."""

    def begins(self, batch: Batch, drive: Drive, journal: Journal, sources: Sources) -> None:
        """Rows are about to be computed, if any are left."""

    def turn(self, counts: Counts) -> None:
        """Some rows are done."""

    def writes(self) -> None:
        """All rows are done, and the output is being written."""


def run_batch(batch: Batch, watcher: Watcher | None = None) -> Done:
    """Do what is left to do. Raises ConfigError before a model is loaded for what is wrong with all rows; GivenUp,
    InvalidInput, OSError for what ends a run that the same call can resume; what loading a model raises."""
    return _Run(batch, watcher or Watcher()).run()


class _Run:
    def __init__(self, batch: Batch, watcher: Watcher) -> None:
        self._batch, self._watcher = batch, watcher
        self._began = time.monotonic()
        self._stack = ExitStack()
        self._about = ""

    def run(self) -> Done:
        with self._stack:
            return self._run()

    def _run(self) -> Done:
        batch = self._batch
        self._piped = PIPE in batch.inputs or batch.output == PIPE
        if self._piped:
            self._watcher.says("A pipe cannot be resumed: if this run is ended, it begins anew.")
        self._form: FileForm = form_of(
            "out.jsonl" if batch.output == PIPE and not batch.format else batch.output, batch.format
        )
        check_form(self._form)
        journal_path = self._paths()
        own = [path for path in (self._path, self._errors_path) if path is not None and journal_path.exists()]
        own += [Path(os.path.realpath(name)) for name in batch.beside]
        self._input = RowInput(batch, spool=journal_path.with_name("input"), own=own, says=self._watcher.says)
        self._sources = self._input.sources
        self._check_places(journal_path)
        self._columns = self._sources.columns
        batch = self._batch = resolve_lines(batch, self._columns)
        self._journal = journal = Journal(journal_path)
        self._stack.callback(journal.close)
        reader = task_of(batch, reading=True)
        check_columns(reader, self._sources, batch)
        self._check_names(reader)
        head = {"created": self._created(), "input": self._input.digests, **batch.facts()}
        changed = self._compare(head, reader)
        self._find_places()
        if changed and batch.overwrite and not batch.accept_changes:
            changed = self._begin_anew(head)
        if (finished := self._finished(changed)) is not None:
            return finished
        for line, at in journal.damaged:
            self._watcher.says(f"{journal.path}, line {line} (byte {at}) is damaged; what it held is computed again.")
        if reader.carries:
            self._columns = self._input.columns(self._form)
            self._check_names(reader)
        if batch.validate:
            validate(reader, self._input.read(reader))
        if batch.retry_errors:
            self._forget_errors()
        return self._compute(task_of(batch, head["created"]), head, changed)

    # ---- before ------------------------------------------------------------------------------------------------

    def _paths(self) -> Path:
        """Where the journal goes; notes where the output and the errors go."""
        batch = self._batch
        self._path = None if batch.output == PIPE else Path(os.path.realpath(batch.output))
        self._errors_path = None if batch.errors is None else Path(os.path.realpath(batch.errors))
        if self._path is not None and not self._piped:
            return self._path.with_name(self._path.name + ".journal")
        prefix, near = "hibachi-batch-", None
        if self._path is not None and os.access(self._path.parent, os.W_OK):
            prefix, near = f"{self._path.name}.", self._path.parent  # where there is room for what is as large
        folder = Path(tempfile.mkdtemp(".tmp", prefix, near))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder / "journal"

    def _check_places(self, journal: Path) -> None:
        files = [path for path in (self._path, self._errors_path) if path is not None]
        check_places(files, [f.path for f in self._sources.files], [journal, *map(part_of, files)])

    def _created(self) -> int:
        return int(self._journal.heads[0]["created"]) if self._journal.heads else self._now

    @property
    def _now(self) -> int:
        """The start of the run in Unix seconds; SOURCE_DATE_EPOCH in its place, so that two runs can be compared."""
        with suppress(KeyError, ValueError):
            return int(os.environ["SOURCE_DATE_EPOCH"])
        return int(time.time() - (time.monotonic() - self._began))

    def _check_names(self, work: RowTask) -> None:
        """Check that result columns do not have names of input columns, which they would hide. Raises ConfigError."""
        if work.carries:
            fields = [*work.fields, CHANGED] if self._batch.accept_changes else work.fields
            check_names([self._batch.prefix + f.name for f in fields], self._columns)

    # ---- is it the run that the journal is of? -----------------------------------------------------------------

    def _compare(self, head: dict[str, Any], work: RowTask) -> list[str]:
        """Compare the run with the journal's; what is the same under another name is taken into `head`. Raises
        ConfigError for a difference, unless changes are accepted.
        """
        if not self._journal.heads:
            return []
        last = self._journal.heads[-1]
        if same := same_input(last, head):
            head["input"] = last["input"]
            self._input.rename(list(last["input"]))
        changed = list(told.differences({key: last.get(key) for key in head}, head))
        if not same and not self._takes_changes:
            changed.append(self._input.edited(work, self._journal))
        return self._accepted(changed)

    @property
    def _takes_changes(self) -> bool:
        return self._batch.accept_changes or self._batch.overwrite

    def _accepted(self, changed: list[str], why: str = "") -> list[str]:
        """why: what follows of the changes, a sentence."""
        if changed and not self._takes_changes:
            raise ConfigError(
                "This output was begun by a run that differs:\n  " + "\n  ".join(changed) + f"\n{why}Go on "
                "nevertheless with --accept-changes, which marks the rows; begin anew with --overwrite; or choose "
                "another output."
            )
        return changed

    def _find_places(self) -> None:
        """Raises ConfigError if a file is there that is not ours."""
        journal, overwrite = self._journal, self._batch.overwrite
        self._place = RunPlace(self._path, journal, OUTPUT, overwrite=overwrite) if self._path is not None else None
        errors = self._errors_path
        self._errors = RunPlace(errors, journal, ERRORS, overwrite=overwrite) if errors is not None else None
        if not journal.heads and not self._piped:
            for place in filter(None, (self._place, self._errors)):
                place.check_part()

    def _begin_anew(self, head: dict[str, Any]) -> list[str]:
        """Returns what differs then: nothing."""
        self._watcher.says("What was done before differs, so this run begins anew.")
        self._journal.clear()
        self._input.rename(self._input.names)
        head |= {"created": self._now, "input": self._input.digests}
        return []

    def _shape(self) -> dict[str, Any]:
        """What makes the files that are written, besides the rows."""
        batch, errors = self._batch, self._errors_path
        return {
            "limit": batch.limit,
            "format": [self._form.format.name, self._form.compression],
            "prefix": batch.prefix,
            "errors": None if errors is None else str(errors),
            "heads": len(self._journal.heads),
        }

    def _finished(self, changed: list[str]) -> Done | None:
        """A run that has nothing to do."""
        if changed or self._place is None or not self._place.whole or self._place.said["shape"] != self._shape():
            return None
        said, journal = self._place.said, self._journal
        if (self._errors is not None and not self._errors.whole) or (self._batch.retry_errors and journal.failures):
            return None
        return self._done("done before", Counts(), said["rows"], said["failed"])

    def _forget_errors(self) -> None:
        """Those that are to be computed again: not those of a retry that was ended and now goes on."""
        journal = self._journal
        begun = journal.notes.get(RETRY)
        if begun is None or journal.notes.get(OUTPUT, {}).get(RETRY) == begun:
            begun = journal.size
            if journal.failures:
                journal.note(RETRY, begun)
        for row in list(journal.failed_rows(begun)):
            journal.forget(row)

    # ---- the run -----------------------------------------------------------------------------------------------

    def _compute(self, work: RowTask, head: dict[str, Any], changed: list[str]) -> Done:
        batch, journal = self._batch, self._journal
        left = self._input.left(work, journal, head)
        first = next(left, None)
        if first is not None:
            if self._open(work, head, changed):
                changed = self._begin_anew(head)
                return self._compute(task_of(batch, head["created"]), head, changed)
            left = chain((first,), left)
        elif not journal.heads or changed:
            before = journal.heads[-1] if journal.heads else {}
            journal.head({**head, **{key: before[key] for key in ("engine", "fields") if key in before}})
        drive = Drive(work, journal, left, fail_fast=batch.fail_fast)
        piece = self._output(self._standard_output(), work) if self._place is None else None

        def turn(counts: Counts) -> None:
            if piece is not None:
                piece.advance()
            self._watcher.turn(counts)

        drive.told = turn
        self._watcher.begins(batch, drive, journal, self._sources)
        try:
            drive.run()
        except InvalidInput:
            self._input.check(self._journal)  # that may be why
            raise
        self._input.check(self._journal)
        if drive.stopping:
            journal.sync()
            failure = None
            if drive.failed is not None:
                failure = f"{next(self._input.rows(lambda n: n != drive.failed_at)).place}: {drive.failed}"
            return self._done("interrupted", drive.counts, journal.done, journal.failures, failure=failure)
        self._watcher.writes()
        output = self._write(work) if piece is None else self._end_pipe(piece)
        return self._done("done", drive.counts, output.written, output.failed, remarks=dict(output.remarks))

    def _open(self, work: RowTask, head: dict[str, Any], changed: list[str]) -> bool:
        """Load the model, and note what makes the run from now on. True means it is not the engine that it was, and the
        run is to begin anew."""
        opened = work.open()
        closing = self._stack.enter_context(ExitStack())
        closing.push(partial(_close, work))
        self._about = opened.about
        self._watcher.loaded(self._batch, opened.about)
        self._check_names(work)  # once more: a model without a tokenizer has other results
        journal = self._journal
        before = journal.heads[-1].get("engine") if journal.heads else None
        if before is not None and not changed:
            differ = [*told.differences({"engine": before}, {"engine": opened.facts})]
            changed = self._accepted(differ, told.advice(before, opened.facts))
            if changed and not self._batch.accept_changes:
                closing.close()
                return True
        if not journal.heads or changed or before is None:
            fields = [[f.name, f.kind] for f in work.fields]
            journal.head({**head, "engine": opened.facts, "fields": fields})
        return False

    # ---- out ---------------------------------------------------------------------------------------------------

    def _output(self, file: BinaryIO, work: RowTask) -> Output:
        journal = self._journal
        last = journal.heads[-1]
        marks: list[str | None] | None = None
        if len(journal.heads) > 1:
            heads = [{key: value for key, value in h.items() if key != "fields"} for h in journal.heads]
            first = next((h for h in heads if "engine" in h), heads[0])  # under one without no row was computed
            marks = ["; ".join(told.differences(first, h)) or None for h in heads]
        prefix, fields = self._batch.prefix, [Field(*f) for f in last["fields"]] if "fields" in last else work.fields
        results = [Field(prefix + f.name, f.kind) for f in (*fields, *((CHANGED,) if marks else ()))]
        carried = self._sources if work.carries else None
        writer = open_writer(file, self._form, sources=carried, results=results, stop=self._batch.limit)
        return Output(writer, journal, self._input.rows(), prefix, marks)

    def _write(self, work: RowTask) -> Output:
        assert self._place is not None
        self._write_errors()

        def note() -> dict[str, Any]:
            self._input.check(self._journal)
            retry = self._journal.notes.get(RETRY)
            return {"rows": output.written, "failed": output.failed, "shape": self._shape(), RETRY: retry}

        with self._place.writing(note) as file:
            output = self._output(file, work)
            if not output.advance():
                raise HibachiError(f"Row {output.written} has no result. Run the same command again.")
            output.close()
        return output

    def _write_errors(self) -> None:
        if self._errors is not None:
            with self._errors.writing() as file:
                write_errors(file, self._journal, self._input.rows(lambda number: not self._journal.failed(number)))

    def _standard_output(self) -> BinaryIO:
        found: BinaryIO | None = getattr(sys.stdout, "buffer", None)
        return found or self._stack.enter_context(open(os.devnull, "wb"))  # the caller has closed it

    def _end_pipe(self, output: Output) -> Output:
        output.advance()
        output.close()
        sys.stdout.flush()
        self._write_errors()
        return output

    def _done(
        self,
        status: str,
        counts: Counts,
        rows: int,
        failed: int,
        *,
        remarks: dict[str, int] | None = None,
        failure: str | None = None,
    ) -> Done:
        return Done(
            status,
            rows,
            failed,
            rows - counts.rows,
            counts,
            time.monotonic() - self._began,
            self._about,
            remarks or {},
            len(self._journal.damaged),
            self._created(),
            failure,
        )


def _close(work: RowTask, error: object, *_: object) -> None:
    """After an error, which may be the second Ctrl-C, nothing that still runs is waited for."""
    if error is not None:
        work.abandon()
    work.close()
