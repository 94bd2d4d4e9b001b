"""Models in a GGUF file or its parts, as llama.cpp uses them: weights, config and tokenizer.

Weights come under canonical names (hibachi.llm.model.arch) and as they were before llama.cpp's converter changed them:
rows of queries and keys in the order of Hugging Face, Gemma's norms minus one, Mamba's a_log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hibachi.backend.stored import HostArray, Stored
from hibachi.errors import InvalidModelFiles
from hibachi.llm.model.gguf.config import NAMES, SETTINGS, GgufSource, find_architecture, read_config
from hibachi.llm.model.gguf.file import QUANTIZED, READABLE, Blocks, Shape, parts, read_parts
from hibachi.llm.model.gguf.tokenizer import Pieces, read_tokenizer
from hibachi.llm.model.weights import Tensors


def find_gguf(path: str | Path) -> Path | None:
    """The GGUF file that `path` means: itself, or the only one in a folder without config.json; else None. Of a model
    that is split the first part, whichever `path` is.

    Raises InvalidModelFiles if such a folder holds several.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return parts(path)[0]
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = list(dict.fromkeys(parts(file)[0] for file in sorted(path.glob("*.gguf"))))
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

    path: the file, or any part of a model that is split. parts: all its files. unpack: quantized matrices are read as
    float32 also where kernels multiply their blocks.
    metadata: all of the file's entries. config: the same in the terms of config.json.
    Raises InvalidModelFiles for a damaged file, UnknownArchitecture for a model that we do not know.
    """

    metadata: dict[str, Any]

    readable = READABLE

    def __init__(self, path: str | Path, *, unpack: bool = False) -> None:
        self.parts, self._unpack = parts(Path(path)), unpack
        self.path = self.parts[0]
        self.metadata, stored = read_parts(self.parts)
        source = GgufSource(self.path, self._architecture(), self.metadata, stored)
        self.config: dict[str, Any] = read_config(source)
        self._how = find_architecture(source)
        own = self._how.names
        self._names = {**NAMES, **(own(source) if callable(own) else own)}
        self._entries: dict[str, _Entry] = {}
        for name, tensor in stored.items():
            base, _, suffix = name.rpartition(".")
            if suffix in ("scale", "input_scale") and f"{base}.weight" in stored:
                continue  # a part of that one; activations, which input_scale is for, are not quantized
            if name not in SETTINGS:
                self._add(name, tensor, stored.get(f"{base}.scale") if suffix == "weight" else None)

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
    def blocks(self) -> tuple[str, ...]:
        """How those tensors are stored of which kernels multiply the blocks."""
        stored = (self.stored(name) for name in self)
        return tuple(sorted({s.dtype for s in stored if s is not None and s.packs and s.dtype in QUANTIZED}))

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
        return name

    def _add(self, name: str, tensor: Blocks, scale: Blocks | None) -> None:
        m = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z0-9_]+?)(?:\.(weight|bias))?", name)
        block, kind, suffix = m.groups() if m else (None, "", None)
        block, suffix = f"layers.{block}." if block else "", f".{suffix}" if suffix else ""
        for ours in self._names.get(kind, ()):
            change, shape = self._change(ours, tensor)
            if scale is not None:
                change = _scaled(self._factor(scale, tensor), change)
            self._entries[f"{block}{ours}{suffix}"] = _Entry(tensor, change, shape)
        if kind not in self._names:  # the check against the config will say that there is no place for it
            self._entries[name] = _Entry(tensor, None, tensor.shape)

    def _factor(self, scale: Blocks, tensor: Blocks) -> HostArray:
        """What all numbers of a tensor are multiplied by, or those of each of its experts, as with NVFP4."""
        each = tensor.shape[:1] if len(tensor.shape) == 3 else (1,)
        factor = scale.read(np.float32) if scale.shape in (each, (1,), ()) else None
        if factor is None or not np.isfinite(factor).all():
            raise InvalidModelFiles(
                f"{scale.file}: the scale of a tensor {tensor.shape} in {tensor.dtype} must be finite numbers of the "
                f"shape {each}; got {f'the shape {scale.shape}' if factor is None else factor}. Convert or download it "
                f"again."
            )
        return factor.reshape(-1, *(1,) * (len(tensor.shape) - 1))

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


def _scaled(factor: HostArray, change: Callable[[HostArray], HostArray] | None) -> Callable[[HostArray], HostArray]:
    def scaled(w: HostArray) -> HostArray:
        w = w.astype(np.float32, copy=False)
        w *= factor
        return w if change is None else change(w)

    return scaled


def _log_of_minus(a: HostArray) -> HostArray:
    with np.errstate(all="ignore"):  # the numbers of a damaged file may be anything
        return np.log(-a)
