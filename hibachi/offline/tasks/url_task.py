"""What a running server computes: requests out, answers in, a server that comes and goes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hibachi.engine.scheduler.compose import blocks_of
from hibachi.errors import ConfigError, EngineFailed, InvalidRequest, shown
from hibachi.llm.dialects.errors import Refused
from hibachi.offline.batch import Batch
from hibachi.offline.files import jsonl
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.sender import DENIED, MAY_PASS, Patience, Sender, denied
from hibachi.offline.tasks.task import Prepared, Result, RowTask, Told
from hibachi.offline.tasks.url_answers import Answer, answer_in, used_of
from hibachi.server.web.client import BadAnswer, Unreachable, Url

LETTERS, TOKENS, BLOCKS = 64, 16, 256  # of a block, and blocks of a prompt that are compared with others'
LETTERS_A_TOKEN = 4  # about
_encoded = json.JSONEncoder(allow_nan=False, default=jsonl.plain, separators=(",", ":")).encode


@dataclass(slots=True)
class UrlRequest:
    """A request that can be sent. count: continuations that it wants. id: that its answer shall have. alias: what a
    line calls the model, where that is not the server's name.
    """

    path: str
    body: bytes
    count: int | None = None
    id: str | None = None
    alias: str | None = None


class _Away(Exception):
    """The server does not say what it has. down: nothing speaks HTTP there."""

    def __init__(self, words: str, *, down: bool = False) -> None:
        super().__init__(words)
        self.down = down


class UrlTask(RowTask):
    """What a server computes for rows of any kind: requests out, answers in, a server that comes and goes."""

    def __init__(self, batch: Batch, created: int, patience: Patience) -> None:
        """Raises ConfigError."""
        if batch.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1 request at a time; got {batch.concurrency}.")
        if not 0 < batch.request_timeout < math.inf:
            raise ConfigError(f"The request timeout must be a number of seconds above 0; got {batch.request_timeout}.")
        self._url, self._key, self._patience = Url.of(batch.url or ""), batch.api_key, patience
        self._wanted, self._seed, self._created = batch.url_model, batch.seed, created
        self.places = batch.concurrency
        self._started: dict[int, Prepared] = {}
        self._sender: Sender | None = None
        self._facts: dict[str, Any] | None = None
        self._model = batch.url_model or ""

    def _answer(self, number: int, request: UrlRequest, answer: Answer) -> Any:
        """The answer of a row, of what the server said. Raises Refused for an answer that is none."""
        raise NotImplementedError

    # ---- the server --------------------------------------------------------------------------------------------------

    def open(self) -> Told:
        """Ask what it serves. Raises ConfigError; EngineFailed if it was there before and is away for long."""
        sender = Sender(self._url, self._key, self._patience)
        try:
            facts = self._reached(sender)
            if self._facts is not None and facts != self._facts:
                raise ConfigError(f"{self._url} was away, and came back as another: {self._facts} before, now {facts}.")
        except BaseException:
            sender.close()
            raise
        self._sender, self._facts, self._model = sender, facts, facts["model"]
        return Told(f"{self._model} at {self._url}", facts)

    def _reached(self, sender: Sender) -> dict[str, Any]:
        first, pause = self._facts is None, 0.25
        end = time.monotonic() + self._patience.back
        while True:
            try:
                return self._ask(sender)
            except _Away as e:
                if time.monotonic() + pause < end and not (first and e.down):
                    time.sleep(pause)
                    pause = min(2 * pause, 2.0)
                    continue
                if first:
                    raise ConfigError(f"No server answers: {e}. Is it running, and is this its address?") from e
                raise EngineFailed(f"The server is away: {e}.") from e

    def _ask(self, sender: Sender) -> dict[str, Any]:
        """Raises ConfigError, _Away."""
        url, wanted = self._url, self._wanted
        try:
            status, data = sender.get("/v1/models")
        except (Unreachable, BadAnswer, OSError) as e:
            raise _Away(str(e) or "no answer", down=True) from e
        if status in MAY_PASS:
            raise _Away(f"{url}/v1/models: HTTP {status}: {sender.refusal(status, data)}")
        if status in DENIED:
            raise denied(url, sender.refusal(status, data))
        found = _models(data) if status == 200 else {}
        if wanted is None and not found:
            raise ConfigError(
                f"{url}/v1/models names no model (HTTP {status}: {sender.refusal(status, data)}). Is this the address "
                f"of a server with OpenAI's API? If so, name the model by --url-model."
            )
        if wanted is not None and found and wanted not in found:
            names = ", ".join(name[:80] for name in list(found)[:20])
            raise ConfigError(f"{url} has no model {shown(wanted)}. It has: {names}.")
        name = wanted or next(iter(found))
        told = found.get(name, {})
        facts = {"model": name, "numerics": told.get("numerics"), "max_model_len": told.get("max_model_len")}
        return {key: value for key, value in facts.items() if isinstance(value, (str, int))}

    @property
    def _ours(self) -> bool:
        """Whether the server is one of ours: only they name the bits that they compute."""
        return self._facts is not None and "numerics" in self._facts

    @property
    def sender(self) -> Sender:
        assert self._sender is not None
        return self._sender

    def abandon(self) -> None:
        self._started.clear()
        self.close()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _prepared(self, row: Row, request: UrlRequest, prompt: Any, limit: int, **about: Any) -> Prepared:
        """limit: of new tokens; 0 means it is not known. about: see `Prepared`."""
        key, tokens = begins(prompt)
        return Prepared(key, tokens + limit, row.size + len(request.body) + 1000, request, about=about)

    def start(self, number: int, prepared: Prepared) -> None:
        request: UrlRequest = prepared.what
        self.sender.start(number, request.path, request.body)
        self._started[number] = prepared

    def wait(self, timeout: float) -> Sequence[int]:
        return self.sender.wait(timeout)

    def wake(self) -> None:
        if self._sender is not None:
            self._sender.wake()

    def take(self, number: int) -> Result:
        prepared = self._started.pop(number)
        try:
            status, data = self.sender.take(number)
            if status != 200:
                raise self.sender.refusal(status, data)
            answer = answer_in(data)
            used = used_of(answer)
            values = self._values(number, prepared.about, self._answer(number, prepared.what, answer))
        except Refused as e:
            raise self._failed(number, prepared.about, e) from e
        return Result(values, used.prompt or 0, used.cached, used.new or 0)

    def withdraw(self) -> Sequence[int]:
        if self._sender is None:  # not yet open, or lost
            return []
        found = self._sender.withdraw()
        for number in found:
            del self._started[number]
        return found


def encoded(body: Mapping[str, Any]) -> bytes:
    """As JSON. Raises InvalidRequest."""
    try:
        return _encoded(body).encode()
    except (ValueError, TypeError, RecursionError) as e:
        raise InvalidRequest(f"The row cannot be said in JSON: {e}.") from None


def signed(seed: int) -> int:
    """As OpenAI has it, and vLLM: 64 bits with a sign. Servers of ours take them without."""
    return (seed + 2**63) % 2**64 - 2**63


def begins(prompt: Any) -> tuple[Any, int]:
    """How a prompt begins, for those with which it shares that; and about how many tokens it has."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return blocks_of(prompt[: BLOCKS * TOKENS], TOKENS) if are_ids(prompt) else (), len(prompt)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=str)
    most = min(len(text) // LETTERS, BLOCKS) * LETTERS
    return tuple([text[at : at + LETTERS] for at in range(0, most, LETTERS)]), len(text) // LETTERS_A_TOKEN


def are_ids(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in prompt)
    )


def _models(data: bytes) -> dict[str, Mapping[str, Any]]:
    """By their names; none if that cannot be read."""
    try:
        found = json.loads(data)["data"]
        return {m["id"]: m for m in found if isinstance(m["id"], str)}
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
