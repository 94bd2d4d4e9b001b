"""One request and its answer, on ASGI: bounded bodies, JSON, server-sent events, and clients that leave."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Self
from urllib.parse import parse_qsl, unquote

from hibachi.llm.dialects.dialects import OPENAI, Dialect
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai.answers import encode, event
from hibachi.server.web.content_encoding import coding_of, decoded

Message = MutableMapping[str, Any]
log: logging.Logger = logging.getLogger("hibachi.serve")
JSON, SSE = b"application/json", b"text/event-stream; charset=utf-8"
MOST_FIELDS = 64  # of a query
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# Types of bodies that a page may send anywhere, its browser asking nobody; "none" stands for no type at all.
_UNASKED = frozenset((b"none", b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data"))


class Gone(Exception):
    """The client has left."""


class Leaving:
    """A block of a task, which ends with Gone once `now` was called."""

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] | None = task
        self._asked, self._gone = task.cancelling(), False  # how often others have cancelled this task
        return self

    def now(self) -> bool:
        """Cancel the block. Returns False, and does nothing, where that was done or the block is over."""
        if self._task is None or self._gone:
            return False
        self._gone = True
        return self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, e: object, trace: object) -> None:
        task, self._task = self._task, None
        assert task is not None
        if self._gone and task.uncancel() <= self._asked and kind is asyncio.CancelledError:
            raise Gone from None


class Exchange:
    """A request that came, and how to answer it. `id`: the client's X-Request-Id, or one of ours. written: when some
    of the answer was last sent, by the loop's clock; writing: it is being sent.
    """

    scope: MutableMapping[str, Any]
    begun: bool
    dialect: Dialect
    done: bool
    status: int
    written: float | None

    def __init__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        self.scope, self.receive, self._send = scope, receive, send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"")
        self.id: str = given.decode() if _ID.fullmatch(given) else secrets.token_hex(12)
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.client: tuple[str, int] | None = scope.get("client")
        self.tenant = ""
        self.part = ""  # of the tenant; see `tenants.part_of`
        self.came: float = time.monotonic()
        self.status = 0  # of its answer
        self.record: Any = None  # what a server notes of a request for text; see `access.Told`
        self.always: list[tuple[bytes, bytes]] = []  # headers of all answers of our own
        self.more: dict[str, Any] = {}  # what else the log says of it
        self.dialect = OPENAI  # of its errors
        self.size = 0  # bytes of its body
        self.begun = False  # its answer
        self.done = False
        self.written, self.writing = None, False

    @property
    def params(self) -> dict[str, str]:
        """Of the path."""
        found: dict[str, str] = self.scope.get("path_params", {})
        return {name: unquote(value) for name, value in found.items()}

    @property
    def route(self) -> str:
        """The path without what a proxy has in front of it."""
        return self.path.removeprefix(self.scope.get("root_path", ""))

    @property
    def query(self) -> list[tuple[str, str]]:
        """Names and values, in their order. Raises Refused."""
        raw: bytes = self.scope["query_string"]
        try:
            return parse_qsl(raw.decode("ascii"), True, True, "utf-8", "strict", MOST_FIELDS)
        except ValueError as e:
            raise Refused(
                f"The query must be name=value, joined by &, in UTF-8: {e}.", param="query", code="invalid_value"
            ) from None

    async def body(self, most: int, *, json: bool = True) -> bytes:
        """The whole body. json: none but JSON is taken. Raises Refused, also for more than `most` bytes; Gone."""
        # A page may send what names no type anywhere, without asking whether it may; a type that is JSON asks first.
        untold = b"none" if b"origin" in self.headers else b"application/json"
        kind = self.headers.get(b"content-type", untold).partition(b";")[0].strip().lower()
        if json and kind != b"application/json" and not kind.endswith(b"+json"):
            raise Refused(
                f"The body must be JSON: expected Content-Type: application/json; got {kind[:60].decode('latin-1')}.",
                status=415,
                code="unsupported_media_type",
            )
        if not json and kind in _UNASKED and b"origin" in self.headers:
            raise Refused(
                f"A page must send its body with a type for which its browser asks first, such as application/json or "
                f"application/octet-stream; got Content-Type: {kind[:60].decode('latin-1')}.",
                status=415,
                code="unsupported_media_type",
            )
        coding = coding_of(self.headers.get(b"content-encoding", b""))
        length = self.headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > most:
            raise _too_large(int(length), most)
        parts, size = [], 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise _too_large(size, most)
            parts.append(part)
            if not message.get("more_body"):
                self.size = size
                break
        whole = b"".join(parts)
        return whole if coding is None else await asyncio.to_thread(decoded, whole, coding, most)

    async def left(self) -> None:
        """Wait until the client has left. The body must have been read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def while_here(self, work: Awaitable[None], leave: Callable[[], object]) -> None:
        """Await `work`; if the client leaves meanwhile, call `leave`, cancel `work` and raise Gone.

        It runs in this task: a client that has its whole answer may ask again at once, and finds what is given back
        behind `work` given back.
        """
        theirs = asyncio.ensure_future(self.left())
        try:
            with Leaving() as leaving:

                def left(done: asyncio.Task[None]) -> None:
                    if not done.cancelled() and leaving.now():
                        leave()

                theirs.add_done_callback(left)
                await work
        finally:
            theirs.cancel()

    # ---- the answer --------------------------------------------------------------------------------------------

    async def begin(self, status: int, kind: bytes, more: dict[str, str] | None = None) -> None:
        headers = [(b"content-type", kind), (b"x-request-id", self.id.encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in (more or {}).items()]
        if self.dialect.tells_id:
            headers.append((b"request-id", self.id.encode()))
        headers += self.always
        if "content-length" not in (more or {}):  # a stream
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self.start(status, headers)

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """`begin` with these headers and no others."""
        self.begun, self.status, self.writing = True, status, True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.writing = False

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send data; waits while the client reads slowly."""
        self.done, self.writing = not more, True
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.written, self.writing = asyncio.get_running_loop().time(), False

    async def answer(self, data: bytes, kind: bytes, status: int = 200, more: dict[str, str] | None = None) -> None:
        await self.begin(status, kind, {"content-length": str(len(data)), **(more or {})})
        await self.write(data, more=False)

    async def json(self, answer: Any, status: int = 200, more: dict[str, str] | None = None) -> None:
        await self.answer(encode(answer), JSON, status, more)

    def blame(self, refused: Refused, error: BaseException) -> None:
        """Log the error for the operator, also where the client is not told all of it."""
        self.more["code"] = refused.code or refused.kind
        if refused.status == 500:
            log.error("request %s: %s %r", self.id, self.method, self.path[:200], exc_info=error)

    async def refuse(self, refused: Refused) -> None:
        """Answer with an error, as the dialect has it."""
        dialect = self.dialect
        body = dialect.told(refused, self.id)
        if dialect.as_event(refused):
            await self.begin(200, SSE, refused.headers)
            await self.write(event(body) + dialect.end, more=False)
        else:
            await self.json(body, dialect.status(refused), refused.headers)


def _too_large(size: int, most: int) -> Refused:
    return Refused(
        f"The body is too large: at most {most} bytes are taken; got {size}.", status=413, code="body_too_large"
    )
