"""Hostile clients: which requests they send, and how they read what comes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hibachi import SamplingParams, StopRule, Terms

from . import drawn
from .drawn import ARRAYS, FIELDS, INPUTS, ODD, PREDICATES, PROCESSORS, PROMPTS, RUN, SALTS, STOP, WORDS
from .hostile import FAULTS
from .places import Innocent, Place
from .watch import short

PATIENCE = 60.0  # seconds for a thread that must come back


# ---- hostile requests ------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """A call of `run`, `stream` or `generate`, and how its stream is read."""

    how: str
    values: dict[str, Any]  # of the call; "params" and "terms" are what they are made of, or what stands for them
    read: str
    said: str  # in words
    fault: str | None = None  # what the model does, by a token of its prompt

    @property
    def streams(self) -> bool:
        return self.how in ("run", "stream")

    def send(self, place: Place) -> Any:
        """Raises what the call raises, or what making its parameters raises."""
        values = dict(self.values)
        for name, kind in (("params", SamplingParams), ("terms", Terms), ("stop_rule", StopRule)):
            if isinstance(values.get(name), _Fields):
                values[name] = kind(**values[name])
        if self.how == "run":
            return place.engine.run(**values)
        prompt = values.pop("prompt")
        if (embeds := values.pop("prompt_embeds", None)) is not None:
            prompt = {"prompt_embeds": embeds}
        values = {name: values[name] for name in ("params", "terms") if name in values}
        if self.how == "stream":
            return place.texts.stream(prompt, **values)
        if self.how == "generate":
            return place.texts.generate([prompt, [1, 2]] if isinstance(prompt, list) else prompt, **values)
        return asyncio.run(place.texts.agenerate(prompt, **values))


class _Fields(dict[str, Any]):
    """The fields of SamplingParams, Terms or StopRule, before one is made."""


def once(place: Place, rng: random.Random) -> deque[tuple[str, Any]]:
    """What a round tries before it draws: each fault, prompt, processor and predicate, each value of each field."""
    faults = sorted(FAULTS, key=lambda name: "coroutine" not in name)  # those first: the engine gets an event loop
    items: list[tuple[str, Any]] = [("fault", name) for name in faults]
    items += [("prompt", name) for name in PROMPTS]
    items += [("processor", each) for each in PROCESSORS if place.sampled]
    items += [("predicate", each) for each in PREDICATES if not place.remote]
    if place.declares:
        items += [("array", (name, key)) for name in place.inputs([1]) for key in ARRAYS]
        items += [("inputs", each) for each in INPUTS]
    kinds = [Terms, *([SamplingParams] if place.sampled else []), *([] if place.remote else [StopRule])]
    values = [("field", (kind, n, value)) for kind in kinds for n, given in FIELDS[kind].items() for value in given]
    return deque(items + rng.sample(values, len(values)))


class Draw:
    """Draws the requests of one client.

    first: what is to be tried once, by whichever client comes first. only: draw nothing whose description lacks this
    pattern (for bisecting).
    """

    def __init__(
        self, place: Place, rng: random.Random, own: list[Innocent], first: deque[tuple[str, Any]], only: str | None
    ) -> None:
        self.place, self.rng, self.innocents, self.first = place, rng, own, first
        self.only = re.compile(only) if only else None
        self.embeds = drawn.embeds(place.embed_size) if place.embed_size else {}

    def __call__(self) -> Request:
        while True:
            request = self._draw()
            if self.only is None or self.only.search(request.said):
                return request

    def _draw(self) -> Request:
        rng, place = self.rng, self.place
        kind, given = None, None
        with contextlib.suppress(IndexError):
            kind, given = self.first.popleft()
        ways = ["run"] if place.texts is None else ["stream", "generate", "agenerate"] if place.remote else None
        how = rng.choice(ways or ["run", "run", "stream", "generate", "agenerate"])
        if kind == "predicate" or (kind == "field" and given[0] is StopRule):
            how = "run"
        values, read = {}, rng.choice(list(READS))
        values["prompt"], said, fault = self._prompt(kind, given)
        if place.sampled:
            params = _Fields(max_tokens=rng.choice((1, 3, 8, 20)), temperature=rng.choice((0, 1.0)))
            if (
                fault is not None and not place.frames and rng.random() < 0.4
            ):  # so that it is hostile in later steps as well
                params["allowed_token_ids"] = [self._trigger(fault)]
            if kind == "processor":
                params["logits_processors"] = [given]
            values["params"] = params
        else:
            values["max_tokens"] = rng.choice((1, 3, 8, 20))
        if place.declares:
            values["inputs"] = self._inputs(kind, given, fault)
        values["terms"] = terms = _Fields(tenant=rng.choice("abc"), cache_salt=rng.choice(SALTS))
        if kind == "predicate":
            values["stop_rule"] = given
        if kind == "field":
            of, name, value = given
            where = {SamplingParams: "params", Terms: "terms", StopRule: "stop_rule"}[of]
            values.setdefault(where, _Fields())[name] = value
        if kind is None:
            said = self._vary(how, values, said)
        if read == "never":  # so that it ends
            values["terms"] = terms
            terms["timeout"] = rng.choice((0.01, 0.1, 0.5))
        words = [f"{name}={_named(value)}" for name, value in values.items() if not name.startswith("prompt")]
        words.append(f"read: {read}" if how in ("run", "stream") else "")
        return Request(how, values, read, "; ".join([how, said, *words]), None if "prompt_embeds" in values else fault)

    def _prompt(self, kind: str | None, given: Any) -> tuple[Any, str, str | None]:
        """A prompt, in words, and the fault that a token of it brings."""
        rng, place = self.rng, self.place
        luck = rng.random()
        if kind == "prompt" or (kind is None and luck < 0.2):
            name = given if kind == "prompt" else rng.choice(list(PROMPTS))
            return PROMPTS[name], f"prompt: {name}", None
        ids = rng.choice(self.innocents).ids
        ids = ids[: rng.randrange(len(ids) + 1)] + [rng.randrange(WORDS) for _ in range(rng.randrange(1, 4))]
        fault = None
        if kind == "fault" or (kind in (None, "field") and luck < 0.85):
            fault = given if kind == "fault" else rng.choice(list(FAULTS))
            ids.insert(rng.randrange(len(ids) + 1), self._trigger(fault))
        return (
            ids if place.texts is not None else place.prompt(ids),
            f"{len(ids)} tokens, model {fault or 'honest'}",
            fault,
        )

    def _inputs(self, kind: str | None, given: Any, fault: str | None) -> Any:
        """What comes with the prompt; of an encoder's, the source may bring the fault."""
        rng = self.rng
        if kind == "inputs" or (kind is None and rng.random() < 0.03):
            return given if kind == "inputs" else rng.choice(INPUTS)
        inputs = self.place.inputs(rng.choice(self.innocents).ids)
        if fault is not None and "source" in inputs and rng.random() < 0.5:
            inputs["source"][-1] = self._trigger(fault)
        if kind == "array" or (kind is None and rng.random() < 0.2):
            name, array = given if kind == "array" else (rng.choice(list(inputs)), rng.choice(list(ARRAYS)))
            inputs[name] = ARRAYS[array]
        return inputs

    def _trigger(self, fault: str) -> int:
        return self.place.triggers[list(FAULTS).index(fault)]

    def _vary(self, how: str, values: dict[str, Any], said: str) -> str:
        """Change some arguments and fields; returns the prompt in words."""
        rng = self.rng
        if self.place.sampled:
            self._change(values["params"], SamplingParams, rng.choice((0, 0, 1, 1, 2, 3)))
        self._change(values["terms"], Terms, rng.choice((0, 0, 1, 2)))
        for name in ("params", "terms"):
            if rng.random() < 0.03:
                values[name] = rng.choice(ODD)
        if how == "run":
            self._arguments(values)
        if self.embeds and rng.random() < 0.06:
            said = rng.choice(list(self.embeds))
            values |= {"prompt": None, "prompt_embeds": self.embeds[said]}
        return said

    def _change(self, fields: _Fields, kind: type, n: int) -> None:
        """Put something unusual, or odd, into n fields."""
        for name in self.rng.sample(list(FIELDS[kind]), min(n, len(FIELDS[kind]))):
            fields[name] = self.rng.choice(ODD if self.rng.random() < 0.3 else FIELDS[kind][name])
        if self.rng.random() < 0.01:
            fields["unknown"] = 1

    def _arguments(self, values: dict[str, Any]) -> None:
        rng = self.rng
        for name in ("max_tokens", "stop_rule", "include_stop", "allowed", "guidance"):
            if rng.random() < 0.15:
                values[name] = rng.choice(ODD if rng.random() < 0.3 else RUN[name])
        if rng.random() < 0.15:
            rule = _Fields()
            self._change(rule, StopRule, rng.choice((1, 2, 3)))
            values["stop_rule"] = rule
        if rng.random() < 0.03:
            values["prompt_embeds"] = rng.choice(ODD)
        if rng.random() < 0.03:  # equal, by its own account, to the rule of an innocent request
            values["stop_rule"] = StopRule((STOP,), drawn.Impostor("says yes"))


def _named(value: Any) -> str:
    if isinstance(value, _Fields):
        return "{" + ", ".join(f"{k}={_named(v)}" for k, v in value.items()) + "}"
    try:
        return short(value)
    except Exception as e:
        return f"a {type(value).__name__} whose repr raises {type(e).__name__}"


# ---- ways to read ----------------------------------------------------------------------------------------------------


def _all(stream: Any, rng: random.Random) -> None:
    for _ in stream:
        pass


def _collect(stream: Any, rng: random.Random) -> None:
    getattr(stream, "tokens", stream).collect()


def _leave(stream: Any, rng: random.Random) -> None:
    end = rng.randrange(5)
    for n, _ in enumerate(stream):
        if n == end:
            break


def _closed_by_another(stream: Any, rng: random.Random) -> None:
    timer = threading.Timer(rng.random() * 0.03, stream.close)
    timer.start()
    try:
        _all(stream, rng)
    finally:
        timer.join(PATIENCE)


def _slowly(stream: Any, rng: random.Random) -> None:
    for _ in stream:
        time.sleep(rng.random() * 0.01)


def _two(stream: Any, rng: random.Random) -> None:
    stream = getattr(stream, "tokens", stream)
    errors: list[BaseException] = []

    def other() -> None:
        try:
            stream.collect()
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    try:
        stream.collect()
    finally:
        thread.join(PATIENCE)
    for e in errors:
        raise e


async def _async_all(stream: Any, rng: random.Random) -> None:
    async for _ in stream:
        pass


async def _async_leave(stream: Any, rng: random.Random) -> None:
    end = rng.randrange(5)
    n = 0
    async for _ in stream:
        if n == end:
            break
        n += 1


async def _async_late(stream: Any, rng: random.Random) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_async_all(stream, rng), rng.random() * 0.03)


async def _async_cancelled(stream: Any, rng: random.Random) -> None:
    task = asyncio.ensure_future(_async_all(stream, rng))
    await asyncio.sleep(rng.random() * 0.02)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _in_asyncio(read: Callable[[Any, random.Random], Any]) -> Callable[[Any, random.Random], None]:
    return lambda stream, rng: asyncio.run(read(stream, rng))


READS: dict[str, Callable[[Any, random.Random], None] | None] = {
    "to the end": _all,
    "at once": _collect,
    "leaves": _leave,
    "closed by another thread": _closed_by_another,
    "slowly": _slowly,
    "two threads": _two,
    "asyncio": _in_asyncio(_async_all),
    "asyncio, leaves": _in_asyncio(_async_leave),
    "asyncio, with a limit": _in_asyncio(_async_late),
    "asyncio, cancelled": _in_asyncio(_async_cancelled),
    "dropped": None,
    "dropped in a cycle": None,
    "never": None,
}
