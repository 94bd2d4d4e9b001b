"""The settings of `hibachi route`, and the variables of text-inference-batcher, which still work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hibachi.common.settings import settle as shared
from hibachi.common.settings.kinds import SWITCH, integer, seconds, setting, size, text, texts
from hibachi.errors import ConfigError
from hibachi.server.web.settings import AddressSettings, KeySettings, LogSettings

LIMIT, TIBS_LIMIT = 64, 1  # requests of an upstream at once: ours, and that of text-inference-batcher


@dataclass(frozen=True, kw_only=True)
class UpstreamSettings:
    """The upstreams, and how one is chosen."""

    upstream: tuple[str, ...] | None = setting(
        texts("URL"), None, "servers with OpenAI's API, such as http://10.0.0.5:8000", "those of --config and UPSTREAMS"
    )
    max_connections: int | None = setting(
        integer(1),
        None,
        "most requests of an upstream at once, over all its models",
        f"{LIMIT}, or {TIBS_LIMIT} with UPSTREAMS",
    )
    upstream_key: str | None = setting(
        text("KEY"),
        None,
        "key to send in checks of upstreams, and in requests where --api-key is given; --config can hold one for each"
        " upstream",
    )
    policy: str = setting(
        text("NAME"),
        "least-connection",
        "how an upstream is chosen: least-connection, least-latency,"
        " round-robin, power-of-two, least-load, prefix-affine, sticky, or an installed one",
    )
    sticky_header: str = setting(
        text("NAME"),
        "X-Session-Id",
        "header whose value decides the upstream, with the policy sticky and where a path names an object",
    )
    check_interval: float = setting(seconds(0.01), 10.0, "seconds from one check of an upstream to the next")
    check_timeout: float = setting(seconds(0.01), 5.0, "seconds for a check")
    fall: int = setting(integer(1), 2, "failed checks in a row after which an upstream gets no requests")
    rise: int = setting(integer(1), 1, "good checks in a row after which it gets requests again")
    resolve_interval: float = setting(
        seconds(), 30.0, "seconds from one look-up of the upstreams' addresses to the next; 0 means only once"
    )


@dataclass(frozen=True, kw_only=True)
class WaitingSettings:
    """How long requests may take, and how large they may be."""

    timeout: float = setting(
        seconds(0.01), 600.0, "seconds to wait for a free upstream, and again for the first byte of its answer"
    )
    idle_timeout: float = setting(seconds(), 300.0, "seconds between two bytes of an answer; 0 means no limit")
    connect_timeout: float = setting(seconds(0.01), 5.0, "seconds to open a connection to an upstream")
    wait_for: float = setting(seconds(), 5.0, "seconds to wait for a ready upstream, where none is ready")
    max_num_queued_reqs: int = setting(integer(0), 1024, "requests that may wait; beyond that they get 429")
    max_body_size: int = setting(size(), "256M", "largest body of a request; bodies above 1 MiB wait in a file")
    max_bodies_size: int = setting(size(), "2G", "all bodies in files together; beyond that requests get 503")
    arrival_timeout: float = setting(
        seconds(), 60.0, "seconds to wait for a request's headers and body; 0 means no limit"
    )
    drain_timeout: float = setting(seconds(), 25.0, "seconds for running requests to end after SIGTERM")


@dataclass(frozen=True, kw_only=True)
class AccessSettings(KeySettings):
    """Who may send what."""

    pass_: tuple[str, ...] | None = setting(
        texts("PATH"), None, "further paths to pass on; * at the end means all that begin so"
    )
    allowed_origins: tuple[str, ...] | None = setting(
        texts("ORIGIN"),
        None,
        "let web pages of these origins send requests; * means any",
        "as the upstreams say; any with UPSTREAMS",
    )
    origin_header: bool = setting(SWITCH, True, "name the upstream of an answer in its header X-Upstream-Origin")


@dataclass(frozen=True, kw_only=True)
class RouteSettings(LogSettings, AccessSettings, AddressSettings, WaitingSettings, UpstreamSettings, shared.Settings):
    """All of them. tib: whether defaults are text-inference-batcher's. config: the file."""

    command, tables = "route", ("upstream",)
    tib: bool = False
    config: str | None = None


GROUPS = shared.groups_of(
    upstreams=UpstreamSettings,
    waiting=WaitingSettings,
    address=AddressSettings,
    access=AccessSettings,
    reports=LogSettings,
)
SETTINGS = shared.by_key(GROUPS)

misspelled = partial(shared.misspelled, SETTINGS)
table = partial(shared.table, SETTINGS)


def settle(flags: Mapping[str, Any], environment: Mapping[str, str], file: str | None = None) -> RouteSettings:
    """See `hibachi.common.settings.settle`. With UPSTREAMS in the environment, defaults are text-inference-batcher's.
    Raises ConfigError.
    """
    tib = bool(environment.get("UPSTREAMS", "").strip())
    others = list(_tibs(environment))
    found = shared.settle(RouteSettings, flags, environment, file, others=others)
    return replace(
        found,
        tib=tib,
        config=file,
        max_connections=found.max_connections or (TIBS_LIMIT if tib else LIMIT),
        allowed_origins=("*",) if found.allowed_origins is None and tib else found.allowed_origins,
    )


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
