"""A model on disk: a folder in Hugging Face layout, or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hibachi.errors import InvalidModelFiles
from hibachi.model.fields import Config, read_json
from hibachi.model.rope import HostArray
from hibachi.model.weights import Checkpoint


@dataclass(frozen=True)
class ModelFiles:
    """What a loader is given.

    path: the folder, or the GGUF file. config: the contents of config.json, with the bos and eos ids of
    generation_config.json, which win as in transformers: chat models name the end of a turn there. For a GGUF file the
    same in the terms of config.json.
    """

    path: Path
    config: Config
    gguf: Any = None

    def checkpoint(self) -> Checkpoint:
        """The tensors of a folder by their names in the files. Raises InvalidModelFiles."""
        return Checkpoint(self.path)

    def tensors(self) -> Mapping[str, HostArray]:
        """The tensors by their names in the files; those of a GGUF file have canonical names."""
        return self.checkpoint() if self.gguf is None else self.gguf


def open_files(path: str | Path) -> ModelFiles:
    """The model at `path`: a folder with config.json, a GGUF file, or a folder that holds one of those and no config.

    Raises InvalidModelFiles, MissingExtra.
    """
    path = Path(path)
    file = path if path.suffix == ".gguf" else None
    if file is None and path.is_dir() and not (path / "config.json").exists():
        from hibachi.model.gguf import find_gguf

        file = find_gguf(path)
    if file is not None:
        from hibachi.model.gguf import GGUF

        gguf = GGUF(file)
        return ModelFiles(file, gguf.config, gguf)
    if not path.is_dir():
        raise InvalidModelFiles(f"There is no folder {path}: expected a model in Hugging Face layout, or a .gguf file.")
    config: dict[str, Any] = read_json(path / "config.json")
    if (path / "generation_config.json").exists():
        generation = read_json(path / "generation_config.json")
        config |= {k: generation[k] for k in ("bos_token_id", "eos_token_id") if generation.get(k) is not None}
    return ModelFiles(path, config)
