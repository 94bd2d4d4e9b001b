"""Arrays in bodies and answers: lists of numbers, {dtype, shape, data}, .npy. Numbers are little-endian."""

from __future__ import annotations

import ast
import io
import math
import re
from collections.abc import Callable
from functools import cache, reduce
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from hibachi.backend.array_backend import HostArray
from hibachi.errors import MOST_SHOWN, ModelError
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.json_limits import at_once

MOST_RANK = 32
LONGEST = 2**40  # of a dimension
LONGEST_HEADER = 4096  # bytes of that of a .npy
MAGIC = b"\x93NUMPY"
BFLOAT16 = "bfloat16"  # NumPy has none: it is read as the same numbers in float32, and told so
_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in _NAMES.split()}
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_DESCR = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")
_AT = re.compile(r" - at `\$([^`]*)`$")
Bytes = bytes | bytearray | memoryview | msgspec.Raw


class Packed(Struct, forbid_unknown_fields=True):
    """data: of all numbers, in C order; in JSON as base64."""

    dtype: str
    shape: list[int]
    data: bytes


def no(param: str, why: str, code: str = "invalid_array") -> Refused:
    return Refused.at(param, f": {why}", code=code)


# ---- in -------------------------------------------------------------------------------------------------------------


def of_json(raw: Bytes, param: str, dtype: str | None = None) -> HostArray:
    """Nested lists of numbers, of which "NaN", "Infinity" and "-Infinity" are written as texts; or `Packed`.

    dtype: that is wanted of lists, which say none: where that is of floats, 1 means 1.0. Raises Refused.
    """
    raw = bytes(raw).strip()
    first = raw[:1]
    if first == b"{":
        return unpacked(_packed(_json(Packed), raw, param), param)
    if first == b'"' and raw[1:-1].decode("utf-8", "replace") not in _SPECIAL:
        raise no(param, "expected numbers; got a text. Texts are completed at /v1/completions.")
    rank = 0
    for byte in raw:
        if byte == 0x5B and rank <= MOST_RANK:  # [
            rank += 1
        elif byte not in b" \t\r\n":
            break
    return _as_kind(_of_lists(raw, rank, _json, param, special=b'"' in raw), dtype)


def of_msgpack(raw: Bytes, param: str, dtype: str | None = None) -> HostArray:
    """Likewise, of msgpack, which has NaN among its numbers, and bytes."""
    raw = bytes(raw)
    at = rank = 0
    while at < len(raw) and rank <= MOST_RANK and (head := _HEADS.get(raw[at])) is not None:
        at, rank = at + head, rank + 1
    if not rank and (0x80 <= raw[0] <= 0x8F or raw[0] in (0xDE, 0xDF)):
        return unpacked(_packed(_msgpack(Packed), raw, param), param)
    return _as_kind(_of_lists(raw, rank, _msgpack, param, special=False), dtype)


_HEADS = {byte: 1 for byte in range(0x90, 0xA0)} | {0xDC: 3, 0xDD: 5}  # of an array: how many bytes say so


def of_npy(data: bytes, param: str = "prompt") -> HostArray:
    """Of numbers; no object is ever unpickled. Raises Refused."""
    if not data.startswith(MAGIC) or len(data) < 12:
        raise no(param, "expected an array as numpy.save writes it (.npy); got something else.")
    wide = data[6] != 1
    start = 12 if wide else 10
    size = int.from_bytes(data[8:start], "little")
    if data[6] not in (1, 2) or size > LONGEST_HEADER or len(data) < start + size:
        raise no(param, f"expected a .npy of version 1 or 2 with a header of at most {LONGEST_HEADER} bytes.")
    try:
        header = ast.literal_eval(data[start : start + size].decode("latin-1").strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        header = None
    if not isinstance(header, dict) or header.keys() != {"descr", "fortran_order", "shape"}:
        raise no(param, "the header of the .npy must be a dictionary of descr, fortran_order and shape.")
    descr, shape, fortran = header["descr"], header["shape"], header["fortran_order"]
    dtype = _dtype(descr) if isinstance(descr, str) and _DESCR.fullmatch(descr) else None
    if dtype is None:
        raise no(param, f"expected numbers, no objects, texts or records; got the dtype {str(descr)[:MOST_SHOWN]}.")
    fine = isinstance(shape, tuple) and all(type(n) is int for n in shape) and isinstance(fortran, bool)
    if not fine:
        raise no(param, "shape must be a tuple of integers, and fortran_order True or False.")
    return _shaped(memoryview(data)[start + size :], dtype, shape, param, order="F" if fortran else "C")


def unpacked(given: Packed, param: str) -> HostArray:
    """Raises Refused for data that are not as dtype and shape say."""
    if given.dtype == BFLOAT16:
        bits = _shaped(given.data, DTYPES["uint16"], given.shape, param)
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if given.dtype not in DTYPES:
        known = ", ".join((*DTYPES, BFLOAT16))
        raise no(f"{param}.dtype", f"expected one of {known}; got {given.dtype[:MOST_SHOWN]!r}.")
    return _shaped(given.data, DTYPES[given.dtype], given.shape, param)


def _as_kind(given: HostArray, dtype: str | None) -> HostArray:
    floats = dtype is not None and (dtype.startswith("float") or dtype == BFLOAT16)
    return given.astype(np.float64) if floats and given.dtype.kind in "iu" else given


def _dtype(descr: str) -> Any:
    try:
        return np.dtype(descr)
    except TypeError:
        return None


def _shaped(data: Bytes, dtype: Any, shape: Any, param: str, order: Literal["C", "F"] = "C") -> HostArray:
    if len(shape) > MOST_RANK or not all(0 <= n <= LONGEST for n in shape):
        raise no(param, f"shape must have at most {MOST_RANK} dimensions >= 0; got {str(list(shape))[:MOST_SHOWN]}.")
    size, got = math.prod(shape) * dtype.itemsize, memoryview(data).nbytes
    if size != got:
        told = f"{list(shape)} of {dtype.name}"[:MOST_SHOWN]
        raise no(param, f"shape {told} takes {str(size)[:40]} bytes of data; got {got}.")
    flat = np.frombuffer(data, dtype) if size else np.empty(0, dtype)
    try:
        found = flat.reshape(shape, order=order)
    except ValueError as e:  # an empty one, of dimensions beyond all sense
        raise no(param, f"shape {str(list(shape))[:MOST_SHOWN]} cannot be held: {e}.") from None
    return found.astype(dtype.newbyteorder("="), order="C", copy=not dtype.isnative)


# JSON and msgpack: a decoder of a type.
_Format = Callable[[Any], Any]


@cache
def _json(kind: Any) -> Any:
    return msgspec.json.Decoder(kind)


@cache
def _msgpack(kind: Any) -> Any:
    return msgspec.msgpack.Decoder(kind)


@cache
def _nested(kind: Any, rank: int) -> Any:
    return reduce(lambda inner, _: list[inner], range(rank), kind)  # type: ignore[valid-type]  # made as it runs


_Special = Literal["NaN", "Infinity", "-Infinity"]
_KINDS: tuple[tuple[Any, Any], ...] = ((int, np.int64), (bool, np.bool_), (float, np.float64))


def _packed(decoder: Any, raw: bytes, param: str) -> Packed:
    try:
        found: Packed = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        place, what = _told(e)
        raise no(param + place, f"expected {{dtype, shape, data}}: {what}.") from None
    return found


def _of_lists(raw: bytes, rank: int, format: _Format, param: str, *, special: bool) -> HostArray:
    if rank > MOST_RANK:
        raise no(param, f"lists may be nested {MOST_RANK} deep at most.")
    if special:
        kinds: tuple[tuple[Any, Any], ...] = ((float | _Special, np.float64),)
    else:
        kinds = _KINDS
    error: Exception | None = None
    for kind, dtype in kinds:
        try:
            with at_once(len(raw)):
                found = format(_nested(kind, rank)).decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            error = e
            continue
        try:
            return np.asarray(_numbers(found) if special else found, dtype)
        except ValueError:
            raise no(param, "lists must be of equal lengths; got ragged ones.") from None
        except OverflowError:
            return _unsigned(found, param)
    assert error is not None
    place, what = _told(error)
    raise no(param + place, f"expected numbers, in lists of equal depth: {what}.")


def _unsigned(found: Any, param: str) -> HostArray:
    try:
        return np.asarray(found, np.uint64)
    except (OverflowError, ValueError):
        raise no(param, "integers must be from -2^63 to 2^64 - 1, and all fit in 64 bits.") from None


def _numbers(found: Any) -> Any:
    if isinstance(found, list):
        return [_numbers(one) for one in found]
    return _SPECIAL[found] if isinstance(found, str) else found


def _told(error: Exception) -> tuple[str, str]:
    """Where, and what."""
    text = str(error)
    at = _AT.search(text)
    return (at[1], text[: at.start()]) if at else ("", text)


# ---- out ------------------------------------------------------------------------------------------------------------


def plain(given: HostArray) -> HostArray:
    """Of a dtype in DTYPES, C order. Raises ModelError for what are no numbers."""
    if given.dtype.name not in DTYPES:
        try:
            if given.dtype.kind in "OUSMm":
                raise TypeError
            given = given.astype(np.float32 if given.dtype.itemsize < 8 else np.float64)
        except (TypeError, ValueError):
            raise ModelError(f"The model must return numbers; got the dtype {given.dtype}.") from None
    return np.ascontiguousarray(given, given.dtype.newbyteorder("<")).reshape(given.shape)


def as_lists(given: HostArray) -> Any:
    """As JSON can hold them: what is no number as "NaN", "Infinity" or "-Infinity". Raises Refused for complex ones."""
    if given.dtype.kind == "c":
        raise Refused('Complex numbers are no JSON: ask for encoding "base64".', param="encoding", code="invalid_value")
    if given.dtype.kind != "f" or np.isfinite(given).all():
        return given.tolist()
    told = given.astype(object)
    told[np.isnan(given)] = "NaN"
    told[given == np.inf] = "Infinity"
    told[given == -np.inf] = "-Infinity"
    return told.tolist()


def as_npy(given: HostArray) -> bytes:
    out = io.BytesIO()
    np.save(out, given, allow_pickle=False)
    return out.getvalue()
