"""Parses the command line, runs a subcommand, turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from inspect import cleandoc
from typing import Any, NoReturn, TypeVar

from hibachi.common.installed import version
from hibachi.common.options import meant
from hibachi.common.phases import INTERRUPTED, showing_phases
from hibachi.errors import HibachiError, printable

COMMANDS = (
    "demo",
    "generate",
    "chat",
    "run-batch",
    "serve",
    "route",
    "inspect",
    "doctor",
    "verify",
    "conformance",
    "sim",
    "bench",
    "cache",
)
FAILED = 1
BROKEN_PIPE = 141  # as shells report a program whose reader closed the pipe

P = TypeVar("P", bound=argparse.ArgumentParser)


class CommandParser(argparse.ArgumentParser):
    """An unknown option is answered with the one that was probably meant."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = [*args]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        known = _names(self._actions)
        if message.startswith("unrecognized arguments"):
            wrong = [name for word in self._words if (name := _name(word)) and name not in known]
            if wrong and (near := meant(wrong[0], _names(shown), flags=True)):
                message = f"{message} ({near})"
        super().error(message)


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line. only: the one command that is parsed, so that the others need not be imported;
    another word means all of them.
    """
    top = CommandParser(
        prog="hibachi",
        description="Continuous batching for any autoregressive model.",
        epilog="`hibachi demo` is a good beginning; `hibachi COMMAND --help` says more.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"hibachi {version()}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in (only,) if only in COMMANDS else COMMANDS:
        module = import_module(f"hibachi.cli.{name.replace('-', '')}")
        sub = add_command(commands, name, module.__doc__, getattr(module, "run", None), module.arguments)
        sub.set_defaults(command=name)
    return top


def add_command(
    to: argparse._SubParsersAction[P],
    name: str,
    doc: str | None,
    run: Callable[[argparse.Namespace], int] | None,
    fill: Callable[[argparse.ArgumentParser], None],
) -> P:
    """doc: its help. run: runs it; None: one of its own commands is run. fill: fills in its arguments."""
    title, _, rest = cleandoc(doc or "").partition("\n")
    sub = to.add_parser(
        name,
        help=title,
        description=f"{title[:1].upper()}{title[1:]}.\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    fill(sub)
    sub.set_defaults(run=run, parser=sub)
    return sub


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 failed, 2 wrong arguments, 130 interrupted, 141 the reader went away."""
    words = sys.argv[1:] if argv is None else argv
    return run_words(lambda: parser(words[0] if words else None), words)


def run_words(make: Callable[[], argparse.ArgumentParser], words: Sequence[str]) -> int:
    """Run what the words of a command line ask for; make: its parser. Returns the exit status."""
    _mend_streams()
    try:  # also around the imports of the command, which take a while
        args, rest = make().parse_known_args(words)
        if rest and args.command != "conformance":
            args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
        args.rest = rest
        with showing_phases():
            status: int = args.run(args)
        sys.stdout.flush()
    except (KeyboardInterrupt, HibachiError, OSError) as e:
        status = _explain(e)
    try:
        sys.stdout.flush()
    except OSError:  # Python flushes once more at exit; give it a place where that works
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _name(word: str) -> str:
    """Of the option in a word of the command line, with underscores; "" where it has none."""
    return word.partition("=")[0][2:].replace("-", "_") if word.startswith("--") else ""


def _names(actions: Iterable[argparse.Action]) -> set[str]:
    return {name for action in actions for option in action.option_strings if (name := _name(option))}


def _explain(e: BaseException) -> int:
    """Print what went wrong; returns the exit status."""
    if isinstance(e, KeyboardInterrupt):
        print(file=sys.stderr)  # the terminal wrote ^C into the line
        return INTERRUPTED
    if isinstance(e, BrokenPipeError):
        return BROKEN_PIPE
    print(f"hibachi: {printable(str(e), lines=True)}", file=sys.stderr)
    return FAILED


def _mend_streams() -> None:
    """Replace streams that the caller closed; characters that the output's encoding lacks become "?"."""
    if sys.stdin is None:
        sys.stdin = io.StringIO()
    if sys.stdout is None:
        sys.stdout = io.StringIO()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
