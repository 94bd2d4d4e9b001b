"""What the routes share: the model, its names and limits, who may come, and how it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hibachi.api.answers import Vocabulary
from hibachi.api.bodies import Bounds
from hibachi.api.errors import Refused
from hibachi.engine.health import Health
from hibachi.engine.texts import Texts
from hibachi.engine.textstream import TextStream
from hibachi.errors import EngineClosed, PromptTooLong
from hibachi.request import SamplingParams, Terms
from hibachi.serve.exchange import Exchange
from hibachi.serve.record import Meter, NoMeter, Record
from hibachi.serve.tenants import Tenants


@dataclass(eq=False)
class Served:
    """A model being served.

    names: that it answers to. max_len: most tokens of a request. max_body: most bytes of one. chat_template: the name
    of one of the model's, or Jinja source; None: the model's own. timeout: seconds for a request that names none.
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

    def __post_init__(self) -> None:
        self.vocabulary = Vocabulary(
            self.texts.tokenizer.token_bytes, lambda ids: self.texts.tokenizer.decode(ids, skip_special_tokens=False)
        )
        self._arriving: set[asyncio.Timeout] = set()

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
        if self.draining:
            raise EngineClosed("The server is shutting down and takes no new requests.")

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

    def encode(self, prompt: Any, param: str, *, special: bool = True) -> list[int]:
        """Ids of a prompt. Raises Refused or InvalidRequest."""
        if isinstance(prompt, str):
            ids: list[int] = self.texts.tokenizer.encode(prompt, add_special_tokens=special)
            if not ids:
                raise Refused(f"{param} is empty: it must hold at least one token.", param=param, code="empty_string")
            return ids
        self.check_ids(prompt, param)
        return list(prompt)

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        """Ids of a conversation. In a thread, as a template may take its time."""
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
        text = await asyncio.to_thread(tokenizer.render_chat, messages, **given, **more)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise Refused("The conversation is empty.", param="messages", code="empty_array")
        return ids

    def submit(self, ids: list[list[int]], params: SamplingParams, terms: Terms) -> list[TextStream]:
        self.check_open()
        self.tenants.check(terms.tenant)
        return self.texts.submit(ids, params, terms=terms)

    def terms(self, given: Terms, tenant: str) -> Terms:
        """With what the server decides: whose request it is, and its time."""
        own = self.tenants.of(tenant)
        return replace(
            given,
            tenant=tenant,
            priority=given.priority if own is None or own.priority is None else own.priority,
            timeout=given.timeout or self.timeout,
            queue_timeout=given.queue_timeout or self.queue_timeout,
        )

    def record(self, x: Exchange, params: SamplingParams, ids: Sequence[Sequence[int]]) -> Record:
        x.record = Record(params, sum(map(len, ids)), self.meter, x.tenant, arrival=x.came)
        return x.record

    @property
    def open_requests(self) -> int:
        """That have not been answered to the end."""
        return self.tenants.running.total()

    # ---- how it is ---------------------------------------------------------------------------------------------

    def why_not_live(self) -> str | None:
        """None: all is well."""
        health: Health = self.texts.health()
        return None if health.ok else health.message

    def why_not_ready(self) -> str | None:
        if self.draining:
            return "The server is shutting down."
        return self.why_not_live()
