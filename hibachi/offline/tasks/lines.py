"""OpenAI's batch lines: {"custom_id", "method", "url", "body"}, by any kind of work.

An answer is {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}. As in vLLM, a line that is
refused has a response as well, with a status of 400 or more; `error` then says why in short.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hibachi.errors import ConfigError, HibachiError, shown
from hibachi.llm.dialects.dialects import ANTHROPIC, OPENAI
from hibachi.llm.dialects.errors import Refused, as_refused
from hibachi.offline.files.format import Field
from hibachi.offline.files.rows import Row, id_text
from hibachi.offline.tasks.task import RowError, RowTask

MUST = ("custom_id", "url", "body")  # columns by which such lines are known
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
URLS = (COMPLETIONS, CHAT, EMBEDDINGS, RESPONSES, MESSAGES)
CODE = "unsupported_parameter"
_DIALECTS = {MESSAGES: ANTHROPIC}
_RECENT = 1 << 16  # names that are kept apart, until they are sorted in
FIELDS = (Field("id", "text"), Field("custom_id", "text"), Field("response", "json"), Field("error", "json"))


def are_lines(columns: Sequence[str] | None) -> bool:
    return columns is not None and all(c in columns for c in MUST)


class Seen:
    """Which names have come before, in 24 bytes a name. They are known by 64 bits of a digest: in a million
    names two share them with a chance of 1 to 37 million.
    """

    def __init__(self) -> None:
        self._files: list[str] = []
        self._numbers: dict[str, int] = {}
        self._recent: dict[int, tuple[int, int]] = {}
        self._digests: Any = np.zeros(0, np.uint64)  # sorted
        self._places: Any = np.zeros((0, 2), np.int64)  # of each, its file and line

    def add(self, name: str, row: Row) -> str | None:
        """Where the name stood before; None means nowhere, and it is known from now on."""
        digest = int.from_bytes(hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
        found = self._recent.get(digest)
        if found is None and len(self._digests):
            at = int(np.searchsorted(self._digests, np.uint64(digest)))
            if at < len(self._digests) and int(self._digests[at]) == digest:
                found = int(self._places[at, 0]), int(self._places[at, 1])
        if found is not None:
            return f"{self._files[found[0]]}, line {found[1]}"
        file = self._numbers.get(row.file)
        if file is None:
            file = self._numbers[row.file] = len(self._files)
            self._files.append(row.file)
        self._recent[digest] = file, row.line
        if len(self._recent) >= _RECENT:
            self._merge()
        return None

    def _merge(self) -> None:
        digests = np.concatenate([self._digests, np.fromiter(self._recent, np.uint64, len(self._recent))])
        places = np.concatenate([self._places, np.array(list(self._recent.values()), np.int64)])
        order = np.argsort(digests)
        self._digests, self._places = digests[order], places[order]
        self._recent.clear()


class LineRows(RowTask):
    """What tasks have in common whose rows are such lines: names, ids, duplicates, answers."""

    carries, compares = False, True
    fields: Sequence[Field] = FIELDS
    _seen: Seen

    def check(self, columns: Sequence[str] | None) -> None:
        if columns is not None and (missing := [c for c in MUST if c not in columns]):
            raise ConfigError(
                f"A line of OpenAI's batches has custom_id, method, url and body; the input has no {missing[0]}."
            )

    def seen(self, row: Row) -> None:
        if isinstance(own := row.values.get("custom_id"), str):
            self._seen.add(own, row)

    def refused(self, row: Row, message: str) -> dict[str, Any]:
        return self._refused(row.number, row.values, Refused(f"{row.place}: {message}", code="invalid_json"))

    def _line(self, row: Row) -> tuple[str, Mapping[str, Any]]:
        """The url and the body of a line. Raises Refused."""
        values = row.values
        if not isinstance(own := values.get("custom_id"), str):
            raise Refused(f"{row.place}: custom_id must be a text; got {shown(own)}.", param="custom_id")
        if (before := self._seen.add(own, row)) is not None:
            raise Refused(
                f"custom_id {shown(own)} was given to {before} already; expected one of its own.",
                param="custom_id",
                code="duplicate_custom_id",
            )
        if (method := values.get("method", "POST")) != "POST":
            raise Refused(f"method must be POST; got {shown(method)}.", param="method")
        url, body = values.get("url"), values.get("body")
        if not isinstance(url, str) or url not in URLS:
            raise Refused(
                f"url must be one of {', '.join(URLS)}; got {shown(url)}.", param="url", code="unsupported_url"
            )
        if row.arrow is not None and isinstance(body, dict):
            body = {name: value for name, value in body.items() if value is not None}  # all rows of it have all names
        if isinstance(body, str):
            body = _decoded(body)
        if not isinstance(body, Mapping):
            raise Refused(f"body must be an object (in CSV, as JSON); got {shown(body)}.", param="body")
        if unknown := [c for c in values if c not in (*MUST, "method")]:
            raise Refused(f"Unknown field: {unknown[0][:200]}. A line has custom_id, method, url and body.")
        if body.get("stream"):
            raise Refused("stream must not be true: an answer in a file comes whole. Leave it out.", param="stream")
        if url == RESPONSES:
            _check_alone(body)
        return url, body

    def _values(self, number: int, about: Mapping[str, Any], answer: Any) -> dict[str, Any]:
        response = {"status_code": 200, "request_id": self._id_of(number, "request"), "body": answer}
        return self._entry(number, about, response, None)

    def _refused(self, number: int, values: Mapping[str, Any], why: Refused) -> dict[str, Any]:
        """values: those of the row, or its custom_id and url: errors are told as the url has them."""
        dialect, request = _DIALECTS.get(str(values.get("url")), OPENAI), self._id_of(number, "request")
        response = {"status_code": dialect.status(why), "request_id": request, "body": dialect.told(why, request)}
        return self._entry(number, values, response, {"code": why.code or why.kind, "message": str(why)})

    def _failed(self, number: int, about: Mapping[str, Any], error: HibachiError) -> RowError:
        found = as_refused(error)  # with all that is known of it, as nobody else reads it
        why = Refused(str(error), status=found.status, kind=found.kind, param=found.param, code=found.code)
        return RowError(str(error), self._refused(number, about, why))

    def _entry(self, number: int, values: Mapping[str, Any], response: Any, error: Any) -> dict[str, Any]:
        return {
            "id": f"batch_req_{self._id_of(number, 'line')}",
            "custom_id": id_text(values.get("custom_id")),
            "response": response,
            "error": error,
        }


def _check_alone(body: Mapping[str, Any]) -> None:
    """Raise Refused for a response that needs what was kept of others: lines are answered in any order."""
    why = "Nothing is kept of a line, so send the whole conversation as input"
    if body.get("previous_response_id") is not None:
        raise Refused(f"previous_response_id is not supported: {why}.", param="previous_response_id", code=CODE)
    items = body.get("input")
    for i, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, Mapping):
            kind = item.get("type")
            if kind == "item_reference" or (kind is None and "role" not in item):
                raise Refused(f"input[{i}]: item_reference is not supported: {why}.", param=f"input[{i}]", code=CODE)


def _decoded(text: str) -> Any:
    """CSV has texts only."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
