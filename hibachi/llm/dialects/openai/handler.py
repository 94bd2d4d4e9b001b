"""Completions and chats in OpenAI's API."""

from __future__ import annotations

from hibachi.llm.dialects.handler import Answerer, Handled
from hibachi.llm.dialects.openai.bodies import ChatBody, CompletionBody, read
from hibachi.llm.dialects.openai.chatwriting import ChatWriter
from hibachi.llm.dialects.openai.writing import CompletionWriter
from hibachi.llm.dialects.steps import Steps


def completion(by: Answerer, raw: bytes) -> Steps[Handled]:
    """Complete prompts: texts or token ids, one or several."""
    body = read(CompletionBody, raw)
    name = by.check_name(body.model)
    asked, ids = yield from by.model.completion(body)
    return Handled(CompletionWriter(asked, name, by.model.vocabulary, by.fingerprint), ids)


def chat(by: Answerer, raw: bytes) -> Steps[Handled]:
    """Answer a conversation, in the model's chat template."""
    body = read(ChatBody, raw)
    name = by.check_name(body.model)
    asked, ids = yield from by.model.chat(body)
    return Handled(ChatWriter(asked, name, by.model.vocabulary, by.fingerprint), [ids])
