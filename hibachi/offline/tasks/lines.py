"""OpenAI's batch lines: {"custom_id", "method", "url", "body"}, by any kind of work.

An answer is {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}. As in vLLM, a line that is
refused has a response as well, with a status of 400 or more; `error` then says why in short.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hibachi.errors import ConfigError, HibachiError, shown
from hibachi.llm.dialects.dialects import ANTHROPIC, OPENAI
from hibachi.llm.dialects.errors import Refused, as_refused
from hibachi.offline.files.format import Field
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.duplicates import Seen
from hibachi.offline.tasks.task import RowError

MUST = ("custom_id", "url", "body")  # columns by which such lines are known
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
URLS = (COMPLETIONS, CHAT, EMBEDDINGS, RESPONSES, MESSAGES)
CODE = "unsupported_parameter"
_DIALECTS = {MESSAGES: ANTHROPIC}
FIELDS = (Field("id", "text"), Field("custom_id", "text"), Field("response", "json"), Field("error", "json"))


def id_of(seed: int, number: int, what: str) -> str:
    """An id of row `number`, the same in every run with this seed. what: it is of."""
    return hashlib.blake2b(f"{seed} {number} {what}".encode(), digest_size=12).hexdigest()


def are_lines(columns: Sequence[str] | None) -> bool:
    return columns is not None and all(c in columns for c in MUST)


class BatchLines:
    """Reading and answering of lines, whatever computes them: names, ids, duplicates, answers.

    created: Unix time in seconds of the run's start.
    """

    def __init__(self, seed: int, created: int) -> None:
        self.seed, self.created = seed, created
        self._seen = Seen()

    def check(self, columns: Sequence[str] | None) -> None:
        """Raises ConfigError."""
        if columns is not None and (missing := [c for c in MUST if c not in columns]):
            raise ConfigError(
                f"A line of OpenAI's batches has custom_id, method, url and body; the input has no {missing[0]}."
            )

    def seen(self, row: Row) -> str | None:
        """Where its custom_id stood before; None means nowhere."""
        own = row.values.get("custom_id")
        return self._seen.add(own, row) if isinstance(own, str) else None

    def read(self, row: Row, urls: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
        """The url and the body of a line. Raises Refused."""
        values = row.values
        if not isinstance(values.get("custom_id"), str):
            raise Refused(f"custom_id must be a text; got {shown(values.get('custom_id'))}.", param="custom_id")
        if (before := self.seen(row)) is not None:
            raise Refused(
                f"custom_id {shown(values['custom_id'])} was given to {before} already; expected one of its own.",
                param="custom_id",
                code="duplicate_custom_id",
            )
        if (method := values.get("method", "POST")) != "POST":
            raise Refused(f"method must be POST; got {shown(method)}.", param="method")
        url, body = values.get("url"), values.get("body")
        if not isinstance(url, str) or url not in urls:
            raise Refused(
                f"url must be one of {', '.join(urls)}; got {shown(url)}.", param="url", code="unsupported_url"
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

    def id_of(self, number: int, what: str) -> str:
        return id_of(self.seed, number, what)

    def answered(self, number: int, values: Mapping[str, Any], body: Any) -> dict[str, Any]:
        response = {"status_code": 200, "request_id": self.id_of(number, "request"), "body": body}
        return self._line(number, values, response, None)

    def refused(self, number: int, values: Mapping[str, Any], why: Refused) -> dict[str, Any]:
        """values: those of the row, or its custom_id and url: errors are told as the url has them."""
        dialect, request = _DIALECTS.get(str(values.get("url")), OPENAI), self.id_of(number, "request")
        response = {
            "status_code": dialect.status(why),
            "request_id": request,
            "body": dialect.told(why, request),
        }
        return self._line(number, values, response, {"code": why.code or why.kind, "message": str(why)})

    def _line(self, number: int, values: Mapping[str, Any], response: Any, error: Any) -> dict[str, Any]:
        own = values.get("custom_id")
        custom = own if isinstance(own, str) else None
        return {
            "id": f"batch_req_{self.id_of(number, 'line')}",
            "custom_id": custom,
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


def refusal_of(error: HibachiError) -> Refused:
    """With all that is known of it, as nobody else reads it."""
    found = as_refused(error)
    return Refused(str(error), status=found.status, kind=found.kind, param=found.param, code=found.code)


class LineRows:
    """What tasks have in common whose rows are such lines, whatever computes them."""

    carries, compares = False, True
    fields: Sequence[Field] = FIELDS
    _lines: BatchLines

    def check(self, columns: Sequence[str] | None) -> None:
        self._lines.check(columns)

    def seen(self, row: Row) -> None:
        self._lines.seen(row)

    def refused(self, row: Row, message: str) -> dict[str, Any]:
        why = Refused(f"{row.place}: {message}", code="invalid_json")
        return self._lines.refused(row.number, row.values, why)

    def _failed(self, number: int, values: Mapping[str, Any], error: HibachiError) -> RowError:
        return RowError(str(error), self._lines.refused(number, values, refusal_of(error)))
