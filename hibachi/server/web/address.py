"""Listening addresses. The socket is bound before the model loads, so a port that is in use is reported at once."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hibachi.errors import ConfigError
from hibachi.server.web.settings import AddressSettings


@contextmanager
def bound(settings: AddressSettings) -> Iterator[tuple[list[socket.socket], str, bool]]:
    """Bind the address: (sockets, URL, whether other machines can reach it). Until uvicorn listens, connections are
    refused. A name with several addresses, as localhost has, gets a socket for each.

    Raises ConfigError.
    """
    if settings.uds is not None:
        listeners, name, public = [_unix(settings.uds)], f"unix:{settings.uds}", False
    else:
        listeners = _bind(settings.host, settings.port)
        host, port = listeners[0].getsockname()[:2]
        scheme = "https" if settings.ssl_certfile else "http"
        name = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        hosts = [listener.getsockname()[0].partition("%")[0] for listener in listeners]
        public = not all(ipaddress.ip_address(host).is_loopback for host in hosts)
    try:
        yield listeners, name, public
    finally:
        for listener in listeners:
            listener.close()
        if settings.uds is not None:
            with suppress(OSError):
                os.unlink(settings.uds)


def _bind(host: str, port: int) -> list[socket.socket]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"--host {host}: there is no such address here ({e}).") from e
    listeners: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(sorted(found, key=lambda f: f[0] != socket.AF_INET)):
        try:
            listener = socket.socket(family, kind, protocol)
        except OSError:  # a kernel without IPv6
            continue
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a server before may linger
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # so that both can have one port
        if listeners:
            address = (address[0], listeners[0].getsockname()[1], *address[2:])  # --port 0: the same
        try:
            listener.bind(address)
        except OSError as e:
            listener.close()
            if e.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(found) > 1:
                continue
            for other in listeners:
                other.close()
            raise ConfigError(
                f"Cannot listen on {host}:{port}: {(e.strerror or str(e)).lower()}. Choose another --port, or 0 for "
                f"any."
            ) from e
        listeners.append(listener)
    if not listeners:
        raise ConfigError(f"--host {host}: there is no such address here.")
    return listeners


def _unix(path: str) -> socket.socket:
    with suppress(OSError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"--uds {path}: there is a file of this name, which is no socket. Name another.")
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
    """Whether this is the socket of a server that is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False
