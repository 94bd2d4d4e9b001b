"""route requests to several servers with OpenAI's API

Every setting may also stand in a TOML file (--config), by the name of its
flag, or in the environment: HIBACHI_PORT=8000 is --port 8000. A flag wins over
the environment, and that over the file. The variables of
text-inference-batcher work as well: UPSTREAMS, MAX_CONNECT_PER_UPSTREAM,
WAIT_FOR, TIMEOUT, DEBUG and TIB_PORT. SIGHUP: the file's upstreams are read
again.
"""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request

from hibachi.cli.settings import settings_arguments
from hibachi.errors import ConfigError, HibachiError
from hibachi.model.extras import need
from hibachi.router.settings import GROUPS, SETTINGS, misspelled, settle

_PACKAGES = ("aiohttp", "msgspec", "prometheus_client", "uvicorn")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "hibachi route [options] [UPSTREAM ...]"
    parser.add_argument("places", nargs="*", metavar="UPSTREAM", help="as --upstream")
    parser.add_argument("--status", metavar="URL", help="show the upstreams of a router that runs there, and end")
    settings_arguments(parser, GROUPS)


def run(args: argparse.Namespace) -> int:
    if args.status is not None:
        print(_status(args.status, args.api_key))
        return 0
    flags = {key: value for key in SETTINGS if (value := getattr(args, key)) is not None}
    if args.places:
        flags["upstream"] = [*flags.get("upstream", ()), *args.places]
    settings = settle(flags, os.environ, args.config)
    for package in _PACKAGES:
        need(package, "`hibachi route`", "route")
    from hibachi.router.run import route

    return route(settings, remarks=misspelled(os.environ))


def _status(url: str, keys: list[str] | None) -> str:
    """A table. Raises HibachiError."""
    from hibachi.router.status import as_table

    if "://" not in url:
        url = f"http://{url}"
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    try:
        request = urllib.request.Request(url.rstrip("/") + "/upstreams", headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10) as answer:
            return as_table(json.load(answer))
    except urllib.error.HTTPError as e:
        why = "it wants a key: --api-key KEY" if e.code == 401 else f"it answered with {e.code}"
        raise HibachiError(f"--status {url}: {why}.") from e
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise ConfigError(f"--status {url}: there is no router ({getattr(e, 'reason', e)}).") from e
