"""serve a model over HTTP, with OpenAI's API

Every setting may also stand in a TOML file (--config), by the name of its
flag, or in the environment: HIBACHI_PORT=8000 is --port 8000. A flag wins over
the environment, and that over the file.
"""

from __future__ import annotations

import argparse
import os

from hibachi.cli.settings import settings_arguments
from hibachi.errors import ConfigError
from hibachi.model.extras import need
from hibachi.serve.settings import GROUPS, SETTINGS, misspelled, settle

_PACKAGES = ("uvicorn", "starlette", "msgspec", "prometheus_client")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "hibachi serve [options] [MODEL]"
    parser.add_argument("place", nargs="?", metavar="MODEL", help="as --model")
    settings_arguments(parser, GROUPS)


def run(args: argparse.Namespace) -> int:
    flags = {key: value for key in SETTINGS if (value := getattr(args, key)) is not None}
    if args.place is not None and flags.setdefault("model", args.place) != args.place:
        raise ConfigError(f"Two models were given: {args.place} and --model {flags['model']}. Leave one out.")
    settings = settle(flags, os.environ, args.config)
    for package in _PACKAGES:
        need(package, "`hibachi serve`", "serve")
    from hibachi.serve.run import serve

    return serve(settings, remarks=misspelled(os.environ))
