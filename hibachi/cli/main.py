"""Parses the command line, runs a subcommand, turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from hibachi.cli import conformance, demo, doctor, generate
from hibachi.errors import HibachiError

INTERRUPTED = 130  # as shells report a program ended by Ctrl-C
BROKEN_PIPE = 141  # and one whose reader went away


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="hibachi", description="Continuous batching for any autoregressive model.")
    top.add_argument("--version", action="version", version=f"hibachi {version('hibachi')}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (demo, generate, doctor, conformance):
        name = module.__name__.rpartition(".")[2]
        sub = commands.add_parser(name, help=(module.__doc__ or "").split("\n")[0], description=module.__doc__)
        module.arguments(sub)
        sub.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 failed, 2 wrong arguments, 130 interrupted, 141 the reader went away."""
    args, rest = parser().parse_known_args(argv)
    if rest and args.run is not conformance.run:
        parser().error(f"unknown arguments: {' '.join(rest)}")
    args.rest = rest
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give it a place where that works.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except HibachiError as e:
        print(f"hibachi: {e}", file=sys.stderr)
        return 1
