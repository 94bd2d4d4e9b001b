"""Checks that find errors of the input before a model is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hibachi.common.installed import need
from hibachi.errors import ConfigError, printable
from hibachi.offline.batch import Batch
from hibachi.offline.files import arrowtypes
from hibachi.offline.files.rows import BATCH, Row
from hibachi.offline.files.sources import Sources
from hibachi.offline.files.table import FileForm
from hibachi.offline.tasks.columns import Columns
from hibachi.offline.tasks.task import RowTask

MOST_NAMED = 20  # wrong rows, in a message


def check_form(form: FileForm) -> None:
    """Check that a writer of this format is installed. Raises MissingExtra."""
    if form.format.needs_pyarrow or form.compression == "zstd":
        what = form.format.title if form.format.needs_pyarrow else form.compression
        need("pyarrow", f"An output of {what}", BATCH)


def check_columns(work: RowTask, sources: Sources, batch: Batch) -> None:
    """Are the columns there that `work` reads, and of its types? OpenAI's lines say all themselves. Raises
    ConfigError."""
    columns = batch.columns
    if batch.openai and (columns != Columns() or batch.task != "generate" or batch.token_ids):
        raise ConfigError(
            "The rows are OpenAI's batch lines, which say themselves what is asked for and how to sample: leave such "
            "flags out (also --task and --token-ids); or, with --no-openai, take the lines for rows like others."
        )
    if all(file.format is None for file in sources.files):
        return  # there are no rows, so none is wrong
    try:
        work.check(sources.columns)
    except ConfigError:
        if not any(file.own_keys for file in sources.files):
            raise
        work.check(arrowtypes.names(sources))  # only the first row was asked for its keys
    if not batch.openai:
        columns.check_types(sources.types)


def check_names(names: Collection[str], columns: Collection[str] | None) -> None:
    """names: of result columns. columns: of the input, as far as they are known. Raises ConfigError."""
    if both := [name for name in names if name in (columns or ())]:
        raise ConfigError(
            f"The input has a column {both[0]!r}, and so would the results. Give the results' columns another name: "
            f"--result-prefix result_, in Python prefix='result_', makes it {'result_' + both[0]!r}."
        )


def apart(rows: Iterator[Row], work: RowTask, prefix: str) -> Iterator[Row]:
    """The rows, of which those are errors that have a column with the name of a result: only in JSON is that not known
    of all rows before."""
    fields, names = None, frozenset[str]()
    for row in rows:
        if fields is not work.fields:  # they may become others when the model is loaded
            fields = work.fields
            names = frozenset(prefix + field.name for field in fields) if work.carries else frozenset()
        if row.error is None and not names.isdisjoint(row.values):
            both = next(name for name in row.values if name in names)
            row.error = f"expected no {both!r}, as the results have a column of that name (see --result-prefix)"
        yield row


def validate(work: RowTask, rows: Iterator[Row]) -> None:
    """Read all rows. Raises ConfigError, which names those that cannot be computed."""
    wrong, n = list[str](), 0
    for row in rows:
        why = f"{row.place}: {row.error}" if row.error is not None else work.wrong(row)
        if why is not None:
            n += 1
            if len(wrong) < MOST_NAMED:
                wrong.append(printable(why))
    if wrong:
        more = f"\n... and {n - len(wrong)} more" if n > len(wrong) else ""
        some = "A row" if n == 1 else f"{n} rows"
        raise ConfigError(f"{some} cannot be computed, so nothing was:\n" + "\n".join(wrong) + more)
