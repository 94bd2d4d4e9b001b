"""OpenAI's batch lines, of which a running server computes each: its body goes out, and the answer comes as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hibachi.engine.sampling.uniforms import fork
from hibachi.llm.dialects.errors import SERVER, Refused
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.answer_ids import alone, rename_chat, rename_message, rename_response, renaming
from hibachi.offline.tasks.engine_task import judged, why_not
from hibachi.offline.tasks.lines import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    URLS,
    BatchLines,
    LineRows,
)
from hibachi.offline.tasks.task import Prepared, Result, RowError
from hibachi.offline.tasks.urlbase import (
    Answer,
    ReadyRequest,
    RemoteServer,
    UrlWork,
    bad,
    begins,
    choices_of,
    encoded,
    signed,
    used_of,
)

_PROMPTS = {
    COMPLETIONS: "prompt",
    CHAT: "messages",
    EMBEDDINGS: "input",
    RESPONSES: "input",
    MESSAGES: "messages",
}
_SYSTEM = {RESPONSES: "instructions", MESSAGES: "system"}  # what stands in front of it
_IDS = {
    COMPLETIONS: ("cmpl-", "text"),
    CHAT: ("chatcmpl-", "chat"),
    EMBEDDINGS: ("embd-", "embedding"),
    RESPONSES: ("resp_", "response"),
    MESSAGES: ("msg_", "message"),
}
_NAMED = (COMPLETIONS, CHAT)  # answers that have the id that a request names
_SEEDLESS = (RESPONSES, MESSAGES)  # where only servers of ours know a seed
_LISTS = {EMBEDDINGS: "data", RESPONSES: "output", MESSAGES: "content"}  # what answers have in them
_OF_COMPANY = ("timings", "kv_transfer_params")  # fields of answers that depend on time, or on other requests


@dataclass(slots=True)
class _Line:
    """custom: its custom_id. request: the id that its answer shall have. alias: what it calls the model, where that is
    not the server's name."""

    custom: Mapping[str, Any]
    request: str | None
    alias: str | None


class UrlLines(LineRows, UrlWork):
    """Has lines answered. names: that a body may call the model by, besides what the server calls it."""

    def __init__(self, server: RemoteServer, names: Sequence[str], *, seed: int = 0, created: int = 0) -> None:
        super().__init__(server)
        self._names, self._lines = names, BatchLines(seed, created)

    def wrong(self, row: Row) -> str | None:
        def read() -> None:
            url, body = self._lines.read(row, URLS)
            name = _PROMPTS[url]
            if body.get(name) == [] or (url == CHAT and body.get(name) is None):
                raise Refused(f"{name} is empty: send at least one.", param=name, code="empty_array")
            encoded(body)

        return why_not(row, read)

    def failed(self, number: int, ready: ReadyRequest, why: Refused) -> RowError:
        return self._failed(number, ready.about.custom, why)

    def prepare(self, row: Row) -> Prepared:
        with judged(partial(self._failed, row.number, row.values)):
            url, given = self._lines.read(row, URLS)
            body = dict(given)
            called = body.get("model")
            alias = called if called in self._names and called != self._model else None
            if called is None or alias is not None:
                body["model"] = self._model
            if url == RESPONSES:
                body["store"] = False
            if url != EMBEDDINGS and body.get("seed") is None and (url not in _SEEDLESS or self._ours):
                body["seed"] = signed(fork(self._lines.seed, row.number + 1))
            request = body.get("request_id")
            named = request if url in _NAMED and isinstance(request, str) else None
            line = _Line({"custom_id": row.values["custom_id"], "url": url}, named, alias)
            ready = ReadyRequest(url, encoded(body), about=line)
        prompt, system = body.get(_PROMPTS[url], ""), body.get(_SYSTEM.get(url, ""))
        key, tokens = begins(prompt if system is None else [system, prompt])
        return Prepared(key, tokens + _limit(body), row.size + len(ready.body) + 1000, ready)

    def result(self, number: int, ready: ReadyRequest, answer: Answer) -> Result:
        line: _Line = ready.about
        _check(ready.path, answer)
        used = used_of(answer)
        if isinstance(answer.get("usage"), dict):
            alone(answer["usage"])
        for name in _OF_COMPANY:
            answer.pop(name, None)
        self._rename(number, ready.path, answer, line.request)
        if "created" in answer:
            answer["created"] = self._lines.created
        if line.alias is not None and "model" in answer:
            answer["model"] = line.alias
        values = self._lines.answered(number, line.custom, answer)
        return Result(values, used.prompt or 0, used.cached, used.new or 0)

    def _rename(self, number: int, path: str, answer: Answer, request: str | None) -> None:
        """Ids become the same in every run."""
        prefix, what = _IDS[path]
        own = request or self._lines.id_of(number, what)
        before, now = str(answer.get("id")), f"{prefix}{own}"
        if "id" in answer:
            answer["id"] = now
        call = renaming(before, now, partial(self._lines.id_of, number), ours=self._ours)
        if path == CHAT:
            rename_chat(answer, call)
        elif path == RESPONSES:
            rename_response(answer, own, self._lines.created, call)
        elif path == MESSAGES:
            rename_message(answer, call)


def _check(path: str, answer: Answer) -> None:
    """Raises Refused for an answer that is none."""
    if path in (COMPLETIONS, CHAT):
        choices_of(answer)
        return
    name = _LISTS[path]
    if not isinstance(answer.get(name), list):
        raise bad(f"expected {name}, a list; got {str(answer.get('error'))[:200]}")
    if answer.get("status") in ("failed", "cancelled"):
        raise Refused(
            f"The server broke off: {str(answer.get('error'))[:200]}.", status=502, kind=SERVER, code="broken_off"
        )


def _limit(body: Mapping[str, Any]) -> int:
    """New tokens, as far as the body says how many."""
    for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        n = body.get(name)
        if isinstance(n, (int, float)) and math.isfinite(n) and 0 < n < 2**31:
            return int(n)
    return 0
