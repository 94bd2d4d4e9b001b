"""judge backends by the promises of the conformance suite

Needs the extra `test`. Other arguments go to pytest: for example -k pop.
`hibachi verify` judges models.
"""

from __future__ import annotations

import argparse

from hibachi.testing import run as suite


def arguments(parser: argparse.ArgumentParser) -> None:
    suite.arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.model is not None:
        args.parser.error(suite.VERIFY)
    return suite.main([*suite.words(args), *args.rest])
