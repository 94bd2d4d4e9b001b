"""judge backends: which promises of the conformance suite are kept?

Needs the extra `test`. Other arguments go to pytest: -k pop, for example, or -x.
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
