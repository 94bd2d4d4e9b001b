"""`hibachi conformance`: runs the conformance suite on installed backends, from any folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

BACKEND = "a registered name, package:object, or an array-API module; repeatable (default: all that load)"
VERIFY = "`hibachi verify --model MODEL` judges models; this command judges backends"


def suite() -> Path:
    """The folder of the suite: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside, beside = package / "conformance", package.parent / "conformance"
    return inside if inside.is_dir() else beside


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", action="append", default=[], metavar="NAME", help=BACKEND)
    parser.add_argument("--model", help=argparse.SUPPRESS)  # what judges models is another command, and is named


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every promise is kept; 1: some are broken; more: the suite did not run."""
    parser = argparse.ArgumentParser(
        prog="hibachi conformance",
        allow_abbrev=False,
        description="Which of the promises that hibachi relies on does a backend keep?",
        epilog="Other arguments go to pytest, for example -k pop, or -x to stop at the first broken promise.",
    )
    arguments(parser)
    argv = sys.argv[1:] if argv is None else list(argv)
    if parser.parse_known_args(argv)[0].model is not None:
        parser.error(VERIFY)
    try:
        import pytest
    except ModuleNotFoundError:
        print("The suite needs pytest. From the checkout: pip install '.[test]'.", file=sys.stderr)
        return 2
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # for --backend my_module:MyBackend; last, so that it hides nothing
    folder = suite()
    what = [str(folder), "-p", "hibachi.testing.plugin", "--tb=short"]
    # Nothing of the folder we are called from may matter: no configuration, no conftest.py, no cache.
    alone = ["-c", os.devnull, "--rootdir", str(folder), "--confcutdir", str(folder), "-p", "no:cacheprovider"]
    quiet = ["-q", "--no-header", "--show-capture=no", "-rN"]
    return int(pytest.main([*what, *alone, *quiet, *argv]))


if __name__ == "__main__":
    sys.exit(main())
