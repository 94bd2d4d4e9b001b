"""The registry of architectures: finds a model's architecture and loads it."""

from __future__ import annotations

import difflib
import importlib
import re
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from hibachi.backend.array_backend import Array, ArrayBackend
from hibachi.backend.discover import resolve_or_best
from hibachi.common.installed import by_name
from hibachi.engine.ladder import LanguageModel
from hibachi.errors import ConfigError, UnknownArchitecture
from hibachi.llm.model.arch import Arch, shapes
from hibachi.llm.model.decoder import Decoder
from hibachi.llm.model.defaults import naming_left_out
from hibachi.llm.model.families import FAMILIES, Family
from hibachi.llm.model.fields import Config, Fields, contradiction
from hibachi.llm.model.files import ModelFiles, locate, open_files, warn_of_ids
from hibachi.llm.model.tensors import Canonical
from hibachi.llm.model.weights import Weights

GROUP = "hibachi.models"


class Loader(Protocol):
    """What is registered for an architecture that the decoder does not cover: a class or object that loads it.

    An attribute `model_type`, if there is one, finds the files that name no architecture.
    """

    def load(
        self, files: ModelFiles, backend: ArrayBackend, *, dtype: str | None, max_model_len: int | None
    ) -> LanguageModel[Any]: ...


Registered: TypeAlias = Family | Loader | str

_BUILT_IN: dict[str, Registered] = {**FAMILIES, "MambaForCausalLM": "hibachi.llm.model.mamba:Mamba"}
_MINE: dict[str, Registered] = {}


def register_model(architecture: str, model: Registered) -> None:
    """Load `architecture` (the name in `architectures` of config.json) with `model` from now on.

    model: a `Family`, if the decoder covers the architecture; else a class or object with a method `load` (see
    `Loader`); or where to find one of these, as "package.module:NAME", which is imported when first needed. It goes
    before a model of the same name that hibachi or an installed package brings.

    An installed package does the same by an entry point in the group "hibachi.models", named like the architecture.

    Raises TypeError for an architecture that is no string or a model of another type, ValueError for a string without
    a colon.
    """
    if not isinstance(architecture, str) or not architecture:
        raise TypeError(f"architecture must be a name such as 'LlamaForCausalLM'; got {architecture!r}.")
    if isinstance(model, str):
        if not re.fullmatch(r"[\w.]+:[\w.]+", model):
            raise ValueError(f"A model given as a string must be 'package.module:NAME'; got {model!r}.")
    else:
        _check(architecture, model)
    _MINE[architecture] = model


def architectures() -> dict[str, str]:
    """Every architecture that can be loaded, and its origin: "hibachi", "register_model" or a package's name."""
    installed = {name: e.dist.name if e.dist else "?" for name, e in by_name(GROUP).items()}
    return dict.fromkeys(_BUILT_IN, "hibachi") | installed | dict.fromkeys(_MINE, "register_model")


def find(config: Config) -> tuple[str, Family | Loader]:
    """The architecture that a config names, and what is registered for it.

    Raises UnknownArchitecture, which says what was found, the nearest names and how to register one.
    """
    c = Fields(config)
    kind, classes = config.get("model_type"), config.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(n, str) for n in classes)):
        raise c.wrong(("architectures",), "a list of names", classes)
    known = architectures()
    if classes:
        for name in classes:
            if name in known:
                model = _resolved(name)
                own, kinds = _kind(model), ["mamba", *map(_kind, FAMILIES.values())]
                if own != kind and own in kinds and kind in kinds:
                    raise contradiction(f"architectures names {name}, whose model_type is {own}; got {kind!r}")
                return name, model
    elif kind is not None:
        for name in known:
            model = _resolved(name)
            if kind == _kind(model):
                return name, model
    found = f"architectures {classes}" if classes else f"model_type {kind!r} and no architectures"
    near = difflib.get_close_matches(classes[0] if classes else str(kind), known, n=4, cutoff=0.5)
    raise UnknownArchitecture(
        f"config.json names {found}, which is not registered. "
        + (f"Nearest known: {', '.join(near)}. " if near else f"Known: {', '.join(sorted(known))}. ")
        + "Register it with hibachi.register_model(name, family or loader), run it on the torch backend with the extra "
        "'hf' (through transformers), or write the model as a hibachi.CachedModel and pass the object to "
        "the engine."
    )


def _kind(model: Any) -> str | None:
    """What config.json calls it as model_type."""
    return getattr(model, "within", None) or getattr(model, "model_type", None)


def load_model(
    model: str | Path | ModelFiles,
    backend: str | ArrayBackend | None = None,
    *,
    dtype: str | None = None,
    max_model_len: int | None = None,
    gguf_unpack: bool = False,
) -> LanguageModel[Array]:
    """Load a language model on `backend`, which may be a name; None means the one that `LLM` takes.

    The model can be passed to `AutoregressiveBatchInference` as it is.

    model: "tiny", which ships; a folder in Hugging Face layout; a GGUF file; a name on the Hugging Face Hub.
    dtype: to compute with and to cache in; None means float32.
    max_model_len: the longest sequence to be ready for; None means what the model was trained for.
    gguf_unpack: as for `LLM`.

    An architecture that is not registered is offered to the backend (`foreign_model`). Raises UnknownArchitecture,
    InvalidModelFiles, MissingExtra, ConfigError, UnsupportedOperation, BackendNotFound, BackendNotInstalled.
    """
    if backend is None or isinstance(backend, str):
        backend = resolve_or_best(backend)
    files = model if isinstance(model, ModelFiles) else open_files(locate(model), gguf_unpack=gguf_unpack)
    loaded: LanguageModel[Any] | None = None
    try:
        _, found = find(files.config)
        load = partial(load_family, found) if isinstance(found, Family) else found.load
        loaded = load(files, backend, dtype=dtype, max_model_len=max_model_len)
    except UnknownArchitecture:
        if files.gguf is None:
            loaded = backend.foreign_model(files.path, dtype=dtype or "float32", max_model_len=max_model_len)
        if loaded is None:
            raise
        if backend.quantization != "none":
            raise ConfigError(
                f"quantization={backend.quantization!r} is for architectures that are registered with hibachi; a model "
                f"that runs through transformers keeps its weights. Pass quantization=None."
            ) from None
    if isinstance(size := getattr(loaded, "vocab_size", None), int):  # a loader of others may return what it likes
        warn_of_ids(files, size)
    return loaded


def arch_of(files: ModelFiles) -> Arch | None:
    """The decoder's numbers; None for other models, and for architectures that are not registered. Raises
    InvalidModelFiles.
    """
    try:
        _, found = find(files.config)
    except UnknownArchitecture:
        return None
    return found.read(files.config) if isinstance(found, Family) else None


def is_portable(files: ModelFiles) -> bool:
    """Does a backend compute all of this model that array libraries may compute in several ways? Raises
    InvalidModelFiles."""
    try:
        _, found = find(files.config)
    except UnknownArchitecture:
        return False
    return isinstance(found, Family) or bool(getattr(found, "portable", False))


def load_family(
    family: Family, files: ModelFiles, backend: ArrayBackend, *, dtype: str | None, max_model_len: int | None
) -> Decoder:
    arch, tensors = canonical(files, family)
    return Decoder.build(arch, tensors, backend, dtype=dtype, max_model_len=max_model_len)


def canonical(files: ModelFiles, family: Family) -> tuple[Arch, Weights]:
    """The model's description and its tensors by canonical name. Raises InvalidModelFiles if they do not fit each
    other, UnknownArchitecture.
    """
    arch = family.read(files.config)
    if files.gguf is None:
        with naming_left_out(family.model_type, files.config):
            known = Canonical(files.checkpoint(), family, files.config, arch)
        return known.arch, known
    fused = [name for name in ("qkv", "gate_up") if f"layers.0.{name}.weight" in files.gguf]
    files.gguf.check(*shapes(arch, fused))
    return arch, files.gguf


def _resolved(name: str) -> Family | Loader:
    """What is registered under a name, imported if need be."""
    model = _MINE.get(name)
    if model is None:
        installed = by_name(GROUP)
        model = installed[name].value if name in installed else _BUILT_IN[name]
    if not isinstance(model, str):
        return model
    module, _, attribute = model.partition(":")
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"{name} is registered as {model!r}, which cannot be imported: {e}.") from e
    _check(name, found)
    return found


def _check(name: str, model: Any) -> None:
    if not isinstance(model, Family) and not callable(getattr(model, "load", None)):
        raise TypeError(f"{name} must be registered as a Family or as something with a method `load`; got {model!r}.")
