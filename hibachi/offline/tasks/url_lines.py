"""OpenAI's batch lines, of which a running server computes each: its body goes out, and the answer comes as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from hibachi.engine.sampling.uniforms import fork
from hibachi.llm.dialects.errors import SERVER, Refused
from hibachi.offline.batch import Batch
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.lines import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, LineRows, Seen
from hibachi.offline.tasks.sender import Patience
from hibachi.offline.tasks.task import Prepared
from hibachi.offline.tasks.url_answers import (
    Answer,
    alone,
    bad,
    choices_of,
    rename_chat,
    rename_message,
    rename_response,
    renaming,
)
from hibachi.offline.tasks.url_task import UrlRequest, UrlTask, encoded, signed

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


class UrlLines(LineRows, UrlTask):
    """A body may call the model by the names of the run, besides what the server calls it."""

    def __init__(self, batch: Batch, created: int, patience: Patience) -> None:
        super().__init__(batch, created, patience)
        self._names, self._seen = batch.served_names, Seen()

    def _judge(self, row: Row) -> None:
        url, body = self._line(row)
        name = _PROMPTS[url]
        if body.get(name) == [] or (url == CHAT and body.get(name) is None):
            raise Refused(f"{name} is empty: send at least one.", param=name, code="empty_array")
        encoded(body)

    def _read(self, row: Row) -> Prepared:
        url, given = self._line(row)
        body = dict(given)
        called = body.get("model")
        alias = called if called in self._names and called != self._model else None
        if called is None or alias is not None:
            body["model"] = self._model
        if url == RESPONSES:
            body["store"] = False
        if url != EMBEDDINGS and body.get("seed") is None and (url not in _SEEDLESS or self._ours):
            body["seed"] = signed(fork(self._seed, row.number + 1))
        named = body.get("request_id")
        id = named if url in _NAMED and isinstance(named, str) else None
        request = UrlRequest(url, encoded(body), id=id, alias=alias)
        prompt, system = body.get(_PROMPTS[url], ""), body.get(_SYSTEM.get(url, ""))
        prompt = prompt if system is None else [system, prompt]
        return self._prepared(row, request, prompt, _limit(body), custom_id=row.values["custom_id"], url=url)

    def _answer(self, number: int, request: UrlRequest, answer: Answer) -> Answer:
        _check(request.path, answer)
        if isinstance(answer.get("usage"), dict):
            alone(answer["usage"])
        for name in _OF_COMPANY:
            answer.pop(name, None)
        self._rename(number, request, answer)
        if "created" in answer:
            answer["created"] = self._created
        if request.alias is not None and "model" in answer:
            answer["model"] = request.alias
        return answer

    def _rename(self, number: int, request: UrlRequest, answer: Answer) -> None:
        """Ids become the same in every run."""
        prefix, what = _IDS[request.path]
        own = request.id or self._id_of(number, what)
        before, now = str(answer.get("id")), f"{prefix}{own}"
        if "id" in answer:
            answer["id"] = now
        call = renaming(before, now, partial(self._id_of, number), ours=self._ours)
        if request.path == CHAT:
            rename_chat(answer, call)
        elif request.path == RESPONSES:
            rename_response(answer, own, self._created, call)
        elif request.path == MESSAGES:
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
