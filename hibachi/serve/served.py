"""What the routes share: the model, its names and limits, who may come, and how it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hibachi.api.answers import Vocabulary
from hibachi.api.bodies import Bounds
from hibachi.api.conversation import rendered
from hibachi.api.errors import SERVER, Refused
from hibachi.engine.health import Health
from hibachi.errors import EngineClosed, PromptTooLong
from hibachi.lm.texts import Texts
from hibachi.lm.textstream import TextStream
from hibachi.request import SamplingParams, Terms
from hibachi.serve.record import Meter, NoMeter, Record
from hibachi.serve.tokenizing import Tokenizing
from hibachi.streams.stream import Item
from hibachi.tensor.array_backend import HostArray
from hibachi.web.exchange import Exchange
from hibachi.web.tenants import Tenants, salt_of

T = TypeVar("T")


def smaller(a: float | None, b: float | None) -> float | None:
    """Of two limits, of which None is none."""
    return min((x for x in (a, b) if x is not None), default=None)


@dataclass(eq=False)
class Served:
    """A model being served.

    names: that it answers to. max_len: most tokens of a request. max_body: most bytes of one. chat_template: the name
    of one of the model's, or Jinja source; None: the model's own. timeout, queue_timeout: most seconds of a request.
    arrival: seconds for a body to come.
    """

    texts: Texts
    names: Sequence[str]
    root: str
    max_len: int
    bounds: Bounds = field(default_factory=Bounds)
    max_body: int = 16 << 20
    chat_template: str | None = None
    tenants: Tenants = field(default_factory=Tenants)
    timeout: float | None = None
    queue_timeout: float | None = None
    arrival: float | None = None
    meter: Meter = field(default_factory=NoMeter)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    vocabulary: Vocabulary = field(init=False)

    def __post_init__(self) -> None:
        self.vocabulary = Vocabulary(
            self.texts.tokenizer.token_bytes, lambda ids: self.texts.tokenizer.decode(ids, skip_special_tokens=False)
        )
        self._arriving: set[asyncio.Timeout] = set()
        self._tokenizing = Tokenizing()
        self._asking = ThreadPoolExecutor(1, "hibachi-ask")

    # ---- bodies ------------------------------------------------------------------------------------------------

    async def body(self, x: Exchange) -> bytes:
        """All of it. Raises Refused, Gone, and EngineClosed if the server shuts down before it is here."""
        self.check_open()
        try:
            async with asyncio.timeout(self.arrival) as limit:
                self._arriving.add(limit)
                try:
                    return await x.body(self.max_body)
                finally:
                    self._arriving.discard(limit)
        except TimeoutError:
            self.check_open()
            raise Refused(
                f"The body did not come within {self.arrival:g} seconds. Send it faster, or less of it.",
                status=408,
                kind="timeout_error",
                code="arrival_timeout",
                headers={"Connection": "close"},
            ) from None

    def drain(self) -> None:
        """From now on nothing new is taken, and what has not come whole is new."""
        self.draining = True
        for limit in self._arriving:
            if not limit.expired():
                limit.reschedule(0.0)

    # ---- checks ------------------------------------------------------------------------------------------------

    def check_name(self, name: str | None) -> str:
        """The name that the answer bears. Raises Refused."""
        if name is None:
            return self.names[0]
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
        """May something new begin? Raises EngineClosed, and Refused while the engine stands still."""
        if self.draining:
            raise EngineClosed("The server is shutting down and takes no new requests.")
        if self.texts.health().state == "stalled":
            raise Refused(
                "The engine has made no step for a while, so nothing more is put before it. Try again later.",
                status=503,
                kind=SERVER,
                code="engine_stalled",
                headers={"Retry-After": "5"},
            )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        size = self.texts.vocab_size
        if ids and size is not None and not (min(ids) >= 0 and max(ids) < size):
            raise Refused(
                f"{param}: token ids must be from 0 to {size - 1}; got {min(ids)} to {max(ids)}.",
                param=param,
                code="invalid_value",
            )

    def check_length(self, ids: Sequence[int], limit: int | None) -> None:
        """Raises PromptTooLong for a prompt, or one with as many new tokens as were asked for, that does not fit."""
        longest, n = self.max_len, len(ids)
        if n >= longest:
            raise PromptTooLong(
                f"The prompt has {n} tokens, and this model's context holds {longest}, at least one of them new. "
                f"Shorten it."
            )
        if limit is not None and n + limit > longest:
            raise PromptTooLong(
                f"max_tokens is {limit} and the prompt has {n} tokens, and this model's context holds {longest}. Ask "
                f"for at most {longest - n}."
            )

    # ---- texts -------------------------------------------------------------------------------------------------

    async def encode(
        self, prompts: Sequence[Any], param: str, tenant: str = "", *, special: bool = True
    ) -> list[list[int]]:
        """Ids of prompts, of which none is too long. Raises Refused, InvalidRequest or PromptTooLong."""
        for prompt in prompts:  # all of them, before any is read
            if isinstance(prompt, str):
                self.texts.check_text(prompt)
            else:
                self.check_length(prompt, None)
                self.check_ids(prompt, param)
        texts = [p for p in prompts if isinstance(p, str)]
        found = iter(await self.tokens(texts, special, tenant))
        ids = [next(found) if isinstance(p, str) else list(p) for p in prompts]
        if not all(ids):
            raise Refused(f"{param} is empty: it must hold at least one token.", param=param, code="empty_string")
        return ids

    async def tokens(self, texts: Sequence[str], special: bool, tenant: str = "") -> list[list[int]]:
        """Ids of texts of any length. Raises Refused if too much is read already, InvalidRequest."""
        tokenizer = self.texts.tokenizer

        def work() -> list[list[int]]:
            return [tokenizer.encode(text, add_special_tokens=special) for text in texts]

        return await self._tokenizing.run(sum(map(len, texts)), work, tenant)

    async def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], tenant: str = ""
    ) -> list[int]:
        """Ids of a conversation, which is not too long. Raises Refused, InvalidRequest or PromptTooLong."""
        tokenizer = self.texts.tokenizer
        if self.chat_template is None and not tokenizer.chat_templates:
            raise Refused(
                "This model has no chat template: send a prompt to /v1/completions. The server can be started with "
                "a template for it (--chat-template).",
                param="messages",
                code="no_chat_template",
            )
        more = {"chat_template": self.chat_template} if self.chat_template is not None else {}
        given = {k: v for k, v in variables.items() if k not in ("chat_template", "messages")}

        def work() -> str:
            return rendered(lambda m, **v: tokenizer.render_chat(m, **v), messages, {**given, **more})

        text = await self._tokenizing.aside(work, tenant)
        self.texts.check_text(text)
        [ids] = await self.tokens([text], False, tenant)
        if not ids:
            raise Refused("The conversation is empty.", param="messages", code="empty_array")
        return ids

    @contextmanager
    def submit(self, ids: list[list[int]], params: SamplingParams, terms: Terms) -> Iterator[list[TextStream]]:
        """Queued, and counted as the tenant's as long as the `with` block lasts."""
        self.check_open()
        with self._counted(terms.tenant, len(ids) * params.runs):
            yield self.texts.submit(ids, params, terms=terms)

    @contextmanager
    def submit_vectors(self, ids: list[list[int]], terms: Terms) -> Iterator[list[Item[HostArray]]]:
        """Likewise."""
        self.check_open()
        with self._counted(terms.tenant, len(ids)):
            yield self.texts.submit_vectors(ids, terms=terms)

    @contextmanager
    def _counted(self, tenant: str, n: int) -> Iterator[None]:
        self.tenants.check(tenant, n)
        self.tenants.served[tenant] += n
        try:
            yield
        finally:
            self.tenants.served[tenant] -= n

    def terms(self, given: Terms, tenant: str) -> Terms:
        """With what the server decides: whose request it is, what it shares, and the most of its time."""
        priority = given.priority
        if tenant:  # its place among tenants is not for it to better
            priority = max(self.tenants.of(tenant).priority, given.priority)
        return replace(
            given,
            tenant=tenant,
            priority=priority,
            timeout=smaller(given.timeout, self.timeout),
            queue_timeout=smaller(given.queue_timeout, self.queue_timeout),
            cache_salt=given.cache_salt if self.tenants.share_prefixes else salt_of(tenant, given.cache_salt),
        )

    def record(self, x: Exchange, params: SamplingParams, ids: Sequence[Sequence[int]]) -> Record:
        x.record = record = Record(params, sum(map(len, ids)), self.meter, x.tenant, arrival=x.came)
        return record

    @property
    def open_requests(self) -> int:
        """That have not been answered to the end."""
        return self.tenants.running.total()

    # ---- how it is ---------------------------------------------------------------------------------------------

    def why_not_live(self, in_full: bool = True) -> str | None:
        """None: all is well. in_full: with what the model or a library said, which is not for everybody."""
        health: Health = self.texts.health()
        if health.ok:
            return None
        return health.message if in_full else f"The engine is {health.state}. The server's log says more."

    def why_not_ready(self, in_full: bool = True) -> str | None:
        if self.draining:
            return "The server is shutting down."
        return self.why_not_live(in_full)

    async def ask(self, what: Callable[[], T]) -> T:
        """What the engine answers, which may take a while: in a thread of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._asking, what)
