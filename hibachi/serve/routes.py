"""What a route is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from hibachi.api.dialects import OPENAI, Dialect
from hibachi.serve.served import Served
from hibachi.web.exchange import Exchange

Handler = Callable[[Served, Exchange], Awaitable[None]]


class Route(NamedTuple):
    """keyed: it takes a key, where there are any. The first line of the handler's docstring says what it does."""

    method: str
    path: str
    handler: Handler
    dialect: Dialect = OPENAI
    keyed: bool = True
