"""The settings of `hibachi serve`: one list, from which come flags, the TOML file, HIBACHI_* and the table in the docs.

A flag wins over the environment, that over the file, and the file over the default.
"""

from __future__ import annotations

from functools import partial

from hibachi.lm.llm import QUANTIZATIONS
from hibachi.web import settle as shared
from hibachi.web.kinds import SWITCH, Setting, choice, integer, seconds, size, text, texts
from hibachi.web.settings import ADDRESS, LOG

GROUPS: dict[str, tuple[Setting, ...]] = {
    "model": (
        Setting("model", text("MODEL"), "tiny", "a folder, a .gguf file, org/name on the Hub, tiny, or pkg:Class"),
        Setting("served-model-name", texts("NAME"), None, "names that requests may call it", "as --model says"),
        Setting("backend", text("NAME"), None, "numpy, torch, jax, mlx or another", "numpy"),
        Setting("device", text("NAME"), None, "in the backend's own notation, for example cuda:0", "the backend's"),
        Setting("dtype", text("NAME"), None, "to compute in", "the checkpoint's, else float32"),
        Setting("quantization", choice(*QUANTIZATIONS), None, "matrices in eight bits", "none"),
        Setting("autotune", text("S"), None, "seconds to time kernels of the same bits, with --kernels of any: 1s,"
                " full, off", "off"),
        Setting("kernels", text("FILE"), None, "take the kernels that a file names; with --autotune: write it",
                "by rule"),
        Setting("deterministic", SWITCH, None, "the same bits whoever shares the batch", "wherever kernels load"),
        Setting("max-model-len", integer(2), None, "most tokens of a request, prompt included", "the model's"),
        Setting("generation-config", text("auto|vllm|PATH"), "auto", "defaults of sampling: the model's, none, or of"
                " another folder"),
        Setting("chat-template", text("T"), None, "a file, the name of one of the model's, or Jinja source",
                "the model's"),
        Setting("seed", integer(0), None, "of requests that bring none", "random"),
    ),
    "engine": (
        Setting("engine", choice("child", "own"), "child", "where it runs: a process of its own, or the server's"),
        Setting("max-num-seqs", integer(1), 64, "requests that run at once"),
        Setting("max-num-batched-tokens", integer(1), 2048, "tokens computed in a step"),
        Setting("block-size", integer(1), None, "positions in a cache block", "what suits the backend"),
        Setting("kv-cache-memory-bytes", size(), None, "memory for keys and values", "for a full batch, at most 1G"),
        Setting("enable-prefix-caching", SWITCH, True, "requests share what they have in common at the beginning"),
        Setting("scheduling-policy", text("NAME"), None, "priority, fcfs, fair, shares, waiting-served, or another",
                "shares with several keys, else priority"),
        Setting("restart", SWITCH, False, "begin again when the engine dies, fails or stalls, or its device is lost"),
        Setting("exit-on-failure", SWITCH, False, "end with status 1 when the engine has failed, or stalls, for good"),
        Setting("stall-after", seconds(), 30.0, "without a step, while work waits, /health is 503; 0: never"),
    ),
    "address": ADDRESS,
    "keys": (
        Setting("api-key", texts("KEY"), None, "who sends one may ask; each is a tenant of its own", "anybody may"),
        Setting("api-keys", text("FILE"), None, "a TOML file of tenants: their keys, priorities and limits"),
        Setting("share-prefixes", SWITCH, False, "tenants share cached prefixes, and can tell what others sent"),
    ),
    "load": (
        Setting("max-num-queued-reqs", integer(0), 1024, "requests that may wait; further ones get 429"),
        Setting("request-timeout", seconds(), 0.0, "for a request, which may name less; 0: any time"),
        Setting("queue-timeout", seconds(), 0.0, "to wait, for a request, which may name less; 0: any time"),
        Setting("max-tokens", integer(1), None, "most new tokens of a continuation, whatever is asked for",
                "as the context holds"),
        Setting("arrival-timeout", seconds(), 60.0, "for a request to come, headers and body; 0: any time"),
        Setting("pause-after", integer(0), 256, "unread tokens, after which a slow reader's request pauses; 0: never"),
        Setting("drain-timeout", seconds(), 25.0, "for running requests to end after SIGTERM"),
        Setting("max-body-size", size(), "16M", "of a request"),
        Setting("max-logprobs", integer(0), 20, "most log-probabilities beside each token"),
        Setting("max-n", integer(1), 128, "most continuations of a prompt"),
    ),
    "reports": (
        Setting("metric-names", choice("hibachi", "vllm", "tgi"), "hibachi", "whose names /metrics uses"),
        *LOG,
    ),
}  # fmt: skip
SETTINGS = shared.by_key(GROUPS)

settle = partial(shared.settle, SETTINGS, "serve")
misspelled = partial(shared.misspelled, SETTINGS)
table = partial(shared.table, SETTINGS)
