"""Drives the rows of a run from the input into the journal: reading ahead, starting rows, and recovery from a lost
engine.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hibachi.engine.scheduler.compose import Composer
from hibachi.errors import EngineFailed, HibachiError
from hibachi.offline.files.rows import InvalidInput, Row
from hibachi.offline.journal import Journal
from hibachi.offline.tasks.task import Full, Lost, Prepared, Result, RowError, RowTask

WINDOW_ROWS, WINDOW_BYTES = 4096, 64 << 20  # that are read and not started
ALONE, GIVEN_UP = 2, 3  # losses of the engine after which a row runs alone, and after which it is an error
SUSPICIOUS, MOST_LOSSES = 4, 32  # without a row computed in between: what is to run alone goes first; the run ends
MOST_OPENINGS = 8  # that fail in succession
MOST_CONDEMNED = 7  # rows, if none was ever computed: with more, the engine is to blame
CUT = ("length", ["length"])  # ends of answers
MOST_REFUSED = 600  # times that there is no room for a row though nothing else runs, about a minute
LOOK = 1.0  # seconds: so often it is asked whether the engine hangs


class GivenUp(HibachiError):
    """The run cannot go on now; finished rows are kept."""


@dataclass(slots=True)
class Counts:
    """Counters of a run since it was started (not of earlier starts).

    cut: rows whose answers reached the limit of new tokens, as far as a column says that. Tokens: of the prompts of
    computed rows, of these those found in the cache, and new ones.
    """

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    losses: int = 0
    given_up: int = 0  # rows with which the engine was lost too often
    cut: int = 0


@dataclass(slots=True)
class _Going:
    """A row that was read and is not done."""

    prepared: Prepared
    digest: int
    losses: int = 0
    refused: int = 0  # times, though nothing else ran


def digest_of(row: Row) -> int:
    """A digest of a row, by which an edited row is noticed."""
    return zlib.crc32(repr((row.values, row.error)).encode(errors="surrogatepass"))


@dataclass(eq=False)
class Drive:
    """Computes the rows that the journal does not have yet.

    rows: those that are not done. told: called after each turn. fail_fast: the first error of a row ends the run. stop:
    once it is set, no row is started any more, and running rows end by themselves.
    """

    work: RowTask
    journal: Journal
    rows: Iterator[Row]
    told: Callable[[Counts], object] = lambda counts: None
    fail_fast: bool = False
    counts: Counts = field(default_factory=Counts)
    stopping: bool = False
    failed: RowError | None = None  # the first, with fail_fast
    failed_at: int = 0  # its row

    def __post_init__(self) -> None:
        self._going: dict[int, _Going] = {}  # all that is read and not done
        self._composer = Composer()
        self._bytes = 0
        self._open: dict[int, None] = {}  # started and not taken
        self._again: deque[int] = deque()  # to be started before those of the composer
        self._alone: deque[int] = deque()
        self._is_alone = False  # the row that runs is the only one that may
        self._condemned: list[tuple[int, int, RowError]] = []  # lost too often, if the engine does better without them
        self._read_all = False
        self._broken: Exception | None = None  # the input cannot be read on
        self._barren = 0  # losses since a row was computed

    def stop(self) -> None:
        """Finish running rows and start no more. Callable from any thread and from a signal's handler."""
        self.stopping = True
        self.work.wake()

    def run(self) -> None:
        """Run until all rows are done, or stopped. Raises GivenUp, InvalidInput, OSError of the journal."""
        withdrawn = False
        while True:
            if self.stopping and not withdrawn:
                withdrawn = True
                for number in self.work.withdraw():
                    del self._open[number]
            if not self.stopping:
                self._fill()
                self._start()
            self.journal.flush()
            self.told(self.counts)
            if not self._open:
                if self.stopping or not self._going:
                    break
                continue
            try:
                done = self.work.wait(LOOK)
            except Lost as e:
                self._lose(e)
                continue
            lost: Lost | None = None
            for number in done:
                lost = self._take(number) or lost
            if lost is not None:
                self._lose(lost)
        if not self.stopping:
            self._convict_the_last()
            self.journal.flush()
        if self._broken is not None:
            raise self._broken

    # ---- in ----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        while not self._read_all and len(self._composer) < WINDOW_ROWS and self._bytes < WINDOW_BYTES:
            try:
                row = next(self.rows, None)
            except (InvalidInput, OSError) as e:  # what was read is computed nevertheless
                row, self._broken = None, e
            if row is None:
                self._read_all = True
                return
            self._enter(row)
            if self.stopping:
                return

    def _enter(self, row: Row) -> None:
        digest = digest_of(row)
        try:
            if row.error is not None:
                raise RowError(row.error, self.work.refused(row, row.error))
            prepared = self.work.prepare(row)
        except RowError as e:
            self._fail(row.number, digest, e)
            return
        self._going[row.number] = _Going(prepared, digest)
        self._bytes += prepared.size
        self._composer.add(row.number, prepared.key, prepared.longest)

    def _start(self) -> None:
        if not self._going:  # perhaps nothing was left to do, so the work was never opened
            return
        while not self.stopping and len(self._open) < self.work.places and (number := self._next()) is not None:
            going = self._going[number]
            try:
                self.work.start(number, going.prepared)
            except RowError as e:
                self._finish(number)
                self._fail(number, going.digest, e)
            except Full as e:
                if not self._open:
                    going.refused += 1
                    if going.refused >= MOST_REFUSED:
                        self._finish(number)
                        self._fail(number, going.digest, self.work.lost(number, going.prepared, str(e)))
                        continue
                    time.sleep(LOOK / 10)
                self._put_back(number)
                return
            except Lost as e:
                self._put_back(number)
                self._lose(e)
                return
            else:
                self._open[number] = None

    def _put_back(self, number: int) -> None:
        (self._alone if self._is_alone else self._again).appendleft(number)

    def _next(self) -> int | None:
        """The row to start next; None means none may start now."""
        if self._is_alone and self._open:
            return None
        self._is_alone = False
        if self._again:
            return self._again.popleft()
        first_alone = len(self._alone) >= WINDOW_ROWS or (self._alone and self._barren >= SUSPICIOUS)
        if len(self._composer) and not first_alone:
            number = self._composer.take()
            self._bytes -= self._going[number].prepared.size
            return number
        if not self._alone or self._open:
            return None
        self._is_alone = True
        return self._alone.popleft()

    # ---- out ---------------------------------------------------------------------------------------------------

    def _take(self, number: int) -> Lost | None:
        going = self._going[number]
        try:
            result = self.work.take(number)
        except Lost as e:
            return e  # it is still open, for `_lose`
        except RowError as e:
            self._finish(number)
            self._fail(number, going.digest, e)
        else:
            self._finish(number)
            self._keep(number, going.digest, result)
        return None

    def _finish(self, number: int) -> None:
        self._open.pop(number, None)
        del self._going[number]

    def _keep(self, number: int, digest: int, result: Result) -> None:
        self._barren = 0
        if self._condemned:
            self._convict()
        counts = self.counts
        counts.rows += 1
        counts.prompt_tokens += result.prompt_tokens
        counts.cached_tokens += result.cached_tokens
        counts.new_tokens += result.new_tokens
        counts.cut += result.values.get("finish_reason") in CUT
        self.journal.row(number, digest, result.values)

    def _fail(self, number: int, digest: int, error: RowError) -> None:
        self.counts.rows += 1
        self.counts.failed += 1
        self.journal.row(number, digest, error.values or {"error": str(error)}, failed=True)
        if self.fail_fast and self.failed is None:
            self.failed, self.failed_at = error, number
            self.stopping = True

    # ---- losses ------------------------------------------------------------------------------------------------

    def _lose(self, why: Lost) -> None:
        """The engine is lost. Its rows start again: together, alone, or not at all. Raises GivenUp."""
        self.counts.losses += 1
        self._barren += 1
        for number in self._open:
            self._going[number].losses += 1
        lost = sorted(self._open)
        self._open.clear()
        for number in reversed(lost):
            going = self._going[number]
            if going.losses >= GIVEN_UP:
                self._finish(number)
                message = f"The engine was lost {going.losses} times while it computed this row, the last time alone."
                self._condemned.append((number, going.digest, self.work.lost(number, going.prepared, message)))
            elif going.losses >= ALONE:
                self._alone.appendleft(number)
            else:
                self._again.appendleft(number)
        self.journal.flush()
        self.work.abandon()
        if self.stopping:
            return
        if self._barren >= MOST_LOSSES:
            raise GivenUp(
                f"The engine was lost {self._barren} times, and no row was computed in between. The last time: {why}"
            ) from why
        self._open_again()

    def _convict_the_last(self) -> None:
        """All else is done. Raises GivenUp if no row was ever computed, as then it may be the engine's fault."""
        if len(self._condemned) > MOST_CONDEMNED and self.journal.done == self.journal.failures:
            raise GivenUp(f"The engine was lost with each of {len(self._condemned)} rows, and no row was computed.")
        self._convict()

    def _convict(self) -> None:
        """Others fared better, or there are no others."""
        for number, digest, error in self._condemned:
            self.counts.given_up += 1
            self._fail(number, digest, error)
        self._condemned.clear()

    def _open_again(self) -> None:
        failed = 0
        while not self.stopping:
            try:
                self.work.open()
                return
            except EngineFailed as e:  # it died while it was loaded, as when memory is short for a while
                failed += 1
                if failed >= MOST_OPENINGS:
                    raise GivenUp(f"The engine could not be started again: {e}") from e
                time.sleep(failed)
