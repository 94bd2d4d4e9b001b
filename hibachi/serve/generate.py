"""Tokens of any kind: an array in, tokens out as they come, whatever rung the model stands on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hibachi.api import answers
from hibachi.api.errors import Refused, as_refused, body_of
from hibachi.api.tokens.accept import Accept, media_type, refused
from hibachi.api.tokens.asking import Asked, asked_of, check_room
from hibachi.api.tokens.bodies import BYTES, MSGPACKS, TYPES, Given
from hibachi.api.tokens.writing import SSE, STREAMS, TOKENS, WHOLE, End, Form, TokenWriter, about
from hibachi.api.writing import reason_of
from hibachi.engine.conversions import to_host
from hibachi.errors import HibachiError, ModelError
from hibachi.lm.texts import Texts
from hibachi.lm.tokens import Tokens
from hibachi.request import SamplingParams
from hibachi.runners.tokentable import IDS
from hibachi.serve.record import Generated, Record
from hibachi.serve.routes import Route
from hibachi.serve.served import Served
from hibachi.streams.merge import await_any
from hibachi.streams.stream import ItemStream
from hibachi.tensor.array_backend import HostArray
from hibachi.web.comments import Comments
from hibachi.web.exchange import Exchange

MOST_WHOLE = 1 << 28  # bytes of tokens of an answer that is no stream
EACH = 2e-4  # seconds for each open request, within which what comes of a stream goes out together: events cost time
INLINE = 1 << 16  # bytes of a body that are read on the event loop
ASIDE = 1 << 16  # bytes of tokens, from which on an answer is written in a thread
_ONE = SamplingParams(max_tokens=1)


async def generate(served: Served, x: Exchange) -> None:
    """Generate tokens of any kind, or compute one output: an array or bytes in, arrays or bytes out."""
    facts = served.what.engine.facts
    kind = _taken(x, facts.reads)
    accept = Accept(x.headers.get(b"accept"))
    raw = await served.body(x, json=False)
    size = len(raw) if len(raw) > INLINE else 0
    given = await served.arrays.run(size, partial(Given, raw, kind, x.scope["query_string"]), x.tenant)
    said, dtype = given.said, _dtype(served)
    name = served.check_name(said.model)
    stop = await served.arrays.run(size, partial(given.stop, dtype), x.tenant)
    asked = asked_of(
        said,
        stop,
        feedforward=facts.feedforward,
        defaults=served.what.default_params if facts.vocab_size is not None else None,
        eos_ids=served.what.eos_ids if isinstance(served.what, Texts) else (),
        bounds=served.bounds,
    )
    form = _form(accept, said.stream, facts.writes)
    if given.own:
        if not facts.reads:
            raise _unsupported(kind)
        prompt = await served.convert(partial(served.what.engine.read, raw, kind))
    else:
        prompt = await served.arrays.run(size, partial(given.prompt, dtype), x.tenant)
    n = 1 if facts.feedforward or not prompt.ndim else len(prompt)
    check_room(n, said.max_tokens, facts.limits.max_len)
    kind_of = (prompt.shape[1:], prompt.dtype.name) if facts.token is None else facts.token
    writer = TokenWriter(name, _IDS if asked.params else kind_of, base64=said.encoding == "base64", id=said.request_id or x.id)
    params = (asked.params or _ONE).with_(max_tokens=asked.limit)
    with (
        served.record(x, params, [range(n)]) as record,
        served.submit_tokens(prompt, asked, served.terms(asked.terms, x.tenant)) as stream,
    ):
        record.text, record.stream = Generated(stream), said.stream
        answer = _Answer(served, x, writer, asked, stream, record, n)
        try:
            await x.while_here(
                answer.whole(accept, form) if form not in STREAMS or not said.stream else answer.stream(STREAMS[form]),
                stream.close,
            )
        except ModelError as e:
            if x.begun or prompt.dtype.kind != "f" or np.isfinite(prompt).all():
                raise
            raise Refused(
                "The prompt holds NaN or infinity, and the model failed on it. Send finite numbers.",
                param="prompt",
                code="not_finite",
            ) from e
        finally:
            stream.close()


_IDS = (IDS.shape, IDS.dtype.name)


class _Answer:
    """n: tokens of the prompt."""

    def __init__(
        self,
        served: Served,
        x: Exchange,
        writer: TokenWriter,
        asked: Asked,
        stream: ItemStream[Any],
        record: Record,
        n: int,
    ) -> None:
        self._served, self._x, self._writer, self._asked = served, x, writer, asked
        self._stream, self._record, self._prompt = stream, record, n
        self._host = served.what.host if isinstance(served.what, Tokens) else _id
        self._loop = asyncio.get_running_loop()
        self._looked = 0.0  # for tokens, by the loop's clock
        self._came = 0
        self._over = False

    async def stream(self, form: Form) -> None:
        """Every event has all tokens that have come since the last."""
        x, writer = self._x, self._writer
        comments = Comments(x, form.kind, form.comment)
        opened = False
        try:
            while not self._over:
                tokens = await self._some()
                await comments.settled()
                events = b""
                if not opened:
                    if not x.begun:
                        await x.begin(200, form.kind)
                    opened, events = True, form.event(writer.opening(form))
                if len(tokens):
                    events += form.event(writer.came(tokens, form, self._scores(len(tokens))))
                if self._over:
                    events += form.event(self._end())
                await x.write(events, more=not self._over)
        except HibachiError as e:
            await comments.settled()
            if not x.begun:  # then it has a status of its own
                raise
            self._record.failed(e)
            told = as_refused(e)
            x.blame(told, e)
            await x.write(form.event(body_of(told)), more=False)
        finally:
            comments.stop()

    async def whole(self, accept: Accept, form: str | None) -> None:
        """form: of WHOLE; None: what the model writes."""
        parts, size = list[HostArray](), 0
        while not self._over:
            tokens = await self._some()
            parts.append(tokens)
            size += tokens.nbytes
            if size > MOST_WHOLE:
                raise Refused(
                    f"The answer is larger than {MOST_WHOLE} bytes. Ask for a stream, or for fewer tokens.",
                    param="max_tokens",
                    code="answer_too_large",
                )
        found = parts[0] if len(parts) == 1 else np.concatenate(parts)
        end, single = None, self._served.what.engine.facts.feedforward
        if not single:
            end = self._end()
        elif len(found) != 1:
            reason_of(self._stream.finish_reason)
            raise ModelError("A feed-forward model must return one output for each input; got none.")
        more = None if end is None else about(end)
        if form is None:
            made = found[0] if end is None else found
            data, kind = await self._served.convert(partial(self._served.what.engine.write, made))
            if accept.quality(media_type(kind.encode("latin-1"))):
                await self._x.answer(data, kind.encode("latin-1"), 200, more)
                return
            form = accept.best(WHOLE)
            if form is None:
                raise refused((media_type(kind.encode("latin-1")), *WHOLE))
        write = (
            partial(self._writer.output, found[0], form)
            if end is None
            else partial(self._writer.whole, found, form, end, self._scores(len(found), 0))
        )
        data = write() if size < ASIDE else await self._served.arrays.aside(write, self._x.tenant)
        await self._x.answer(data, form.encode(), 200, more if form not in (WHOLE[0], WHOLE[2]) else None)

    async def _some(self) -> HostArray:
        """The tokens that have come since it was last asked, [n, *token]; none at the end only. Raises what the stream
        raises, after its tokens."""
        stream = self._stream
        await await_any((stream,))
        if (wait := self._looked + EACH * self._served.open_requests - self._loop.time()) > 0 and stream.finish_reason is None:
            await asyncio.sleep(wait)
        self._looked = self._loop.time()
        over = stream.finish_reason is not None  # read first: nothing comes after the end
        items = stream.come()
        if over and (not items or stream.error is None):
            stream.check()
            self._over = True
        if not items:
            return self._writer.none()
        self._record.got(len(items))
        self._came += len(items)
        return self._writer.made(_joined(items, self._host))

    def _scores(self, n: int, since: int | None = None) -> Sequence[dict[int, float] | None] | None:
        if not self._asked.logprobs:
            return None
        since = self._came - n if since is None else since
        return self._stream.logprobs_from(since, since + n)

    def _end(self) -> End:
        """Raises EngineClosed for what was cut off."""
        stream = self._stream
        cached = stream.reused if self._served.what.engine.facts.cached else None
        stopped = stream.stop_token if stream.stop_token in self._asked.ids else None
        return End(reason_of(stream.finish_reason), stopped, answers.usage(self._prompt, self._came, stream.reused))


def _joined(items: list[Any], host: Any) -> HostArray:
    if isinstance(items[0], int):
        return np.asarray(items, IDS.dtype)
    if len(items) == 1:
        one: HostArray = host(items[0])
        return one[None]
    return np.stack([host(item) for item in items])


def _id(item: Any) -> HostArray:
    return to_host(item)


def _dtype(served: Served) -> str | None:
    """Of tokens or inputs, where all have one."""
    token = served.what.engine.facts.token
    return None if token is None else token[1]


def _taken(x: Exchange, reads: bool) -> str:
    """The media type of the body. Raises Refused for one that is not taken."""
    encoding = x.headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding != b"identity":
        raise Refused(
            f"Content-Encoding: {encoding[:60].decode('latin-1')} is not taken. Send the body as it is.",
            status=415,
            code="unsupported_media_type",
        )
    kind = media_type(x.headers.get(b"content-type", b"")) or TYPES[0]
    if not (reads or kind in TYPES or kind in MSGPACKS or kind.endswith("+json")):
        raise _unsupported(kind)
    return kind


def _unsupported(kind: str) -> Refused:
    told = " that begins as .npy does" if kind == BYTES else ""
    return Refused(
        f"Content-Type: expected one of {', '.join(TYPES)}{told}; got {kind[:100]}. This model reads no other.",
        status=415,
        code="unsupported_media_type",
    )


def _form(accept: Accept, stream: bool, writes: bool) -> str | None:
    """None: what the model's own `write` makes. Raises Refused."""
    ours = tuple(STREAMS) if stream else WHOLE
    if not stream and writes and accept.prefers_another(ours):
        return None
    found = accept.best(ours)
    if found is None:
        streams = not stream and accept.best((SSE, "application/x-ndjson")) is not None
        raise refused(ours, "; for a stream send stream=true" if streams else "")
    return found


ROUTES = (Route("POST", "/v1/generate", generate, TOKENS),)
