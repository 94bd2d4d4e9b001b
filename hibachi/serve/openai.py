"""The routes of OpenAI's API."""

from __future__ import annotations

from typing import Any

from hibachi.api import answers, asking
from hibachi.api.bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody, read
from hibachi.api.conversation import conversation
from hibachi.api.errors import Refused, as_refused, body_of
from hibachi.api.writing import ChatWriter, CompletionWriter, Writer
from hibachi.errors import HibachiError
from hibachi.request import SamplingParams, Terms
from hibachi.serve.record import Record, Vectors
from hibachi.serve.served import Served
from hibachi.streams.textstream import Piece, TextChoice, TextStream
from hibachi.web.exchange import Exchange

MOST_SHOWN = 1 << 16  # tokens that are turned into text, where the context holds fewer
SSE = b"text/event-stream; charset=utf-8"


async def models(served: Served, x: Exchange) -> None:
    """The names that are served."""
    await x.json(answers.models(served.names, served.created, served.max_len, served.root, served.numerics))


async def model(served: Served, x: Exchange) -> None:
    """One of them."""
    name = x.params["model"]
    served.check_name(name)
    await x.json(answers.model(name, served.created, served.max_len, served.root, served.numerics))


async def completions(served: Served, x: Exchange) -> None:
    """Complete prompts: texts or token ids, one or several."""
    body = read(CompletionBody, await served.body(x))
    name = served.check_name(body.model)
    asked = asking.completion(body, served.texts.default_params, served.bounds)
    ids = await served.reading.encode(asked.prompts, "prompt", x.tenant, special=asked.special)
    await _text(served, x, CompletionWriter(asked, name, served.vocabulary, served.numerics), ids)


async def chat(served: Served, x: Exchange) -> None:
    """Answer a conversation, in the model's chat template."""
    body = read(ChatBody, await served.body(x))
    name = served.check_name(body.model)
    asked = asking.chat(body, served.texts.default_params, served.bounds)
    assert asked.messages is not None
    ids = await served.reading.render(asked.messages, asked.template, x.tenant)
    await _text(served, x, ChatWriter(asked, name, served.vocabulary, served.numerics), [ids])


async def embeddings(served: Served, x: Exchange) -> None:
    """A vector for each input."""
    body = read(EmbeddingBody, await served.body(x))
    name = served.check_name(body.model)
    ids = await served.reading.encode(asking.embedding(body, served.bounds), "input", x.tenant)
    for own in ids:
        served.reading.check_length(own, None)
    with (
        served.record(x, SamplingParams(max_tokens=1), ids) as record,
        served.submit_vectors(ids, served.terms(Terms(), x.tenant)) as items,
    ):
        record.text = Vectors(items)
        try:
            await x.while_here(_vectors(x, record.text, name, ids, body.encoding_format == "base64"), record.text.close)
        finally:
            record.text.close()


async def _vectors(x: Exchange, found: Vectors, name: str, ids: list[list[int]], packed: bool) -> None:
    vectors = [await item for item in found.items]
    await x.json(answers.embeddings(vectors, name, sum(map(len, ids)), packed=packed))


async def tokenize(served: Served, x: Exchange) -> None:
    """Token ids of a text, or of a conversation."""
    body = read(TokenizeBody, await served.body(x))
    served.check_name(body.model)
    if body.messages is not None and body.prompt is None:
        variables = dict(body.chat_template_kwargs or {}) | {"add_generation_prompt": body.add_generation_prompt}
        if body.tools:
            variables["tools"] = body.tools
        ids = await served.reading.render(conversation(body.messages, served.bounds.messages), variables, x.tenant)
    elif body.prompt is not None and body.messages is None:
        served.texts.prompts.check_size(body.prompt)
        [ids] = await served.reading.tokens([body.prompt], body.add_special_tokens, x.tenant)
    else:
        raise Refused("Send either prompt or messages.", param="prompt", code="missing_required_parameter")
    told: dict[str, Any] = {"count": len(ids), "max_model_len": served.max_len, "tokens": ids}
    if body.return_token_strs:
        if len(ids) > (most := max(served.max_len, MOST_SHOWN)):
            raise Refused(f"There are {len(ids)} tokens; at most {most} are shown.", param="return_token_strs")
        told["token_strs"] = [served.vocabulary(i)[0] for i in ids]
    await x.json(told)


async def detokenize(served: Served, x: Exchange) -> None:
    """The text of token ids."""
    body = read(DetokenizeBody, await served.body(x))
    served.check_name(body.model)
    if len(body.tokens) > (most := max(served.max_len, MOST_SHOWN)):
        raise Refused(f"tokens has {len(body.tokens)} entries; at most {most} are served.", param="tokens")
    served.reading.check_ids(body.tokens, "tokens")
    await x.json({"prompt": served.vocabulary.text(body.tokens)})


# ---- text ----------------------------------------------------------------------------------------------------------


async def _text(served: Served, x: Exchange, writer: Writer, ids: list[list[int]]) -> None:
    asked = writer.asked
    for own in ids:
        served.reading.check_length(own, asked.limit)
    with (
        served.record(x, asked.params, ids) as record,
        served.submit(ids, asked.params, served.terms(asked.terms, x.tenant)) as writer.streams,
    ):
        writer.ids = ids
        text = _one(writer.streams, asked.params.n)
        record.text, record.stream = text, asked.stream
        try:
            await x.while_here(_answer(x, writer, text, record), text.close)
        finally:
            text.close()


async def _answer(x: Exchange, writer: Writer, text: TextStream, record: Record) -> None:
    pieces = await text.come()  # before the answer begins, as an error has a status of its own
    record.came(pieces)
    if writer.asked.stream:
        await _stream(x, writer, text, pieces, record)
        return
    while pieces:
        pieces = await text.come()
        record.came(pieces)
    await x.json(writer.whole())


async def _stream(x: Exchange, writer: Writer, text: TextStream, pieces: list[Piece], record: Record) -> None:
    """Every chunk leaves with the step that made it."""
    await x.begin(200, SSE)
    chunks = writer.opening()
    open_ = {c.index: c for c in text.choices}
    try:
        while pieces:
            chunks += [writer.piece(p) for p in pieces]
            chunks += [writer.end(c) for c in _over(open_)]
            await x.write(b"".join(map(answers.event, chunks)))
            chunks = []
            pieces = await text.come()
            record.came(pieces)
        chunks = [writer.end(c) for c in open_.values()]
        if writer.asked.usage:
            chunks.append(writer.last())
    except HibachiError as e:
        record.failed(e)
        refused = as_refused(e)
        x.blame(refused, e)
        chunks = [body_of(refused)]
    await x.write(b"".join(map(answers.event, chunks)) + answers.DONE, more=False)


def _over(open_: dict[int, TextChoice]) -> list[TextChoice]:
    """Those that have ended, and of which everything was read; they are no longer open."""
    over = [c for c in open_.values() if c.over]
    for choice in over:
        del open_[choice.index]
    return over


def _one(streams: list[TextStream], n: int) -> TextStream:
    """All continuations of all prompts as one stream, numbered as OpenAI does."""
    if len(streams) == 1:
        return streams[0]
    choices = []
    for p, stream in enumerate(streams):
        for choice in stream.choices:
            choice.index += p * n
            choices.append(choice)
    return TextStream("", [], choices, len(choices))
