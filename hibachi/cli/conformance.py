"""judge backends by the promises of the conformance suite

Needs the extra `test`. Other arguments go to pytest: for example -k pop.
"""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="a registered name, package:object, or an array-API module; repeatable (default: all that load)",
    )


def run(args: argparse.Namespace) -> int:
    from hibachi.testing.run import main

    return main([*(f"--backend={name}" for name in args.backend), *args.rest])
