"""Whole answers of texts that have ended: what is given from outside, and what depends on who else was there."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("tokenizers")

from hibachi import LLM
from hibachi.llm.dialects.openai.answers import TokenTexts, encode
from hibachi.llm.dialects.openai.bodies import Bounds, ChatBody, CompletionBody
from hibachi.llm.dialects.openai.chatwriting import ChatWriter
from hibachi.llm.dialects.openai.parse import chat, completion
from hibachi.llm.dialects.openai.writing import CompletionWriter, Signature
from hibachi.request import SamplingParams

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def written():
    """written(body, **options): the writer, when its texts have ended."""
    with LLM("tiny") as llm:
        words = TokenTexts(llm.tokenizer.token_bytes, llm.tokenizer.decode)

        def call(body, **options):
            make, kind = (chat, ChatWriter) if isinstance(body, ChatBody) else (completion, CompletionWriter)
            writer = kind(make(body, SamplingParams(), Bounds()), Signature("m", words, **options))
            writer.ids = [PROMPT, PROMPT[::-1]] if kind is CompletionWriter else [PROMPT]
            writer.streams = llm.submit(writer.ids, writer.asked.params)
            for stream in writer.streams:
                for _ in stream:
                    pass
            return writer

        yield call


def bodies(**more):
    more = {"seed": 3, "max_tokens": 4, "n": 2, "ignore_eos": True, **more}
    yield CompletionBody(prompt=[PROMPT, PROMPT[::-1]], **more)
    yield ChatBody(messages=[{"role": "user", "content": "a"}], **more)


def test_an_answer_may_be_the_same_bytes_each_time(written):
    for body, prefix in zip(bodies(), ("cmpl", "chatcmpl"), strict=True):
        first, again = (written(body, id="row-7", created=0, cached=False).whole() for _ in range(2))
        assert encode(first) == encode(again)
        assert (first.id, first.created) == (f"{prefix}-row-7", 0)
        assert first.usage.prompt_tokens_details is None
        assert [c.index for c in first.choices] == list(range(len(first.choices)))
        told = written(body, id="row-7", created=0).whole()  # by now all of it is in the cache
        assert told.usage.prompt_tokens_details["cached_tokens"] >= 16
        told.usage.prompt_tokens_details = None
        assert encode(told) == encode(first)


def test_otherwise_an_answer_has_an_id_of_its_own_and_its_time(written):
    for body in bodies():
        before = int(time.time())
        one, two = written(body), written(body)
        assert one.id != two.id and len(one.id) > 20 and before <= one.created <= time.time()
        assert one.whole().usage.prompt_tokens_details is not None


def test_what_the_request_calls_itself_comes_first(written):
    for body, prefix in zip(bodies(request_id="mine"), ("cmpl", "chatcmpl"), strict=True):
        assert written(body, id="row-7").whole().id == f"{prefix}-mine"
