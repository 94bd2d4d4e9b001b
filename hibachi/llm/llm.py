"""Text in, text out: a model folder, its tokenizer and an engine."""

from __future__ import annotations

import logging
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.candidates import AllowedKernels
from hibachi.backend.discover import resolve_or_best
from hibachi.backend.group import check_leaves
from hibachi.backend.library import check_numerics
from hibachi.common.options import takes
from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.forms import vocabulary_of
from hibachi.engine.ladder import LanguageModel
from hibachi.errors import ConfigError, UnsupportedOperation
from hibachi.llm.drafts import resolved
from hibachi.llm.model import MEANING
from hibachi.llm.model.arch import Arch
from hibachi.llm.model.digest import FilesDigest
from hibachi.llm.model.files import ModelFiles, locate, open_files
from hibachi.llm.model.pooling import pooling_of
from hibachi.llm.model.registry import arch_of, is_portable, load_model
from hibachi.llm.model.shards import check_shards, smallest
from hibachi.llm.options import TextConfig, TextOptions
from hibachi.llm.texts import Texts
from hibachi.llm.tokenizers.own import NoTokenizer
from hibachi.llm.tune.autotune import KernelChoice, seconds_of, settle
from hibachi.request import Pooling, SamplingParams

QUANTIZATIONS = ("auto", "none", "int8", "int4")

log: logging.Logger = logging.getLogger("hibachi.engine")


class LLM(Texts):
    """A language model loaded from its files, with an engine that batches its requests.

    model: "tiny", which ships with hibachi; a folder in Hugging Face layout; a GGUF file; or "org/name" on the Hugging
    Face Hub, from the local cache or downloaded (extra 'hf').
    backend: a name or a backend. None means what the variable HIBACHI_DEFAULT_BACKEND names, else the first of torch,
    jax and numpy that imports.
    device: in the backend's own notation.
    dtype: to compute in; None means the checkpoint's, where hibachi's kernels or an accelerator compute it, else
    float32.
    max_model_len: longest sequence in tokens; None means what the model was trained for.
    max_num_seqs: requests at once. max_num_batched_tokens: tokens of a step.
    kv_cache_memory_bytes, cache_tokens, block_size: memory for keys and values. For the options from
    enable_prefix_caching on, see `AutoregressiveBatchInference`.
    deterministic: other requests in the batch never change a bit of an answer; None means wherever hibachi's kernels
    load, and on the CPU with torch. See docs/determinism.md.
    numerics: the name that the bits must have, else the model is refused; None means that any will do. See
    docs/determinism.md.

    autotune: seconds to time kernels on the model's shapes, "1s" or "full"; None means none, or what the environment
    variable HIBACHI_AUTOTUNE says. Only kernels that give the same bits are candidates, unless `kernels` is given.
    kernels: a file. If it exists, its kernels are used; otherwise it is written with the fastest of all, so that
    another machine can use the same. See docs/backends.md.
    quantization: "int8": matrices in eight bits, which takes half the memory of bfloat16 and less time; "int4": in four
    bits; "auto": in eight where that was measured to take less time on this machine; None or "none": as the dtype says,
    and as they are if a GGUF file has them in Q4_0 or Q8_0. See docs/quantization.md.
    gguf_unpack: matrices in Q4_0 and Q8_0 become numbers of the dtype, as all other quantized ones do, and activations
    are not rounded.

    default_params: an attribute, the SamplingParams of a request that brings none; from the model's
    generation_config.json, or its GGUF file. As in vLLM, parameters given with a request replace all of them;
    `llm.default_params.with_(...)` changes a few. eos_ids, rules: attributes, which tokens end a text and which may not
    come, by the same files and the tokenizer's; they hold for every request (docs/sampling.md).

    Raises UnknownArchitecture, InvalidModelFiles, MissingExtra, ConfigError, UnsupportedOperation, BackendNotFound,
    BackendNotInstalled.
    """

    backend: ArrayBackend
    path: Path

    engine: AutoregressiveBatchInference

    @takes(TextConfig)
    def __init__(self, model: str | Path, **options: Unpack[TextOptions]) -> None:
        config = TextConfig(**options)
        files = open_files(locate(model), gguf_unpack=config.gguf_unpack)
        self.path, self.backend = files.path, _backend(config.backend, config.device)
        early = config.numerics and re.sub("/[0-9]+", "", config.numerics)  # leaves are not known yet
        check_numerics(early, self.backend)  # before anything is timed or loaded
        invariant = config.deterministic
        if invariant is None:
            invariant = self.backend.keeps_promise
        choice = settle(
            self.backend,
            arch_of(files),
            config.dtype,
            stored=files.dtype,
            allowed=AllowedKernels(bool(invariant), rounding=config.quantization == "auto"),
            budget=seconds_of(config.autotune),
            file=config.kernels,
            portable=is_portable(files),
        )
        dtype = choice.dtype
        self.backend = _quantized(
            choice.backend, "none" if config.quantization == "auto" and files.blocks else config.quantization, dtype
        )
        self.backend = _grouped(self.backend, config, arch_of(files), dtype, (type(self), (model,), options))
        try:
            self._open(files, config, choice)
        except BaseException:
            if self.backend.group is not None:  # nobody would close it
                self.backend.group.close()
            raise

    def _open(self, files: ModelFiles, config: TextConfig, choice: KernelChoice) -> None:
        group, dtype = self.backend.group, choice.dtype
        named = config.kv_tiers is not None or group is not None
        digest = FilesDigest(files.paths) if named else None  # computed while the model loads
        self.model: LanguageModel[Any] = load_model(
            files, self.backend, dtype=dtype, max_model_len=config.max_model_len
        )
        if (kept := getattr(self.model, "quantization", "none")) != "none":
            log.info(
                "matrices are kept in %s, and activations rounded before each product (docs/quantization.md)%s",
                kept,
                "" if kept == self.backend.quantization else "; gguf_unpack undoes both",
            )
        # Kernels of a file may have other bits, and libraries compute some models apart.
        check_numerics(config.numerics, self.backend, portable=getattr(self.model, "portable", False), dtype=dtype)
        tiers = config.kv_tiers
        if digest is not None and group is not None:
            group.facts["files"] = digest.result()
        if digest is not None and tiers is not None:
            stages = getattr(self.model, "stage_layers", ())  # an entry has their layers one after the other
            how = MEANING, kept, config.gguf_unpack, self.model.max_model_len, *stages
            tiers = replace(tiers, cache_id=repr((digest.result(), *how)))
        tokenizer = files.tokenizer(vocab_size=self.model.vocab_size)
        ends = self.model.eos_ids
        if (end := tokenizer.eos_id) is not None and end not in ends and end < self.model.vocab_size:
            ends = (*ends, end)
        rules = files.generation.rules(self.model.vocab_size, ends)
        speculation = resolved(
            config.speculative_config,
            choice.backend,
            self.model.dtype,
            lambda: vocabulary_of(tokenizer, self.model.vocab_size, ends),
        )
        known = replace(config, max_model_len=self.model.max_model_len, speculative_config=speculation, kv_tiers=tiers)
        engine = AutoregressiveBatchInference(
            self.model,
            backend=self.backend,
            dtype=self.model.dtype,
            deterministic=config.deterministic,
            **known.engine_options(),
        )
        params = files.generation.params()
        if isinstance(tokenizer, NoTokenizer):
            params.pop("stop", None)  # there is no text to find them in
        super().__init__(
            engine,
            tokenizer,
            vocab_size=self.model.vocab_size,
            eos_ids=ends,
            default_params=SamplingParams(**params),
        )
        self.rules = rules

    def _pooling(self, asked: Pooling | None) -> tuple[Pooling, bool]:
        return (asked, True) if asked else pooling_of(self.path)

    @property
    def deterministic(self) -> bool:
        return self.engine.facts.deterministic

    def selfcheck(self) -> int:
        """Compute a few random prompts alone and beside others; returns how many outputs agreed in every bit.

        Raises NotDeterministic, which names the first difference.
        """
        return self.engine.selfcheck()


def _backend(backend: str | ArrayBackend | None, device: Any) -> ArrayBackend:
    if backend is None or isinstance(backend, str):
        return resolve_or_best(backend, device=device)
    if not isinstance(backend, ArrayBackend):
        raise ConfigError(f"backend must be a name, an ArrayBackend or None; got {backend!r}.")
    if device is not None:
        raise ConfigError(f"{backend!r} has its device already; got device={device!r} as well. Leave device out.")
    return backend


def _grouped(
    backend: ArrayBackend, config: TextConfig, arch: Arch | None, dtype: str, opens: tuple[Any, ...]
) -> ArrayBackend:
    """The backend as one of the ranks that compute a model, which are started if nobody has. opens: what they call."""
    asked, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise ConfigError(f"pipeline_parallel_size must be a number of stages, 1 or more; got {stages!r}.")
    size = 1 if asked == "auto" else asked
    if asked == "auto" and arch is not None:
        size, why = smallest(arch, backend, dtype, stages)
        log.info("tensor_parallel_size is %d: %s", size, why)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f'tensor_parallel_size must be a number of processes, 1 or more, or "auto"; got {size!r}.')
    leaves = check_leaves(config.tp_leaves, size)
    if leaves == stages == 1:
        return backend
    if arch is None:
        raise UnsupportedOperation(
            "Only decoders of hibachi's own are cut over processes or into leaves; this model has another loader. "
            "Leave tensor_parallel_size, pipeline_parallel_size and tp_leaves out."
        )
    check_shards(arch, size, leaves, stages)
    try:
        opening = pickle.dumps(opens) if size * stages > 1 else b""
    except Exception as e:
        raise ConfigError(f"The other ranks are told what to open, and that cannot be pickled: {e}.") from e
    return backend.together(size, leaves, stages=stages, timeout=config.stall_after, opening=opening)


def _quantized(backend: ArrayBackend, how: str | None, dtype: str) -> ArrayBackend:
    if how not in (None, *QUANTIZATIONS):
        raise ConfigError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, or None; got {how!r}.")
    if how in (None, "none", backend.quantization) or (how == "auto" and not backend.prefers("int8", dtype)):
        return backend
    return backend.quantized("int8" if how == "auto" else str(how))
