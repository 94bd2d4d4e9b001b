"""Settings of every command with a language model: which model, how its chats are read, and how its engine is made."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from hibachi.common.settings.kinds import SWITCH, ValueKind, choice, integer, seconds, setting, size, text
from hibachi.common.settings.settle import Settings
from hibachi.engine.tiers.config import LOAD_FAILURES, KVTiers
from hibachi.engine.tiers.keeping import EVICTIONS
from hibachi.errors import ConfigError
from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.chatformat.templates.known import REASONING_NAMES, TOOL_NAMES
from hibachi.llm.llm import QUANTIZATIONS

_ranks = integer(1).read


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model, and how it computes."""

    model: str = setting(text("MODEL"), "tiny", "a folder, a .gguf file, org/name on the Hub, tiny, or pkg:Class")
    backend: str | None = setting(
        text("NAME"),
        None,
        "array library: numpy, torch, jax, mlx or an installed one",
        "the first of torch, jax, numpy that imports; of your own class numpy",
    )
    device: str | None = setting(
        text("NAME"), None, "device in the backend's own notation, for example cuda:0", "the backend's"
    )
    dtype: str | None = setting(text("NAME"), None, "dtype to compute in", "the checkpoint's, else float32")
    quantization: str | None = setting(
        choice(*QUANTIZATIONS),
        None,
        "store matrices in eight or four bits; auto: in eight where that was measured to be faster",
        "none",
    )
    gguf_unpack: bool = setting(SWITCH, False, "multiply a GGUF file's Q4_0 and Q8_0 in the dtype, not as they are")
    autotune: str | None = setting(
        text("S"), None, "take the fastest kernels of the same bits (with --kernels: of any): 1s, full, off", "off"
    )
    kernels: str | None = setting(
        text("FILE"), None, "use the kernels that a file names; with --autotune: write it", "by rule"
    )
    deterministic: bool | None = setting(
        SWITCH, None, "give each request the same bits whatever shares the batch", "wherever kernels load"
    )
    numerics: str | None = setting(
        text("NAME"), None, "refuse to compute bits of another name: docs/determinism.md", "any"
    )
    tensor_parallel_size: int | str = setting(
        ValueKind(
            "N|auto", "a number of processes, or auto", lambda given: given if given == "auto" else _ranks(given)
        ),
        1,
        "processes that have a part of the model each (torch); auto: as few as it fits in: docs/scale.md",
    )
    tp_leaves: int | None = setting(
        integer(1), None, "parts of sums, which decide the bits: docs/scale.md", "one a process"
    )
    pipeline_parallel_size: int = setting(
        integer(1), 1, "stages that have some of the layers each, of so many processes (torch): docs/scale.md"
    )
    max_model_len: int | None = setting(integer(2), None, "most tokens of a request, prompt included", "the model's")
    generation_config: str = setting(
        text("auto|vllm|PATH"), "auto", "sampling defaults: the model's (auto), none (vllm), or those of another folder"
    )
    chat_template: str | None = setting(
        text("T"), None, "chat template: a file, the name of one of the model's, or Jinja source", "the model's"
    )


def _parser(own: str, names: tuple[str, ...]) -> ValueKind:
    """The name of a format, which is checked here so that a wrong one is told by where it was given."""
    taken = ("auto", own, *names)
    return replace(choice(*taken), metavar="NAME", expected=f"one of {', '.join(taken)} (auto: by the chat template)")


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """How the answers of chats are read."""

    tool_call_parser: str = setting(
        _parser("generic", TOOL_NAMES),
        "auto",
        "how the model writes tool calls: auto (by its template), generic (if that shows none), or a name",
    )
    reasoning_parser: str = setting(
        _parser("none", REASONING_NAMES),
        "auto",
        "how the model writes reasoning: auto (by its template), none (it stays in the text), or a name",
    )
    reasoning_field: str = setting(
        choice("reasoning_content", "reasoning", "both"),
        "reasoning_content",
        "field of an answer that has the reasoning",
    )
    split_special_tokens: bool = setting(
        SWITCH, True, "names of special tokens in what users and tools say are text, no tokens"
    )


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How the engine runs."""

    engine: str = setting(choice("child", "own"), "child", "process of the engine: its own, or this one")
    max_num_seqs: int = setting(integer(1), 64, "most requests that run at once")
    max_num_batched_tokens: int = setting(integer(1), 1024, "most tokens computed in a step")
    block_size: int | None = setting(integer(1), None, "positions in a cache block", "what suits the backend")
    kv_cache_memory_bytes: int | None = setting(
        size(), None, "memory for keys and values", "for a full batch, at most 1G"
    )
    speculative_config: str | None = setting(
        text("CONFIG"),
        None,
        "propose tokens, and keep those that come anyhow: auto, or JSON: docs/speculation.md",
        "off",
    )
    enable_prefix_caching: bool = setting(SWITCH, True, "let requests that begin alike share keys and values")
    kv_host_bytes: int | None = setting(
        size(), None, "host memory for prefixes that the cache has no room for", "none; 256M with a disk or a store"
    )
    kv_disk: str | None = setting(text("DIR"), None, "keep prefixes in this folder: they survive a restart", "nowhere")
    kv_disk_bytes: int | None = setting(size(), None, "most bytes of that folder", "none: say how many")
    kv_store: str | None = setting(
        text("URL"), None, "share prefixes through a store: redis://, s3://, memory://", "no"
    )
    kv_key_file: str | None = setting(
        text("FILE"), None, "secret of who may share them: other entries of the store are not believed", "none"
    )
    kv_load_failure: str = setting(
        choice(*LOAD_FAILURES), "recompute", "what becomes of a request for which a store failed"
    )
    kv_eviction: str = setting(choice(*EVICTIONS), "lru", "which prefix makes way in host memory")
    kv_recency_window: int = setting(integer(0), 0, "of those, this many used last never make way")
    stall_after: float = setting(
        seconds(), 120.0, "seconds without a step after which the engine counts as lost; 0 means never"
    )


@dataclass(frozen=True, kw_only=True)
class LLMSettings(EngineSettings, ModelSettings, Settings):
    """What opens a model; see `hibachi.llm.remote.opening.open_settled`."""


def tiers_of(settings: EngineSettings) -> KVTiers | None:
    """What settings say of tiers; None means there are none. Raises ConfigError."""
    if settings.kv_host_bytes is None and settings.kv_disk is None and settings.kv_store is None:
        for one in fields(EngineSettings):
            given, of_tiers = getattr(settings, one.name), one.name.startswith("kv_") and "cache" not in one.name
            if of_tiers and given != one.default:
                raise ConfigError(
                    f"--{one.name.replace('_', '-')} {given}: nothing is kept. Add --kv-host-bytes N, --kv-disk DIR or "
                    "--kv-store URL, or leave it out."
                )
        return None
    if not settings.enable_prefix_caching:
        raise ConfigError("Tiers keep prefixes, and --no-enable-prefix-caching shares none. Leave one of them out.")
    return KVTiers(
        host_bytes=settings.kv_host_bytes,
        disk=settings.kv_disk,
        disk_bytes=settings.kv_disk_bytes,
        store=settings.kv_store,
        key_file=settings.kv_key_file,
        load_failure=settings.kv_load_failure,
        eviction=settings.kv_eviction,
        recency_window=settings.kv_recency_window,
    )


def parsers_of(settings: ChatSettings) -> Parsers:
    """What settings of a chat say. Raises ConfigError."""
    field = settings.reasoning_field
    fields = ("reasoning_content", "reasoning") if field == "both" else (field,)
    return Parsers(settings.tool_call_parser, settings.reasoning_parser, fields, settings.split_special_tokens)
