"""Rows for a model of one's own that returns tokens, or one output for each input (feed-forward), in this process or in
one of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.backend.infer import mapped
from hibachi.engine.conversions import to_host
from hibachi.errors import ConfigError, HibachiError, InvalidRequest, shown, text_of
from hibachi.llm.holding import about
from hibachi.llm.tokens import Tokens
from hibachi.offline.batch import Batch
from hibachi.offline.files.format import Field
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.columns import ColumnRows, Columns, RowReader
from hibachi.offline.tasks.engine_task import EngineTask
from hibachi.offline.tasks.task import Prepared, Result, RowError, Told
from hibachi.request import DRAWN, SamplingParams

OUTPUT = (Field("output", "json"), Field("error", "text"))
TOKENS = (
    Field("output", "json"),
    Field("finish_reason", "text"),
    Field("prompt_tokens", "int"),
    Field("completion_tokens", "int"),
    Field("error", "text"),
)
PARAMS = ("max_tokens", "seed", *DRAWN, "codebooks")  # that may have a meaning, as long as the model is not opened


class ArrayTask(ColumnRows, EngineTask[Tokens]):
    """Tokens after tokens that are arrays. The columns of a result: output, a list of tokens without the one that ended
    it; finish_reason, prompt_tokens, completion_tokens, error. For the task forward, one output for each input: output,
    a number or a list of them; error.
    """

    places: int

    def __init__(self, batch: Batch, open_: Callable[[], Tokens]) -> None:
        """The dtype of what the model takes, if the settings name none, is float32 where columns are features, else as
        the numbers are. Raises ConfigError."""
        super().__init__()
        self._columns, self._open = batch.columns, open_
        self._dtype = _dtype(batch.settings.dtype, batch.columns)
        self._reader = RowReader(batch.columns, SamplingParams())
        self._forward = batch.task == "forward"
        self.fields: Sequence[Field] = OUTPUT if self._forward else TOKENS
        self._params: Sequence[str] = () if self._forward else PARAMS

    def check(self, columns: Sequence[str] | None) -> None:
        self._columns.only(self._params, "this model returns no logits of single ids")
        if self._columns.talks:
            raise ConfigError("A chat needs a tokenizer: expected tokens or numbers for this model; got messages.")
        super().check(columns)

    def open(self) -> Told:
        self._serving = self._open()
        facts = self._serving.engine.facts
        if not self._forward and facts.codebooks is None:
            self._params = ("max_tokens", "seed") if facts.seeded else ("max_tokens",)
        try:
            self.check(None)  # what the model is may have been learnt since
            if facts.feedforward is not self._forward:
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
        return Told(f"{facts.model}: {about(self._serving)}", told)

    def _judge(self, row: Row) -> tuple[HostArray, SamplingParams]:
        asked = self._reader.read(row)
        return numbers(asked.prompt, self._dtype), asked.params

    def _read(self, row: Row) -> Prepared:
        given, params = self._judge(row)
        size, longest = row.size + 500 + given.nbytes, 0
        if not self._forward:
            if not given.ndim or not len(given):
                raise InvalidRequest(
                    f"This model takes tokens: expected a list with at least one; got {shown(given.tolist())}."
                )
            longest = len(given) + (params.max_tokens or 0)
        return Prepared((), longest, size, (given, params))

    def start(self, number: int, prepared: Prepared) -> None:
        given, params = prepared.what
        with self._judging(number, prepared.about):
            if self._forward:
                stream = self.serving.submit(given)
            else:
                drawn = params if "seed" in self._params else None
                stream = self.serving.submit(given, params=drawn, max_tokens=params.max_tokens, include_stop=False)
        self._watch(number, prepared, [stream])

    def take(self, number: int) -> Result:
        prepared, (stream,) = self._started.pop(number)
        with self._judging(number, prepared.about):
            items = [mapped(lambda _, array: host(array).tolist(), item) for item in stream.collect()]
        if self._forward:
            return Result({"output": items[0]})
        n = len(prepared.what[0])
        values = {
            "output": items,
            "finish_reason": str(stream.finish_reason),
            "prompt_tokens": n,
            "completion_tokens": len(items),
        }
        return Result(values, n, 0, len(items))


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
