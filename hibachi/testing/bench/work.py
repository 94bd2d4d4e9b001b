"""Requests of fixed prompts and lengths, from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hibachi.errors import ConfigError

_FIELDS = {"id", "arrival", "prompt", "max_tokens"}


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """What is asked of an engine. arrival: after the start, in means of the time between two; 0 means at the start."""

    id: int
    arrival: float
    prompt: list[int]
    max_tokens: int


def read(path: str | Path, vocab_size: int | None = None) -> list[TimedRequest]:
    """From JSON lines, in the order of arrival. Raises ConfigError with the line that is wrong, OSError."""
    found: list[TimedRequest] = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            request = TimedRequest(**raw)
            fault = _fault(request, vocab_size)
        except (ValueError, TypeError):
            fault = f"an object with {', '.join(sorted(_FIELDS))}"
        if fault:
            raise ConfigError(f"{path}, line {number}: expected {fault}; got {line[:80]}.")
        found.append(request)
    if not found:
        raise ConfigError(
            f'{path} holds no request: expected lines like {{"id": 0, "arrival": 0, "prompt": [5], "max_tokens": 9}}.'
        )
    return sorted(found, key=lambda r: r.arrival)


def _fault(r: TimedRequest, vocab_size: int | None) -> str | None:
    """What should have been there."""
    if not isinstance(r.prompt, list) or not r.prompt or not all(type(t) is int and t >= 0 for t in r.prompt):
        return "prompt: a list of token ids, at least one"
    if vocab_size is not None and max(r.prompt) >= vocab_size:
        return f"token ids below {vocab_size}, the model's vocabulary"
    if type(r.max_tokens) is not int or r.max_tokens < 1:
        return "max_tokens: an integer >= 1"
    if not isinstance(r.arrival, (int, float)) or isinstance(r.arrival, bool) or not 0 <= r.arrival < float("inf"):
        return "arrival: a number >= 0"
    return None
