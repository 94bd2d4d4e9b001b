"""The certificate that a server shows."""

from __future__ import annotations

import ssl
from types import SimpleNamespace
from typing import Any

from hibachi.errors import ConfigError


def certificate_of(settings: SimpleNamespace) -> dict[str, Any]:
    """For uvicorn. Raises ConfigError for one that cannot be used."""
    cert, key = settings.ssl_certfile, settings.ssl_keyfile
    if cert is None:
        if key is not None:
            raise ConfigError("--ssl-keyfile is the key of --ssl-certfile, which is missing.")
        return {}
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
        raise ConfigError(f"--ssl-certfile {cert}, --ssl-keyfile {key}: {e}.") from e
    return {"ssl_certfile": cert, "ssl_keyfile": key}
