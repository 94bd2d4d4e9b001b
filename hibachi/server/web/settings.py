"""Settings that all servers have."""

from __future__ import annotations

from hibachi.common.settings.kinds import Setting, choice, integer, text

ADDRESS = (
    Setting("host", text("NAME"), "127.0.0.1", "address to listen on; 0.0.0.0 means every network"),
    Setting("port", integer(0, 65535), 8000, "port to listen on; 0 means any free one"),
    Setting("uds", text("FILE"), None, "listen on a Unix socket in place of host and port"),
    Setting("ssl-certfile", text("FILE"), None, "serve HTTPS with this certificate"),
    Setting("ssl-keyfile", text("FILE"), None, "private key of the certificate", "in the same file"),
    Setting("ssl-ca-certs", text("FILE"), None, "accept only clients with a certificate that one of these signed"),
)
LOG = (
    Setting("log-format", choice("text", "json"), "text", "format of log lines: text, or a JSON object for each event"),
    Setting(
        "log-level",
        choice("debug", "info", "warning", "error"),
        "info",
        "least severe events to log; from warning on, requests are not logged",
    ),
)
