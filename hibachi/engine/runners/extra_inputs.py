"""What comes beside the tokens of a call: the lengths of prompts, seeds, random numbers, and the requests' own inputs.

All of it is made on the host from records of the rows, so that it is equal on all backends and in any company.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from hibachi.backend.array_backend import ArrayBackend, HostArray
from hibachi.backend.layout import Input
from hibachi.engine.runners.job import Job
from hibachi.engine.sampling.uniforms import draws
from hibachi.engine.scheduler.lower import Packed
from hibachi.errors import ConfigError, shown, text_of

MOST_DRAWS = 2**16
EXAMPLE = 8  # the size, in an example, of a dimension of any size; the next examples are two and three times as long
LENGTHS = 3
KNOWN = ("prompt_len", "seed")
_DRAWN = ("uniform", "normal")
ENCODED = "encoded"
KEEP = "logits_to_keep"  # a parameter, named as in transformers
_ITEMS = frozenset("biuf")
_METHODS = ("forward", "logits", "step")


@dataclass(frozen=True)
class Declared:
    """What a model declares that it wants beside its tokens.

    draws: random numbers for each output. seeded: it says how many (or 0), knows the seed, or a method takes it; then a
    request may have one, also where the model returns tokens. knows: what of each request a step of level 2 looks at,
    of KNOWN. What it caches then depends on more than tokens and inputs, so no prefix is shared.
    """

    draws: int = 0
    seeded: bool = False
    knows: frozenset[str] = frozenset()
    inputs: Mapping[str, Input] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.seeded or self.inputs)


def declared_by(model: Any) -> Declared:
    """Read a model's attributes `draws` and `inputs`. Raises ConfigError."""
    name, count = type(model).__name__, getattr(model, "draws", 0)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST_DRAWS:
        raise ConfigError(
            f"{name}.draws must be the number of random numbers for a token, an integer from 0 to {MOST_DRAWS}; got "
            f"{shown(count)}."
        )
    inputs = getattr(model, "inputs", None) or {}
    if not isinstance(inputs, Mapping) or not all(isinstance(key, str) for key in inputs):
        raise ConfigError(f"{name}.inputs must be a mapping, {{name: hibachi.Input(...)}}; got {shown(inputs)}.")
    for key, one in inputs.items():
        _check(f"{name}.inputs[{key!r}]", key, one)
    knows = getattr(model, "knows", ())
    if not isinstance(knows, (tuple, list, set, frozenset)) or not all(name in KNOWN for name in knows):
        raise ConfigError(f"{name}.knows must be a tuple of names of {', '.join(KNOWN)}; got {shown(knows)}.")
    seeded = hasattr(model, "draws") or any("seed" in parameters_of(getattr(model, name, None)) for name in _METHODS)
    return Declared(count, seeded or "seed" in knows, frozenset(knows), dict(inputs))


def kept_by(backend: ArrayBackend, declared: Declared, name: str) -> Declared:
    """The same, with the dtypes that the library makes of those of inputs: JAX may have no 64-bit integers. name: of
    the model. Raises ConfigError.
    """
    inputs = {}
    for key, one in declared.inputs.items():
        where = f"{name}.inputs[{key!r}]"
        try:
            dtype = backend.get(backend.put(np.zeros(1, np.dtype(one.dtype).newbyteorder("=")))).dtype
        except Exception as e:
            raise ConfigError(
                f"{where}: dtype must be one that {backend.name} has; got {one.dtype} ({text_of(e).rstrip('.')})."
            ) from e
        inputs[key] = replace(one, dtype=dtype.name)
        _check(where, key, inputs[key])
    return replace(declared, inputs=inputs)


def _check(where: str, key: str, one: Any) -> None:
    if not isinstance(one, Input):
        raise ConfigError(f"{where} must be a hibachi.Input; got {shown(one)}.")
    if not key.isidentifier() or key in (*KNOWN, *_DRAWN, ENCODED, "tokens", "lengths", "past"):
        raise ConfigError(f"{where}: expected a name of its own that can be a parameter's; got {key!r}.")
    sizes = one.shape if isinstance(one.shape, tuple) else (0.5,)
    if not all(n is None or (isinstance(n, int) and not isinstance(n, bool) and n >= 0) for n in sizes):
        raise ConfigError(f"{where}: shape must be a tuple of sizes, such as (16,); got {shown(one.shape)}.")
    if one.per not in ("request", "position"):
        raise ConfigError(f"{where}: per must be 'request' or 'position'; got {shown(one.per)}.")
    if one.per == "position" and None in sizes:
        raise ConfigError(f"{where}: an input per position has a fixed shape; got {one.shape}.")
    try:
        fine = np.dtype(one.dtype).kind in _ITEMS
    except TypeError:
        fine = False
    if not fine:
        raise ConfigError(f"{where}: dtype must be a name of NumPy's, of numbers; got {shown(one.dtype)}.")
    if one.example is not None:
        try:
            given = np.asarray(one.example)
        except Exception as e:
            raise ConfigError(f"{where}.example must be an array that NumPy can read; got {text_of(e)}") from e
        fits(given, one, f"{where}.example", ConfigError)


def fits(given: HostArray, one: Input, what: str, error: type[Exception]) -> HostArray:
    """A copy of an array for an input, in its dtype. Raises `error`."""
    shape = shape_of(one)
    same = len(shape) == given.ndim and all(n in (None, m) for n, m in zip(shape, given.shape, strict=True))
    dtype = np.dtype(one.dtype)
    rounds = dtype.kind in "iu" and given.dtype.kind == "f" and given.size  # (an empty list is of floats)
    if not same or given.dtype.kind not in _ITEMS or rounds:
        sizes = ", ".join(
            ("positions" if one.per == "position" and not i else "any") if n is None else str(n)
            for i, n in enumerate(shape)
        )
        raise error(f"{what} must have the shape ({sizes}) and numbers of {dtype}; got {given.shape} of {given.dtype}.")
    with np.errstate(over="ignore", invalid="ignore"):
        found = given.astype(dtype)
    lost = np.isfinite(given) & ~np.isfinite(found) if dtype.kind == "f" else given != found
    if lost.any():
        raise error(f"{what} holds {given[lost][0]}, which {dtype} cannot. Send smaller numbers.")
    if dtype.kind == "f" and not np.isfinite(found).all():
        raise error(f"{what} must be finite; got NaN or infinity. Look where it was made.")
    return found


class ExtraInputs:
    """What comes beside the tokens, by row."""

    declared: Declared

    def __init__(self, declared: Declared, rows: int) -> None:
        self.declared = declared
        self._prompt_len = np.zeros(rows + 1, np.int32)  # one more, for padding rows
        self._seed = np.zeros(rows + 1, np.uint64)
        self._jobs: WeakValueDictionary[int, Job] = WeakValueDictionary()

    def admit(self, job: Job) -> None:
        row = job.seq.row
        self.set(row, job.seq.prompt_len, job.seed)
        if self.declared.inputs:
            self._jobs[row] = job

    def set(self, row: int, prompt_len: int, seed: int) -> None:
        """What is known of a row that no request has."""
        self._prompt_len[row], self._seed[row] = prompt_len, seed

    def nobody(self, n: int) -> HostArray:
        """Row numbers for a call of n rows that no request has, as in trials: it gets examples."""
        return np.full(n, len(self._seed) - 1, np.intp)

    def prompt_len(self, rows: Any) -> HostArray:
        """int32 [B]."""
        found: HostArray = self._prompt_len[rows]
        return found

    def seed(self, rows: Any) -> HostArray:
        """The lowest 31 bits, int32 [B]."""
        found: HostArray = (self._seed[rows] & np.uint64(2**31 - 1)).astype(np.int32)
        return found

    def drawn(self, rows: Any, positions: Any) -> tuple[HostArray, HostArray]:
        """Random numbers for the tokens at `positions` [m] of `rows` [m]: uniform and normal, float32 [m, draws]."""
        return draws(self._seed[rows], positions, self.declared.draws)

    def fields(self, packed: Packed) -> dict[str, HostArray]:
        """Fields of `StepInputs` for a step."""
        rows, last, found = packed.row, packed.last, dict[str, HostArray]()
        if "prompt_len" in self.declared.knows:
            found["prompt_len"] = self.prompt_len(rows)
        if "seed" in self.declared.knows:
            found["seed"] = self.seed(rows)
        if self.declared.draws:
            found["uniform"], found["normal"] = self.drawn(rows[packed.seg[last]], packed.pos[last] + 1)
        return found

    def given(self, row: int, name: str) -> HostArray:
        """What a row's request gave for an input; an example where it gave nothing, as in trials."""
        job = self._jobs.get(row)
        if job is None or not job.request.inputs:
            return example(self.declared.inputs[name])
        given: HostArray = job.request.inputs[name]  # as it was checked
        return given

    def inputs(self, rows: Any, each: Any, positions: Any, names: frozenset[str] | None = None) -> dict[str, HostArray]:
        """Inputs of fixed shape: per request [B, *shape] for `rows` [B], per position [T, *shape] for tokens at
        `positions` [T], which are of the rows `each` [T]. names: only these; None means all.
        """
        found = {}
        for name, one in self.declared.inputs.items():
            if names is not None and name not in names:
                continue
            if one.per == "position":
                found[name] = self._positions(name, one, each, positions)
            elif None not in one.shape:
                found[name] = np.stack([self.given(row, name) for row in rows.tolist()])
        return found

    def _positions(self, name: str, one: Input, each: Any, positions: Any) -> HostArray:
        out = np.zeros([len(positions), *(n for n in one.shape if n is not None)], one.dtype)
        # Tokens of a row stand together, one position after another; what is beyond an example is like its end.
        apart = (each[1:] != each[:-1]) | (positions[1:] != positions[:-1] + 1)
        begins = [0, *(np.flatnonzero(apart) + 1).tolist(), len(positions)]
        for begin, end in pairwise(begins):
            given, first = self.given(int(each[begin]), name), int(positions[begin])
            part = given[first : first + end - begin]
            out[begin : begin + len(part)] = part
            if len(part) < end - begin:
                out[begin + len(part) : end] = given[-1]
        return out


def example(one: Input, i: int = 0, n: int | None = None) -> HostArray:
    """An array as an input might be; of an input of any size, three that follow each other differ much in length.

    n: positions that an input per position has; None means any number.
    """
    part = 1 - (i % LENGTHS) / 4  # of an example that is given
    if one.example is not None:
        given: HostArray = np.asarray(one.example).astype(one.dtype)
        sizes = [max(1, int(m * part)) if k is None else m for k, m in zip(shape_of(one), given.shape, strict=True)]
        found = given[tuple(map(slice, sizes))]
    else:
        found = np.zeros([EXAMPLE * (1 + i % LENGTHS) if k is None else k for k in shape_of(one)], one.dtype)
    if n is None or one.per == "request":
        return found
    return np.resize(found, (n, *found.shape[1:]))


def shape_of(one: Input) -> tuple[int | None, ...]:
    """Of the array that a request gives; None stands for any size."""
    return (None, *one.shape) if one.per == "position" else one.shape


class Arguments:
    """Which of these a method takes as keyword arguments, and their values for the rows of a call."""

    def __init__(self, method: Callable[..., Any], beside: ExtraInputs) -> None:
        self.names, self._beside = wanted(method, beside.declared), beside

    def of(self, rows: Any, lengths: Any, width: int) -> dict[str, HostArray]:
        """For rows [B] of these lengths, of which the call has the last `width` positions: arrays on the host.

        prompt_len, seed: int32 [B]. uniform, normal: float32 [B, draws]. Inputs: [B, *shape], or [B, width, *shape],
        zeros where a row is shorter.
        """
        found, names, beside = dict[str, HostArray](), self.names, self._beside
        if "prompt_len" in names:
            found["prompt_len"] = beside.prompt_len(rows)
        if "seed" in names:
            found["seed"] = beside.seed(rows)
        if names & {*_DRAWN}:
            both = dict(zip(_DRAWN, beside.drawn(rows, lengths), strict=True))
            found |= {name: both[name] for name in _DRAWN if name in names}
        if names & beside.declared.inputs.keys():
            positions = lengths[:, None] - width + np.arange(width)
            real = positions >= 0
            each = np.repeat(rows, width)
            for name, array in beside.inputs(rows, each, np.maximum(positions, 0).reshape(-1), names).items():
                if beside.declared.inputs[name].per == "position":
                    array = array.reshape(len(rows), width, *array.shape[1:])
                    array[~real] = 0
                found[name] = array
        return found


def check_taken(model: Any, declared: Declared, *methods: str, fields: bool = False) -> None:
    """Check that methods of a model take each input that it declares, and only `encode` those of any size. fields: they
    come as `x.inputs`. Raises ConfigError.
    """
    taken = {name: wanted(getattr(model, name), declared) for name in methods if callable(getattr(model, name, None))}
    for name, one in declared.inputs.items():
        by = [method for method, names in taken.items() if name in names]
        if None in one.shape and (fields or by != ["encode"]):
            raise ConfigError(
                f"{type(model).__name__}.inputs[{name!r}] has any size, shape {one.shape}: expected a method `encode` "
                f"beside `past`, which alone takes it; got {', '.join(by) or 'none'}. Give it a fixed shape, or write "
                f"`encode({name})`."
            )
        if not by and not fields:
            raise ConfigError(
                f"{type(model).__name__}.inputs has {name!r}, but no method has a parameter of that name: expected it "
                f"in {' or '.join(f'`{method}`' for method in methods)}. Add it, or leave the input out."
            )


def parameters_of(method: Any) -> Mapping[str, Any]:
    """{} for what is no method, and for compiled code, which need not tell."""
    try:
        return inspect.signature(method).parameters
    except (TypeError, ValueError):
        return {}


def wanted(method: Callable[..., Any], declared: Declared) -> frozenset[str]:
    """Names of what a method takes beside tokens, lengths and past. Raises ConfigError if it was not declared."""
    parameters = parameters_of(method)
    if not declared.draws and (asked := sorted(parameters.keys() & {*_DRAWN})):
        raise ConfigError(
            f"A method takes {', '.join(asked)}, random numbers that the model does not declare: expected an attribute "
            f"draws = n, how many for each token. Add it."
        )
    return frozenset(parameters.keys() & {*KNOWN, *_DRAWN, ENCODED, *declared.inputs})
