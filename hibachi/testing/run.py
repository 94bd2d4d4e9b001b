"""`hibachi conformance`: runs the conformance suite on installed backends, from any folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

BACKEND = "a registered name, package:object, or an array-API module; repeatable (default: all that load)"
VERIFY = "`hibachi verify --model MODEL` judges models; this command judges backends"
PROMISE = 30.0  # seconds


def suite() -> Path:
    """The folder of the suite: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside, beside = package / "conformance", package.parent / "conformance"
    return inside if inside.is_dir() else beside


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", action="append", default=[], metavar="NAME", help=BACKEND)
    parser.add_argument(
        "--promise-timeout",
        type=_seconds,
        default=PROMISE,
        metavar="SECONDS",
        help="seconds after which a promise is cut off and shown as HUNG; 0 means never (default: %(default)g)",
    )
    parser.add_argument("--no-smoke", action="store_true", help="go on where the smoke stage fails")
    parser.add_argument(
        "--known-gaps", metavar="FILE", help="file of promises that need not be kept, one a line: name or glob # reason"
    )
    parser.add_argument("--json", metavar="FILE", help="write what became of each promise as JSON; - means stdout")
    parser.add_argument("--model", help=argparse.SUPPRESS)  # what judges models is another command, and is named


def _seconds(text: str) -> float:
    if (seconds := float(text)) >= 0:
        return seconds
    raise argparse.ArgumentTypeError(f"expected seconds >= 0 (0: no limit); got {text!r}")


def words(args: argparse.Namespace) -> list[str]:
    """What `arguments` took, as the words of a command line."""
    found = [f"--backend={name}" for name in args.backend]
    found += [f"--promise-timeout={args.promise_timeout:g}"] * (args.promise_timeout != PROMISE)
    found += ["--no-smoke"] * args.no_smoke
    return found + [f"--{name}={file}" for name, file in (("known-gaps", args.known_gaps), ("json", args.json)) if file]


def pytest_words(own: Sequence[str]) -> list[str]:
    """The arguments of pytest that run the suite on its own, and these."""
    folder = suite()
    what = [str(folder), "-p", "hibachi.testing.plugin", "--tb=no"]
    # Nothing of the folder we are called from may matter: no configuration, no conftest.py, no cache.
    alone = ["-c", os.devnull, "--rootdir", str(folder), "--confcutdir", str(folder), "-p", "no:cacheprovider"]
    quiet = ["-q", "--no-header", "--show-capture=no", "-rN"]
    return [*what, *alone, *quiet, *own]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: every promise is kept, or is a known gap; 1: some are broken; more: the suite did not run."""
    parser = argparse.ArgumentParser(
        prog="hibachi conformance",
        allow_abbrev=False,
        description="Which of the promises that hibachi relies on does a backend keep?",
        epilog="Other arguments go to pytest, for example -k pop, -x to stop at the first broken promise, or "
        "--tb=short to see tracebacks.",
    )
    arguments(parser)
    args, rest = parser.parse_known_args(argv)
    if args.model is not None:
        parser.error(VERIFY)
    try:
        import pytest  # noqa: F401 (it is the child that needs it)
    except ModuleNotFoundError:
        print("The suite needs pytest. From the checkout: pip install '.[test]'.", file=sys.stderr)
        return 2
    from hibachi.testing.watch import watched

    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # for --backend my_module:MyBackend; last, so that it hides nothing
    limit, args.promise_timeout = args.promise_timeout, PROMISE  # which is no option of pytest
    if "--pdb" in rest or "--trace" in rest:
        limit = 0.0  # debugging takes time
    if args.json != "-":
        return watched(pytest_words([*words(args), *rest]), limit)
    with TemporaryDirectory() as folder:  # standard output is for JSON alone
        args.json = str(Path(folder) / "json")
        code = watched(pytest_words([*words(args), *rest]), limit, to_stderr=True)
        if Path(args.json).exists():
            print(Path(args.json).read_text(encoding="utf-8"), end="")
    return code


if __name__ == "__main__":
    sys.exit(main())
