"""Ends with 0 if the server in this container answers, at the port that its variables name."""

import http.client
import os
import sys

port = int(os.environ.get("HIBACHI_PORT") or os.environ.get("TIB_PORT") or 8000)
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
try:
    connection.request("GET", "/health")
    sys.exit(connection.getresponse().status != 200)
except (OSError, http.client.HTTPException) as e:
    sys.exit(f"port {port}: {e}")
