"""Routes that compare texts by their vectors, and one that puts inputs into classes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.engine.conversions import to_host
from hibachi.llm.dialects import ranking
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai.bodies import ClassifyBody, RerankBody, ScoreBody, read
from hibachi.llm.dialects.openai.parse import request_id, terms_of, truncation
from hibachi.request import SamplingParams
from hibachi.server.openai import answer_items, answer_vectors
from hibachi.server.routes import About, Route, for_texts_vectors
from hibachi.server.served import Served
from hibachi.server.web.exchange import Exchange


async def score(served: Served, x: Exchange) -> None:
    """The cosine of the vectors of two texts, or of several pairs."""
    body = read(ScoreBody, await served.body(x))
    name, id_ = served.check_name(body.model), _id(body)
    ours, theirs = ranking.scored(body, served.bounds)

    def answer(vectors: Sequence[HostArray], tokens: int) -> Any:
        found = ranking.cosines(vectors[: len(ours)], vectors[len(ours) :])
        return ranking.scores(found, id_, int(time.time()), name, tokens)

    ids = await served.read(x, served.reading.encode([*ours, *theirs], "text_1", truncation=truncation(body)))
    await answer_vectors(served, x, ids, terms_of(body), answer)


async def rerank(served: Served, x: Exchange) -> None:
    """The documents whose vectors are nearest to the query's, by the cosine, best first."""
    body = read(RerankBody, await served.body(x))
    name, id_ = served.check_name(body.model), _id(body)
    texts, most = ranking.ranked(body, served.bounds)
    with_texts = body.return_documents is not False

    def answer(vectors: Sequence[HostArray], tokens: int) -> Any:
        found = ranking.cosines(vectors[:1], vectors[1:])
        return ranking.ranking(found, texts, most, id_, name, tokens, with_texts=with_texts)

    reading = served.reading.encode([body.query, *texts], "documents", truncation=truncation(body))
    ids = await served.read(x, reading)
    await answer_vectors(served, x, ids, terms_of(body), answer)


async def classify(served: Served, x: Exchange) -> None:
    """The label of each input, of a feed-forward model that has labels, and the probabilities of all."""
    raw = await served.body(x)
    body, facts = read(ClassifyBody, raw), served.what.engine.facts
    name, id_, labels = served.check_name(body.model), _id(body), facts.labels
    if not labels or not facts.feedforward:
        raise Refused(
            "This model does not classify: expected a feed-forward one with an attribute `labels`.", code="unsupported"
        )
    reading = partial(ranking.inputs, body.input, facts.token, served.bounds)
    inputs = await served.arrays.run(len(raw), reading, x.tenant)
    applied = body.use_activation is not False and not facts.probabilities

    def answer(outputs: Sequence[Any]) -> Any:
        found = [ranking.output(to_host(one), len(labels)) for one in outputs]
        probs = [ranking.softmax(one) for one in found] if applied else found
        return ranking.classes(probs, labels, id_, int(time.time()), name)

    with (
        served.record(x, SamplingParams(max_tokens=1), [range(len(inputs))]) as record,
        served.submit_inputs(inputs, served.terms(terms_of(body), x.tenant, x.part)) as items,
    ):
        await answer_items(x, record, items, answer)


def _id(body: Any) -> str:
    return request_id(body.request_id) or secrets.token_hex(12)


def _classifies(served: Served) -> bool:
    return bool(served.what.engine.facts.labels)


def _two_texts(served: Served) -> Any:
    return {"text_1": "Emma", "text_2": ["Anne", "Harriet"]}


def _documents(served: Served) -> Any:
    return {"query": "Emma", "documents": ["Anne", "Harriet"]}


def _input(served: Served) -> Any:
    token = served.what.engine.facts.token
    return {"input": np.zeros(token[0] if token else (1, 1)).tolist()}


_SCORES = About(ScoreBody, ranking.Scores, named=True, asks=True, example=_two_texts, useful=for_texts_vectors)
_RANKS = About(RerankBody, ranking.Ranking, named=True, asks=True, example=_documents, useful=for_texts_vectors)
_CLASSES = About(ClassifyBody, ranking.Classes, named=True, asks=True, example=_input, useful=_classifies)
ROUTES = (
    *(Route("POST", path, score, about=_SCORES) for path in ("/score", "/v1/score")),
    *(Route("POST", path, rerank, about=_RANKS) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    Route("POST", "/classify", classify, about=_CLASSES),
)
