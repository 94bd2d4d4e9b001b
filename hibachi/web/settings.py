"""Settings that all servers have."""

from __future__ import annotations

from hibachi.settings.kinds import Setting, choice, integer, text

ADDRESS = (
    Setting("host", text("NAME"), "127.0.0.1", "to listen on; 0.0.0.0: every network"),
    Setting("port", integer(0, 65535), 8000, "0: any that is free"),
    Setting("uds", text("FILE"), None, "listen on a Unix socket in place of host and port"),
    Setting("ssl-certfile", text("FILE"), None, "serve HTTPS with this certificate"),
    Setting("ssl-keyfile", text("FILE"), None, "its key", "in the same file"),
    Setting("ssl-ca-certs", text("FILE"), None, "clients must show a certificate that one of these signed"),
)
LOG = (
    Setting("log-format", choice("text", "json"), "text", "a line for each event, or a JSON object"),
    Setting("log-level", choice("debug", "info", "warning", "error"), "info", "warning: no line for each request"),
)
