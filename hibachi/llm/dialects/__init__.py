"""Request and answer formats of the HTTP APIs. No sockets, no engine."""
