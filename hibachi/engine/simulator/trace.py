"""Traces: when requests came, and how many tokens they brought and got. Read from files, or made up."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hibachi.errors import InvalidTrace

Numbers: TypeAlias = "np.ndarray[Any, Any]"
Keys: TypeAlias = Sequence[Hashable]

PICOSECONDS = 10**12  # of a second: the unit of all times in the simulator, so that sums are exact

# Names of columns, in lower case, of the traces that we know; the first is what messages say.
_COLUMNS = {
    "arrival": ("timestamp", "arrival", "arrived_at", "arrival_time"),
    "prompt": ("contexttokens", "prompt_tokens", "input_length", "input_tokens", "num_prefill_tokens"),
    "output": ("generatedtokens", "output_tokens", "output_length", "num_decode_tokens"),
    "tenant": ("tenant", "user"),
    "priority": ("priority",),
}
_SHOWN = {"arrival": "TIMESTAMP", "prompt": "ContextTokens", "output": "GeneratedTokens"}
_MS = PICOSECONDS // 1000


@dataclass(frozen=True, eq=False)
class Trace:
    """n requests in order of arrival.

    arrival: int64 [n], picoseconds from the first. prompt, output: int64 [n], tokens. priority: int64 [n].
    tenant: names, or None. keys: for each request the identity of each block of `key_tokens` tokens of its prompt, from
    the first one on, as far as other requests may share them; None means nothing is known about what the prompts hold.
    group: int64 [n]: requests of two groups share nothing, whatever their keys; None means there is one group.
    """

    name: str
    arrival: Numbers
    prompt: Numbers
    output: Numbers
    priority: Numbers
    tenant: list[str] | None = None
    keys: list[Keys] | None = None
    key_tokens: int = 0
    group: Numbers | None = None

    def __len__(self) -> int:
        return len(self.arrival)

    def head(self, n: int) -> Trace:
        """Its first n requests."""
        part: Any = {f: getattr(self, f)[:n] for f in ("arrival", "prompt", "output", "priority")}
        part |= {f: own[:n] for f in ("tenant", "keys", "group") if (own := getattr(self, f)) is not None}
        return replace(self, **part)

    def faster(self, factor: float) -> Trace:
        """The same requests, coming `factor` times as fast."""
        return replace(self, arrival=np.rint(self.arrival / factor).astype(np.int64))

    def at_once(self) -> Trace:
        """The same requests, all of them there at the start."""
        return replace(self, arrival=np.zeros_like(self.arrival))

    def repeated(self, times: int) -> Trace:
        """The trace `times` in a row. A repeated prompt shares its keys with the first."""
        n = len(self)
        pause = int(self.arrival[-1]) // max(n - 1, 1)  # a mean interval between two rounds
        offset = np.repeat(np.arange(times, dtype=np.int64) * (int(self.arrival[-1]) + pause), n)
        part: Any = {f: np.tile(getattr(self, f), times) for f in ("prompt", "output", "priority")}
        part |= {f: own * times for f in ("tenant", "keys") if (own := getattr(self, f)) is not None}
        return replace(self, arrival=np.tile(self.arrival, times) + offset, **part)

    def copies(self, n: int, seed: int = 0) -> Trace:
        """As from n times as many people: so many copies at the same time, each a group of its own, which begin at
        random within a minute.
        """
        late = np.random.default_rng(seed).integers(0, 60 * PICOSECONDS, n)
        at = (self.arrival + late[:, None] - late.min()).ravel()
        order = np.argsort(at, kind="stable")
        which = order % len(self)
        part: Any = {f: getattr(self, f)[which] for f in ("prompt", "output", "priority")}
        part |= {
            f: [own[i] for i in which.tolist()] for f in ("tenant", "keys") if (own := getattr(self, f)) is not None
        }
        return replace(self, arrival=at[order], group=order // len(self), **part)

    def shared_by(self, tenants: int, priorities: int = 1, seed: int = 0) -> Trace:
        """The same requests handed out at random to tenants, the k-th of whom sends 1/k as many as the first, and to
        equally many of each priority (0 to priorities - 1)."""
        rng = np.random.default_rng(seed)
        weight = 1 / np.arange(1, tenants + 1)
        who = rng.choice(tenants, len(self), p=weight / weight.sum())
        names = [f"tenant {i + 1}" for i in range(tenants)]
        tenant = [names[i] for i in who.tolist()] if tenants > 1 else self.tenant
        priority = rng.integers(0, priorities, len(self)) if priorities > 1 else self.priority
        return replace(self, tenant=tenant, priority=priority)

    def block_keys(self, block_size: int) -> Callable[[int], list[Hashable] | None]:
        """request -> the identity of each full block of its prompt. Raises InvalidTrace if blocks do not fit."""
        keys = self.keys
        if keys is None:
            return lambda i: None
        if self.key_tokens % block_size:
            raise InvalidTrace(
                f"The trace {self.name} says which pieces of {self.key_tokens} tokens requests share: expected a block "
                f"size that divides {self.key_tokens}; got {block_size}."
            )
        pieces = self.key_tokens // block_size
        full = (self.prompt // block_size).tolist()

        def of(i: int) -> list[Hashable]:
            own = keys[i]
            if pieces > 1:
                own = [(key, j) for key in own for j in range(pieces)]
            own = list(own[: full[i]])
            if self.group is not None and own:
                own[0] = (int(self.group[i]), own[0])
            return own

        return of


def read_trace(path: str | Path) -> Trace:
    """A trace from a file.

    .csv: a header, then a line for each request; columns TIMESTAMP (seconds, or date and time), ContextTokens and
    GeneratedTokens as in Azure's traces, or prompt_tokens and output_tokens; `tenant` and `priority` may be there.
    .jsonl: an object for each request with timestamp (milliseconds), input_length, output_length and, if prefixes are
    known, hash_ids: a number for each piece of 512 tokens of the prompt, as in Mooncake's traces.
    Requests need not be in order. Raises InvalidTrace, OSError.
    """
    path = Path(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            if path.suffix == ".csv":
                return _from_csv(path.name, csv.reader(file))
            if path.suffix in (".jsonl", ".json"):
                return _from_jsonl(path.name, enumerate(file, 1))
        except UnicodeDecodeError as e:
            raise InvalidTrace(f"{path}: expected UTF-8; got something else ({e.reason}).") from e
    raise InvalidTrace(f"{path}: expected a file that ends in .csv or .jsonl; got {path.suffix!r}.")


def _from_csv(name: str, lines: Any) -> Trace:
    header = [h.strip().lower() for h in next(lines, [])]
    place = {}
    for what, names in _COLUMNS.items():
        found = [header.index(n) for n in names if n in header]
        if found:
            place[what] = found[0]
        elif what in _SHOWN:
            raise InvalidTrace(
                f"{name}: expected a column {_SHOWN[what]} (or {', '.join(names[1:])}); got "
                f"{', '.join(header) or 'an empty file'}. Rename a column."
            )
    rows: Any = {what: [] for what in place}
    for line in lines:
        if not line:
            continue
        where = f"{name}, line {lines.line_num}"
        if len(line) < len(header):
            raise InvalidTrace(f"{where}: expected {len(header)} columns; got {len(line)}.")
        rows["arrival"].append(_time(line[place["arrival"]], where))
        for what in ("prompt", "output"):
            rows[what].append(_count(line[place[what]], _SHOWN[what], where))
        if "tenant" in place:
            rows["tenant"].append(line[place["tenant"]])
        if "priority" in place:
            rows["priority"].append(_int(line[place["priority"]], "priority", where))
    return _trace(name, **rows)


def _from_jsonl(name: str, lines: Iterator[tuple[int, str]]) -> Trace:
    arrival, prompt, output = [], [], []
    keys: list[Keys] = []
    for number, line in lines:
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as e:
            raise InvalidTrace(f"{where}: expected a JSON object; got {line.strip()[:60]!r} ({e}).") from e
        if not isinstance(record, dict):
            raise InvalidTrace(f"{where}: expected a JSON object; got {line.strip()[:60]!r}.")
        for field in ("timestamp", "input_length", "output_length"):
            if field not in record:
                raise InvalidTrace(f"{where}: expected a field {field}; got {', '.join(record) or 'none'}.")
        arrival.append(_scaled(record["timestamp"], _MS, "milliseconds", where))
        prompt.append(_count(record["input_length"], "input_length", where))
        output.append(_count(record["output_length"], "output_length", where))
        ids = record.get("hash_ids", [])
        if not isinstance(ids, list) or not all(isinstance(i, (int, str)) for i in ids):
            raise InvalidTrace(f"{where}: hash_ids must be a list of numbers; got {str(ids)[:60]}.")
        keys.append(tuple(ids))
    known = any(keys)
    return _trace(name, arrival, prompt, output, keys=keys if known else None, key_tokens=512 if known else 0)


def _trace(
    name: str,
    arrival: list[int],
    prompt: list[int],
    output: list[int],
    priority: list[int] | None = None,
    tenant: list[str] | None = None,
    keys: list[Keys] | None = None,
    key_tokens: int = 0,
) -> Trace:
    if not arrival:
        raise InvalidTrace(f"{name}: expected at least one request; got none.")
    first = min(arrival)
    at = np.array([t - first for t in arrival], np.int64)
    order = np.argsort(at, kind="stable")
    listed = order.tolist()
    return Trace(
        name,
        at[order],
        np.array(prompt, np.int64)[order],
        np.array(output, np.int64)[order],
        np.zeros(len(at), np.int64) if priority is None else np.array(priority, np.int64)[order],
        None if tenant is None else [tenant[i] for i in listed],
        None if keys is None else [keys[i] for i in listed],
        key_tokens,
    )


def _time(text: str, where: str) -> int:
    try:
        return _scaled(float(text), PICOSECONDS, "seconds", where)
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidTrace(f"{where}: expected seconds, or a date and a time; got {text!r}.") from None
    since = at.replace(tzinfo=at.tzinfo or UTC) - datetime(2000, 1, 1, tzinfo=UTC)
    return ((since.days * 86400 + since.seconds) * 10**6 + since.microseconds) * 10**6


def _scaled(value: Any, unit: int, called: str, where: str) -> int:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidTrace(f"{where}: the time must be a number of {called}; got {value!r}.")
    return round(value * unit)


def _int(value: Any, called: str, where: str) -> int:
    try:
        number = float(value)
        if number != int(number):
            raise ValueError
        return int(number)
    except (TypeError, ValueError, OverflowError):
        raise InvalidTrace(f"{where}: {called} must be an integer; got {value!r}.") from None


def _count(value: Any, called: str, where: str) -> int:
    count = _int(value, called, where)
    if not 0 < count < 2**31:
        raise InvalidTrace(f"{where}: {called} must be from 1 to {2**31 - 1}; got {value!r}.")
    return count


def synthetic(
    n: int,
    *,
    rate: float = 5.0,
    bursts: float = 1.0,
    prompt: float = 500.0,
    output: float = 150.0,
    longest: int = 8192,
    shared: float = 0.5,
    prefixes: int = 8,
    tenants: int = 4,
    priorities: int = 2,
    seed: int = 0,
) -> Trace:
    """n made-up requests; the same seed gives the same ones.

    rate: requests a second, on average. bursts: 1 is a Poisson process; b > 1 has its requests in groups of b on
    average, which come together. prompt, output: medians of log-normal lengths (sigma 1.0 and 0.8), cut at `longest`.
    shared: so many of the requests begin with one of `prefixes` common texts of 64 to 1,024 tokens, those of low number
    more often. tenants, priorities: as `Trace.shared_by`. Raises InvalidTrace.
    """
    for name, value, least in (("n", n, 1), ("bursts", bursts, 1), ("prefixes", prefixes, 1), ("tenants", tenants, 1)):
        if value < least:
            raise InvalidTrace(f"{name} must be at least {least}; got {value}.")
    if not rate > 0 or not 0 <= shared <= 1:
        raise InvalidTrace(f"rate must be above 0 and shared from 0 to 1; got rate={rate}, shared={shared}.")
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(bursts / rate, n) * (rng.random(n) < 1 / bursts)
    at = np.rint(np.cumsum(gaps) * PICOSECONDS).astype(np.int64)
    own = np.clip(rng.lognormal(math.log(prompt), 1.0, n), 1, longest).astype(np.int64)
    out = np.clip(rng.lognormal(math.log(output), 0.8, n), 1, longest).astype(np.int64)
    length = 64 * rng.integers(1, 17, prefixes)
    weight = 1 / np.arange(1, prefixes + 1)
    which = np.where(rng.random(n) < shared, rng.choice(prefixes, n, p=weight / weight.sum()), -1)
    common = np.where(which >= 0, length[which], 0)
    texts: list[Keys] = [tuple((p, j) for j in range(int(length[p]) // 64)) for p in range(prefixes)]
    keys = [texts[p] if p >= 0 else () for p in which.tolist()]
    made = Trace(f"synthetic-{n}", at - at[0], own + common, out, np.zeros(n, np.int64), None, keys, 64)
    return made.shared_by(tenants, priorities, seed)
