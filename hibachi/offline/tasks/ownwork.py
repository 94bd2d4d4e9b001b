"""Rows for a model of one's own that returns tokens, or one output for each input (feed-forward), in this process or in
one of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.backend.infer import mapped
from hibachi.engine.batchengine import Facts
from hibachi.engine.conversions import to_host
from hibachi.engine.streams.stream import ItemStream
from hibachi.errors import ConfigError, HibachiError, InvalidRequest, shown, text_of
from hibachi.llm.remote.opening import about
from hibachi.llm.tokens import Tokens
from hibachi.offline.files.format import Field
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.columns import Columns, RowReader
from hibachi.offline.tasks.engine_task import EngineTask, judged, why_not
from hibachi.offline.tasks.task import ColumnRows, Prepared, Result, RowError, Told
from hibachi.request import DRAWN, SamplingParams


class _OwnWork(ColumnRows, EngineTask[Tokens]):
    fields: Sequence[Field]
    places: int
    feedforward: bool

    params: Sequence[str] = ()  # of sampling, that have a meaning; before the model is opened, that may have one
    no_params = "this model returns no logits to sample from"

    def __init__(self, columns: Columns, open_: Callable[[], Tokens], dtype: str | None = None) -> None:
        """dtype: of what the model takes, a name that NumPy knows; None means float32 where columns are features, else
        as the numbers are. Raises ConfigError."""
        super().__init__()
        self._columns, self._open, self._dtype = columns, open_, _dtype(dtype, columns)
        self._asking = RowReader(columns, SamplingParams())

    def check(self, columns: Sequence[str] | None) -> None:
        own = self._columns
        own.only(self.params, self.no_params)
        if own.talks:
            raise ConfigError("A chat needs a tokenizer: expected tokens or numbers for this model; got messages.")
        own.check(columns)

    def open(self) -> Told:
        self._serving = self._open()
        facts = self.serving.engine.facts
        self.params = self.taken(facts)
        try:
            self.check(None)  # what the model is may have been learnt since
            if facts.feedforward is not self.feedforward:
                raise ConfigError(
                    f"{facts.model} is {'' if facts.feedforward else 'not '}feed-forward: expected the task "
                    f"{'forward' if facts.feedforward else 'generate'}."
                )
            if facts.inputs:
                raise ConfigError(
                    f"{facts.model} takes inputs beside its tokens ({', '.join(facts.inputs)}), which no column of a "
                    f"file gives. Serve it (`hibachi serve`) and send them to /v1/generate, or call `run`."
                )
        except BaseException:
            self.close()
            raise
        self.places = 2 * facts.limits.rows
        told = {"backend": facts.fingerprint, "dtype": None if self._dtype is None else str(self._dtype)}
        return Told(f"{facts.model}: {about(self.serving)}", told)

    def taken(self, facts: Facts) -> Sequence[str]:
        """Parameters of sampling that have a meaning for this model."""
        return self.params

    def wrong(self, row: Row) -> str | None:
        return why_not(row, lambda: self._input(row))

    def _input(self, row: Row) -> tuple[HostArray, SamplingParams]:
        asked = self._asking.read(row)
        return numbers(asked.prompt, self._dtype), asked.params

    def _items(self, number: int) -> tuple[list[Any], int]:
        """All that came for a row, and the length of its prompt."""
        started: tuple[ItemStream[Any], int] = self._started.pop(number)
        stream, n = started
        self._watched.drop(number)
        with judged():
            return [mapped(lambda _, array: host(array).tolist(), item) for item in stream.collect()], n


class TokenWork(_OwnWork):
    """Tokens after tokens that are arrays. The columns of a result: output, a list of tokens without the one that ended
    it; finish_reason, prompt_tokens, completion_tokens, error."""

    fields: Sequence[Field] = (
        Field("output", "json"),
        Field("finish_reason", "text"),
        Field("prompt_tokens", "int"),
        Field("completion_tokens", "int"),
        Field("error", "text"),
    )

    params = ("max_tokens", "seed", *DRAWN, "codebooks")
    feedforward = False

    def taken(self, facts: Facts) -> Sequence[str]:
        if facts.codebooks is not None:
            return self.params
        return ("max_tokens", "seed") if facts.seeded else ("max_tokens",)

    def prepare(self, row: Row) -> Prepared:
        with judged():
            prompt, params = self._input(row)
            if not prompt.ndim or not len(prompt):
                raise InvalidRequest(
                    f"This model takes tokens: expected a list with at least one; got {shown(prompt.tolist())}."
                )
        limit = params.max_tokens
        return Prepared((), len(prompt) + (limit or 0), row.size + 500 + prompt.nbytes, (prompt, params))

    def start(self, number: int, prepared: Prepared) -> None:
        prompt, params = prepared.what
        limit, drawn = params.max_tokens, params if "seed" in self.params else None
        with judged():
            stream = self.serving.submit(prompt, params=drawn, max_tokens=limit, include_stop=False)
        self._started[number] = stream, len(prompt)
        self._watched.add(number, [stream])

    def take(self, number: int) -> Result:
        stream = self._started[number][0]
        items, n = self._items(number)
        values = {
            "output": items,
            "finish_reason": str(stream.finish_reason),
            "prompt_tokens": n,
            "completion_tokens": len(items),
        }
        return Result(values, n, 0, len(items))


class ForwardWork(_OwnWork):
    """One output for each input. The columns of a result: output, a number or a list of them; error."""

    fields: Sequence[Field] = (Field("output", "json"), Field("error", "text"))
    feedforward = True

    def prepare(self, row: Row) -> Prepared:
        with judged():
            given, _ = self._input(row)
        return Prepared((), 0, row.size + 500 + given.nbytes, given)

    def start(self, number: int, prepared: Prepared) -> None:
        with judged():
            stream = self.serving.submit(prepared.what)
        self._started[number] = stream, 0
        self._watched.add(number, [stream])

    def take(self, number: int) -> Result:
        (output,), _ = self._items(number)
        return Result({"output": output})


def numbers(given: Any, dtype: np.dtype[Any] | None = None) -> HostArray:
    """Of numbers, or lists of them, perhaps in a text as JSON. dtype: None means int64, or float32 if any is not whole.

    Raises InvalidRequest.
    """
    try:
        found = np.asarray(json.loads(given) if isinstance(given, str) else given)
    except (ValueError, RecursionError, OverflowError):
        raise InvalidRequest(f"Expected numbers, or lists of equal length of them; got {shown(given)}.") from None
    if found.dtype.kind not in "iubf":
        raise InvalidRequest(f"Expected numbers, or lists of them; got {shown(given)}.")
    if dtype is None:
        dtype = np.dtype(np.float32 if found.dtype.kind == "f" else np.int64)
    with np.errstate(over="ignore", invalid="ignore"):
        made = found.astype(dtype)
    whole = made.dtype.kind in "iu"
    if np.any(made != found) if whole else np.any(np.isinf(made) & ~np.isinf(found.astype(np.float64))):
        raise InvalidRequest(f"Expected numbers that {dtype} can hold (see --dtype); got {shown(given)}.")
    return made


def _dtype(name: str | None, columns: Columns) -> np.dtype[Any] | None:
    if name is None:
        return np.dtype(np.float32) if columns.features else None
    try:
        found = np.dtype(name)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "iuf":
        raise ConfigError(f"--dtype {name}: expected a dtype of numbers that NumPy has, such as float32 or int64.")
    return found


def host(item: Any) -> Any:
    """As an array of NumPy's that JSON has as lists of numbers or texts. Raises RowError."""
    try:
        found = to_host(item)
    except HibachiError as e:
        raise RowError(f"What the model returned cannot be written: {text_of(e)}.") from e
    if found.dtype.kind not in "biufU" and not found.dtype.name.startswith(("bfloat", "float")):
        raise RowError(f"What the model returned cannot be written: expected numbers; got the dtype {found.dtype}.")
    return found.astype(np.float64) if found.dtype.kind == "f" else found  # a long double is no float in a list
