"""Models in one GGUF file, as llama.cpp uses them: weights, config and tokenizer.

Weights come under canonical names (hibachi.model.arch) and as they were before llama.cpp's converter changed them: rows
of queries and keys in the order of Hugging Face, Gemma's norms minus one, Mamba's a_log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hibachi.errors import InvalidModelFiles
from hibachi.model.gguf.config import NAMES, SETTINGS, Source, find_architecture, read_config
from hibachi.model.gguf.file import QUANTIZED, READABLE, Blocks, Shape, read_header
from hibachi.model.gguf.tokenizer import Pieces, read_tokenizer
from hibachi.model.weights import Tensors
from hibachi.tensor.stored import HostArray, Stored


def find_gguf(path: str | Path) -> Path | None:
    """The GGUF file that `path` means: itself, or the only one in a folder without config.json; else None.

    Raises InvalidModelFiles if such a folder holds several.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise InvalidModelFiles(
            f"{path} holds {len(found)} GGUF files: {', '.join(f.name for f in found[:8])}. Pass one of these "
            f"files: {found[0]}"
        )
    return found[0] if found else None


@dataclass(frozen=True, slots=True, eq=False)
class _Ordered:
    """The rows of a tensor in another order."""

    order: Any

    def __call__(self, w: HostArray) -> HostArray:
        found: HostArray = w[self.order]
        return found


@dataclass(frozen=True, slots=True)
class _Entry:
    """A stored tensor and what makes the canonical one of it, which has this shape."""

    stored: Blocks
    change: Callable[[HostArray], HostArray] | None
    shape: Shape


class GGUF(Tensors):
    """The tensors of a GGUF file by canonical name; quantized ones come as float32.

    unpack: quantized matrices are read as float32 also where kernels multiply their blocks.
    metadata: all of the file's entries. config: the same in the terms of config.json.
    Raises InvalidModelFiles for a damaged file, UnknownArchitecture for a model that we do not know.
    """

    metadata: dict[str, Any]

    readable = READABLE

    def __init__(self, path: str | Path, *, unpack: bool = False) -> None:
        self.path, self._unpack = Path(path), unpack
        self.metadata, stored = read_header(self.path)
        source = Source(self.path, self._architecture(), self.metadata, stored)
        self.config: dict[str, Any] = read_config(source)
        self._how = find_architecture(source)
        own = self._how.names
        self._names = {**NAMES, **(own(source) if callable(own) else own)}
        self._entries: dict[str, _Entry] = {}
        for name, tensor in stored.items():
            if name not in SETTINGS:
                self._add(name, tensor)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape(self, name: str) -> Shape:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        return self._entries[name].stored.dtype

    def read(self, name: str, dtype: npt.DTypeLike | None = None) -> HostArray:
        e = self._entries[name]
        if e.change is None:
            return e.stored.read(dtype)
        array = e.change(e.stored.read())
        return array if dtype is None else array.astype(dtype, copy=False)

    def stored(self, name: str) -> Stored | None:
        e = self._entries[name]
        if self._unpack and e.stored.dtype in QUANTIZED:
            return None
        if isinstance(e.change, _Ordered) and len(e.shape) == 2:
            return replace(e.stored, order=e.change.order)
        return e.stored if e.change is None else None

    @property
    def has_tokenizer(self) -> bool:
        """Does the file hold a vocabulary of texts?"""
        return self.metadata.get("tokenizer.ggml.model") not in (None, "none", "no_vocab")

    def tokenizer(self) -> Pieces:
        """The tokenizer. Raises InvalidModelFiles, UnknownArchitecture for a kind we do not know, MissingExtra."""
        return read_tokenizer(self.path, self.metadata)

    def _architecture(self) -> str:
        kind, name = self.metadata.get("general.type", "model"), self.metadata.get("general.architecture")
        if not isinstance(kind, str) or kind != "model" or not isinstance(name, str):
            raise InvalidModelFiles(
                f"{self.path} holds no language model: general.type is {kind!r:.100}, general.architecture "
                f"{name!r:.100}. Name the file of the model itself."
            )
        parts = self.metadata.get("split.count", 1)
        if type(parts) is not int or parts > 1:
            raise InvalidModelFiles(
                f"{self.path} is one of {parts!r:.100} parts. Join them first: llama-gguf-split --merge."
            )
        return name

    def _add(self, name: str, tensor: Blocks) -> None:
        m = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z0-9_]+?)(?:\.(weight|bias))?", name)
        block, kind, suffix = m.groups() if m else (None, "", None)
        block, suffix = f"layers.{block}." if block else "", f".{suffix}" if suffix else ""
        for ours in self._names.get(kind, ()):
            change, shape = self._change(ours, tensor)
            self._entries[f"{block}{ours}{suffix}"] = _Entry(tensor, change, shape)
        if kind not in self._names:  # the check against the config will say that there is no place for it
            self._entries[name] = _Entry(tensor, None, tensor.shape)

    def _change(self, name: str, tensor: Blocks) -> tuple[Callable[[HostArray], HostArray] | None, Shape]:
        """What undoes the converter's work, and the shape after it."""
        shape = tensor.shape
        if self._how.paired and name in ("q", "k", "qkv"):
            heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
            rows = _unpaired(name, shape[0] if shape else 0, *heads)
            if rows is None:
                raise InvalidModelFiles(
                    f"{self.path}: {name} has the shape {shape}, which {heads[0]} and {heads[1]} heads cannot share. "
                    f"Convert or download it again."
                )
            return _Ordered(rows), shape
        if self._how.plus_one and name.endswith("norm"):
            return lambda w: w - np.float32(1), shape
        if name == "a_log":
            return _log_of_minus, shape
        if name == "conv" and len(shape) == 2:
            return lambda w: w[:, None, :], (shape[0], 1, shape[1])
        return None, shape


def _unpaired(name: str, rows: int, heads: int, kv_heads: int) -> Any:
    """Where the rows of queries and keys lie that llama.cpp stores so that it can turn neighbours; None means nowhere.

    Hugging Face pairs row i of a head with row i + size / 2; the file has them side by side.
    """
    every = {"q": heads, "k": kv_heads, "qkv": heads + 2 * kv_heads}[name]
    if rows == 0 or rows % (2 * every):
        return None
    order = np.arange(rows).reshape(every, -1, 2).swapaxes(1, 2).reshape(every, -1)
    if name == "qkv":
        order[heads + kv_heads :] = np.arange(rows).reshape(every, -1)[heads + kv_heads :]
    return order.reshape(-1).astype(np.int32)


def _log_of_minus(a: HostArray) -> HostArray:
    with np.errstate(all="ignore"):  # the numbers of a damaged file may be anything
        return np.log(-a)
