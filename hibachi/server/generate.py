"""POST /v1/generate: tokens of any kind, an array in, tokens out as they come, for a model on any level."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.backend.infer import leaves, mapped
from hibachi.engine.batchengine import Facts
from hibachi.engine.conversions import to_host
from hibachi.engine.runners.stops import as_token
from hibachi.engine.runners.tokentable import IDS
from hibachi.engine.streams.merge import await_any
from hibachi.engine.streams.stream import ItemStream
from hibachi.errors import HibachiError, InvalidRequest, ModelError, NonFiniteOutput
from hibachi.llm.dialects.errors import Refused, as_refused, body_of
from hibachi.llm.dialects.forms import said_by
from hibachi.llm.dialects.openai import answers
from hibachi.llm.dialects.openai.writing import reason_of
from hibachi.llm.dialects.tokens.accept import Accept, media_type, refused
from hibachi.llm.dialects.tokens.arrays import DTYPES
from hibachi.llm.dialects.tokens.bodies import (
    BYTES,
    JSON,
    MSGPACK,
    MSGPACKS,
    NPY,
    TYPES,
    Given,
    Parameters,
    TokensBody,
    is_json,
)
from hibachi.llm.dialects.tokens.parse import AskedModel, asked_of
from hibachi.llm.dialects.tokens.writing import (
    NDJSON,
    SSE,
    STREAMS,
    TOKENS,
    WHOLE,
    Came,
    End,
    Opening,
    Scores,
    TokenFormat,
    TokenSamples,
    TokensOutput,
    TokenWriter,
    Whole,
    about,
)
from hibachi.llm.texts import Texts
from hibachi.llm.tokenizers.prompts import check_fits
from hibachi.llm.tokens import Tokens
from hibachi.request import Request, SamplingParams, StopRule
from hibachi.server.openapi import BINARY, Error
from hibachi.server.record import Generated, Record
from hibachi.server.routes import About, Route, example_array
from hibachi.server.served import Served
from hibachi.server.streaming import send_parts
from hibachi.server.web.comments import Comments
from hibachi.server.web.exchange import Exchange

T = TypeVar("T")
MOST_WHOLE = 1 << 28  # bytes of tokens of an answer that is no stream
EACH = 2e-4  # seconds for each open request, within which what comes of a stream goes out together: events cost time
LATEST = 0.05  # seconds at most
INLINE = 1 << 16  # bytes of a body that are read on the event loop
ASIDE = 1 << 16  # bytes of tokens, from which on an answer is written in a thread
_ONE = SamplingParams(max_tokens=1)


async def generate(served: Served, x: Exchange) -> None:
    """Generate tokens of any kind, or compute one output: an array or bytes in, arrays or bytes out."""
    facts, what = served.what.engine.facts, served.what
    kind = _taken(x, facts.reads)
    accept = Accept(x.headers.get(b"accept"))
    raw = await served.body(x, json=False)
    if is_json(kind):
        await served.weigh(raw)
    elif kind in MSGPACKS:
        await served.weigh(raw, packed=True)
    size = len(raw) if len(raw) > INLINE else 0

    async def read(work: Callable[[], T]) -> T:
        return await served.arrays.run(size, work, x.tenant)

    given = await read(partial(Given, raw, kind, x.query))
    said, dtype = given.said, None if facts.token is None else facts.token[1]
    name = served.check_name(said.model)
    model = AskedModel(
        served.bounds,
        facts.feedforward,
        None if facts.vocab_size is None else what.default_params,
        what.eos_ids if isinstance(what, Texts) else (),
        facts.seeded,
        facts.codebooks,
    )
    request, ids = asked_of(said, await read(partial(given.stop, dtype)), model)
    dtypes = {name: one.dtype for name, one in facts.inputs.items()}
    inputs = await read(partial(given.inputs, dtypes))
    form = _form(accept, said.stream, facts.writes, given.own)
    if not given.own:
        prompt = await read(partial(given.prompt, dtype))
    elif facts.reads:
        prompt = await served.convert(partial(what.engine.read, raw, kind), x.tenant)
    else:
        raise _unsupported(kind)
    request = replace(request, prompt=prompt, inputs=inputs, terms=served.terms(request.terms, x.tenant, x.part))
    try:
        n, token = _checked(request, said, facts)
        writer = TokenWriter(
            name, None if facts.feedforward else token, base64=said.encoding == "base64", id=said.request_id or x.id
        )
        await served.check_form(request.params, x.tenant)
        params = (request.params or _ONE).with_(max_tokens=request.max_tokens)
        with (
            said_by(None),
            served.record(x, params, [range(n)]) as record,
            served.submit_tokens(request, said.n or 1) as streams,
        ):
            record.text, record.stream = Generated(streams), said.stream
            events = STREAMS[form] if said.stream and form is not None else None
            each = [_TokenAnswer(served, x, writer, ids, stream, record, events, i) for i, stream in enumerate(streams)]
            try:
                if len(each) > 1:
                    work = _samples(x, each, writer, form)
                else:
                    work = each[0].whole(accept, form) if events is None else each[0].stream()
                await x.while_here(work, record.text.close)
            except (ModelError, NonFiniteOutput) as e:
                if x.begun or prompt.dtype.kind != "f" or np.isfinite(prompt).all():
                    raise
                raise Refused(
                    "The prompt holds NaN or infinity, and the model failed on it. Send finite numbers.",
                    param="prompt",
                    code="not_finite",
                ) from e
            finally:
                record.text.close()
    except InvalidRequest as e:
        raise _of_prompt(e) from e


def _checked(request: Request, said: Parameters, facts: Facts) -> tuple[int, tuple[tuple[int, ...], str]]:
    """Check a request. Returns its tokens, and the shape and dtype of one. Raises Refused or PromptTooLong."""
    prompt: HostArray = request.prompt
    n = 1 if facts.feedforward or not prompt.ndim else len(prompt)
    if n < facts.limits.max_model_len:  # whether they fit without new ones is for the engine to say
        check_fits(n, said.max_tokens, facts.limits.max_model_len)
    token = facts.token or (prompt.shape[1:], prompt.dtype.name)
    if not facts.arrays:
        token = IDS.shape, IDS.dtype.name
    if request.stop_rule is not None:
        _check_stop(request.stop_rule, token)
    return n, token


class _TokenAnswer:
    """The answer to a request. ids: that end it. form: of a stream; None means it is whole. index: of the sample."""

    def __init__(
        self,
        served: Served,
        x: Exchange,
        writer: TokenWriter,
        ids: tuple[int, ...],
        stream: ItemStream[Any],
        record: Record,
        form: TokenFormat | None,
        index: int,
    ) -> None:
        self._served, self._x, self._writer, self._ids, self._index = served, x, writer, ids, index
        self._stream, self._record, self._form = stream, record, form
        self._opened, self._left = False, b""  # its first event is made; events that were not sent
        self._host = served.what.host if isinstance(served.what, Tokens) else to_host
        self._loop = asyncio.get_running_loop()
        self._looked = 0.0  # for tokens, by the loop's clock
        self._came = 0
        self.over = False

    async def stream(self) -> None:
        """Send events; each has all tokens that have come since the last."""
        assert self._form is not None
        await send_parts(
            self._x, self._record, Comments(self._x, self._form.kind, self._form.comment), self, _of_prompt
        )

    async def next(self) -> bytes:
        """All tokens that have come since the last part."""
        form, writer = self._form, self._writer
        assert form is not None
        tokens = await self._some()
        if not self._opened:
            self._opened, self._left = True, form.event(writer.opening(form))
        if len(tokens):
            write = partial(self._event, tokens, form, self._scores(len(tokens)))
            slow = tokens.nbytes >= ASIDE and writer.lists(form)
            self._left += await self._served.arrays.aside(write, self._x.tenant) if slow else write()
        if self.over:
            self._left += form.event(self.end())
        sent, self._left = self._left, b""
        return sent

    async def failed(self, refused: Refused) -> bytes:
        assert self._form is not None
        return self._left + self._form.event(body_of(refused))

    def _event(self, tokens: HostArray, form: TokenFormat, scores: Scores | None) -> bytes:
        return form.event(self._writer.came(tokens, form, scores))

    async def whole(self, accept: Accept, form: str | None) -> None:
        """Send one answer. form: of WHOLE; None means what the model's own `write` makes."""
        if self._served.what.engine.facts.feedforward:
            end, (found, size) = None, await self._output()
        else:
            found, size = await self.tokens()
            end = self.end()
        more = None if end is None else about(end)
        if form is None:
            data, kind = await self._served.convert(partial(self._written, found), self._x.tenant)
            if accept.quality(media_type(kind.encode("latin-1"))):
                await self._x.answer(data, kind.encode("latin-1"), 200, more)
                return
            form = accept.best(WHOLE)
            if form is None:
                raise refused((media_type(kind.encode("latin-1")), *WHOLE))
        write = (
            partial(self._writer.output, found, form)
            if end is None
            else partial(self._writer.whole, found, form, end, self._scores(len(found), 0))
        )
        data = write() if size < ASIDE else await self._served.arrays.aside(write, self._x.tenant)
        await self._x.answer(data, form.encode(), 200, more if form == NPY else None)

    def told(self, tokens: HostArray) -> tuple[HostArray, End, Scores | None, float | None]:
        """Of a sample that has ended, with these tokens."""
        return tokens, self.end(), self._scores(len(tokens), 0), self._stream.score

    async def tokens(self) -> tuple[HostArray, int]:
        """All tokens [n, *token], and their bytes."""
        parts, size = list[HostArray](), 0
        while not self.over:
            tokens = await self._some()
            parts.append(tokens)
            size += tokens.nbytes
            if size > MOST_WHOLE:
                raise Refused(
                    f"The answer is larger than {MOST_WHOLE} bytes. Ask for a stream, or for fewer tokens.",
                    param="max_tokens",
                    code="answer_too_large",
                )
        if len(parts) == 1:
            return parts[0], size
        join = partial(np.concatenate, parts)
        return join() if size < ASIDE else await self._served.arrays.aside(join, self._x.tenant), size

    async def _output(self) -> tuple[Any, int]:
        """The one output of a feed-forward model, an array, or several in a list, tuple or dict, and its bytes."""
        items = await self._stream.acollect()
        self._record.got(len(items))
        if len(items) != 1:
            reason_of(self._stream.finish_reason)
            raise ModelError("A feed-forward model must return one output for each input; got none.")
        found = self._host(items[0])
        return found, sum(array.nbytes for array in leaves(found))

    def _written(self, made: Any) -> tuple[bytes, str]:
        copies = mapped(lambda _, array: array.copy(), made)  # the model may write there, and we go on with ours
        return self._served.what.engine.write(copies)

    async def _some(self) -> HostArray:
        """The tokens that have come since the last call, [n, *token]; none at the end only. Raises what the stream
        raises, after its tokens.
        """
        stream = self._stream
        await await_any((stream,))
        wait = self._looked + min(EACH * self._served.open_requests, LATEST) - self._loop.time()
        if wait > 0 and stream.finish_reason is None:
            await asyncio.sleep(wait)
        self._looked = self._loop.time()
        over = stream.finish_reason is not None  # read first: nothing comes after the end
        items = stream.come()
        if over and (not items or stream.error is None):
            stream.check()
            self.over = True
        if not items:
            return self._writer.none()
        self._record.got(len(items), self._index)
        self._came += len(items)
        return self._writer.made(_joined(items, self._host))

    def _scores(self, n: int, since: int | None = None) -> Scores | None:
        if self._record.params.logprobs is None:
            return None
        since = self._came - n if since is None else since
        return self._stream.logprobs_from(since, since + n)

    def end(self) -> End:
        """End the answer. Raises EngineClosed for one that was cut off."""
        stream = self._stream
        facts = self._served.what.engine.facts
        cached = stream.reused if facts.cached or facts.limits.copies else None
        stopped = stream.stop_token if stream.stop_token in self._ids else None
        return End(
            reason_of(stream.finish_reason), stopped, answers.usage(self._record.prompt_tokens, self._came, cached)
        )


async def _samples(x: Exchange, each: Sequence[_TokenAnswer], writer: TokenWriter, form: str | None) -> None:
    """Send several samples in one answer. Raises Refused."""
    if form not in (JSON, *MSGPACKS):
        raise Refused.at(
            "n", f" samples are an answer of {JSON} or {MSGPACK}. Accept one of them.", code="invalid_value"
        )
    made = [(answer, (await answer.tokens())[0]) for answer in each]
    await x.answer(writer.samples([answer.told(tokens) for answer, tokens in made], form), form.encode(), 200)


def _joined(items: list[Any], host: Any) -> HostArray:
    if isinstance(items[0], int):
        return np.asarray(items, IDS.dtype)
    if len(items) == 1:
        one: HostArray = host(items[0])
        return one[None]
    tokens = [host(item) for item in items]
    if not tokens[0].ndim or not tokens[0].shape[0]:
        return np.stack(tokens)
    # As `stack`, which costs twice as much.
    return np.concatenate(tokens).reshape(len(tokens), *tokens[0].shape)


def _of_prompt(error: HibachiError) -> Refused:
    """Name the faulty field where the engine refuses a request: the one that the error is about, else the prompt."""
    refused = as_refused(error)
    if isinstance(error, InvalidRequest):
        field = (error.path or ("prompt",))[:1]
        refused.path = field if field[0] in Parameters.__struct_fields__ else ("prompt",)
        refused.code = refused.code or "invalid_value"
    return refused


def _check_stop(stop: StopRule, kind: tuple[tuple[int, ...], str]) -> None:
    """Check stop tokens. kind: shape and dtype of a token. Raises Refused."""
    try:
        for token in stop.tokens:
            as_token(token, kind[0], DTYPES.get(kind[1], DTYPES["float32"]), "stop token")
    except InvalidRequest as e:
        raise Refused(f"{e} The field stop is a list of tokens.", param="stop", code="invalid_value") from None


def _taken(x: Exchange, reads: bool) -> str:
    """The media type of the body. Raises Refused for an unsupported one."""
    kind = media_type(x.headers.get(b"content-type", b"")) or JSON
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


def _form(accept: Accept, stream: bool, writes: bool, own: bool) -> str | None:
    """The form of the answer; None means what the model's own `write` makes. own: the model has read the body. Raises
    Refused.
    """
    ours = tuple(STREAMS) if stream else WHOLE
    if not stream and writes and (accept.prefers_another(ours) or (own and not accept.names(ours))):
        return None
    found = accept.best(ours)
    if found is None and stream and accept.quality(JSON):
        return SSE  # so `curl --json` asks, and OpenAI's clients, whatever they stream
    if found is None:
        streams = not stream and accept.best((SSE, NDJSON)) is not None
        raise refused(ours, "; for a stream send stream=true" if streams else "")
    return found


def _example(served: Served) -> dict[str, Any]:
    given = {"prompt": example_array(served)}
    return given if served.what.engine.facts.feedforward else given | {"max_tokens": 8}


GENERATE = About(
    TokensBody,
    (Whole, TokenSamples, TokensOutput),
    (Opening, Came, End, Error),
    reads=dict.fromkeys((*MSGPACKS, NPY, BYTES), BINARY),
    writes=dict.fromkeys((NPY, MSGPACK, NDJSON), BINARY),
    query=Parameters,
    statuses=(406,),
    named=True,
    asks=True,
    example=_example,
)
ROUTES = (Route("POST", "/v1/generate", generate, TOKENS, about=GENERATE),)
