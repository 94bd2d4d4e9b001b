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
from hibachi.llm.dialects.messages.bodies import MessagesBody
from hibachi.llm.dialects.messages.writing import MessagesWriter
from hibachi.llm.dialects.openai import parse as asking
from hibachi.llm.dialects.openai.bodies import PAGE as CHATS_PAGE
from hibachi.llm.dialects.openai.bodies import Bounds, ChatBody, CompletionBody, taken
from hibachi.llm.dialects.openai.chatwriting import ChatWriter
from hibachi.llm.dialects.openai.parse import ParsedRequest
from hibachi.llm.dialects.openai.writing import AnswerWriter, CompletionWriter
from hibachi.llm.dialects.responses import parse as of_responses
from hibachi.llm.dialects.responses.bodies import ResponsesBody
from hibachi.llm.dialects.responses.items import PAGE, Item, ItemReference
from hibachi.llm.dialects.responses.writing import ResponsesWriter
from hibachi.llm.dialects.steps import run
from hibachi.llm.dialects.textmodel import TextModel
from hibachi.offline.tasks.lines import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from hibachi.request import SamplingParams

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
        return of_responses.as_chat(body, _items(body, bounds))
    if isinstance(body, MessagesBody):
        return of_messages.chat_of(body)
    assert isinstance(body, ChatBody)
    return body


def _items(body: ResponsesBody, bounds: Bounds) -> list[Item]:
    """Those of the input; references were refused with the line."""
    return [item for item in of_responses.own_items(body, bounds) if not isinstance(item, ItemReference)]


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

    model: TextModel
    created: int
    fingerprint: str | None

    def writer(
        self, url: str, body: Any, name: str, id_of: Callable[[str], str]
    ) -> tuple[AnswerWriter, list[list[int]]]:
        """What writes the answer to a body, and the token ids of its prompts. name: of the model. id_of: makes an id
        of one kind. Raises Refused, InvalidRequest or PromptTooLong.
        """
        writer, ids = self._read(url, body, name, id_of)
        with words(url, body):
            for own in ids:
                self.model.reading.check_length(own, writer.asked.limit)
        return writer, ids

    def _read(
        self, url: str, body: Any, name: str, id_of: Callable[[str], str]
    ) -> tuple[AnswerWriter, list[list[int]]]:
        model = self.model
        if url == COMPLETIONS:
            asked, several = run(model.completion(body))
            return self._usual(CompletionWriter, asked, name, id_of("text")), several
        if url == CHAT:
            asked, ids = run(model.chat(body))
            return self._usual(ChatWriter, asked, name, id_of("chat")), [ids]
        if url == MESSAGES:
            asked, ids = run(of_messages.request(model, body))
            full = of_messages.fit(asked, len(ids), model.reading.prompts.context)
            return MessagesWriter(asked, name, model.vocabulary, id=id_of("message"), cached=False, full=full), [ids]
        asked, ids = run(of_responses.request(model, body, partial(_items, body, model.bounds)))
        id = id_of("response")
        responses = ResponsesWriter(
            asked, name, model.vocabulary, body, server=None, id=id, created=self.created, cached=False
        )
        return responses, [ids]

    def _usual(self, kind: type[AnswerWriter], asked: ParsedRequest, name: str, id: str) -> AnswerWriter:
        return kind(asked, name, self.model.vocabulary, self.fingerprint, id=id, created=self.created, cached=False)
