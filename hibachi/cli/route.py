"""route requests to several servers with OpenAI's API

Every setting may also stand in a TOML file (--config), by the name of its
flag, or in the environment: HIBACHI_PORT=8000 is --port 8000. A flag wins over
the environment, and that over the file. The variables of
text-inference-batcher work as well: UPSTREAMS, MAX_CONNECT_PER_UPSTREAM,
WAIT_FOR, TIMEOUT, DEBUG and TIB_PORT. SIGHUP makes it read the file's
upstreams again.
"""

from __future__ import annotations

import argparse
import os

from hibachi.cli.settings import settings_arguments
from hibachi.common.installed import need
from hibachi.router.settings import GROUPS, SETTINGS, misspelled, settle

_PACKAGES = ("aiohttp", "msgspec", "prometheus_client", "uvicorn")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "hibachi route [options] [UPSTREAM ...]"
    parser.add_argument("places", nargs="*", metavar="UPSTREAM", help="server with OpenAI's API, as --upstream")
    parser.add_argument("--status", metavar="URL", help="show the upstreams of the router at this URL, and exit")
    settings_arguments(parser, GROUPS)


def run(args: argparse.Namespace) -> int:
    if args.status is not None:
        from hibachi.router.status import fetched

        print(fetched(args.status, (args.api_key or [None])[0]))
        return 0
    flags = {key: value for key in SETTINGS if (value := getattr(args, key)) is not None}
    if args.places:
        flags["upstream"] = [*flags.get("upstream", ()), *args.places]
    settings = settle(flags, os.environ, args.config)
    for package in _PACKAGES:
        need(package, "`hibachi route`", "route")
    from hibachi.router.run import route

    return route(settings, remarks=misspelled(os.environ))
