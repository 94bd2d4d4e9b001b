"""Bodies of lines that are answered by a text: how each is read, and what writes its answer, as a server has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from hibachi.errors import FieldPath
from hibachi.llm.dialects.errors import refusing
from hibachi.llm.dialects.messages import parse as of_messages
from hibachi.llm.dialects.messages import preparing as messages
from hibachi.llm.dialects.messages.bodies import MessagesBody
from hibachi.llm.dialects.messages.writing import MessagesWriter
from hibachi.llm.dialects.openai import parse as asking
from hibachi.llm.dialects.openai.answers import Vocabulary
from hibachi.llm.dialects.openai.bodies import PAGE as CHATS_PAGE
from hibachi.llm.dialects.openai.bodies import Bounds, ChatBody, CompletionBody, taken
from hibachi.llm.dialects.openai.chatwriting import ChatWriter
from hibachi.llm.dialects.openai.parse import Asked
from hibachi.llm.dialects.openai.writing import CompletionWriter, Writer
from hibachi.llm.dialects.preparing import at_once
from hibachi.llm.dialects.reading import Reading
from hibachi.llm.dialects.responses import parse as of_responses
from hibachi.llm.dialects.responses import preparing as responses
from hibachi.llm.dialects.responses.bodies import ResponsesBody
from hibachi.llm.dialects.responses.items import PAGE, Item, ItemReference
from hibachi.llm.dialects.responses.writing import ResponsesWriter
from hibachi.llm.texts import Texts
from hibachi.offline.tasks.lines import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from hibachi.request import SamplingParams
from hibachi.structured import StructuredOutputs

BODIES: dict[str, Any] = {
    COMPLETIONS: CompletionBody,
    CHAT: ChatBody,
    RESPONSES: ResponsesBody,
    MESSAGES: MessagesBody,
}
"""By url."""
IN_BODY: dict[str, Callable[[Any, FieldPath], FieldPath]] = {
    RESPONSES: lambda body, path: of_responses.in_body(body.tools, path),
    MESSAGES: of_messages.in_body,
}
"""By url: where a field of the chat that is made of a body stands in it."""


def body_of(url: str, given: Mapping[str, Any], name: str) -> Any:
    """The record of a body. name: of the model, which a line may leave out. Raises Refused."""
    if url == MESSAGES and given.get("model") is None:
        given = {**given, "model": name}
    return taken(BODIES[url], given, PAGE if url in IN_BODY else CHATS_PAGE)


def words(url: str, body: Any) -> AbstractContextManager[None]:
    """Within it, what is refused of a chat is told of the body that the chat was made of."""
    return refusing(partial(IN_BODY[url], body) if url in IN_BODY else None)


def chat_for(body: Any, bounds: Bounds) -> ChatBody:
    """The chat that a body asks for. Raises Refused."""
    if isinstance(body, ResponsesBody):
        items: list[Item] = [
            item for item in of_responses.own_items(body, bounds) if not isinstance(item, ItemReference)
        ]
        return of_responses.as_chat(body, items)  # references were refused with the line
    if isinstance(body, MessagesBody):
        return of_messages.chat_of(body)
    assert isinstance(body, ChatBody)
    return body


def check(url: str, body: Any, bounds: Bounds) -> None:
    """What can be said of a body without its model. Raises Refused, InvalidRequest."""
    if isinstance(body, CompletionBody):
        asking.completion(body, SamplingParams(), bounds)
        return
    chat = chat_for(body, bounds)
    with words(url, body):
        asking.chat(chat, SamplingParams(), bounds)


@dataclass(frozen=True, slots=True)
class Answering:
    """Reads bodies and makes their writers, for one model. created: Unix time in seconds, of all answers."""

    texts: Texts
    reading: Reading
    vocabulary: Vocabulary
    bounds: Bounds
    created: int
    fingerprint: str | None

    def writer(self, url: str, body: Any, name: str, id_of: Callable[[str], str]) -> tuple[Writer, list[list[int]]]:
        """What writes the answer to a body, and the token ids of its prompts. name: of the model. id_of: makes an id
        of one kind. Raises Refused, InvalidRequest or PromptTooLong.
        """
        chat = body if url == COMPLETIONS else chat_for(body, self.bounds)
        with words(url, body):
            if url == COMPLETIONS:
                writer, ids = self._completion(body, name, id_of("text"))
            elif url == RESPONSES:
                writer, ids = self._response(body, chat, name, id_of("response"))
            elif url == MESSAGES:
                writer, ids = self._message(chat, name, id_of("message"))
            else:
                asked, own = at_once(self.prepare(chat))
                writer, ids = self._usual(ChatWriter, asked, name, id_of("chat")), [own]
            for own in ids:
                self.reading.check_length(own, writer.asked.limit)
        return writer, ids

    async def prepare(self, body: ChatBody) -> tuple[Asked, list[int]]:
        """What a chat asks for, and the token ids of its prompt. Waits for nothing."""
        asked = asking.chat(body, self.texts.default_params, self.bounds)
        ids = self.reading.chat_now(asked, {"strftime_now": self.created})
        self.reading.talk.form(asked, partial(self._check, asked.params), self.texts.eos_ids)
        return asked, ids

    def _check(self, params: SamplingParams, form: StructuredOutputs) -> None:
        self.texts.check_form(params.with_(structured_outputs=form))

    def _usual(self, kind: type[Writer], asked: Asked, name: str, id: str) -> Writer:
        return kind(asked, name, self.vocabulary, self.fingerprint, id=id, created=self.created, cached=False)

    def _completion(self, body: CompletionBody, name: str, id: str) -> tuple[Writer, list[list[int]]]:
        asked = asking.completion(body, self.texts.default_params, self.bounds)
        ids = self.reading.encode_now(asked.prompts, "prompt", special=asked.special, truncation=asked.truncation)
        return self._usual(CompletionWriter, asked, name, id), ids

    def _response(self, body: ResponsesBody, chat: ChatBody, name: str, id: str) -> tuple[Writer, list[list[int]]]:
        fits = self.reading.check_length
        asked, ids = at_once(responses.prepared(self.prepare, fits, chat, shortens=body.truncation == "auto"))
        writer = ResponsesWriter(
            asked, name, self.vocabulary, body, server=None, id=id, created=self.created, cached=False
        )
        return writer, [ids]

    def _message(self, chat: ChatBody, name: str, id: str) -> tuple[Writer, list[list[int]]]:
        asked, ids = at_once(messages.prepared(self.prepare, chat))
        full = messages.fit(asked, len(ids), self.reading.prompts.context)
        return MessagesWriter(asked, name, self.vocabulary, id=id, cached=False, full=full), [ids]
