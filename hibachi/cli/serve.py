"""serve a model over HTTP, with OpenAI's API

Every setting may also stand in a TOML file (--config), by the name of its
flag, or in the environment: HIBACHI_PORT=8000 is --port 8000. A flag wins over
the environment, and that over the file.
"""

from __future__ import annotations

import argparse
import os

from hibachi.errors import ConfigError
from hibachi.model.extras import need
from hibachi.serve.settings import GROUPS, SETTINGS, misspelled, settle
from hibachi.web.kinds import SWITCH

_PACKAGES = ("uvicorn", "starlette", "msgspec", "prometheus_client")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "hibachi serve [options] [MODEL]"
    parser.add_argument("place", nargs="?", metavar="MODEL", help="as --model")
    parser.add_argument("--config", metavar="FILE", help="settings in TOML")
    for title, settings in GROUPS.items():
        group = parser.add_argument_group(title)
        for s in settings:
            kind, text = s.kind, f"{s.help} (default: {s.default_text})".replace("%", "%%")
            if kind is SWITCH:
                group.add_argument(s.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
            elif kind.many:
                group.add_argument(s.flag, nargs="+", action="extend", metavar=kind.metavar, help=text)
            else:
                group.add_argument(s.flag, metavar=kind.metavar, help=text)


def run(args: argparse.Namespace) -> int:
    flags = {key: value for key in SETTINGS if (value := getattr(args, key)) is not None}
    if args.place is not None and flags.setdefault("model", args.place) != args.place:
        raise ConfigError(f"Two models were given: {args.place} and --model {flags['model']}. Leave one out.")
    settings = settle(flags, os.environ, args.config)
    for package in _PACKAGES:
        need(package, "`hibachi serve`", "serve")
    from hibachi.serve.run import serve

    return serve(settings, remarks=misspelled(os.environ))
