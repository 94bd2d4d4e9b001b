"""serve a model over HTTP, with OpenAI's API and TGI's

Every setting may also stand in a TOML file (--config), by the name of its
flag, or in the environment: HIBACHI_PORT=8000 is --port 8000. A flag wins over
the environment, and that over the file. With --compat tgi the flags and
variables of text-generation-launcher work as well, below ours and above the
file: see docs/coming-from-tgi.md.
"""

from __future__ import annotations

import argparse
import os

from hibachi.cli.settings import settings_arguments
from hibachi.common.installed import need
from hibachi.common.settings.kinds import SWITCH
from hibachi.errors import ConfigError
from hibachi.server.settings import GROUPS, SETTINGS, misspelled, settle
from hibachi.server.tgi_settings import FLAGS, TgiFlag

_PACKAGES = ("uvicorn", "starlette", "msgspec", "prometheus_client")
_WITH_VALUE = ("sharded",)  # switches that the launcher wants a value of


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "hibachi serve [options] [MODEL]"
    parser.add_argument("place", nargs="?", metavar="MODEL", help="model to serve, as --model")
    settings_arguments(parser, GROUPS)
    for flag in FLAGS:
        _add(parser, flag)


def _add(parser: argparse.ArgumentParser, flag: TgiFlag) -> None:
    """Add the launcher's flags, hidden from help. They are always parsed, so that their values are not taken for
    MODEL.
    """
    names = [name for name in (flag.short, flag.flag) if name and name[2:] not in _OURS]
    if not names:
        return
    if flag.kind is SWITCH and flag.name not in _WITH_VALUE:
        parser.add_argument(*names, dest=flag.dest, action="store_const", const="true", help=argparse.SUPPRESS)
    else:
        many = flag.name == "cors-allow-origin"
        action = "append" if many else "store"
        parser.add_argument(*names, dest=flag.dest, action=action, help=argparse.SUPPRESS)


_OURS = frozenset(s.name for s in SETTINGS.values())


def run(args: argparse.Namespace) -> int:
    flags = {key: value for key in SETTINGS if (value := getattr(args, key)) is not None}
    if args.place is not None and flags.setdefault("model", args.place) != args.place:
        raise ConfigError(f"Two models were given: {args.place} and --model {flags['model']}. Leave one out.")
    theirs = {flag.key: value for flag in FLAGS if (value := getattr(args, flag.dest, None)) is not None}
    settings = settle(flags, os.environ, args.config, theirs)
    if theirs and settings.tgi is None:
        names = ", ".join(flag.flag for flag in FLAGS if flag.key in theirs)
        args.parser.error(f"unrecognized arguments: {names} (of text-generation-launcher; --compat tgi takes them)")
    for package in _PACKAGES:
        need(package, "`hibachi serve`", "serve")
    from hibachi.server.run import serve

    return serve(settings, remarks=[*misspelled(os.environ), *settings.remarks])
