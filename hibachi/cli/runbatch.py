"""put files of prompts through a model; resume a run that was interrupted

Reads JSON Lines, CSV and Parquet (gzip, zstd), row by row, also OpenAI's batch
lines, and writes any of them, in the input's order. Kill it at any moment and
run the same command again: nothing is lost, nothing done twice. Settings of
model and engine may also stand in a TOML file (--config), by the names of their
flags, or in the environment: HIBACHI_MODEL=tiny is --model tiny.

hibachi run-batch -i prompts.jsonl -o answers.jsonl --model path/to/model
hibachi run-batch -i a.csv b.parquet -o out.csv --template "Summarise: {text}"
hibachi run-batch -i batch.jsonl -o out.jsonl --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hibachi.cli.rowsview import RowsView
from hibachi.cli.settings import record_of, settings_arguments
from hibachi.errors import ConfigError, HibachiError, printable
from hibachi.offline.batch import PIPE, TASKS, Batch
from hibachi.offline.files.sources import expand
from hibachi.offline.files.table import NAMES
from hibachi.offline.report import check_plot, is_told, plot, report, text, write
from hibachi.offline.runs import Done, run_batch
from hibachi.offline.settings import GROUPS, SETTINGS, misspelled, settle
from hibachi.offline.tasks.columns import Columns, value_of
from hibachi.offline.whole import part_of

KEY = "HIBACHI_API_KEY"
SOME_FAILED, LOST, INTERRUPTED, TERMINATED = 3, 1, 130, 143


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "hibachi run-batch [options] -i IN [IN ...] -o OUT"
    add = parser.add_argument_group("files").add_argument
    add(
        "-i",
        "--input",
        dest="inputs",
        nargs="+",
        required=True,
        metavar="IN",
        help="files, globs or folders to read; - means standard input",
    )
    add("-o", "--output", required=True, metavar="OUT", help="file to write; - means standard output")
    add(
        "--format",
        metavar="F",
        help=f"format of OUT: {', '.join(NAMES)}, jsonl.gz, csv.zst ... (default: by its name)",
    )
    add("--delimiter", metavar="C", help="delimiter of CSV input (default: a comma; for .tsv a tab)")
    add("--encoding", metavar="NAME", help="encoding of CSV input (default: utf-8)")
    add("--limit", type=int, metavar="N", help="read only the first N rows")
    add(
        "--shard",
        type=_shard,
        default=(1, 1),
        metavar="I/N",
        help="take every N-th row from the I-th: 1/4, 2/4, 3/4, 4/4",
    )
    add("--errors", metavar="FILE", help="write rows that failed as JSON Lines; they are in OUT as well")
    add("--result-prefix", dest="prefix", default="", metavar="P", help="prefix of the names of result columns")
    add = parser.add_argument_group("what rows say").add_argument
    add(
        "--task",
        choices=TASKS,
        default="generate",
        help="work to do; forward is for a feed-forward model (default: generate)",
    )
    add("--openai", action=argparse.BooleanOptionalAction, help="read OpenAI's batch lines (default: if they look so)")
    add(
        "--served-model-name",
        dest="served_names",
        default=[],
        nargs="+",
        action="extend",
        metavar="NAME",
        help="names by which such lines may call the model",
    )
    add("--prompt-column", dest="prompt", metavar="C", help="column of texts or token ids (default: prompt, else text)")
    add(
        "--messages-column",
        dest="messages",
        metavar="C",
        help="column of conversations, for the model's chat template",
    )
    add(
        "--tokens-column",
        dest="tokens",
        metavar="C",
        help="column of token ids, or of lists of your own model's tokens",
    )
    add(
        "--feature-columns",
        dest="features",
        type=_names,
        default=(),
        metavar="C,C",
        help="columns of numbers that together are one input",
    )
    add("--template", metavar="TEXT", help='prompt with columns in braces: "Summarise: {text}"')
    add("--system", metavar="TEXT", help="system message; the prompt becomes the user's message")
    add("--chat", action="store_true", help="send the prompt as a user's message, without a system message")
    add("--token-ids", action="store_true", help="write the ids of new tokens to the results")
    add = parser.add_argument_group("how to sample (default: as the model's files say)").add_argument
    add("--max-tokens", type=int, metavar="N", help="most new tokens of a row (default: 16)")
    add("--temperature", type=float, metavar="T", help="sampling temperature; 0 means greedy (default: the model's)")
    pairs: dict[str, Any] = {"action": "append", "type": _pair, "default": []}
    add("--param", **pairs, metavar="NAME=VALUE", help="set any sampling parameter, or tools: top_p=0.9; repeatable")
    add("--param-column", **pairs, metavar="NAME=C", help="take a parameter from a column; repeatable")
    add("--seed", type=int, default=0, metavar="N", help="seed of the run, for rows without one (default: 0)")
    add = parser.add_argument_group("the run").add_argument
    add("--plan", action="store_true", help="show tokens, expected cache hits and time; compute nothing")
    add("--validate", action="store_true", help="check all rows first, and begin only if none is wrong")
    add("--fail-fast", action="store_true", help="end at the first row that fails")
    add("--retry-errors", action="store_true", help="compute rows that failed before again")
    add("--overwrite", action="store_true", help="replace another run's output, or begin anew where something differs")
    add("--accept-changes", action="store_true", help="go on although something differs; rows then say what")
    add("--verify-weights", action="store_true", help="identify the model by all bytes of its weights, not by samples")
    add("--report", metavar="FILE", help="write how the run went, as JSON; with --plan: read rates of an earlier run")
    add("--plot", metavar="FILE", help="draw the same as .png or .svg (extra: plot)")
    add("--step-time", metavar="FILE", help="step times for --plan, from `hibachi bench fit`")
    add("--plain", action="store_true", help="write plain lines, as when the output is piped")
    add = parser.add_argument_group("a server in place of a model").add_argument
    add("--url", metavar="URL", help="server or router with OpenAI's API, such as http://127.0.0.1:8000")
    add("--url-model", metavar="NAME", help="model to ask for (default: the first that the server names)")
    add("--api-key", metavar="KEY", help=f"key to send (default: the variable {KEY}, which no list of processes shows)")
    add("--concurrency", type=int, default=64, metavar="N", help="most requests at a time (default: 64)")
    add("--request-timeout", type=float, default=600.0, metavar="S", help="seconds for an answer (default: 600)")
    settings_arguments(parser, GROUPS)


def run(args: argparse.Namespace) -> int:
    batch = _batch(args)
    for remark in misspelled(os.environ):
        print(f"hibachi: {remark}.", file=sys.stderr)
    if args.plot:
        check_plot(args.plot)
    if not args.plan:
        _check_places(args)
    if args.plan:
        from hibachi.offline.forecast import forecast

        print(forecast(batch, report=args.report, step_time=args.step_time).text())
        return 0
    view = RowsView(live=False if args.plain else None)
    with _signals(view) as signals, view:
        try:
            done = run_batch(batch, view)
        except BrokenPipeError:  # the reader of our output has closed the pipe
            raise
        except (HibachiError, OSError) as e:
            view.end()
            more = f"\n{_resumable(batch)}" if view.drive is not None else ""
            print(f"hibachi: {printable(str(e), lines=True)}{more}", file=sys.stderr)
            return LOST
    _tell(args, batch, view, done)
    if done.status == "interrupted":
        if signals.got is not None:
            print(f"Ended by {signals.got.name}, after what ran was finished. {_resumable(batch)}", file=sys.stderr)
            return TERMINATED if signals.got is signal.SIGTERM else INTERRUPTED
        why = printable(done.failure or "")
        print(f"Ended at the first row that failed: {why}\n{_resumable(batch)}", file=sys.stderr)
        return SOME_FAILED
    return SOME_FAILED if done.failed and done.status == "done" else 0


def _tell(args: argparse.Namespace, batch: Batch, view: RowsView, done: Done) -> None:
    """The report, as text, as JSON and as a picture; files that tell of an earlier start stay if this one had nothing
    to do."""
    out = sys.stderr if batch.output == PIPE else sys.stdout
    columns = batch.columns
    limited = "max_tokens" in columns.params or "max_tokens" in columns.param_columns
    words = text(done, "Standard output" if batch.output == PIPE else batch.output, limited=limited)
    print(words, file=out, flush=True)
    idle = not done.counts.rows and (done.resumed or done.status == "done before")
    files = {"input": list(batch.inputs), "output": batch.output, "model": batch.url or batch.settings.model}
    told = report(done, view.course, files)
    if args.report and not (idle and os.path.exists(args.report)):
        write(args.report, told)
    if args.plot and not (idle and os.path.exists(args.plot)):
        plot(told, args.plot)


def _check_places(args: argparse.Namespace) -> None:
    """Check that report and picture can be written, before a run that may take all night. Raises ConfigError,
    OSError.
    """
    files = [file for file in (args.report, args.plot) if file]
    if not files:
        return
    written = [Path(os.path.realpath(name)) for name in (args.output, args.errors) if name and name != PIPE]
    others = {str(path) for each in written for path in (each, part_of(each))}
    others |= {f"{os.path.realpath(args.output)}.journal", *map(os.path.realpath, args.inputs)}
    names = [name for name in args.inputs if name != PIPE]
    inputs = [path for path in (expand(names) if names else ()) if os.path.realpath(path) not in others]
    for file in files:
        own = os.path.exists(file) and os.path.isfile(file) and is_told(file)
        if os.path.realpath(file) in others or (not own and any(_same(file, path) for path in inputs)):
            raise ConfigError(f"{file} is read or written by the run itself: expected another file for its report.")
        others.add(os.path.realpath(file))
        if os.path.isdir(file) or not os.path.isdir(os.path.dirname(file) or "."):
            raise ConfigError(f"{file} cannot be written: expected a file's name, in a folder that is there.")
        if not os.access(file if os.path.exists(file) else os.path.dirname(file) or ".", os.W_OK):
            raise ConfigError(f"{file} cannot be written, permissions say. Choose another place for it.")


def _same(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.samefile(one, other)


def _resumable(batch: Batch) -> str:
    if batch.output == PIPE or PIPE in batch.inputs:
        return "A run with a pipe begins anew."
    return "Run the same command again to go on where it was."


def _batch(args: argparse.Namespace) -> Batch:
    flags = {key: value for key in SETTINGS if (value := getattr(args, key)) is not None}
    params: dict[str, Any] = {name: value_of(name, value) for name, value in args.param}
    params |= {n: v for n in ("max_tokens", "temperature") if (v := getattr(args, n)) is not None}
    columns = record_of(Columns, args, params=params, param_columns=dict(args.param_column))
    return record_of(
        Batch,
        args,
        settings=settle(flags, os.environ, args.config),
        columns=columns,
        api_key=args.api_key or os.environ.get(KEY),
        beside=[name for name in (args.report, args.plot) if name],
    )


# ---- signals ---------------------------------------------------------------------------------------------------------


class _Signals:
    """The first Ctrl-C or SIGTERM lets running rows finish; the second ends everything at once."""

    got: signal.Signals | None = None

    def __init__(self, view: RowsView) -> None:
        self._view = view

    def handle(self, number: int, _frame: FrameType | None) -> None:
        if self.got is not None or self._view.drive is None:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
            if number == signal.SIGTERM:
                raise SystemExit(TERMINATED)
            raise KeyboardInterrupt
        self.got = signal.Signals(number)
        self._view.stops()


@contextmanager
def _signals(view: RowsView) -> Iterator[_Signals]:
    signals = _Signals(view)
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {n: signal.signal(n, signals.handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- values of flags -------------------------------------------------------------------------------------------------


def _shard(text: str) -> tuple[int, int]:
    i, slash, n = text.partition("/")
    if not slash or not i.isdecimal() or not n.isdecimal() or not 1 <= int(i) <= int(n):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, such as 1/4; got {text!r}")
    return int(i), int(n)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE; got {text!r}")
    return name.replace("-", "_"), value
