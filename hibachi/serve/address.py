"""Where the server listens. That is settled before the model is loaded, so that a port in use is told of at once."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

from hibachi.errors import ConfigError


@contextmanager
def bound(settings: SimpleNamespace) -> Iterator[tuple[socket.socket, str, bool]]:
    """(socket, its URL, may others than this machine reach it?). Until uvicorn listens, connections are refused.

    Raises ConfigError.
    """
    if settings.uds is not None:
        listener, name, public = _unix(settings.uds), f"unix:{settings.uds}", False
    else:
        listener = _bind(settings.host, settings.port)
        host, port = listener.getsockname()[:2]
        scheme = "https" if settings.ssl_certfile else "http"
        name = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        public = not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    try:
        yield listener, name, public
    finally:
        listener.close()
        if settings.uds is not None:
            with suppress(OSError):
                os.unlink(settings.uds)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"--host {host}: there is no such address here ({e}).") from e
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a server before may linger
    try:
        listener.bind(address)
    except OSError as e:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {(e.strerror or str(e)).lower()}. Choose another --port, or 0 for any."
        ) from e
    return listener


def _unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _left_over(path):
            os.unlink(path)
        listener.bind(path)
    except OSError as e:
        listener.close()
        raise ConfigError(f"--uds {path}: {(e.strerror or str(e)).lower()}.") from e
    return listener


def _left_over(path: str) -> bool:
    """Is this the socket of a server that is gone?"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False
