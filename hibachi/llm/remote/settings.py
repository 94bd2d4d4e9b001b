"""Settings of every command with a language model: which model, and how its engine is made.

A command adds to them, in words of its own, `engine` (child or own: where it runs) and `stall-after` (seconds).
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from hibachi.common.settings.kinds import SWITCH, Kind, Setting, choice, integer, size, text
from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.chatformat.templates.known import REASONING_NAMES, TOOL_NAMES
from hibachi.llm.llm import QUANTIZATIONS

MODEL: tuple[Setting, ...] = (
    Setting("model", text("MODEL"), "tiny", "a folder, a .gguf file, org/name on the Hub, tiny, or pkg:Class"),
    Setting("backend", text("NAME"), None, "array library: numpy, torch, jax, mlx or an installed one",
            "the first of torch, jax, numpy that imports; of your own class numpy"),
    Setting("device", text("NAME"), None, "device in the backend's own notation, for example cuda:0", "the backend's"),
    Setting("dtype", text("NAME"), None, "dtype to compute in", "the checkpoint's, else float32"),
    Setting("quantization", choice(*QUANTIZATIONS), None, "store matrices in eight or four bits; auto: in eight where"
            " that was measured to be faster", "none"),
    Setting("gguf-unpack", SWITCH, False, "multiply a GGUF file's Q4_0 and Q8_0 in the dtype, not as they are"),
    Setting("autotune", text("S"), None, "take the fastest kernels of the same bits (with --kernels: of any): 1s,"
            " full, off", "off"),
    Setting("kernels", text("FILE"), None, "use the kernels that a file names; with --autotune: write it", "by rule"),
    Setting("deterministic", SWITCH, None, "give each request the same bits whatever shares the batch", "wherever"
            " kernels load"),
    Setting("numerics", text("NAME"), None, "refuse to compute bits of another name: docs/determinism.md", "any"),
    Setting("max-model-len", integer(2), None, "most tokens of a request, prompt included", "the model's"),
    Setting("generation-config", text("auto|vllm|PATH"), "auto", "sampling defaults: the model's (auto), none (vllm),"
            " or those of another folder"),
    Setting("chat-template", text("T"), None, "chat template: a file, the name of one of the model's, or Jinja source",
            "the model's"),
)  # fmt: skip


def _parser(own: str, names: tuple[str, ...]) -> Kind:
    """The name of a format, which is checked here so that a wrong one is told by where it was given."""
    taken = ("auto", own, *names)
    return replace(choice(*taken), metavar="NAME", expected=f"one of {', '.join(taken)} (auto: by the chat template)")


CHAT: tuple[Setting, ...] = (
    Setting("tool-call-parser", _parser("generic", TOOL_NAMES), "auto", "how the model writes tool calls: auto (by"
            " its template), generic (if that shows none), or a name"),
    Setting("reasoning-parser", _parser("none", REASONING_NAMES), "auto", "how the model writes reasoning: auto (by"
            " its template), none (it stays in the text), or a name"),
    Setting("reasoning-field", choice("reasoning_content", "reasoning", "both"), "reasoning_content", "field of an"
            " answer that has the reasoning"),
)  # fmt: skip

ENGINE: tuple[Setting, ...] = (
    Setting("max-num-seqs", integer(1), 64, "most requests that run at once"),
    Setting("max-num-batched-tokens", integer(1), 1024, "most tokens computed in a step"),
    Setting("block-size", integer(1), None, "positions in a cache block", "what suits the backend"),
    Setting("kv-cache-memory-bytes", size(), None, "memory for keys and values", "for a full batch, at most 1G"),
    Setting(
        "speculative-config",
        text("CONFIG"),
        None,
        "propose tokens, and keep those that come anyhow: auto, or JSON: docs/speculation.md",
        "off",
    ),
    Setting("enable-prefix-caching", SWITCH, True, "let requests that begin alike share keys and values"),
)


def parsers_of(settings: SimpleNamespace) -> Parsers:
    """What settings of `CHAT` say. Raises ConfigError."""
    field = settings.reasoning_field
    fields = ("reasoning_content", "reasoning") if field == "both" else (field,)
    return Parsers(settings.tool_call_parser, settings.reasoning_parser, fields)
