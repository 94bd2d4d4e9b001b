"""The default name of a model, and a digest by which models that compute the same are recognised."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hibachi.common.named import source_of
from hibachi.engine.batchengine import Facts
from hibachi.llm.model import MEANING
from hibachi.llm.model.files import SHIPPED, locate
from hibachi.llm.model.gguf import find_gguf, parts, stem
from hibachi.llm.own import is_own

SMALL = 1 << 20  # bytes of a file that is read in full
PIECES, PIECE = 16, 1 << 16  # of a larger file: this many samples, of this many bytes, evenly spread
_ENDINGS = (".json", ".safetensors", ".gguf", ".model", ".txt", ".jinja")


def name_of(model: str) -> str:
    """Of files the last part of their path, without .gguf and a part's number; `org/name` and `pkg:Class` as given."""
    path = Path(model).expanduser()
    if model in SHIPPED or not path.exists():
        return model
    path = Path(os.path.abspath(path))
    return stem(path) or path.name or model


def system_fingerprint(facts: Facts, model: str) -> str:
    """`fp_` and twelve digits: replicas with the same ones compute the same bits, as far as can be told beforehand.

    Of the bits' name (else library, device and kernels), dtype, quantization, and the model's files: how they are
    understood (`MEANING`), their names and sizes, small ones in full, and pieces of large ones. Read at the start.
    """
    own = is_own(model)
    bits = facts.numerics or facts.fingerprint
    said = bits, facts.dtype, facts.quantization, f"meaning {MEANING}", model.rpartition("/")[2] if own else ""
    found = hashlib.sha256("\0".join(said).encode())
    for path, name in _sources(model) if own else _files(model):
        found.update(f"\0{name}\0".encode())
        with suppress(OSError):  # one that the model was not made of, or it would not be here
            _read(path, found.update)
    return f"fp_{found.hexdigest()[:12]}"


def _files(model: str) -> list[tuple[Path, str]]:
    """With their names, which are the same wherever the files lie."""
    path = locate(model)
    if (file := find_gguf(path)) is not None:  # however it is called
        return [(part, "gguf") for part in parts(file)]
    return [(each, each.name) for each in sorted(path.iterdir()) if each.suffix in _ENDINGS and each.is_file()]


def _sources(model: str) -> list[tuple[Path, str]]:
    """The file of a model of one's own; []: it has none."""
    file = source_of(model)
    return [] if file is None else [(file, "")]


def _read(path: Path, take: Callable[[bytes], object]) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        take(f"{size}\0".encode())
        if size <= SMALL:
            take(file.read(SMALL))
            return
        for piece in range(PIECES):
            file.seek((size - PIECE) * piece // (PIECES - 1))
            take(file.read(PIECE))
