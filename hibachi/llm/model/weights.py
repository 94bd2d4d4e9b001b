"""The tensors of a model on disk as NumPy arrays: what every format offers, and safetensors."""

from __future__ import annotations

import json
import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import numpy.typing as npt
from typing_extensions import override

from hibachi.backend.packing import Rows
from hibachi.backend.stored import AGAIN, PLAIN, HostArray, Stored, equal
from hibachi.errors import InvalidModelFiles, UnknownArchitecture

log: logging.Logger = logging.getLogger("hibachi.engine")

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class Weights(Mapping[str, HostArray]):
    """Tensors by name, some of which need not be read to become weights."""

    def matrices(self, name: str) -> list[Rows]:
        """The matrix of this name, or all along the first dimension of a larger tensor; unread where kernels can take
        them from their file. Raises as `self[name]` does.
        """
        return matrices(self[name])


def matrices(w: HostArray | Stored) -> list[Rows]:
    """The matrix, or all along the first dimension of a larger tensor."""
    return [w] if len(w.shape) == 2 else list(w)


class Tensors(Weights):
    """Tensors by name; each is read from its file when asked for, and not kept.

    `weights[name]` and `read` give arrays of their own memory in the machine's byte order. Raise KeyError for a name
    that is not there, InvalidModelFiles for a tensor that cannot be read.
    """

    path: Path
    readable: frozenset[str]
    """What numbers may be stored as, of those that `dtype` may return."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def dtype(self, name: str) -> str:
        """What its numbers are stored as, in the format's own words ("BF16")."""

    @abstractmethod
    def read(self, name: str, dtype: npt.DTypeLike | None = None) -> HostArray:
        """The tensor, cast to a NumPy dtype while reading, without a second copy.

        None means as it is stored, and float32 if NumPy has no such dtype (bfloat16, quantized).
        """

    @abstractmethod
    def stored(self, name: str) -> Stored | None:
        """Where the tensor lies; None means that it is made of what lies there."""

    def __getitem__(self, name: str) -> HostArray:
        return self.read(name)

    @override
    def matrices(self, name: str) -> list[Rows]:
        found = self.stored(name)
        return matrices(self[name] if found is None or not found.packs else found)

    def __contains__(self, name: object) -> bool:
        return any(name == n for n in self)

    def check(self, required: Shapes, optional: Shapes | None = None) -> None:
        """Compare all names, shapes and dtypes with those that the model's config implies.

        `optional` tensors may be missing. Raises one InvalidModelFiles that lists what is wrong, to 100 lines.
        """
        allowed = {**(optional or {}), **required}
        faults = [f"{name} is missing (expected shape {shape})" for name, shape in required.items() if name not in self]
        for name in sorted(self):
            shape, dtype = self.shape(name), self.dtype(name)
            if name not in allowed:
                faults.append(f"{name} {shape} is not part of this architecture")
            elif shape != tuple(allowed[name]):
                faults.append(f"{name} has shape {shape}, expected {tuple(allowed[name])}")
            elif dtype not in self.readable:
                faults.append(f"{name} is stored as {dtype}, expected one of {', '.join(sorted(self.readable))}")
        if faults:
            faults[_MOST_FAULTS:] = [f"and {len(faults) - _MOST_FAULTS} more"] if len(faults) > _MOST_FAULTS else []
            raise InvalidModelFiles(
                f"The weights in {self.path} do not fit its config:\n  " + "\n  ".join(faults) + "\n"
                "Take config and weights from one download; a model of another architecture or quantized in another "
                "way does not load."
            )


# ---- safetensors ---------------------------------------------------------------------------------------------------
#
# The format: 8 bytes with the length of a JSON header, the header, then the data that it points into. Reading it takes
# few lines and no library; ours takes bfloat16, which the library's NumPy side refuses, and maps no more than it must.

_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E5M2": 8, "F8_E4M3": 8, "F4": 4, "I64": 64, "I32": 32}
_BITS |= {"I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64}
_MOST_HEADER = 32 << 20  # bytes; real ones have some thousands
_MOST_INDEX = 64 << 20
_MOST_DIMS = 16
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_FAULTS = 100  # lines of a message
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Checkpoint(Tensors):
    """The tensors of a folder by their names in its safetensors files.

    Reads `model.safetensors`, or of the shards what `model.safetensors.index.json` assigns to them. float16, float32
    and float64 come as they are, bfloat16 as float32 (exact). Raises InvalidModelFiles for a missing or damaged file.

    entries: the tensors by name. Whoever loads them may rename, cut, and take out what is not to be read.
    """

    entries: dict[str, Stored]

    readable = frozenset(PLAIN)

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.entries = {}
        single, index = self.path / _SINGLE, self.path / _INDEX
        if single.is_file():  # not exists(): opening a named pipe would wait for ever
            self.entries = _read_header(single)
        elif index.is_file():
            self._read_shards(index)
        else:
            raise InvalidModelFiles(self._nothing())

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    def dtype(self, name: str) -> str:
        return self.entries[name].dtype

    def read(self, name: str, dtype: npt.DTypeLike | None = None) -> HostArray:
        e = self.entries[name]
        if e.dtype not in PLAIN:
            raise InvalidModelFiles(
                f"{e.file}: {name} is stored as {e.dtype}, expected one of {', '.join(PLAIN)}. Use a model that is "
                f"not quantized, or convert it with transformers' save_pretrained."
            )
        return e.read(dtype)

    def stored(self, name: str) -> Stored | None:
        return self.entries[name]

    def _read_shards(self, index: Path) -> None:
        names = _read_object(index, 0, _size(index, _MOST_INDEX)).get("weight_map")
        if not isinstance(names, dict) or not all(map(_is_plain, names.values())):
            raise InvalidModelFiles(
                f"{index}: expected a weight_map from tensor names to names of files beside it. {AGAIN}."
            )
        assigned: dict[str, list[str]] = {file: [] for file in sorted(set(names.values()))}
        for name, file in names.items():
            assigned[file].append(name)
        if missing := [f for f in assigned if not (self.path / f).is_file()]:
            raise InvalidModelFiles(
                f"{index.name} names {len(assigned)} shards; missing in {self.path}: {_listed(missing)}. Download them."
            )
        lost = []
        for file, promised in assigned.items():
            held = _read_header(self.path / file)
            self.entries |= {name: held[name] for name in promised if name in held}
            lost += [f"{name} in {file}" for name in promised if name not in held]
        if lost:
            raise InvalidModelFiles(
                f"{index.name} promises tensors that their shard does not hold: {_listed(lost)}. {AGAIN}, index and "
                f"shards together."
            )

    def _nothing(self) -> str:
        found = sorted(f.name for pattern in _PICKLES for f in self.path.glob(pattern))
        if found:
            return (
                f"{self.path} has its weights in {_listed(found)}: expected {_SINGLE}. Such files are Python pickles, "
                f"which can run any code when they are read, so hibachi reads none. If you trust their source, convert "
                f"them once: transformers.AutoModelForCausalLM.from_pretrained(path).save_pretrained(path)."
            )
        if found := sorted(f.name for f in self.path.glob("*.gguf")):
            return f"{self.path} has its weights in {_listed(found)} beside a config.json: name that file instead."
        return (
            f"No weights in {self.path}: expected {_SINGLE}, or {_INDEX} and its shards. Download them, or convert "
            f"other formats with transformers' save_pretrained."
        )


def refuse_quantized(files: Checkpoint, config: Mapping[str, Any]) -> None:
    """Raise UnknownArchitecture for weights that the config calls quantized, unless they are plain numbers after all:
    what merges and dequantizes models often leaves the quantization_config in the file.
    """
    settings = config.get("quantization_config")
    if not settings:
        return
    method = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else settings
    odd = [f"{n} is {e.dtype}" for n, e in files.entries.items() if e.dtype not in PLAIN or n.endswith(_OF_QUANTIZED)]
    if method in _ROUNDED_LATER:
        odd.append("its layers round plain weights when they compute")
    if odd:
        raise UnknownArchitecture(
            f"config.json: the weights are quantized (quant_method {method!r}: {odd[0]}); expected float32, float16 or "
            f"bfloat16 weights. Use the original, unquantized model."
        )


def settle_vocabulary(files: Checkpoint, embed: str, head: str, vocab_size: int, *, tied: bool) -> bool:
    """Whether the head is the embedding by what the files hold; a copy of it in them counts as none.

    embed, head: names in the files. tied: what config.json says. Rows of both beyond vocab_size are left out. The log
    says where the files differ from the config.
    """
    entries = files.entries
    tall = [n for n in (embed, head) if n in entries and (*entries[n].shape, 0)[0] > vocab_size]
    for name in tall:
        entries[name] = replace(entries[name], shape=(vocab_size, *entries[name].shape[1:]))
    if tall:
        log.warning("%s: more rows than vocab_size (%d), those beyond are not used", " and ".join(tall), vocab_size)
    if not tied or head not in entries:
        return tied
    if embed not in entries:
        entries[embed] = entries.pop(head)
    elif not {entries[embed].dtype, entries[head].dtype} <= PLAIN.keys():
        return tied  # whoever checks the dtypes will say so
    elif equal(entries[embed], entries[head]):
        del entries[head]
    else:
        log.warning(OWN_HEAD, head)
        return False
    return True


OWN_HEAD = "config.json says tie_word_embeddings, but %s holds other numbers than the embeddings: it is the head"
_OF_QUANTIZED = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", "SCB", "absmax")
_ROUNDED_LATER = ("bitnet",)


def _read_header(file: Path) -> dict[str, Stored]:
    """Names, dtypes, shapes and places of the tensors in a file; they fill it without gap or overlap."""
    total = _size(file)
    size = int.from_bytes(_read_bytes(file, 0, 8), "little")
    if total < 8 or size > min(total - 8, _MOST_HEADER):
        raise _broken(file, f"its header should have {size} bytes, the file has {total}")
    entries, places = {}, []
    for name, t in _read_object(file, 8, size).items():
        if name != "__metadata__":
            entries[name], place = _read_entry(file, name, t, 8 + size, total - 8 - size)
            places.append((*place, name))
    end = 0
    for start, stop, name in sorted(places):
        if start != end:
            raise _broken(file, f"the data of {name!r:.100} begins at {start}, not at {end}, where the one before ends")
        end = stop
    if end != total - 8 - size:
        raise _broken(file, f"its tensors have {end} bytes, the file holds {total - 8 - size}")
    return entries


def _read_entry(file: Path, name: str, t: Any, base: int, room: int) -> tuple[Stored, tuple[int, int]]:
    dtype, shape, place = (t.get(k) for k in ("dtype", "shape", "data_offsets")) if isinstance(t, dict) else (None,) * 3
    if not isinstance(dtype, str) or not _are_counts(shape, _MOST_DIMS) or not _are_counts(place, 2) or len(place) != 2:
        raise _broken(file, f"expected a dtype, a shape and two offsets for {name!r:.100}; got {t!r:.200}")
    start, stop = place
    bits, count = _BITS.get(dtype), math.prod(shape)
    fits = bits is None or (count * bits + 7) // 8 == stop - start
    if not start <= stop <= room or not fits or math.prod(n or 1 for n in shape) >= 2**48:
        raise _broken(file, f"{name!r:.100}, {dtype} {tuple(shape)}, cannot lie in bytes {start} to {stop} of {room}")
    return Stored(file, dtype, tuple(shape), base + start), (start, stop)


def _read_object(file: Path, offset: int, size: int) -> dict[str, Any]:
    """The JSON object in a part of a file."""
    try:
        value = json.loads(_read_bytes(file, offset, size).decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise _broken(file, str(e)) from e
    if not isinstance(value, dict):
        raise _broken(file, f"expected a JSON object; got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out


def _read_bytes(file: Path, offset: int, size: int) -> bytes:
    try:
        with file.open("rb") as f:
            f.seek(offset)
            return f.read(size)
    except OSError as e:
        raise _broken(file, str(e)) from e


def _size(file: Path, most: int | None = None) -> int:
    try:
        size = file.stat().st_size
    except OSError as e:
        raise _broken(file, str(e)) from e
    if most is not None and size > most:
        raise _broken(file, f"it has {size} bytes, expected at most {most}")
    return size


def _are_counts(x: Any, most: int) -> TypeGuard[list[int]]:
    """Whether this is a list of at most this many integers that can be sizes or offsets."""
    return isinstance(x, list) and len(x) <= most and all(type(n) is int and 0 <= n < 2**63 for n in x)


def _is_plain(name: Any) -> bool:
    """The name of a file beside the index. (The file itself may be a link to elsewhere, as in a Hub cache.)"""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set('/\\:"\0')


def _broken(file: Path, why: str) -> InvalidModelFiles:
    kind = "safetensors" if file.suffix == ".safetensors" else "JSON"
    return InvalidModelFiles(f"{file} is not a complete {kind} file: {why}. {AGAIN}.")


def _listed(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
