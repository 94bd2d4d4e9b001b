"""Safetensors files of a model directory, as NumPy arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hibachi.errors import InvalidModelFiles
from hibachi.model.arch import read_json
from hibachi.model.extras import need

HostArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # as stored; NumPy has no bfloat16
_AGAIN = "Copy or download the file again"


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Checkpoint(Mapping[str, HostArray]):
    """The tensors of a model directory by their Hugging Face name; each is read from its file when asked for.

    float32 and float16 come as they are, bfloat16 as float32 (exact). Reads `model.safetensors`, or the shards that
    `model.safetensors.index.json` names. Raises InvalidModelFiles for a missing or damaged file, MissingExtra without
    the library safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._entries: dict[str, _Entry] = {}
        single, index = self.path / "model.safetensors", self.path / "model.safetensors.index.json"
        if single.exists():
            self._entries = _read_header(single)
        elif index.exists():
            self._read_shards(index)
        else:
            raise InvalidModelFiles(
                f"No weights in {self.path}: expected model.safetensors, or model.safetensors.index.json and its "
                f"shards. Download them, or convert other formats with transformers' save_pretrained."
            )

    def _read_shards(self, index: Path) -> None:
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or any(Path(str(f)).name != f for f in names.values()):
            raise InvalidModelFiles(
                f"{index}: expected a weight_map from tensor names to names of files beside it. {_AGAIN}."
            )
        files = sorted(set(names.values()))
        if missing := [f for f in files if not (self.path / f).exists()]:
            raise InvalidModelFiles(
                f"{index.name} names {len(files)} shards; missing in {self.path}: {', '.join(missing)}. Download them."
            )
        for file in files:
            self._entries |= _read_header(self.path / file)
        if lost := sorted(names.keys() - self._entries.keys()):
            raise InvalidModelFiles(
                f"{index.name} promises tensors that no shard holds: {_listed(lost)}. {_AGAIN}, index and shards "
                f"together."
            )

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, name: str) -> HostArray:
        e = self._entries[name]
        count = int(np.prod(e.shape, dtype=np.int64))
        a = np.fromfile(e.file, dtype=_DTYPES[e.dtype], count=count, offset=e.offset).reshape(e.shape)
        if e.dtype == "BF16":  # a bfloat16 is the upper half of a float32
            a = (a.astype(np.uint32) << 16).view(np.float32)
        return a

    def check(self, required: Shapes, optional: Shapes | None = None) -> None:
        """Compare all names, shapes and dtypes with those that config.json implies.

        `optional` tensors may be missing. Raises one InvalidModelFiles that lists everything that is wrong.
        """
        allowed = {**(optional or {}), **required}
        faults = [f"{name} is missing (expected shape {shape})" for name, shape in required.items() if name not in self]
        for name, e in sorted(self._entries.items()):
            if name not in allowed:
                faults.append(f"{name} {e.shape} is not part of this architecture")
            elif e.shape != tuple(allowed[name]):
                faults.append(f"{name} has shape {e.shape}, expected {tuple(allowed[name])}")
            elif e.dtype not in _DTYPES:
                faults.append(f"{name} is stored as {e.dtype}, expected one of {', '.join(_DTYPES)}")
        if faults:
            raise InvalidModelFiles(
                f"The weights in {self.path} do not fit its config.json:\n  " + "\n  ".join(faults) + "\n"
                "Take config.json and the weights from one download; a model of another architecture or a quantized "
                "one does not load."
            )


def _read_header(file: Path) -> dict[str, _Entry]:
    """Names, dtypes, shapes and places of the tensors in a file.

    The library checks the file as a whole (sizes, overlaps, truncation). Its NumPy side refuses bfloat16 tensors, so
    they are read by their offset: 8 bytes with the length of a JSON header, the header, then the data it points into.
    """
    safetensors = need("safetensors", "Reading weights")
    try:
        with safetensors.safe_open(str(file), framework="numpy"):
            pass
    except (safetensors.SafetensorError, OSError) as e:
        raise InvalidModelFiles(f"{file} is not a complete safetensors file: {e}. {_AGAIN}.") from e
    with file.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
    return {
        name: _Entry(file, t["dtype"], tuple(t["shape"]), 8 + size + t["data_offsets"][0])
        for name, t in header.items()
        if name != "__metadata__"
    }


def _listed(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
