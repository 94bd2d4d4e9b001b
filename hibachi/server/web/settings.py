"""Settings that all servers have."""

from __future__ import annotations

from dataclasses import dataclass

from hibachi.common.settings.kinds import choice, integer, setting, text, texts


@dataclass(frozen=True, kw_only=True)
class AddressSettings:
    """Where a server listens."""

    host: str = setting(text("NAME"), "127.0.0.1", "address to listen on; 0.0.0.0 means every network")
    port: int = setting(integer(0, 65535), 8000, "port to listen on; 0 means any free one")
    uds: str | None = setting(text("FILE"), None, "listen on a Unix socket in place of host and port")
    ssl_certfile: str | None = setting(text("FILE"), None, "serve HTTPS with this certificate")
    ssl_keyfile: str | None = setting(text("FILE"), None, "private key of the certificate", "in the same file")
    ssl_ca_certs: str | None = setting(
        text("FILE"), None, "accept only clients with a certificate that one of these signed"
    )


@dataclass(frozen=True, kw_only=True)
class KeySettings:
    """Who may send requests."""

    api_key: tuple[str, ...] | None = setting(
        texts("KEY"), None, "accept only requests with one of these keys", "the upstream decides"
    )
    api_keys: str | None = setting(text("FILE"), None, "TOML file of tenants and their keys")


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What is logged, and how."""

    log_format: str = setting(
        choice("text", "json"), "text", "format of log lines: text, or a JSON object for each event"
    )
    log_level: str = setting(
        choice("debug", "info", "warning", "error"),
        "info",
        "least severe events to log; from warning on, requests are not logged",
    )
