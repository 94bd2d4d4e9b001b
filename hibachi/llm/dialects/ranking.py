"""Requests and answers of routes that compare texts by their vectors, and of one that classifies inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import DecodeError, Raw, Struct, json

from hibachi.backend.array_backend import HostArray
from hibachi.errors import ModelError, shown
from hibachi.llm.dialects.errors import Refused, unsupported
from hibachi.llm.dialects.openai.answers import VectorsUsage
from hibachi.llm.dialects.openai.bodies import Bounds, Document, RerankBody, ScoreBody
from hibachi.llm.dialects.openai.parse import check_count
from hibachi.llm.dialects.tokens.arrays import of_json
from hibachi.llm.dialects.vectors import unit

_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def scored(body: ScoreBody, bounds: Bounds) -> tuple[list[str], list[str]]:
    """The pairs of texts to compare: one with each of several, or each with its partner. Raises Refused."""
    given = {name for pair in _PAIRS for name in pair if getattr(body, name) is not None}
    pair = next((pair for pair in _PAIRS if set(pair) == given), None)
    if pair is None:
        raise Refused(
            "Send two fields of texts, text_1 and text_2 (or queries and documents, queries and items, data_1 and "
            f"data_2); got {', '.join(sorted(given)) or 'none'}.",
            param="text_1",
            code="missing_required_parameter",
        )
    _check_ranking(body)
    found = []
    for name in pair:
        texts = getattr(body, name)
        found.append([texts] if isinstance(texts, str) else texts)
        if not texts:
            raise Refused.at(name, " is empty: send a text, or a list of texts.", code="empty_array")
        check_count(name, found[-1], bounds.prompts)
    ours, theirs = found
    if len(ours) not in (1, len(theirs)):
        raise Refused(
            f"{pair[0]} must hold one text, or as many as {pair[1]}, {len(theirs)}; got {len(ours)}.",
            param=pair[0],
            code="invalid_value",
        )
    return ours, theirs


def ranked(body: RerankBody, bounds: Bounds) -> tuple[list[str], int]:
    """The texts of the documents, and how many are wanted. Raises Refused."""
    _check_ranking(body)
    if not body.documents:
        raise Refused.at("documents", " is empty: send at least one text.", code="empty_array")
    check_count("documents", body.documents, bounds.prompts)
    if body.top_n is not None and body.top_n < 0:
        raise Refused.at("top_n", f" must be at least 0 (0: all); got {shown(body.top_n)}.")
    texts = [d.text if isinstance(d, Document) else d for d in body.documents]
    return texts, body.top_n or len(texts)


def _check_ranking(body: Any) -> None:
    if body.use_activation:
        raise unsupported("use_activation", "A score is the cosine of two vectors, and nothing is applied to it")


def inputs(raw: Raw, kind: tuple[tuple[int, ...], str] | None, bounds: Bounds) -> list[HostArray]:
    """Of JSON, written as POST /v1/generate takes arrays. kind: shape and dtype of an input: then one is given, or
    several; None means a list of inputs, each of its own shape. Raises Refused."""
    if kind is None:
        try:
            each = json.decode(raw, type=list[Raw])
        except (DecodeError, RecursionError):
            raise _no_input("a list of inputs, as this model does not say what one is like", "no list") from None
        _check_inputs(each, bounds)
        return [of_json(one, f"input[{i}]") for i, one in enumerate(each)]
    shape, dtype = kind
    found = of_json(raw, "input", dtype)
    if found.shape == shape:
        return [found]
    if not found.ndim or found.shape[1:] != shape:
        one = "one number" if not shape else f"numbers of shape {list(shape)}"
        raise _no_input(f"{one}, or a list of such", f"shape {list(found.shape)}")
    _check_inputs(found, bounds)
    return list(found)


def _check_inputs(given: Any, bounds: Bounds) -> None:
    if not len(given):
        raise Refused.at("input", " is empty: send at least one.", code="empty_array")
    check_count("input", given, bounds.prompts)


def _no_input(expected: str, got: str) -> Refused:
    return Refused.at("input", f": expected {expected}; got {got}.")


# ---- answers -----------------------------------------------------------------------------------------------------


def cosines(ours: Sequence[Any], theirs: Sequence[Any]) -> list[float]:
    """Cosines of pairs of vectors; one of ours may stand for all. A zero vector has 0 with any."""
    units = [unit(v) for v in ours]
    pairs = zip(units * len(theirs) if len(units) == 1 else units, theirs, strict=True)
    return [float(np.clip(a @ unit(b), -1.0, 1.0)) for a, b in pairs]


class Score(Struct):
    index: int
    score: float
    object: str = "score"


class Scores(Struct):
    """The answer to /score, as vLLM's."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: VectorsUsage
    object: str = "list"


def used(tokens: int) -> VectorsUsage:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def scores(found: Sequence[float], id: str, created: int, name: str, tokens: int) -> Scores:
    return Scores(f"score-{id}", created, name, [Score(i, x) for i, x in enumerate(found)], used(tokens))


class Ranked(Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(Struct):
    """The answer to /rerank, as Jina's and Cohere's: the documents of the largest scores, best first."""

    id: str
    model: str
    usage: VectorsUsage
    results: list[Ranked]


def ranking(
    scores: Sequence[float], texts: Sequence[str], most: int, id: str, name: str, tokens: int, *, with_texts: bool
) -> Ranking:
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[:most]
    results = [Ranked(i, scores[i], Document(texts[i]) if with_texts else None) for i in order]
    return Ranking(f"rerank-{id}", name, used(tokens), results)


def output(found: HostArray, labels: int) -> HostArray:
    """What a classifier returned for one input, as float64 [labels]. Raises ModelError."""
    if found.size != labels or not np.isfinite(found).all():
        raise ModelError(
            f"A classifier must return one finite number for each of its {labels} labels; got shape {found.shape}."
        )
    return found.astype(np.float64).reshape(labels)


def softmax(logits: HostArray) -> HostArray:
    with np.errstate(over="ignore"):  # infinitely far below the largest is 0
        powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum())


class Class(Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(Struct):
    """The answer to /classify, as vLLM's."""

    id: str
    created: int
    model: str
    data: list[Class]
    usage: VectorsUsage
    object: str = "list"


def classes(probs: Sequence[HostArray], labels: Sequence[str], id: str, created: int, name: str) -> Classes:
    """probs: of each input, arrays [labels]."""
    data = [Class(i, labels[int(p.argmax())], p.tolist(), len(p)) for i, p in enumerate(probs)]
    return Classes(f"classify-{id}", created, name, data, used(len(data)))
