"""A model on disk: where it is, and what is in it: a folder in Hugging Face layout, or a GGUF file."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hibachi.errors import ConfigError, InvalidModelFiles
from hibachi.llm.model.fields import Config, is_int, read_json
from hibachi.llm.model.generation import Generation
from hibachi.llm.model.gguf import GGUF, find_gguf, parts
from hibachi.llm.model.hub import local_snapshot, parse_name
from hibachi.llm.model.weights import Checkpoint, Tensors
from hibachi.llm.tokenizers import Tokenizer
from hibachi.llm.tokenizers.own import NoTokenizer
from hibachi.llm.tokenizers.tokenizer import NAMES, has_tokenizer

log: logging.Logger = logging.getLogger("hibachi.engine")

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_OF_THE_WHOLE = {"architectures": None, "model_type": None, "tie_word_embeddings": True}
"""What a text_config does not say, and what it means if config.json does not say it either."""
TINY = Path(__file__).parent.parent / "data" / "tiny"
SHIPPED = {"tiny": TINY, "tiny-draft": TINY.with_name("tiny-draft")}


@dataclass(frozen=True)
class ModelFiles:
    """What a loader is given.

    path: the folder, or the GGUF file. config: the contents of config.json, with the fields of its text_config, if it
    has one, as if they were its own. Its eos_token_id has those of generation_config.json besides, as chat models name
    the end of a turn there; the bos_token_id of that file wins. For a GGUF file the same in the terms of config.json.
    generation: what the files recommend.
    """

    path: Path
    config: Config
    gguf: GGUF | None = None
    generation: Generation = field(default_factory=lambda: Generation({}))

    def checkpoint(self) -> Checkpoint:
        """The tensors of a folder by their names in the files. Raises InvalidModelFiles."""
        return Checkpoint(self.path)

    def tensors(self) -> Tensors:
        """The tensors by their names in the files; those of a GGUF file have canonical names."""
        return self.checkpoint() if self.gguf is None else self.gguf

    @property
    def paths(self) -> list[Path]:
        """All files that what it computes depends on: settings, and those that hold its tensors. Raises as
        `checkpoint`.
        """
        if self.gguf is not None:
            return parts(self.path)
        held = {stored.file for stored in self.checkpoint().entries.values()}
        return sorted(held | {path for path in self.path.glob("*.json") if path.is_file()})

    @property
    def dtype(self) -> str | None:
        """The dtype that most of its numbers are stored as; None means none of a dtype's, as they are quantized."""
        tensors = self.tensors()
        stored: Counter[str] = Counter()
        for name in tensors:
            stored[tensors.dtype(name)] += math.prod(tensors.shape(name))
        return _DTYPES.get(stored.most_common(1)[0][0]) if stored else None

    @property
    def blocks(self) -> tuple[str, ...]:
        """How those of its numbers are stored of which hibachi's kernels multiply the blocks, such as "Q4_0"."""
        return () if self.gguf is None else self.gguf.blocks

    def tokenizer(self, *, vocab_size: int | None = None) -> Tokenizer | NoTokenizer:
        """The model's tokenizer, whose ids must be below vocab_size; `NoTokenizer` where there is no file of one.

        Raises InvalidModelFiles, MissingExtra.
        """
        if self.gguf is None:
            if has_tokenizer(self.path):
                return Tokenizer.load(self.path, vocab_size=vocab_size)
            return NoTokenizer(f"{self.path} has none of {NAMES}")
        if not self.gguf.has_tokenizer:
            return NoTokenizer(f"{self.path} holds no vocabulary")
        raw, special, chat_template = self.gguf.tokenizer()
        found = Tokenizer(raw, special=special, chat_template=chat_template)
        if vocab_size is not None and found.vocab_size > vocab_size:
            raise InvalidModelFiles(
                f"{self.path}: expected at most {vocab_size} tokens, as many as rows of token_embd.weight; got "
                f"{found.vocab_size}. Convert or download it again."
            )
        return found


def locate(model: str | Path) -> Path:
    """Where a model is: "tiny" or "tiny-draft", which ship; a folder or a file; or "org/name" on the Hugging Face Hub.

    A name is looked up in the local cache, and downloaded if the extra 'hf' is installed and the network allows.
    Raises InvalidModelFiles, and ConfigError for what is neither a path nor a name.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(
            f"model must be a path or a name; got an object of the class {type(model).__qualname__}. A model of your "
            f"own goes into AutoregressiveBatchInference(model) instead (docs/models.md)."
        )
    if not os.fspath(model):
        raise ConfigError('model must be a path or a name, such as "tiny"; got an empty one.')
    if isinstance(model, str) and model in SHIPPED:
        return SHIPPED[model]
    path = Path(model).expanduser()
    if path.exists():
        return path
    if isinstance(model, str) and parse_name(model) is not None:
        return local_snapshot(model)
    raise InvalidModelFiles(
        f'There is no folder {path}: expected "tiny", a folder with a model in Hugging Face layout (config.json, '
        f"model.safetensors, tokenizer.json), a .gguf file, or a name on the Hugging Face Hub such as org/name. A "
        f"model of your own is file.py:Class or package.module:Class."
    )


def open_files(path: str | Path, *, gguf_unpack: bool = False) -> ModelFiles:
    """The model at `path`: a folder with config.json, a GGUF file, or a folder that holds one of those and no config.

    gguf_unpack: as for `LLM`.
    Raises InvalidModelFiles, UnknownArchitecture for a GGUF file of a kind that we do not know, MissingExtra.
    """
    path = Path(path)
    if (file := find_gguf(path)) is not None:
        gguf = GGUF(file, unpack=gguf_unpack)
        return ModelFiles(file, gguf.config, gguf, Generation.of_gguf(gguf.metadata, file))
    if not path.is_dir():
        raise InvalidModelFiles(f"{path} is no model: expected a folder in Hugging Face layout, or a .gguf file.")
    config: dict[str, Any] = read_json(path / "config.json")
    if isinstance(text := config.get("text_config"), dict):
        ids = {k: config[k] for k in _SPECIAL if config.get(k) is not None}
        config = config | text | ids | {k: config.get(k, usual) for k, usual in _OF_THE_WHOLE.items()}
    generation = Generation.read(path)
    bos, eos = (generation.special(name) for name in _SPECIAL)
    config |= {} if bos is None else {"bos_token_id": bos}
    config |= {} if eos in (None, []) else {"eos_token_id": [*_listed(config.get("eos_token_id")), *_listed(eos)]}
    return ModelFiles(path, config, generation=generation)


_SPECIAL = ("bos_token_id", "eos_token_id")
_TOKENS = (*_SPECIAL, "eot_token_id", "eom_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids")


def warn_of_ids(files: ModelFiles, vocab_size: int) -> None:
    """Log the token ids of the files that are none of the model's, as they have no effect."""
    if files.gguf is None:
        said = {"config.json": read_json(files.path / "config.json"), "generation_config.json": files.generation.said}
    else:
        own = {name.removeprefix("tokenizer.ggml."): value for name, value in files.gguf.metadata.items()}
        said = {files.path.name: own | dict(files.generation.said)}
    odd = {
        f"{name} of {file}": ids
        for file, config in said.items()
        for name in _TOKENS
        if (ids := [i for each in _listed(config.get(name)) for i in _listed(each) if is_int(i) and i >= vocab_size])
    }
    if odd:
        told = "; ".join(f"{where}: {', '.join(map(str, ids)):.200}" for where, ids in odd.items())
        log.warning("token ids outside the vocabulary of %d tokens are left out: %s", vocab_size, told)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
