"""Where the upstreams are: from flags, UPSTREAMS and a TOML file; and the addresses that a name stands for."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from hibachi.common.settings.settle import read_toml
from hibachi.errors import ConfigError
from hibachi.router.settings import LIMIT, RouteSettings
from hibachi.router.upstreams import Place

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_FIELDS = {
    "url": "text", "limit": "count", "weight": "number", "key": "text", "key_env": "text", "ca": "text",
    "server_name": "text", "models": "texts",
}  # fmt: skip
_EXPECTED = {
    "text": "a text",
    "texts": "a list of texts",
    "count": "an integer >= 1",
    "number": "a number above 0",
}


def places_of(settings: RouteSettings, environment: Mapping[str, str]) -> list[Place]:
    """All that are configured, each once. Reads the file again. Raises ConfigError, which shows no key."""
    named: dict[str, Place] = {}
    default = Place("", limit=settings.max_connections or LIMIT, key=settings.upstream_key or "")
    tables: Any = read_toml("--config", settings.config).get("upstream", []) if settings.config is not None else []
    if not isinstance(tables, list):
        raise ConfigError(f"{settings.config}: expected [[upstream]] with url = ... below it.")
    for n, table in enumerate(tables, 1):
        place = _of_table(f"{settings.config}: upstream {n}", table, default, environment)
        if place.url in named:
            raise ConfigError(f"{settings.config}: {place.url} is there twice. Leave one out.")
        named[place.url] = place
    urls = [(url, "--upstream") for given in settings.upstream or () for url in given.split(",")]
    urls += [(url, "UPSTREAMS") for url in environment.get("UPSTREAMS", "").split(",")]
    for url, where in urls:
        if url.strip():
            origin = origin_of(url, where)
            named.setdefault(origin, replace(default, url=origin))
    if not named:
        raise ConfigError(
            "UPSTREAMS is missing: no upstream is named. Expected --upstream http://HOST:PORT, the variable UPSTREAMS "
            "(several are separated by commas), or [[upstream]] in the file of --config."
        )
    return list(named.values())


def origin_of(given: str, where: str) -> str:
    """A URL without what says nothing: http://Llama.ai:6666/ is http://llama.ai:6666. Raises ConfigError."""
    url = given.strip()

    if "@" in url:
        raise ConfigError(f"{where}: a URL with a user in it. Give the upstream a key instead.")

    def wrong(cause: str) -> ConfigError:
        return ConfigError(f"{where}: {url[:200]} is not a valid URL: {cause}. Expected such as http://10.0.0.5:8000.")

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as e:
        raise wrong(str(e)) from None
    scheme = parts.scheme.lower()
    if scheme not in ("http", "https"):
        raise wrong(f"{scheme}:// is not supported" if "://" in url and scheme else "it begins neither with http:// "
                    "nor with https://")  # fmt: skip
    host = (parts.hostname or "").lower()
    if not host:
        raise wrong("it has no host")
    if path := parts.path.rstrip("/"):
        raise wrong(f"it should not have a path ({path})")
    if parts.query or parts.fragment:
        raise wrong("it should have nothing after the port")
    if ":" in host:
        try:
            host = f"[{ipaddress.IPv6Address(host)}]"
        except ValueError as e:
            raise wrong(str(e)) from None
    elif not _HOST.fullmatch(host):
        raise wrong(f"{host} is no name of a host")
    if port == 0:
        raise wrong("0 is no port")
    return f"{scheme}://{host}" + ("" if port is None else f":{port}")


def _of_table(where: str, table: Any, default: Place, environment: Mapping[str, str]) -> Place:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: expected a table, [[upstream]] with url = ... below it.")
    given = {name.replace("-", "_"): value for name, value in table.items()}
    if unknown := given.keys() - _FIELDS.keys():
        raise ConfigError(f"{where}: {min(unknown)} is not known. Expected {', '.join(_FIELDS)}.")
    for name, value in given.items():
        if not _is(_FIELDS[name], value):
            shown = "something else" if "key" in name else repr(value)[:80]
            raise ConfigError(f"{where}: {name} must be {_EXPECTED[_FIELDS[name]]}; got {shown}.")
    if "url" not in given:
        raise ConfigError(f"{where}: url is missing. Expected such as http://10.0.0.5:8000.")
    if "key" in given and "key_env" in given:
        raise ConfigError(f"{where}: expected key or key_env; got both.")
    if (variable := given.pop("key_env", None)) is not None:
        if not environment.get(variable):
            raise ConfigError(f"{where}: the variable {variable}, which holds its key, is not set.")
        given["key"] = environment[variable]
    given["url"] = origin_of(given["url"], where)
    given["models"] = tuple(given.get("models", ()))
    place = replace(default, **given)
    context_of(place, where)
    return place


def _is(kind: str, value: Any) -> bool:
    if kind == "texts":
        return isinstance(value, list) and all(_is("text", v) for v in value)
    if kind == "text":
        return isinstance(value, str) and bool(value.strip()) and value.isprintable()
    number = isinstance(value, int if kind == "count" else (int, float)) and not isinstance(value, bool)
    return number and (value >= 1 if kind == "count" else 0 < value < 1e9)


def context_of(place: Place, where: str = "") -> ssl.SSLContext | None:
    """How its certificate is looked at; None means it has none. Raises ConfigError."""
    if not place.url.startswith("https:"):
        return None
    context = ssl.create_default_context()
    if place.ca:
        try:
            context.load_verify_locations(place.ca)
        except OSError as e:  # ssl.SSLError is one
            raise ConfigError(f"{where or place.url}: ca {place.ca}: {e.strerror or e}.") from e
    return context


def target(place: Place) -> tuple[str, str | None, str | None]:
    """(the beginning of the URLs that are asked; the header Host and the name in the certificate, where others)."""
    parts = urlsplit(place.url)
    name = place.server_name or None
    if not place.address:
        return place.url, None, name
    address = f"[{place.address}]" if ":" in place.address else place.address
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{address}{port}", parts.netloc, name or parts.hostname


async def resolved(places: Iterable[Place], before: Sequence[Place]) -> list[Place]:
    """The same, but names that stand for several addresses have an entry for each. What cannot be found out just now
    stays as it was `before`."""
    found = await asyncio.gather(*(_addresses(place) for place in places))
    out: list[Place] = []
    for place, addresses in zip(places, found, strict=True):
        if addresses is None:
            addresses = [p.address for p in before if p.url == place.url] or [""]
        out += [replace(place, address=address) for address in addresses]
    return out


async def _addresses(place: Place) -> list[str] | None:
    """The addresses of a name. [""] means that it has only one, or is an address itself. None means the look-up
    failed.
    """
    host = urlsplit(place.url).hostname or ""
    if host == "localhost" or _is_address(host):
        return [""]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    # One server often has an address of each family, which would count as two.
    family = socket.AF_INET if any(f[0] == socket.AF_INET for f in found) else socket.AF_INET6
    addresses = sorted({str(address[0]) for f, _, _, _, address in found if f == family})
    return addresses if len(addresses) > 1 else [""]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
