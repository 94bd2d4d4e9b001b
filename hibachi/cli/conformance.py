"""judge backends: which promises of the conformance suite each one keeps

Needs the extra `test`. Further arguments go to pytest (for example -k pop, or -x).
"""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="a registered name, package:object, or the name of an array-API module; repeatable (default: all that load)",
    )


def run(args: argparse.Namespace) -> int:
    from hibachi.testing.run import main

    return main([*(f"--backend={name}" for name in args.backend), *args.rest])
