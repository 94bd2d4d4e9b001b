"""What is known of a model from its files alone: nothing is loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hibachi.errors import HibachiError, MissingExtra
from hibachi.llm.model.arch import Arch
from hibachi.llm.model.families import Family
from hibachi.llm.model.files import ModelFiles, open_files
from hibachi.llm.model.registry import architectures, canonical, find
from hibachi.llm.model.tensors import Canonical
from hibachi.llm.tokenizers import Tokenizer
from hibachi.llm.tokenizers.own import NoTokenizer

_TEMPLATES = {  # what a template writes that no other does -> its name
    "<|im_start|>": "ChatML",
    "<|start_header_id|>": "Llama 3",
    "<start_of_turn>": "Gemma",
    "<|start_of_role|>": "Granite",
    "<|assistant|>": "Zephyr",
    "[INST]": "Llama 2 or Mistral",
    "### Instruction": "Alpaca",
    "ASSISTANT:": "Vicuna",
}


@dataclass(frozen=True)
class Description:
    """What `hibachi inspect` shows.

    path, files: where the model is, and in what kind of files. architecture: as the files name it. mapping: what loads
    it, with the name of the package that brings it; None means nothing that is registered. problem: None, or why it
    would not load. parameters: how many are used. stored: what they are stored as -> how many of them. arch: the
    description that the decoder is built from. context: most tokens that it was trained for; None means unknown.
    token: numbers that the cache keeps for each token. template: the name of the chat template. not_obeyed: what the
    files recommend and answers here do not follow, by its name.
    """

    path: Path
    files: str
    architecture: str
    mapping: str | None
    problem: str | None
    parameters: int
    stored: Mapping[str, int]
    arch: Arch | None
    context: int | None
    vocab_size: int | None
    token: int
    template: str | None
    not_obeyed: Mapping[str, Any]


def describe(path: Path) -> Description:
    """Describe the model in a folder or a GGUF file. Raises InvalidModelFiles, UnknownArchitecture, MissingExtra."""
    files = open_files(path)
    tensors = files.tensors()
    named = files.config.get("architectures") or [files.config.get("model_type")]
    architecture, mapping, arch, problem, template = str(named[0]), None, None, None, None
    try:
        architecture, found = find(files.config)
        by = architectures()[architecture]
        mapping = f"{by}: {'the decoder' if isinstance(found, Family) else getattr(found, '__name__', repr(found))}"
        if isinstance(found, Family):
            arch = found.read(files.config)
            arch, known = canonical(files, found)  # raises if the weights do not fit
            tensors = known.files if isinstance(known, Canonical) else tensors
    except HibachiError as e:
        problem = str(e)
    try:
        files.generation.params(), files.generation.rules(0, ())
        template = _template(files.tokenizer(vocab_size=arch.vocab_size if arch else None))
    except MissingExtra:
        pass  # of the tokenizer: its template is not known
    except HibachiError as e:
        problem = problem or str(e)
    stored: Counter[str] = Counter()
    for name in tensors:
        stored[tensors.dtype(name)] += math.prod(tensors.shape(name))
    context = arch.max_positions if arch else files.config.get("max_position_embeddings")
    return Description(
        path=files.path,
        files=_kind(files),
        architecture=architecture,
        mapping=mapping,
        problem=problem,
        parameters=stored.total(),
        stored=dict(stored.most_common()),
        arch=arch,
        context=context if isinstance(context, int) else None,
        vocab_size=arch.vocab_size if arch else files.config.get("vocab_size"),
        token=2 * arch.kv_heads * arch.head_dim * len(arch.layers) if arch else 0,
        template=template,
        not_obeyed=files.generation.not_obeyed(),
    )


def _kind(files: ModelFiles) -> str:
    if files.gguf is not None:
        return f"GGUF, {len(files.gguf.parts)} parts" if len(files.gguf.parts) > 1 else "GGUF"
    shards = len(list(files.path.glob("model-*-of-*.safetensors")))
    return f"safetensors, {shards} shards" if shards else "safetensors"


def _template(tokenizer: Tokenizer | NoTokenizer) -> str | None:
    """The name of the chat template by the marks that it writes, or "its own"; None means there is none."""
    if tokenizer.chat_template is None:
        return None
    return next((name for mark, name in _TEMPLATES.items() if mark in str(tokenizer.chat_template)), "its own")


def as_json(d: Description) -> dict[str, Any]:
    """The description in plain types."""
    arch = d.arch
    return {
        "path": str(d.path),
        "files": d.files,
        "architecture": d.architecture,
        "mapping": d.mapping,
        "problem": d.problem,
        "parameters": d.parameters,
        "stored": dict(d.stored),
        "context": d.context,
        "vocab_size": d.vocab_size,
        "layers": len(arch.layers) if arch else None,
        "hidden_size": arch.hidden_size if arch else None,
        "heads": arch.heads if arch else None,
        "kv_heads": arch.kv_heads if arch else None,
        "head_dim": arch.head_dim if arch else None,
        "windows": sorted({layer.window for layer in arch.layers if layer.window}) if arch else None,
        "experts": arch.experts.count if arch and arch.experts else 0,
        "chat_template": d.template,
        "not_obeyed": dict(d.not_obeyed),
    }
