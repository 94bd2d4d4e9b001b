"""Serves under a path prefix, as behind a proxy."""

from __future__ import annotations

import re
from typing import Any

from hibachi.errors import ConfigError

_ROOT = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+")


def root_of(given: str | None) -> str:
    """The path of --root-path; "" for none. Raises ConfigError."""
    if given is not None and not _ROOT.fullmatch(given):
        raise ConfigError(f"--root-path: expected a path such as /llm, without a slash at its end; got {given[:80]!r}.")
    return given or ""


class Rooted:
    """The application under `root`, whether the proxy takes that off or leaves it there.

    As ASGI has it, `path` begins with `root_path`, and what finds routes takes it off.
    """

    def __init__(self, app: Any, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, root = scope["path"], self._root
        if path == root:
            path = f"{root}/"
        elif not path.startswith(f"{root}/"):
            path = root + path
        await self._app({**scope, "path": path, "root_path": root}, receive, send)
