"""State that all routes share: the model, its names and limits, its tenants and its health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

from hibachi.backend.array_backend import HostArray
from hibachi.engine.conversions import AT_ONCE
from hibachi.engine.health import Health
from hibachi.engine.sampling.uniforms import fork
from hibachi.engine.streams.stream import Item, ItemStream
from hibachi.errors import EngineClosed, InvalidRequest
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.dialects.errors import SERVER, Refused, unsupported
from hibachi.llm.dialects.forms import OURS, refused
from hibachi.llm.dialects.handler import Use
from hibachi.llm.dialects.json_limits import LIGHT, check_packed_weight, check_weight, may_be_deep
from hibachi.llm.dialects.openai.answers import TokenTexts
from hibachi.llm.dialects.openai.bodies import Bounds
from hibachi.llm.dialects.openai.writing import Signature
from hibachi.llm.dialects.reading import Reading
from hibachi.llm.dialects.responses.store import Stores
from hibachi.llm.dialects.steps import ReadingStep, Steps
from hibachi.llm.dialects.textmodel import TextModel
from hibachi.llm.dialects.tgi.limits import TgiLimits
from hibachi.llm.dialects.tgi.writing import TgiTokens
from hibachi.llm.remote.identity import name_of, system_fingerprint
from hibachi.llm.remote.settings import parsers_of
from hibachi.llm.texts import Texts
from hibachi.llm.textstream import TextStream
from hibachi.llm.tokens import Tokens
from hibachi.request import Request, SamplingParams, Terms
from hibachi.server.gate import Gate
from hibachi.server.record import Meter, NoMeter, Record
from hibachi.server.settings import ServeSettings
from hibachi.server.tenant_pool import TenantPool
from hibachi.server.tgi_settings import NAME, NAMELESS
from hibachi.server.tokenizing import Tokenizing
from hibachi.server.web.exchange import Exchange
from hibachi.server.web.tenants import Tenants, salt_of
from hibachi.structured import StructuredOutputs

T = TypeVar("T")
SMALL = 1 << 15  # bytes of a body, of which others wait for a millisecond or two
LARGE_FORM = 1 << 17  # bytes of tools and schemas that are checked when no other so large is: it may take long


def smaller(a: float | None, b: float | None) -> float | None:
    """The smaller of two limits; None means no limit."""
    return min((x for x in (a, b) if x is not None), default=None)


def names_of(settings: ServeSettings) -> tuple[str, ...]:
    """Names by which requests may call the model."""
    own = name_of(settings.model)
    return settings.served_model_name or ((own,) if settings.tgi is None else tuple(dict.fromkeys((NAME, own))))


def bounds_of(settings: ServeSettings, rows: int) -> Bounds:
    """The bounds of requests. rows: of the batch."""
    found = Bounds(
        n=settings.max_n,
        logprobs=settings.max_logprobs,
        rows=rows + settings.max_num_queued_reqs,
        new=settings.max_tokens,
    )
    return found if settings.tgi is None else replace(found, prompts=settings.tgi.max_client_batch_size)


class Served:
    """A model being served: text, or tokens of any other kind.

    chat_template: the name of one of the model's, or Jinja source; None means the model's own. max_model_len: most
    tokens of a request. fingerprint: equal where the same bits are computed, see `system_fingerprint`. responses: that
    are kept.
    """

    def __init__(
        self,
        what: Texts | Tokens,
        settings: ServeSettings,
        chat_template: str | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        facts = what.engine.facts
        self.what, self.settings, self.chat_template = what, settings, chat_template
        self.tenants = Tenants() if tenants is None else tenants
        self.names: tuple[str, ...] = names_of(settings)
        self.max_model_len: int = facts.limits.max_model_len
        self.bounds = bounds_of(settings, facts.limits.rows)
        self.fingerprint: str = system_fingerprint(facts, settings.model)
        self.responses = Stores(settings.responses_store)
        self.meter: Meter = NoMeter()
        self.created = int(time.time())
        self.draining = False
        self.gate = Gate(None if settings.tgi is None else settings.tgi.max_concurrent_requests)
        self._model = self._of_texts(self.what) if isinstance(self.what, Texts) else None
        self._texts = Tokenizing()
        self._arriving: set[asyncio.Timeout] = set()
        self._asking = ThreadPoolExecutor(1, "hibachi-ask")
        self._converting = TenantPool(
            "hibachi-convert", "bodies wait for the model to read or write them", at_once=AT_ONCE
        )
        self._checking = TenantPool("hibachi-check", "forms of answers wait to be checked")
        # One at a time, so that of the processes in which forms are checked one is always there for small ones.
        self._checking_large = TenantPool(
            "hibachi-check-large", "forms of answers wait to be checked", at_once=1, threads=1
        )
        self._short = ThreadPoolExecutor(2, "hibachi-short")
        self.arrays = Tokenizing()  # where large ones are read

    # ---- bodies ------------------------------------------------------------------------------------------------

    async def body(self, x: Exchange, *, json: bool = True) -> bytes:
        """The whole body of a request. json: accept nothing else. From then on the request counts in the gate.

        Raises Refused, Gone, and EngineClosed if the server shuts down before the body is complete.
        """
        self.check_open()
        seconds = self.settings.arrival_timeout or None
        try:
            async with asyncio.timeout(seconds) as limit:
                self._arriving.add(limit)
                try:
                    found = await x.body(self.settings.max_body_size, json=json)
                finally:
                    self._arriving.discard(limit)
        except TimeoutError:
            self.check_open()
            raise Refused(
                f"The body did not come within {seconds:g} seconds. Send it faster, or less of it.",
                status=408,
                kind="timeout_error",
                code="arrival_timeout",
                headers={"Connection": "close"},
            ) from None
        self.gate.enter(x)
        if json:
            await self.weigh(found)
        return found

    async def weigh(self, body: bytes, *, packed: bool = False) -> None:
        """Check that reading a body of JSON, or `packed` as msgpack, does not hold up others and that it is not nested
        too deep. Raises Refused.
        """
        check = check_packed_weight if packed else check_weight
        if len(body) > LIGHT or (not packed and may_be_deep(body)):
            if len(body) <= SMALL:
                check(body)
            else:
                await self.apart(partial(check, body))

    def drain(self) -> None:
        """Take no new requests from now on, nor those whose body is not complete."""
        self.draining = True
        for limit in self._arriving:
            if not limit.expired():
                limit.reschedule(0.0)

    async def beside(self, x: Exchange, work: Callable[[], T], more: int = 0) -> T:
        """What `work()` returns, which reads the body of a request: beside the event loop if that is large. more: bytes
        that it reads besides. Raises Refused if too much is being read already, and what it raises.
        """
        size = x.size + more
        return work() if size <= SMALL else await self.arrays.run(size, work, x.tenant)

    # ---- checks ------------------------------------------------------------------------------------------------

    def check_name(self, name: str | None) -> str:
        """The model name to put in the answer. Raises Refused for an unknown one."""
        nameless = name is None or (self.settings.tgi is not None and name in NAMELESS and name not in self.names)
        return self.names[0] if name is None or nameless else self.named(name)

    def sign(self, name: str | None, use: Use = "text") -> Signature:
        """What an answer says of its model. Raises as `check_name`."""
        return Signature(self.check_name(name), self.vocabulary, self.fingerprint)

    def named(self, name: str) -> str:
        """One of the names. Raises Refused for another."""
        if name not in self.names:
            served = ", ".join(self.names)
            raise Refused(
                f"The model {name[:200]!r} does not exist here. Served: {served}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name

    def check_open(self) -> None:
        """Check that a new request may begin. Raises EngineClosed, or Refused while the engine is stalled."""
        if self.draining:
            raise EngineClosed("The server is shutting down and takes no new requests.")
        if self.what.health().state == "stalled":
            raise Refused(
                "The engine has made no step for a while, so nothing more is put before it. Try again later.",
                status=503,
                kind=SERVER,
                code="engine_stalled",
                headers={"Retry-After": "5"},
            )

    async def check_form(self, params: SamplingParams | None, tenant: str, said: str | None = None) -> None:
        """Check the form that an answer must have, which may take seconds, beside the event loop. said: the field of
        the request that says it; None means `structured_outputs`. Raises Refused, which names it, and QueueFull.
        """
        if params is None or params.structured_outputs is None:
            return
        if self.tgi.disable_grammar_support:
            raise unsupported(said or OURS, "The server was started with --disable-grammar-support")
        if self.what.knows_form(params):
            return
        assert isinstance(params.structured_outputs, StructuredOutputs)
        try:
            await self._check(partial(self.what.check_form, params), len(params.structured_outputs.text), tenant)
        except InvalidRequest as e:
            raise refused(e, said) from e

    async def _check(self, check: Callable[[], T], size: int, tenant: str) -> T:
        """Check a form, which a client has said in so many bytes. Raises QueueFull, and what `check()` raises."""
        return await (self._checking if size <= LARGE_FORM else self._checking_large).run(check, tenant)

    # ---- texts -------------------------------------------------------------------------------------------------

    def _of_texts(self, texts: Texts) -> TextModel:
        decode = partial(texts.tokenizer.decode, skip_special_tokens=False)
        longest, parsers = self.tgi.max_input_tokens, parsers_of(self.settings)
        reading = Reading(texts.prompts, texts.vocab_size, self.chat_template, longest, parsers)
        return TextModel(texts, reading, TokenTexts(texts.tokenizer.token_bytes, decode), self.bounds)

    @property
    def model(self) -> TextModel:
        """Raises Refused, as the other methods of this part, where the model serves no text."""
        if self._model is None:
            raise Refused("This model makes no text. Ask for its tokens: POST /v1/generate.", code="no_text")
        return self._model

    @property
    def texts(self) -> Texts:
        texts = self.model.texts
        assert isinstance(texts, Texts)
        return texts

    @property
    def vocabulary(self) -> TokenTexts:
        return self.model.vocabulary

    @property
    def reading(self) -> Reading:
        return self.model.reading

    @cached_property
    def words(self) -> TgiTokens:
        return TgiTokens(self.vocabulary, self.texts.tokenizer, self.texts.eos_ids, fork)

    async def read(self, x: Exchange, steps: Steps[T]) -> T:
        """Run the steps of a request, long ones beside the event loop. Raises Refused or QueueFull if too much of this
        tenant waits already, and what they raise.
        """
        try:
            step = next(steps)
            while True:
                try:
                    found = await self._step(x, step)
                except BaseException as e:
                    step = steps.throw(e)
                else:
                    step = steps.send(found)
        except StopIteration as e:
            result: T = e.value
            return result

    async def _step(self, x: Exchange, step: ReadingStep) -> Any:
        if step.kind == "body":
            return await self.beside(x, step.work, step.size)
        if step.kind == "text":
            return await self._texts.run(step.size, step.work, x.tenant)
        if step.kind == "template":
            return await self._texts.aside(step.work, x.tenant)
        return await self._check(step.work, step.size, x.tenant)

    @contextmanager
    def submit(
        self,
        ids: list[list[int]],
        params: SamplingParams,
        terms: Terms,
        prediction: list[int] | None = None,
        reader: AnswerReader | None = None,
    ) -> Iterator[list[TextStream]]:
        """Queue prompts; they count as the tenant's for as long as the `with` block lasts.

        prediction: what each answer may be. reader: of their texts, see `Texts.submit`.
        """
        self.check_open()
        with self._counted(terms.tenant, len(ids) * params.runs):
            yield self.texts.submit(ids, params, terms=terms, prediction=prediction, reader=reader)

    @contextmanager
    def submit_vectors(self, ids: list[list[int]], terms: Terms) -> Iterator[list[Item[HostArray]]]:
        """`submit` for vectors."""
        self.check_open()
        with self._counted(terms.tenant, len(ids)):
            yield self.texts.submit_vectors(ids, terms=terms)

    @contextmanager
    def submit_inputs(self, inputs: Sequence[HostArray], terms: Terms) -> Iterator[list[Item[Any]]]:
        """`submit` for inputs of a feed-forward model."""
        self.check_open()
        engine = self.what.engine
        with self._counted(terms.tenant, len(inputs)):
            engine.check_room(terms.tenant, len(inputs))
            ready = [engine.check(Request(one, terms=terms)) for one in inputs]
            yield [Item(engine.submit(each)) for each in ready]

    @contextmanager
    def submit_tokens(self, request: Request, n: int = 1) -> Iterator[list[ItemStream[Any]]]:
        """`submit` for n samples of tokens of any kind, also for feed-forward: one item."""
        self.check_open()
        with self._counted(request.terms.tenant, n):
            if isinstance(self.what, Tokens):
                yield self.what.queue_many(request, n)
            else:
                engine = self.what.engine
                params, words, first = self.what.rules.applied(request.params or SamplingParams())
                request = replace(request, params=params, max_tokens=None, bad_words=words, banned_first=first)
                yield engine.submit_many(engine.check(request), n)

    @contextmanager
    def _counted(self, tenant: str, n: int) -> Iterator[None]:
        self.tenants.check(tenant, n)
        self.tenants.served[tenant] += n
        try:
            yield
        finally:
            self.tenants.served[tenant] -= n

    def terms(self, given: Terms, tenant: str, part: str = "") -> Terms:
        """A request's terms with what the server decides: its tenant, its cache salt, and the most of its time.

        part: of the tenant; it shares prefixes with no other.
        """
        settings, priority = self.settings, given.priority
        if tenant:  # a request may not improve its place among tenants
            priority = max(self.tenants.of(tenant).priority, given.priority)
        salt = given.cache_salt
        if not self.tenants.share_prefixes:
            salt = salt_of(tenant, salt_of(part, salt))
        return replace(
            given,
            tenant=tenant,
            priority=priority,
            timeout=smaller(given.timeout, settings.request_timeout or None),
            queue_timeout=smaller(given.queue_timeout, settings.queue_timeout or None),
            cache_salt=salt,
        )

    def record(self, x: Exchange, params: SamplingParams, ids: Sequence[Sequence[int]]) -> Record:
        x.record = record = Record(params, sum(map(len, ids)), self.meter, x.tenant, arrival=x.came)
        return record

    @cached_property
    def tgi(self) -> TgiLimits:
        """Limits of requests in TGI's dialect: its launcher's, or those of `bounds`."""
        return self.settings.tgi or TgiLimits.of(self.bounds)

    @property
    def numerics(self) -> str | None:
        """The name of the bits that the model computes."""
        return self.what.engine.facts.numerics

    @property
    def open_requests(self) -> int:
        """Number of requests that have not been answered to the end."""
        return self.tenants.running.total()

    # ---- how it is ---------------------------------------------------------------------------------------------

    def why_not_live(self, in_full: bool = True) -> str | None:
        """Why the server is not live; None means all is well. in_full: with messages of the model or a library, which
        not every client may see.
        """
        health: Health = self.what.health()
        if health.ok:
            return None
        return health.message if in_full else f"The engine is {health.state}. The server's log says more."

    def why_not_ready(self, in_full: bool = True) -> str | None:
        if self.draining:
            return "The server is shutting down."
        return self.why_not_live(in_full)

    async def convert(self, call: Callable[[], T], tenant: str = "") -> T:
        """Run the model's own `read` or `write` in one of a few threads. Raises QueueFull."""
        return await self._converting.run(call, tenant)

    async def apart(self, work: Callable[[], T]) -> T:
        """What `work()` returns, which never takes long: beside the event loop, and refused to nobody."""
        return await asyncio.get_running_loop().run_in_executor(self._short, work)

    async def ask(self, what: Callable[[], T]) -> T:
        """Ask the engine a question that may take a while, in a thread of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._asking, what)
