"""Completions and chats in OpenAI's API."""

from __future__ import annotations

from hibachi.llm.dialects.handler import Answerer, Handled, TextDialect
from hibachi.llm.dialects.openai.bodies import PAGE, ChatBody, CompletionBody
from hibachi.llm.dialects.openai.chatwriting import ChatWriter
from hibachi.llm.dialects.openai.writing import CompletionWriter
from hibachi.llm.dialects.steps import Steps


def completion(by: Answerer, body: CompletionBody) -> Steps[Handled]:
    """Complete prompts: texts or token ids, one or several."""
    signature = by.sign(body.model, "text")
    asked, ids = yield from by.model.completion(body)
    return CompletionWriter(asked, signature), ids


def chat(by: Answerer, body: ChatBody) -> Steps[Handled]:
    """Answer a conversation, in the model's chat template."""
    signature = by.sign(body.model, "chat")
    asked, ids = yield from by.model.chat(body)
    return ChatWriter(asked, signature), [ids]


COMPLETIONS = TextDialect(CompletionBody, PAGE, completion)
CHATS = TextDialect(ChatBody, PAGE, chat, lambda body: body)
