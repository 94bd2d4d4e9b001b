"""API keys from the settings, and from a file of tenants."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hibachi.errors import ConfigError
from hibachi.server.web.settings import KeySettings
from hibachi.server.web.tenants import Tenant, Tenants

_FIELDS = ("key", "keys", "priority", "max_requests", "admin")


def tenants_of(settings: KeySettings) -> Tenants:
    """The tenants. Each key of --api-key is a tenant of its own: key1, key2, ... Raises ConfigError, which shows no
    key.
    """
    keys = [(key, f"key{i}") for i, key in enumerate(settings.api_key or (), 1)]
    named: dict[str, Tenant] = {}
    if settings.api_keys is not None:
        for name, table in _read(settings.api_keys).items():
            own, named[name] = _tenant(f"{settings.api_keys}: {name}", table)
            keys += [(key, name) for key in own]
    if settings.api_keys is not None and not keys:
        raise ConfigError(f'{settings.api_keys}: there is no tenant in it. Expected [NAME] with key = "...".')
    if clash := {f"key{i}" for i in range(1, 1 + len(settings.api_key or ()))} & named.keys():
        raise ConfigError(
            f"{settings.api_keys}: {min(clash)} is what the tenant of a key of --api-key is called. Name it otherwise."
        )
    owners: dict[str, str] = {}
    for key, name in keys:
        if (other := owners.setdefault(key, name)) != name:
            raise ConfigError(f"{other} and {name} have the same API key. Give each its own.")
    return Tenants(tuple(keys), named, getattr(settings, "share_prefixes", False))


def _read(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text())
    except OSError as e:
        raise ConfigError(f"--api-keys {file}: {e.strerror}.") from e
    except UnicodeDecodeError:
        raise ConfigError(f"--api-keys {file}: expected TOML in UTF-8.") from None
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"--api-keys {file}: expected TOML; {e}.") from None


def _tenant(where: str, table: Any) -> tuple[list[str], Tenant]:
    """A tenant of the file: its keys and its limits."""
    if not isinstance(table, Mapping):
        raise ConfigError(f'{where}: expected a table, [NAME] with key = "..." below it.')
    if unknown := table.keys() - set(_FIELDS):
        raise ConfigError(f"{where}: {sorted(unknown)[0]} is not known. Expected {', '.join(_FIELDS)}.")
    given = table.get("keys", []) if "key" not in table else [table["key"]]
    if not isinstance(given, list) or not given or not all(isinstance(k, str) and k.strip() for k in given):
        raise ConfigError(f'{where}: expected key = "..." or keys = ["...", "..."].')
    if any(k != k.strip() for k in given):
        raise ConfigError(f"{where}: a key begins or ends with a blank, which no header can hold. Take it away.")
    if "key" in table and "keys" in table:
        raise ConfigError(f"{where}: expected key or keys; got both.")
    for name, least in (("priority", None), ("max_requests", 1)):
        value = table.get(name)
        if value is not None and (type(value) is not int or (least is not None and value < least)):
            expected = "an integer" if least is None else f"an integer >= {least}"
            raise ConfigError(f"{where}: {name} must be {expected}; got {value!r:.80}.")
    admin = table.get("admin", False)
    if not isinstance(admin, bool):
        raise ConfigError(f"{where}: admin must be true or false; got {admin!r:.80}.")
    return given, Tenant(table.get("priority", 0), table.get("max_requests"), admin)
