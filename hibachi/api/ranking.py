"""Texts that are compared by their vectors, and inputs that are put into classes: what is asked, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import UNSET

from hibachi.api.answers import unit
from hibachi.api.asking import check_count, unsupported
from hibachi.api.bodies import Bounds, Document, RerankBody, ScoreBody
from hibachi.api.errors import Refused
from hibachi.errors import ModelError, shown
from hibachi.tensor.array_backend import HostArray

_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def scored(body: ScoreBody, bounds: Bounds) -> tuple[list[str], list[str]]:
    """The texts to be compared: one with each of several, or each with its partner. Raises Refused."""
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
            raise Refused(f"{name} is empty: send a text, or a list of texts.", param=name, code="empty_array")
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
        raise Refused("documents is empty: send at least one text.", param="documents", code="empty_array")
    check_count("documents", body.documents, bounds.prompts)
    if body.top_n is not None and body.top_n < 0:
        raise Refused(
            f"top_n must be at least 0 (0: all); got {shown(body.top_n)}.", param="top_n", code="invalid_value"
        )
    texts = [d.text if isinstance(d, Document) else d for d in body.documents]
    return texts, body.top_n or len(texts)


def _check_ranking(body: Any) -> None:
    if body.use_activation not in (UNSET, None):
        raise unsupported("use_activation", "A score is the cosine of two vectors, and nothing is applied to it")


def inputs(given: Any, shape: tuple[int, ...] | None, bounds: Bounds) -> list[HostArray]:
    """Of JSON: one input of this shape, or a list of such; None: a list of inputs, each of its own shape. Raises
    Refused."""
    if shape is None:
        if not isinstance(given, list):
            raise _no_input("a list of inputs, as this model does not say what one is like", "a number")
        _check_inputs(given, bounds)
        return [_numbers(one) for one in given]
    one = "one number" if not shape else f"numbers of shape {list(shape)}"
    if isinstance(given, list):
        _check_inputs(given if not given or _depth(given) > len(shape) else [given], bounds)
    found = _numbers(given)
    if found.shape == shape:
        return [found]
    if found.shape[1:] != shape or not found.ndim:
        raise _no_input(f"{one}, or a list of such", f"shape {list(found.shape)}")
    return list(found)


def _depth(given: Any) -> int:
    """Of the first in each list."""
    n = 0
    while isinstance(given, list) and given:
        given, n = given[0], n + 1
    return n


def _check_inputs(given: list[Any], bounds: Bounds) -> None:
    if not given:
        raise Refused("input is empty: send at least one.", param="input", code="empty_array")
    check_count("input", given, bounds.prompts)


def _numbers(given: Any) -> HostArray:
    """As JSON has them: integers, or else float32, which most models take."""
    try:
        found = np.asarray(given)
    except (ValueError, OverflowError, RecursionError):
        raise _no_input("numbers in lists of equal length", "lists of unequal length") from None
    if found.dtype.kind not in "iuf" or not found.size:
        raise _no_input("numbers in lists of equal length", "something else" if found.size else "an empty list")
    if found.dtype.kind == "f":
        with np.errstate(over="ignore"):
            found = found.astype(np.float32)
        if not np.isfinite(found).all():
            raise _no_input("numbers that float32 can hold", "larger ones")
    return found


def _no_input(expected: str, got: str) -> Refused:
    return Refused(f"input: expected {expected}; got {got}.", param="input", code="invalid_value")


# ---- answers -----------------------------------------------------------------------------------------------------


def cosines(ours: Sequence[Any], theirs: Sequence[Any]) -> list[float]:
    """Of pairs of vectors; one of ours may stand for all. A vector of no length has 0 with any."""
    units = [unit(v) for v in ours]
    pairs = zip(units * len(theirs) if len(units) == 1 else units, theirs, strict=True)
    return [float(np.clip(a @ unit(b), -1.0, 1.0)) for a, b in pairs]


def scores(found: Sequence[float], id: str, created: int, name: str, tokens: int) -> dict[str, Any]:
    """As vLLM's /score."""
    data = [{"index": i, "object": "score", "score": x} for i, x in enumerate(found)]
    return _list(f"score-{id}", created, name, data, tokens)


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


def classes(
    probs: Sequence[Any], labels: Sequence[str], id: str, created: int, name: str, tokens: int
) -> dict[str, Any]:
    """As vLLM's /classify. probs: of each input, arrays [labels]."""
    data = [
        {"index": i, "label": labels[int(p.argmax())], "probs": [float(x) for x in p], "num_classes": len(p)}
        for i, p in enumerate(probs)
    ]
    return _list(f"classify-{id}", created, name, data, tokens)


def _list(id: str, created: int, name: str, data: Sequence[Any], tokens: int) -> dict[str, Any]:
    used = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": id, "object": "list", "created": created, "model": name, "data": data, "usage": used}


def ranking(
    scores: Sequence[float], texts: Sequence[str], most: int, id: str, name: str, tokens: int, *, with_texts: bool
) -> dict[str, Any]:
    """As Jina's and Cohere's rerank: the documents of the largest scores, best first."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[:most]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
    if with_texts:
        results = [{**told, "document": {"text": texts[told["index"]]}} for told in results]
    used = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": f"rerank-{id}", "model": name, "usage": used, "results": results}
