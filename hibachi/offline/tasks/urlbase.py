"""What rows that a running server computes have in common: requests out, answers in, a server that comes and goes."""

from __future__ import annotations

import base64
import binascii
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hibachi.engine.scheduler.compose import blocks_of
from hibachi.errors import ConfigError, EngineFailed, InvalidRequest, shown
from hibachi.llm.dialects.errors import SERVER, Refused
from hibachi.offline.files import jsonl
from hibachi.offline.files.format import Field
from hibachi.offline.tasks.sender import DENIED, MAY_PASS, Patience, Sender, denied
from hibachi.offline.tasks.task import Prepared, Result, RowError, Told
from hibachi.server.web.client import BadAnswer, Unreachable, Url

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
LETTERS, TOKENS, BLOCKS = 64, 16, 256  # of a block, and blocks of a prompt that are compared with others'
LETTERS_A_TOKEN = 4  # about
_encoded = json.JSONEncoder(allow_nan=False, default=jsonl.plain, separators=(",", ":")).encode
Answer = dict[str, Any]


class Asks(Protocol):
    """What of a `Batch` concerns a server."""

    @property
    def url(self) -> str | None: ...
    @property
    def url_model(self) -> str | None: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def concurrency(self) -> int: ...
    @property
    def request_timeout(self) -> float: ...


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """Where to send, and as whom. model: None means the first that the server names. places: requests at a time."""

    url: Url
    model: str | None
    key: str | None = field(repr=False)
    places: int
    patience: Patience

    @classmethod
    def of(cls, batch: Asks, patience: Patience) -> RemoteServer:
        """Raises ConfigError."""
        if batch.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1 request at a time; got {batch.concurrency}.")
        if not 0 < batch.request_timeout < math.inf:
            raise ConfigError(f"The request timeout must be a number of seconds above 0; got {batch.request_timeout}.")
        return cls(Url.of(batch.url or ""), batch.url_model, batch.api_key, batch.concurrency, patience)


@dataclass(slots=True)
class ReadyRequest:
    """A request that can be sent. count: continuations that it wants. about: what else its kind of work keeps."""

    path: str
    body: bytes
    count: int = 1
    about: Any = None


class _Away(Exception):
    """The server does not say what it has. down: nothing speaks HTTP there."""

    def __init__(self, words: str, *, down: bool = False) -> None:
        super().__init__(words)
        self.down = down


class UrlWork:
    """What all kinds of rows share: requests out, answers in, a server that comes and goes."""

    fields: Sequence[Field] = ()

    def __init__(self, server: RemoteServer) -> None:
        self._server, self.places = server, server.places
        self._ready: dict[int, ReadyRequest] = {}
        self._sender: Sender | None = None
        self._facts: dict[str, Any] | None = None
        self._model = server.model or ""

    # ---- of each kind ------------------------------------------------------------------------------------------------

    def result(self, number: int, ready: ReadyRequest, answer: Answer) -> Result:
        """Raises Refused for an answer that is none."""
        raise NotImplementedError

    def failed(self, number: int, ready: ReadyRequest, why: Refused) -> RowError:
        return RowError(str(why))

    # ---- the server --------------------------------------------------------------------------------------------------

    def open(self) -> Told:
        """Ask what it serves. Raises ConfigError; EngineFailed if it was there before and is away for long."""
        server = self._server
        sender = Sender(server.url, server.key, server.patience)
        try:
            facts = self._reached(sender)
        except BaseException:
            sender.close()
            raise
        if self._facts is not None and facts != self._facts:
            sender.close()
            raise ConfigError(f"{server.url} was away, and came back as another: {self._facts} before, now {facts}.")
        self._sender, self._facts, self._model = sender, facts, facts["model"]
        return Told(f"{self._model} at {server.url}", facts)

    def _reached(self, sender: Sender) -> dict[str, Any]:
        first, pause = self._facts is None, 0.25
        end = time.monotonic() + self._server.patience.back
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
        url, wanted = self._server.url, self._server.model
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
        self._ready.clear()
        self.close()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    # ---- rows --------------------------------------------------------------------------------------------------------

    def lost(self, number: int, prepared: Prepared, message: str) -> RowError:
        why = Refused(message, status=500, kind=SERVER, code="engine_failed")
        return self.failed(number, prepared.what, why)

    def start(self, number: int, prepared: Prepared) -> None:
        ready: ReadyRequest = prepared.what
        self.sender.start(number, ready.path, ready.body)
        self._ready[number] = ready

    def wait(self, timeout: float) -> Sequence[int]:
        return self.sender.wait(timeout)

    def wake(self) -> None:
        if self._sender is not None:
            self._sender.wake()

    def take(self, number: int) -> Result:
        ready = self._ready.pop(number)
        try:
            status, data = self.sender.take(number)
            if status != 200:
                raise self.sender.refusal(status, data)
            return self.result(number, ready, _answer(data))
        except Refused as e:
            raise self.failed(number, ready, e) from e

    def withdraw(self) -> Sequence[int]:
        if self._sender is None:  # not yet open, or lost
            return []
        found = self._sender.withdraw()
        for number in found:
            del self._ready[number]
        return found


# ---- what goes out ---------------------------------------------------------------------------------------------------


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


# ---- what comes in ---------------------------------------------------------------------------------------------------


def bad(words: str) -> Refused:
    """An answer with status 200 that is none."""
    return Refused(f"The server's answer cannot be read: {words}.", status=502, kind=SERVER, code="bad_answer")


def _answer(data: bytes) -> Answer:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise bad(f"expected JSON; got {shown(data[:100].decode(errors='replace'))}") from None
    if not isinstance(found, dict):
        raise bad(f"expected an object; got {shown(found)}")
    return found


def choices_of(answer: Answer, count: int | None = None) -> list[Answer]:
    """In their order; None means as many as there are. Raises Refused."""
    found = answer.get("choices")
    if not isinstance(found, list) or not all(isinstance(c, dict) for c in found):
        raise bad(f"expected choices; got {shown(answer.get('error', found))}")
    if count is not None and len(found) != count:
        raise bad(f"expected {count} continuations; got {len(found)}")
    for choice in found:
        if (why := choice.get("finish_reason")) in ("abort", "error"):
            raise Refused(f"The server broke off (finish_reason {why}).", status=502, kind=SERVER, code="broken_off")
        if why is not None and not isinstance(why, str):
            raise bad(f"expected a finish_reason; got {shown(why)}")
    if all(isinstance(c.get("index"), int) for c in found):
        found.sort(key=lambda c: c["index"])
    return found


def text_of(choice: Answer, path: str) -> str:
    message = choice.get("message")
    found = choice.get("text") if path == COMPLETIONS else isinstance(message, dict) and (message.get("content") or "")
    if not isinstance(found, str):
        raise bad(f"expected a text; got {shown(choice)}")
    return found


def vectors_of(answer: Answer) -> list[list[float]]:
    """In their order. Raises Refused."""
    data = answer.get("data")
    if not isinstance(data, list) or not all(isinstance(d, dict) for d in data):
        raise bad(f"expected data, with vectors; got {shown(answer.get('error', data))}")
    if all(isinstance(d.get("index"), int) for d in data):
        data = sorted(data, key=lambda d: d["index"])
    return [_vector(d.get("embedding")) for d in data]


def _vector(given: Any) -> list[float]:
    """Of numbers, or of float32 in base64."""
    try:
        if isinstance(given, str):
            found: list[float] = np.frombuffer(base64.b64decode(given, validate=True), "<f4").astype(float).tolist()
            return found
        if isinstance(given, list):
            return [float(x) for x in given]
    except (ValueError, TypeError, OverflowError, binascii.Error):
        pass
    raise bad(f"expected a vector; got {shown(given)}")


@dataclass(frozen=True, slots=True)
class Used:
    """Tokens; None means the server does not say."""

    prompt: int | None
    new: int | None
    cached: int


def used_of(answer: Answer) -> Used:
    """In OpenAI's words, or in Anthropic's, whose input_tokens are those that the cache did not have."""
    found = answer.get("usage")
    used = found if isinstance(found, dict) else {}
    details = used.get("prompt_tokens_details", used.get("input_tokens_details"))
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    read, made = (_count(used.get(f"cache_{what}_input_tokens")) for what in ("read", "creation"))
    prompt = _count(used.get("prompt_tokens", used.get("input_tokens")))
    new = _count(used.get("completion_tokens", used.get("output_tokens")))
    if prompt is not None:
        prompt += (read or 0) + (made or 0)
    return Used(prompt, new, cached or read or 0)


def _count(given: Any) -> int | None:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given):
        return None
    return int(given) if 0 <= given < 2**53 else None


def _models(data: bytes) -> dict[str, Mapping[str, Any]]:
    """By their names; none if that cannot be read."""
    try:
        found = json.loads(data)["data"]
        return {m["id"]: m for m in found if isinstance(m["id"], str)}
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
