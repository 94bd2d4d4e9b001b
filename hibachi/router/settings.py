"""The settings of `hibachi route`, and the variables of text-inference-batcher, which still work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from hibachi.common.settings import settle as shared
from hibachi.common.settings.kinds import SWITCH, Setting, integer, seconds, size, text, texts
from hibachi.errors import ConfigError
from hibachi.server.web.settings import ADDRESS, LOG

LIMIT, TIBS_LIMIT = 64, 1  # requests of an upstream at once: ours, and that of text-inference-batcher
TABLES = ("upstream",)  # of the configuration, besides settings

GROUPS: dict[str, tuple[Setting, ...]] = {
    "upstreams": (
        Setting("upstream", texts("URL"), None, "servers with OpenAI's API, such as http://10.0.0.5:8000",
                "those of --config and UPSTREAMS"),
        Setting("max-connections", integer(1), None, "most requests of an upstream at once, over all its models",
                f"{LIMIT}, or {TIBS_LIMIT} with UPSTREAMS"),
        Setting("upstream-key", text("KEY"), None, "key to send in checks of upstreams, and in requests where"
                " --api-key is"
                " given; --config can hold one for each upstream"),
        Setting("policy", text("NAME"), "least-connection", "how an upstream is chosen: least-connection,"
                " least-latency,"
                " round-robin, power-of-two, least-load, prefix-affine, sticky, or an installed one"),
        Setting("sticky-header", text("NAME"), "X-Session-Id", "header whose value decides the upstream, with the"
                " policy"
                " sticky and where a path names an object"),
        Setting("check-interval", seconds(0.01), 10.0, "seconds from one check of an upstream to the next"),
        Setting("check-timeout", seconds(0.01), 5.0, "seconds for a check"),
        Setting("fall", integer(1), 2, "failed checks in a row after which an upstream gets no requests"),
        Setting("rise", integer(1), 1, "good checks in a row after which it gets requests again"),
        Setting("resolve-interval", seconds(), 30.0, "seconds from one look-up of the upstreams' addresses to the next;"
                " 0 means only once"),
    ),
    "waiting": (
        Setting("timeout", seconds(0.01), 600.0, "seconds to wait for a free upstream, and again for the first byte of"
                " its answer"),
        Setting("idle-timeout", seconds(), 300.0, "seconds between two bytes of an answer; 0 means no limit"),
        Setting("connect-timeout", seconds(0.01), 5.0, "seconds to open a connection to an upstream"),
        Setting("wait-for", seconds(), 5.0, "seconds to wait for a ready upstream, where none is ready"),
        Setting("max-num-queued-reqs", integer(0), 1024, "requests that may wait; beyond that they get 429"),
        Setting("max-body-size", size(), "256M", "largest body of a request; bodies above 1 MiB wait in a file"),
        Setting("max-bodies-size", size(), "2G", "all bodies in files together; beyond that requests get 503"),
        Setting("arrival-timeout", seconds(), 60.0, "seconds to wait for a request's headers and body; 0 means no"
                " limit"),
        Setting("drain-timeout", seconds(), 25.0, "seconds for running requests to end after SIGTERM"),
    ),
    "address": ADDRESS,
    "access": (
        Setting("pass", texts("PATH"), None, "further paths to pass on; * at the end means all that begin so"),
        Setting("api-key", texts("KEY"), None, "accept only requests with one of these keys", "the upstream decides"),
        Setting("api-keys", text("FILE"), None, "TOML file of tenants and their keys"),
        Setting("allowed-origins", texts("ORIGIN"), None, "let web pages of these origins send requests; * means any",
                "as the upstreams say; any with UPSTREAMS"),
        Setting("origin-header", SWITCH, True, "name the upstream of an answer in its header X-Upstream-Origin"),
    ),
    "reports": LOG,
}  # fmt: skip
SETTINGS = shared.by_key(GROUPS)

misspelled = partial(shared.misspelled, SETTINGS)
table = partial(shared.table, SETTINGS)


def settle(flags: Mapping[str, Any], environment: Mapping[str, str], file: str | None = None) -> SimpleNamespace:
    """See `hibachi.common.settings.settle`. With UPSTREAMS in the environment, defaults are text-inference-batcher's.

    `tib`: is that so? `config`: the file. Raises ConfigError.
    """
    tib = bool(environment.get("UPSTREAMS", "").strip())
    others = list(_tibs(environment))
    found = shared.settle(SETTINGS, "route", flags, environment, file, tables=TABLES, others=others)
    found.tib, found.config = tib, file
    if found.max_connections is None:
        found.max_connections = TIBS_LIMIT if tib else LIMIT
    if found.allowed_origins is None and tib:
        found.allowed_origins = ("*",)
    return found


def _tibs(environment: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    """text-inference-batcher's variables. Raises ConfigError. UPSTREAMS is read with the other upstreams."""
    for name, key in (("MAX_CONNECT_PER_UPSTREAM", "max_connections"), ("TIB_PORT", "port")):
        if given := environment.get(name, "").strip():
            yield key, given, name
    for name, key in (("TIMEOUT", "timeout"), ("WAIT_FOR", "wait_for")):
        if given := environment.get(name, "").strip():
            try:
                milliseconds = float(given)
            except ValueError:
                raise ConfigError(f"{name}: expected milliseconds; got {given[:40]!r}.") from None
            yield key, milliseconds / 1000, name
    if environment.get("DEBUG", "").strip().lower() in ("1", "true"):
        yield "log_level", "debug", "DEBUG"
