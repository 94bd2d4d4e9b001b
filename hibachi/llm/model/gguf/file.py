"""The GGUF format: a header with metadata and the places of tensors, then their data.

Written after the format's description (github.com/ggml-org/ggml, docs/gguf.md). The library gguf has a reader as well,
but one that trusts the header; only its dequantisation is used here.

    "GGUF", version u32, number of tensors u64, number of metadata entries u64
    each entry: key string, type u32, value
        string: length u64, UTF-8; array: type u32, length u64, values
    each tensor: name string, number of dimensions u32, dimensions u64 (the last varies slowest), type u32, offset u64
    padding to `general.alignment`, then the data, each tensor padded likewise
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from hibachi.backend.stored import AGAIN, BLOCKS, PLAIN, HostArray, Stored, windows
from hibachi.common.installed import need
from hibachi.errors import InvalidModelFiles

Metadata: TypeAlias = Mapping[str, Any]
Shape: TypeAlias = tuple[int, ...]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT, _STRING, _ARRAY = 6, 8, 9

_TYPES = {  # number -> name, values of a block, bytes of a block
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
_UNREAD = {  # given up by llama.cpp, its own between two computations, or nothing that gguf unpacks
    **{4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
    **{9: "Q8_1", 15: "Q8_K", 41: "Q1_0", 42: "Q2_0"},
}
_NAN = {"MXFP4": (1, 0xFF), "NVFP4": (4, 0x7F)}  # bytes of scales before a block's numbers, and the bits that are NaN
QUANTIZED = frozenset(n for n, values, _ in _TYPES.values() if values > 1)
READABLE = QUANTIZED | PLAIN.keys()
_NUMBERS = {name: number for number, (name, _, _) in _TYPES.items()}

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)
_QUANTIZED_WINDOW = 1 << 17  # values that are dequantized at a time: what fits into a processor's cache
_MOST_HEADER = 64 << 20  # bytes; a vocabulary of 256k tokens takes 10 MB
_MOST_ENTRIES, _MOST_TENSORS, _MOST_NAME, _MOST_DIMS = 1 << 16, 1 << 17, 1 << 16, 4


class Blocks(Stored):
    """A tensor in a GGUF file, which may be stored in blocks of quantized numbers."""

    __slots__ = ()

    @override
    def rows(self, multiple: int) -> Iterator[HostArray]:
        """As of `Stored`. Raises InvalidModelFiles for blocks of which the scale is NaN or infinite as well."""
        for rows in super().rows(multiple):
            if self.dtype in QUANTIZED:
                upper = rows.reshape(-1, BLOCKS[self.dtype][1])[:, 1]  # byte of the scale, float16
                self._check((upper & 0x7C != 0x7C).all())
            yield rows

    def _check(self, finite: np.bool_) -> None:
        if not finite:
            raise InvalidModelFiles(
                f"{self.file}: a block of a tensor {self.shape} in {self.dtype} has a scale that is NaN or infinite. "
                f"{AGAIN}."
            )

    @override
    def read(self, dtype: npt.DTypeLike | None = None) -> HostArray:
        """As of `Stored`; quantized numbers as float32. Raises MissingExtra for these without the library gguf,
        InvalidModelFiles for integers, for blocks that the installed gguf does not know, and for those whose scale is
        NaN or infinite.
        """
        if self.dtype not in READABLE:
            raise InvalidModelFiles(f"{self.file}: weights are stored as {self.dtype}; expected {_listed(READABLE)}.")
        if self.dtype in PLAIN:
            return super().read(dtype)
        out = np.empty(self.shape, np.float32 if dtype is None else dtype)
        self._dequantize(out.reshape(-1))
        return out if self.order is None else out[self.order]

    def _dequantize(self, flat: HostArray) -> None:
        library = need("gguf", f"Reading {self.dtype} weights", "gguf")
        _, values, size = _TYPES[number := _NUMBERS[self.dtype]]
        try:
            kind = library.GGMLQuantizationType(number)
            library.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except (NotImplementedError, ValueError) as e:
            raise InvalidModelFiles(
                f"{self.file}: the installed version of gguf cannot read {self.dtype}. Install a newer one."
            ) from e
        bytes_, step = flat.size // values * size, _QUANTIZED_WINDOW // values * size
        for start, part in windows(self.file, self.offset, np.dtype(np.uint8), bytes_, step):
            if self.dtype in _NAN:  # the library makes numbers of it
                count, nan = _NAN[self.dtype]
                self._check((part.reshape(-1, size)[:, :count] & nan != nan).all())
            with np.errstate(all="ignore"):  # the numbers of a damaged file may be anything
                numbers = library.quants.dequantize(part.reshape(1, -1), kind)[0]
            self._check(np.isfinite(numbers).all())
            flat[start // size * values :][: len(numbers)] = numbers


def parts(file: Path) -> list[Path]:
    """All files of a split model in their order, by the name of one, NAME-00002-of-00003.gguf; any other file alone.

    By names only: what is not there is in the list as well.
    """
    m = _PART.fullmatch(file.name)
    if m is None or not 1 <= int(m[2]) <= int(m[3]):
        return [file]
    return [file.with_name(f"{m[1]}-{i:05}-of-{m[3]}.gguf") for i in range(1, int(m[3]) + 1)]


def stem(file: Path) -> str:
    """The name of a model's file: without .gguf, and without the number of a part."""
    m = _PART.fullmatch(file.name)
    return file.name.removesuffix(".gguf") if m is None else m[1]


def read_parts(files: list[Path]) -> tuple[dict[str, Any], dict[str, Blocks]]:
    """Metadata of the first of `parts`, and the tensors of all. Raises InvalidModelFiles as `read_header` does, and for
    parts that are missing or do not belong together.
    """
    if len(files) > 1 and (missing := [f.name for f in files if not f.is_file()]):
        raise InvalidModelFiles(
            f"{files[0].parent} lacks {len(missing)} of the {len(files)} parts of a GGUF model: "
            f"{', '.join(missing[:8])}. Copy or download what is missing into this folder."
        )
    headers = [read_header(file) for file in files]
    stored: dict[str, Blocks] = {}
    for i, (file, (metadata, tensors)) in enumerate(zip(files, headers, strict=True)):
        no, count = metadata.get("split.no", 0), metadata.get("split.count", 1)
        if type(no) is not int or type(count) is not int or (no, max(count, 1)) != (i, len(files)):
            raise InvalidModelFiles(
                f"{file} has split.no {no!r:.100} and split.count {count!r:.100}; expected {i} and {len(files)}, by "
                f"its name. Parts are called NAME-00001-of-00003.gguf and so on, from split.no + 1: give it its own "
                f"name again, or copy or download it again."
            )
        for name in tensors.keys() & stored.keys():
            raise InvalidModelFiles(f"{file} holds the tensor {name!r:.100}, as {stored[name].file} does. {AGAIN}.")
        stored |= tensors
    told = [metadata.get("split.tensors.count") for metadata, _ in headers]
    if len(files) > 1 and any(type(n) is not int or n != len(stored) for n in told):
        each = zip(files[:8], headers, told, strict=False)
        raise InvalidModelFiles(
            f"The parts in {files[0].parent} hold {len(stored)} tensors, and one of them is of another model: "
            + ", ".join(f"{file.name} holds {len(h[1])} of a model's {n!r:.100}" for file, h, n in each)
            + f". {AGAIN}."
        )
    return headers[0][0], stored


def read_header(file: Path) -> tuple[dict[str, Any], dict[str, Blocks]]:
    """Metadata and tensors of a file. Numbers of an array come as a NumPy array, floats in their shortest form.

    In entries of text, bytes that are no UTF-8 come as U+FFFD; in those of a tokenizer as lone surrogates, as with
    errors="surrogateescape".
    Raises InvalidModelFiles for a file that is not GGUF, damaged, or of a version before 2.
    """
    try:
        if not file.is_file():  # opening a named pipe would wait for ever
            raise InvalidModelFiles(f"There is no file {file}: expected a model in GGUF.")
        size = file.stat().st_size
        with file.open("rb") as f, mmap.mmap(f.fileno(), min(size, _MOST_HEADER), access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(file, data), size)
    except (OSError, ValueError) as e:  # ValueError: an empty file cannot be mapped
        if isinstance(e, InvalidModelFiles):
            raise
        raise InvalidModelFiles(f"{file} cannot be read: {e}. {AGAIN}.") from e


def _read(c: _Cursor, size: int) -> tuple[dict[str, Any], dict[str, Blocks]]:
    magic, version, tensors, entries = c.take(4), c.number("I"), c.number("Q"), c.number("Q")
    if magic != b"GGUF":
        raise c.broken(f"it begins with {magic!r}, not with b'GGUF'")
    if version not in (2, 3):
        raise InvalidModelFiles(
            f"{c.file} is of GGUF version {version}; expected 2 or 3, little-endian. Convert the model again with a "
            f"recent llama.cpp."
        )
    if entries > _MOST_ENTRIES or tensors > _MOST_TENSORS:
        raise c.broken(f"its header promises {entries} entries and {tensors} tensors")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = c.strings(1, _MOST_NAME, errors="replace")[0]
        if key in metadata:
            raise c.broken(f"the entry {key!r:.100} occurs twice")
        metadata[key] = c.value(c.number("I"), key)
    infos = [c.tensor() for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise c.broken(f"general.alignment must be a power of two; got {alignment!r:.100}")
    return metadata, _placed(c, infos, alignment, size)


def _placed(c: _Cursor, infos: list[tuple[str, str, Shape, int, int]], align: int, total: int) -> dict[str, Blocks]:
    """The tensors, one after the other from the end of the header, as every writer lays them."""
    base = -(-c.at // align) * align
    expected, stored = 0, {}
    for name, dtype, shape, offset, size in infos:
        if name in stored:
            raise c.broken(f"the tensor {name!r:.100} occurs twice")
        if offset != expected or base + offset + size > total:
            raise c.broken(f"{name!r:.100} has {size} bytes at {offset}, expected {expected}; there are {total - base}")
        stored[name] = Blocks(c.file, dtype, shape, base + offset)
        expected += -(-size // align) * align
    return stored


class _Cursor:
    """Reads values one after the other; refuses what is longer than the header."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.at = file, data, 0

    def broken(self, why: str) -> InvalidModelFiles:
        return InvalidModelFiles(f"{self.file} is not a complete GGUF file: {why}. {AGAIN}.")

    def fits(self, size: int) -> int:
        if size > len(self.data) - self.at:
            raise self.broken(f"a value of {size} bytes at {self.at} does not fit into its header")
        return size

    def take(self, size: int) -> bytes:
        start = self.at
        self.at += self.fits(size)
        return self.data[start : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def strings(self, count: int, most: int = _MOST_HEADER, *, errors: str, what: str = "a name") -> list[str]:
        """errors: as of bytes.decode."""
        out, length = [], struct.Struct("<Q")
        try:
            for _ in range(count):
                (size,) = length.unpack(self.take(8))
                if size > most:
                    raise self.broken(f"a name of {size} bytes")
                out.append(self.take(size).decode("utf-8", errors))
        except UnicodeDecodeError as e:
            raise self.broken(f"{what} is no UTF-8: {e.object!r:.80}") from e
        return out

    def value(self, kind: int, key: str) -> Any:
        """Bytes that are no UTF-8 matter to who reads the entry: most are for people, a tokenizer says which token it
        is, and without an architecture there is nothing.
        """
        errors = "surrogateescape" if key.startswith("tokenizer.") else "replace"
        errors = "strict" if key == "general.architecture" else errors
        if kind == _STRING:
            return self.strings(1, errors=errors, what=key)[0]
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"), errors)
        number = self.number(self.form(kind))
        return float(str(np.float32(number))) if kind == _FLOAT else number  # 1e-05, not 9.999999747378752e-06

    def array(self, kind: int, count: int, errors: str) -> Any:
        if kind == _STRING:
            return self.strings(count, errors=errors)
        form = self.form(kind)
        numbers = np.frombuffer(self.take(struct.calcsize(f"<{form}") * count), f"<{form}".replace("?", "u1"))
        return numbers != 0 if form == "?" else numbers

    def form(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.broken(f"a value of type {kind}, which is unknown here")
        return _SCALARS[kind]

    def tensor(self) -> tuple[str, str, Shape, int, int]:
        """name, dtype, shape, offset, size in bytes"""
        name, count = self.strings(1, _MOST_NAME, errors="strict")[0], self.number("I")
        if count > _MOST_DIMS:
            raise self.broken(f"{name!r:.100} has {count} dimensions")
        shape = tuple(self.number("Q") for _ in range(count))[::-1]
        if 0 in shape:
            raise self.broken(f"{name!r:.100} has the shape {shape}")
        kind, offset = self.number("I"), self.number("Q")
        if kind not in _TYPES:
            called = _UNREAD.get(kind, f"type {kind}")
            raise InvalidModelFiles(
                f"{self.file}: {name!r:.100} is stored as {called}, which cannot be read here; expected "
                f"{_listed(READABLE)}. Use the model in another quantization."
            )
        dtype, values, size = _TYPES[kind]
        if (shape[-1] if shape else 1) % values:
            raise self.broken(f"{name!r:.100}, {shape}, is stored as {dtype}, whose rows have a multiple of {values}")
        return name, dtype, shape, offset, math.prod(shape) // values * size


def _listed(names: Iterable[str]) -> str:
    return f"one of {', '.join(sorted(names))}"
