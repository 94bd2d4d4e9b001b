"""The server: OpenAI's API over HTTP, for any model that `hibachi.LLM` or a user's own class serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hibachi.server.server import Application


def asgi(settings: Mapping[str, Any] | None = None) -> Application:
    """The ASGI application of `hibachi serve`, with all its routes, for a server that is not ours. By the protocol that
    ASGI calls lifespan it loads the model, and at the end drains and closes it.

    settings: by the names of `hibachi serve`'s flags: {"model": "tiny", "max_num_seqs": 64, "backend": "torch"}.

    Raises ConfigError, before a model is loaded, and MissingExtra.
    """
    from hibachi.common.installed import need
    from hibachi.errors import ConfigError
    from hibachi.server.settings import SETTINGS, settle
    from hibachi.server.web.settings import AddressSettings

    given = dict(settings or {})
    if unknown := [name for name in given if name not in SETTINGS]:
        raise ConfigError(f"There is no setting {unknown[0]!r}. There are: {', '.join(SETTINGS)}.")
    if vain := [one.name for one in fields(AddressSettings) if one.name in given]:
        raise ConfigError(f"{vain[0]} is for `hibachi serve`: say it to what serves the application.")
    for package in ("starlette", "msgspec", "prometheus_client"):
        need(package, "hibachi.server.asgi", "serve")
    from hibachi.server.server import Application

    return Application(settle(given, {}))
