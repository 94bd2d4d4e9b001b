"""What the fuzzer draws from, all of it: values of fields, prompts, exceptions, callables, and ways to read a stream.

`FIELDS` and `RUN` name every field of a request; test_fuzz.py fails where one is missing. What a hostile *model* does
stands in hostile.py, in `FAULTS`.
"""

from __future__ import annotations

import array
import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

import hibachi
from hibachi import Beams, Guidance, SamplingParams, StopRule, StructuredOutputs, Terms, Trie

from ..lib.filters import TRIED

WORDS = 64  # ordinary token ids of our own models; beyond them are those that make a model hostile
STOP = 7  # a stop token of some innocent requests
SALTS = (None, "a", "b", "c")  # of all requests: those with one salt share prefixes, as long as they are in the cache
HUGE, NAN, INF = 10**400, float("nan"), float("inf")
MANY = 10**5
BEAMS = (None, Beams(), Beams(1), Beams(3, -30.0), Beams(512, early_stopping="never"), {"width": 4})
LONG, SURROGATES = "a" * MANY, "\ud800 \udfff"


# ---- exceptions ------------------------------------------------------------------------------------------------------


class Own(BaseException):
    """As a Rust panic is: not an Exception."""


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class MuteBase(BaseException):
    def __str__(self):
        raise Own("no text")

    __repr__ = __str__


class Unpicklable(Exception):
    def __init__(self, *args):
        super().__init__(*args)
        self.lock = threading.Lock()


class NeedsTwo(Exception):
    """Can be pickled, and not unpickled."""

    def __init__(self, one, two):
        super().__init__(one)


class Bomb(Exception):
    """Ends whatever unpickles it."""

    def __reduce__(self):
        return _explode, ()


class Falsy(Exception):
    def __bool__(self):
        raise ValueError("neither true nor false")


def _explode():
    raise SystemExit(4)


class Unread:
    """Cannot be iterated, though it says so."""

    def __iter__(self):
        raise RuntimeError("planted")


class Unreadable(Mapping):
    """A mapping whose values cannot be read."""

    def __getitem__(self, name):
        raise RuntimeError("planted")

    def __iter__(self):
        return iter(["speaker", "hours", "source"])

    def __len__(self):
        return 3


class Spoilt:
    """Says that it is an array, and raises what it has when it is read; or gives it."""

    def __init__(self, given):
        self.given = given

    def __array__(self, dtype=None, copy=None):
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


def _own_cause(error: BaseException) -> BaseException:
    error.__cause__ = error
    return error


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("planted"),
    "MemoryError": MemoryError,
    "MemoryError that is its own cause": lambda: _own_cause(MemoryError()),
    "RecursionError": lambda: RecursionError("planted"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "StopIteration": lambda: StopIteration(5),
    "StopAsyncIteration": StopAsyncIteration,
    "a BaseException of its own": lambda: Own("planted"),
    "one without a text": Mute,
    "a BaseException without a text": MuteBase,
    "one with a text that is no UTF-8": lambda: ValueError(SURROGATES),
    "one with a long text": lambda: ValueError(LONG),
    "one that cannot be pickled": lambda: Unpicklable("planted"),
    "one that cannot be unpickled": lambda: NeedsTwo("planted", 2),
    "one that ends who unpickles it": lambda: Bomb("planted"),
    "one that is its own cause": lambda: _own_cause(ValueError("planted")),
    "one that is neither true nor false": lambda: Falsy("planted"),
    "a group": lambda: ExceptionGroup("planted", [ValueError(1), ExceptionGroup("more", [KeyError(2)])]),
    "OSError": lambda: OSError(28, "No space left on device"),
    "TimeoutError": TimeoutError,
    "EngineFailed": lambda: hibachi.EngineFailed("planted"),
    "EngineClosed": lambda: hibachi.EngineClosed("planted"),
    "QueueFull": lambda: hibachi.QueueFull("planted"),
    "NonFiniteOutput": lambda: hibachi.NonFiniteOutput("planted"),
    "InvalidTensorOperation": lambda: hibachi.InvalidTensorOperation("op", expected="a", got="b", mend="c"),
}


def scribble(a: Any, value: float = 77) -> None:
    """Overwrite an array that the library lets one write to."""
    if isinstance(a, list):
        a[:] = [value] * (len(a) + 3)
    elif isinstance(a, np.ndarray):
        if a.flags.writeable and a.dtype.kind in "iufb":
            a[...] = value
    elif hasattr(a, "fill_"):
        a.fill_(value)


# ---- callables that a request brings ---------------------------------------------------------------------------------


class Callback:
    """A stop predicate or a logits processor that does what its name says."""

    table: ClassVar[dict[str, Callable[..., Any]]]

    def __init__(self, name: str) -> None:
        self.name, self.kept = name, []

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def __call__(self, *args: Any) -> Any:
        if self.name.startswith("raises "):
            raise EXCEPTIONS[self.name.removeprefix("raises ")]()
        kept, self.kept = self.kept, []
        for a in kept:
            scribble(a)
        return self.table[self.name](self, *args)

    def overwrite_later(self, *arrays: Any) -> None:
        self.kept = list(arrays)


class Processor(Callback):
    """(ids so far, logits [V]) -> logits [V]."""

    @staticmethod
    def scribbled(logits: Any, result: Any) -> Any:
        scribble(logits)
        return result

    table: ClassVar = {
        "fine": lambda self, ids, logits: logits,
        "shifts": lambda self, ids, logits: logits + len(ids) % 3,
        "returns None": lambda self, ids, logits: None,
        "returns a list": lambda self, ids, logits: list(logits),
        "returns the ids": lambda self, ids, logits: ids,
        "returns one too few": lambda self, ids, logits: logits[1:],
        "returns a table": lambda self, ids, logits: logits[None],
        "returns a number": lambda self, ids, logits: 1.0,
        "returns integers": lambda self, ids, logits: logits > 0,
        "returns complex numbers": lambda self, ids, logits: logits * 1j,
        "returns NaN": lambda self, ids, logits: logits * NAN,
        "returns infinity": lambda self, ids, logits: logits * 0 + INF,
        "returns minus infinity": lambda self, ids, logits: logits * 0 - INF,
        "overwrites and returns": lambda self, ids, logits: Processor.scribbled(logits, logits),
        "overwrites and returns None": lambda self, ids, logits: Processor.scribbled(logits, None),
        "overwrites the ids": lambda self, ids, logits: Processor.scribbled(ids, logits),
        "overwrites later": lambda self, ids, logits: self.overwrite_later(ids, logits) or logits,
        "is slow": lambda self, ids, logits: time.sleep(0.003) or logits,
    }


class Bound(Processor):
    """Cannot be pickled."""

    def __init__(self, name: str = "fine") -> None:
        super().__init__(name)
        self.lock = threading.Lock()


class Trap(Processor):
    """Ends whatever unpickles it."""

    def __reduce__(self):
        return _explode, ()


class Predicate(Callback):
    """(new tokens of all rows that have it [B, *tok]) -> bool [B]."""

    table: ClassVar = {
        "fine": lambda self, batch: _rows(batch) % 9 == 0,
        "says yes": lambda self, batch: _rows(batch) == _rows(batch),
        "returns None": lambda self, batch: None,
        "returns True": lambda self, batch: True,
        "returns one too many": lambda self, batch: np.zeros(len(batch) + 1, bool),
        "returns a table": lambda self, batch: np.zeros((len(batch), 2), bool),
        "returns texts": lambda self, batch: np.array(["no"] * len(batch)),
        "returns objects": lambda self, batch: np.array([Falsy()] * len(batch), object),
        "returns NaN": lambda self, batch: np.full(len(batch), NAN),
        "returns times": lambda self, batch: np.zeros(len(batch), "datetime64[s]"),
        "returns its batch": lambda self, batch: batch,
        "overwrites its batch": lambda self, batch: scribble(batch) or np.zeros(len(batch), bool),
        "overwrites later": lambda self, batch: self.overwrite_later(batch) or np.zeros(len(batch), bool),
        "is slow": lambda self, batch: time.sleep(0.003) or np.zeros(len(batch), bool),
    }


class Impostor(Predicate):
    """Says that it is equal to everything, above all to the predicate of a request that has none."""

    def __hash__(self):
        return hash(None)

    def __eq__(self, other):
        return True


def _rows(batch: Any) -> Any:
    """One number a row."""
    return batch if batch.ndim == 1 else batch.reshape(len(batch), -1)[:, 0]


RAISES = [f"raises {name}" for name in EXCEPTIONS]
PROCESSORS = [*map(Processor, [*Processor.table, *RAISES]), Bound(), Trap("fine")]
PREDICATES = [*map(Predicate, [*Predicate.table, *RAISES]), Impostor("says yes")]

# ---- fields ----------------------------------------------------------------------------------------------------------

NUMBERS = (
    *(0, -1, 1, 2, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 + 5, HUGE, -HUGE),
    *(NAN, INF, -INF, 1e-320, 0.5, 1e39, 1e300, 1e308, -1e-9),
)
ODD = (
    *(*NUMBERS, True, False, None, "", "1", LONG, SURROGATES, b"1", 1j, object(), len, int),
    *([], (), {}, set(), [1], {1: 1}, range(3), [[1]], [None], [""], ["a"], iter([1]), [NAN], [HUGE]),
    *(np.int64(1), np.uint8(1), np.float32(0.5), np.float64(0.5), np.array(1), np.array([1, 2]), np.array([])),
    *(Decimal("0.5"), Fraction(1, 3), NotImplemented, ..., ValueError("a value")),
)  # for every field
IDS = (
    *((), [0], [1, 1, 1], [STOP], list(range(WORDS)), list(range(MANY)), [3] * MANY, [WORDS - 1], [2**31], [2**40]),
    *(np.arange(5), [np.int64(3)], {1, 2}, [True], [1.0], [-1], [HUGE], "12", [2**63]),
)
TEXTS = ("", "a", ["a", "b"], [LONG], SURROGATES, ["\n"] * MANY, ["a", ""], [b"a"], ["\0"])
WHOLE = (0, 1, 2, 5, 20, 200, WORDS, 2**31 - 1, 2**31, 2**63, HUGE, None)

SCHEMAS = (
    *({}, "{}", "{", {"type": "object"}, {"type": "nonsense"}, {"enum": [1, "a", None]}, {"$ref": "#"}, {"a": NAN}),
    *({"type": "array", "items": {"$ref": "#"}}, {"anyOf": [{}] * MANY}, {"const": SURROGATES}, {"a": HUGE}, [], True),
    *(
        Unreadable(),
        {"properties": {str(i): {} for i in range(MANY)}},
        "[" * MANY,
        {"pattern": "(" * WORDS},
        {"a": b"b"},
    ),
)
PATTERNS = ("", "a", "[a-z]+", "(", "(?=a)", "a{1000000}", "(a*)*b" * 9, SURROGATES, LONG, "\0", ".*", "(?s:.)*")

FIELDS: dict[type, dict[str, tuple[Any, ...]]] = {
    SamplingParams: {
        **{name: (*tried.right, *tried.far) for name, tried in TRIED.items()},
        "seed": (0, 3, 2**31, 2**63, 2**64 + 5, HUGE, None),
        "max_tokens": WHOLE,
        "beams": (*BEAMS, {"width": 0}, {"length_penalty": NAN}, {"early_stopping": "soon"}, {"widht": 3}, [], 7),
        "stop": TEXTS,
        "stop_token_ids": IDS,
        "ignore_eos": (True, False),
        "skip_special_tokens": (True, False),
        "logprobs": WHOLE,
        "logit_bias": (
            *(
                {},
                {3: 5},
                {3: -100, 4: 100},
                [(3, 1), (3, 2)],
                {i: 1.0 for i in range(WORDS)},
                {i: -100 for i in range(MANY)},
            ),
            *(
                {2**40: 1},
                {-1: 1},
                {3: NAN},
                {3: 1e39},
                {3: HUGE},
                {HUGE: 1},
                {"a": 1},
                [(1, 2, 3)],
                {3: -1e-320},
                [(1, 2)] * MANY,
            ),
        ),
        "allowed_token_ids": (None, *IDS),
        "bad_words": TEXTS,
        "logits_processors": (*([p] for p in PROCESSORS), [PROCESSORS[0]] * 50, [PROCESSORS[0], PROCESSORS[6]]),
        "min_tokens": WHOLE,
        "include_stop": (True, False),
        "n": (1, 2, 3, 10),
        "best_of": (None, 1, 2, 4),
        "prompt_logprobs": WHOLE,
        "num_speculative_tokens": (None, *WHOLE),
        "codebooks": (
            *((), [{}], [{}, {"temperature": 0}], [{"temperature": 0.5}] * 3, [{"top_k": 5, "top_p": 0.5}, {}]),
            *([{"allowed_token_ids": [1, 3]}, {"logit_bias": {2: 5}}], [{"logit_bias": {10**6: 1}}, {}]),
            *([{"seed": 1}, {}], [{"temperature": NAN}, {}], [{1: 2}, {}], [None, {}], "ab", {"temperature": 1}),
            *([[("min_p", 0.1)], []], [[("min_p",)], []], Unread(), [Unread(), {}], [Unreadable(), {}], [{}] * 1000),
        ),
        "structured_outputs": (
            *(None, *({"json": schema} for schema in SCHEMAS), *({"regex": text} for text in PATTERNS)),
            *(
                {"json_object": True},
                {"json_object": 1},
                {"choice": TEXTS[3]},
                {"choice": ["a", "b"] * 99},
                {"choice": [""]},
            ),
            *(
                {"choice": Unread()},
                {"grammar": "start: <[0-7]>+"},
                {"grammar": 'root ::= "a" root'},
                {"grammar": LONG},
            ),
            *({}, {"json": {}, "regex": "a"}, {"regex": "a", "whitespace_pattern": " "}, {"unknown": 1}, {1: 2}),
            *({"json": {}, "whitespace_pattern": " *"}, {"json": {}, "one_of_as_any_of": True}, Unread(), Unreadable()),
            *(StructuredOutputs(regex="[a-z]{0,9}"), StructuredOutputs(json={"type": "integer"}), "json", 7),
        ),
    },
    Terms: {
        "priority": (0, 1, -1, 2**31, -(2**63), HUGE, -HUGE, 10**309),
        "tenant": ("", "a", "b", LONG, SURROGATES, "\0"),
        "timeout": (None, 1e-320, 1e-9, 0.001, 0.05, 1, 60, 1e9, 1e11, 1e39, 1e300, 2**63, HUGE),
        "queue_timeout": (None, 1e-320, 1e-9, 0.001, 0.05, 1, 60, 1e9, 1e11, 1e39, 1e300, 2**63, HUGE),
        "cache_salt": (None, "", "a", LONG, SURROGATES),
    },
    StopRule: {
        "tokens": (*IDS, [NAN], [INF], [1e39], [None], ["a"], [object()], [[1]], [[[1]]], [np.array([1])], 5),
        "where": (None, *PREDICATES),
        "atol": (0, 1e-320, 0.5, 1, 1e39, 1e300, HUGE, NAN, -1),
    },
}  # what is unusual, or out of range in a way that only this field has


# ---- prompts ---------------------------------------------------------------------------------------------------------


def _nested(depth: int) -> list[Any]:
    out: list[Any] = [1]
    for _ in range(depth):
        out = [out]
    return out


def _circle() -> list[Any]:
    out: list[Any] = [1]
    out.append(out)
    return out


PROMPTS: dict[str, Any] = {
    "a list": [1, 2, 3],
    "a tuple": (1, 2, 3),
    "a range": range(5),
    "one token": [1],
    "small integers": np.array([1, 2, 3], np.uint8),
    "large integers": np.array([1, 2, 3], np.uint64),
    "another byte order": np.array([1, 2, 3], ">i4"),
    "not contiguous": np.arange(20)[::-3],
    "one number again and again": np.broadcast_to(5, (10,)),
    "the last id": [WORDS - 1],
    "bytes in an array": array.array("b", [1, 2, 3]),
    "empty": [],
    "an empty array": np.zeros(0, np.int64),
    "a number": 5,
    "a scalar": np.array(5),
    "a float": np.float64(5),
    "nothing": None,
    "truth": [True, False],
    "floats": [1.5, 2.5],
    "whole floats": [1.0, 2.0],
    "half floats": np.array([1, 2], np.float16),
    "NaN": [NAN, 1.0],
    "infinity": np.array([INF, -INF]),
    "complex": [1j, 2.0],
    "a text": "She was",
    "an empty text": "",
    "a long text": LONG,
    "surrogates": SURROGATES,
    "bytes": b"abc",
    "texts": ["a", "b"],
    "objects": np.array([1, 2, "a"], object),
    "whole numbers as objects": np.array([1, 2, 3], object),
    "None in a list": [1, None],
    "NaN in a list": [1, NAN],
    "an object": object(),
    "a type": int,
    "a function": len,
    "an exception": ValueError("a prompt"),
    "a dictionary": {1: 2},
    "a dictionary that says nothing": {},
    "embeddings of nothing": {"prompt_embeds": None},
    "embeddings of texts": {"prompt_embeds": [["a"]]},
    "a set": {1, 2},
    "an iterator": iter([1, 2]),
    "ragged": [[1, 2], [3]],
    "pairs": [[1, 2], [3, 4]],
    "deep": _nested(100),
    "deeper": _nested(2000),
    "a list in itself": _circle(),
    "masked": np.ma.masked_array([1, 2, 3], [False, True, False]),
    "records": np.array([(1, 2.0)], "i4,f4"),
    "times": np.array(["2020-01-01"], "datetime64[s]"),
    "the id after the last": [10**6],
    "an id of 41 bits": [2**40],
    "an id of 64 bits": [2**63],
    "an id of 1300 bits": [HUGE],
    "a negative id": [1, -1],
    "10^5 ids": np.ones(MANY, np.int64),
    "10^5 ids in a list": [1] * MANY,
    "of shape (0, 10^5)": np.zeros((0, MANY)),
    "of shape (1, 0)": np.zeros((1, 0), np.int64),
    "of rank 30": np.ones((1,) * 30, np.int64),
}


def embeds(size: int) -> dict[str, Any]:
    """Prompts as embeddings, for a model with vectors of this size."""
    right = np.random.default_rng(0).normal(size=(5, size)).astype(np.float32)
    return {
        "embeddings": right,
        "embeddings in 64 bits": right.astype(np.float64),
        "embeddings in a list": right.tolist(),
        "embeddings of one position": right[:1],
        "embeddings that are large": right * 1e38,
        "NaN among embeddings": np.where(np.eye(5, size) > 0, NAN, right),
        "embeddings that are too wide": np.zeros((5, size + 1), np.float32),
        "embeddings that overflow": right.astype(np.float64) * 1e300,
        "embeddings of rank 1": right[0],
        "embeddings of rank 3": right[None],
        "no embeddings": np.zeros((0, size), np.float32),
        "integers for embeddings": right.astype(np.int32),
        "objects for embeddings": right.astype(object),
        "complex embeddings": right * 1j,
        "texts for embeddings": [["a"] * size],
        "too many embeddings": np.zeros((MANY, size), np.float16),
    }


ARRAYS: dict[str, Any] = {
    "floats": np.array([0.5, 1.5]),
    "integers": [1, 2],
    "one number": 3,
    "another byte order": np.array([1, 2], ">i4"),
    "not contiguous": np.arange(80)[::-2],
    "one number again and again": np.broadcast_to(np.int32(2), (10**4,)),
    "of 4 TB": np.broadcast_to(np.int32(2), (10**6, 10**6)),
    "nothing": None,
    "empty": [],
    "of shape (0, 2)": np.zeros((0, 2)),
    "of rank 30": np.ones((1,) * 30),
    "NaN": [NAN, 1.0],
    "infinity": [INF, 1.0],
    "beyond 32 bits": [2**40, 1],
    "beyond 64 bits": [HUGE, 1],
    "beyond float32": [1e300, 1.0],
    "complex": [1j, 2.0],
    "texts": ["a", "b"],
    "objects": np.array([1, None], object),
    "records": np.array([(1, 2.0)], "i4,f4"),
    "times": np.zeros(2, "datetime64[s]"),
    "masked": np.ma.masked_array([1.0, 2.0], [False, True]),
    "ragged": [[1, 2], [3]],
    "a list in itself": _circle(),
    "an iterator": iter([1, 2]),
    "gives a text": Spoilt("a"),
    "gives an array": Spoilt(np.ones(2, np.float32)),
    **{f"raises {e.__name__}": Spoilt(e()) for e in (ValueError, RuntimeError, MemoryError, AttributeError)},
    "raises what has no text": Spoilt(Mute()),
}
INPUTS = (None, {}, [], (), "ab", 3, [("speaker", [1, 2])], {1: 2}, {"unknown": 1}, {SURROGATES: 1}, Unreadable())


def raises(*_: Any) -> Any:
    raise ValueError("planted")


GUIDANCE = (
    *(
        None,
        [],
        [None],
        {},
        7,
        Guidance(),
        Guidance(3.0, prompt=[1]),
        Guidance(prompt=[WORDS + 10**6]),
        Guidance(prompt=[]),
    ),
    *(Guidance(prompt=range(2000)), Guidance(9e29, prompt=[2]), [Guidance(prompt=[1]), Guidance(prompt=[2])]),
    *(Guidance(prompt=[3], mix=raises), Guidance(mix=lambda own, other: own[0]), Guidance(mix=lambda *_: None)),
    *([Guidance(prompt=[4], mix=lambda *all: all[-1])] * 2, Guidance(mix=lambda own, other: own * NAN)),
)

# What `run` takes; "prompt", "params", "terms" and "prompt_embeds" are drawn from what stands above.
RUN: dict[str, tuple[Any, ...]] = {
    "prediction": (
        *(
            None,
            [],
            [1, 2, 3],
            range(WORDS),
            [WORDS],
            [-1],
            [1.5],
            [True],
            [[1]],
            [2**70],
            [None],
            LONG,
            SURROGATES,
            {1: 2},
        ),
        *(np.array([1, 2], np.uint64), np.zeros((2, 2), int), np.array(3), [1] * MANY, Unread(), Unreadable(), 7),
        *(Spoilt(ValueError("planted")), Spoilt(np.array([1]))),
    ),
    "prompt": (),
    "params": (),
    "max_tokens": (*WHOLE, np.int64(3)),
    "stop_rule": (None, STOP, [1, 2], (), {3}, np.array([1]), *PREDICATES, *IDS),
    "include_stop": (None, True, False),
    "prompt_embeds": (),
    "inputs": INPUTS,
    "allowed": (None, Trie([[1, 2], [1, 3, 4], [5] * 9]), Trie([[WORDS]]), Trie([[2**31 - 1]]), [[1, 2]], {}, 7),
    "fed": (),  # nobody would feed it: tests/engine/test_fed.py
    "guidance": GUIDANCE,
    "terms": (),
}
