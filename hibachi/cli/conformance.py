"""judge backends, or your own model, by the promises of the conformance suite

Needs the extra `test`. Other arguments go to pytest: for example -k pop.
"""

from __future__ import annotations

import argparse

from hibachi.testing.options import OPTIONS, add_to, words


def arguments(parser: argparse.ArgumentParser) -> None:
    add_to(parser.add_argument, OPTIONS)


def run(args: argparse.Namespace) -> int:
    from hibachi.testing.run import main

    return main([*words(args), *args.rest])
