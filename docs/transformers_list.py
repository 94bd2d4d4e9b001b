"""Which architectures of `transformers` run in hibachi, and how: tries all, and writes transformers.md.

    python docs/transformers_list.py            # all, into docs/transformers.md
    python docs/transformers_list.py olmo phi   # these, onto the screen

Each gets a tiny model with random weights, saved as safetensors and loaded as any folder is. Three requests of
different lengths are served by the engine, prompts in chunks beside requests that decode, and every logit is compared
with the model's own eager forward pass over the whole text; of a model that keeps its own cache, the log-probability of
every token.
"""

from __future__ import annotations

import copy
import logging
import sys
import tempfile
import textwrap
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hibachi import AutoregressiveBatchInference, ConfigError, SamplingParams, UnknownArchitecture
from hibachi.backend.discover import load_backend
from hibachi.llm.model.registry import architectures
from hibachi_torch.transformers_model import TransformersModel

PAGE = Path(__file__).parent / "transformers.md"
LIMIT = 1e-4  # of the difference of a logit
PROMPTS, NEW = (5, 23, 9), 8  # lengths; tokens to generate
BUDGET, BLOCK = 12, 4  # tokens of a step, so that prompts come in chunks; positions of a cache block
NOT_TRIED = "not tried: "
SHARES = {"whole": "prompts come whole", "even": "rows of one length only share"}  # of the engine's remarks
LARGEST = 5_000_000  # parameters of what still counts as tiny

# Names that configs use for their sizes; each config gets those it has.
SMALL: dict[str, Any] = dict(
    vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=256, max_seq_len=256,
    hidden_size=48, d_model=48, intermediate_size=80, ffn_hidden_size=80, num_hidden_layers=3, n_layers=3,
    num_attention_heads=4, n_heads=4, num_key_value_heads=2, head_dim=12, sliding_window=8, window_size=8,
    attention_chunk_size=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=97, laurel_rank=4,
    decoder_layers=3, decoder_ffn_dim=80, decoder_attention_heads=4, encoder_layers=1, encoder_ffn_dim=80,
    encoder_attention_heads=4, is_decoder=True, use_sliding_window=True, max_window_layers=1,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4, num_local_experts=4,
    n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
    kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12, qk_head_dim=12,
)  # fmt: skip

MLA = dict(num_key_value_heads=4, head_dim=None)  # all heads have keys of their own; head_dim is the rotary part's
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
SHARED = dict(
    num_hidden_layers=4, num_kv_shared_layers=1, layer_types=["full_attention", *LAYERS[:2], "full_attention"]
)
EXCEPT: dict[str, dict[str, Any]] = {
    "bailing_hybrid": dict(layer_types=HYBRID),
    "bamba": dict(mamba_n_heads=8, mamba_d_head=12, attn_layer_indices=[1]),
    "codegen": dict(rotary_dim=8),
    "cohere_compass_text": dict(rope_parameters={k: dict(rope_theta=1e4, rope_type="default") for k in LAYERS}),
    "dbrx": dict(
        attn_config=dict(rope_theta=1e4, kv_n_heads=2, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=16, moe_num_experts=4, moe_top_k=2),
    ),
    "falcon_h1": dict(mamba_d_ssm=96, mamba_n_heads=12, mamba_d_state=16),
    "gemma3n_text": SHARED | dict(intermediate_size=80, activation_sparsity_pattern=None),
    "gemma4_text": SHARED | dict(global_head_dim=16),
    "gemma4_unified_text": dict(global_head_dim=16, layer_types=["full_attention", *LAYERS[:2]]),
    "gpt_neo": dict(num_hidden_layers=2, attention_types=[[["global", "local"], 1]]),
    "gptj": dict(rotary_dim=8),
    "granitemoehybrid": dict(mamba_n_heads=8, mamba_d_head=12, layer_types=HYBRID),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    "lfm2": dict(layer_types=["conv", "full_attention", "conv"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention", "conv"]),
    "longcat_flash": dict(num_layers=2, head_dim=4, expert_ffn_hidden_size=16, zero_expert_num=2, moe_topk=2),
    "mamba2": dict(num_heads=12, head_dim=8, n_groups=4),
    "minimax_m3_vl_text": dict(layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]),
    "qwen3_5_moe_text": dict(layer_types=HYBRID),
    "qwen3_5_text": dict(layer_types=HYBRID),
    "qwen3_next": dict(layer_types=HYBRID),
    "qwen4_exp_text": dict(
        layer_types=HYBRID,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=12,
        indexer_budget=8,
        indexer_compress_ratio=4,
    ),
    "stablelm": dict(head_dim=16, hidden_size=64),  # a quarter of a head is turned
    "xlstm": dict(hidden_size=128, embedding_dim=128, num_heads=4, chunk_size=16),
    "xmod": dict(default_language="en_XX"),
    "zaya": dict(num_experts_per_tok=1),
}
"""Sizes of single architectures; None: leave the config's own."""


@dataclass(frozen=True)
class Verdict:
    """What came of an architecture.

    gap: the largest difference, or None: refused, or not tried; why says it. unpaged: why the paged engine does not run
    it, where it runs with its own cache. shares: what the engine found of that cache.
    """

    kind: str
    name: str
    gap: float | None = None
    why: str = ""
    tokens_equal: bool = False
    mixed: bool = False
    unpaged: str = ""
    shares: str = ""

    @property
    def agrees(self) -> bool:
        return self.gap is not None and self.gap <= LIMIT and self.tokens_equal


def tiny(kind: str, **changes: Any) -> Any:
    """A small random model of this model_type; changes: of its config. Raises ValueError if it does not get small."""
    make = CONFIG_MAPPING[kind]
    known = make()
    sizes = {k: v for k, v in SMALL.items() if has(known, k) and not isinstance(getattr(make, k, 0), property)}
    if hasattr(known, "qk_rope_head_dim"):
        sizes |= MLA
    if {*LAYERS} == {*(getattr(known, "layer_types", None) or ())}:
        sizes["layer_types"] = LAYERS
    sizes |= EXCEPT.get(kind, {}) | changes
    config = make(**{k: v for k, v in sizes.items() if v is not None})
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[make]
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if count > LARGEST:
        raise ValueError(f"its config does not get small enough ({count / 1e6:.0f} million parameters)")
    torch.manual_seed(0)
    model = cls(config).float().eval()
    with torch.no_grad():
        for p in filter(lambda p: p.requires_grad, model.parameters()):
            p.add_(torch.randn_like(p) * 0.05) if p.ndim == 1 else p.copy_(torch.randn_like(p) * 0.08)
    return model


def has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # what layers have each for themselves cannot be read here
        return True


class Recorder:
    """A model whose logits are kept by row and position, and whose first step waits until all requests are there."""

    def __init__(self, model: Any) -> None:
        self.model, self.vocab_size, self.params = model, model.vocab_size, model.params
        self.cache_spec, self.ready, self.mixed = model.cache_spec, threading.Event(), False
        self.logits: dict[int, dict[int, Any]] = defaultdict(dict)

    def step(self, params: Any, cache: list[Any], x: Any) -> tuple[Any, list[Any]]:
        self.ready.wait(60)
        logits, cache = self.model.step(params, cache, x)
        q = x.cu_q.diff()
        self.mixed |= bool(((q == 1) & (x.start > 0)).any() and (q > 1).any())
        for row, pos, values in zip(x.row[x.seg[x.last]].tolist(), x.pos[x.last].tolist(), logits, strict=True):
            self.logits[row][pos] = values.clone()
        return logits, cache


def compare(folder: Path, kind: str, name: str) -> Verdict:
    """The model in a folder through the engine, against its own forward pass."""
    backend, messages = load_backend("torch", device="cpu"), list[str]()
    with heard(messages):
        model = backend.foreign_model(folder, dtype="float32", max_model_len=128)
    assert model is not None, "transformers does not know it"
    paged = isinstance(model, TransformersModel)
    recorder, rng = Recorder(model) if paged else None, np.random.default_rng(1)
    prompts = [rng.integers(3, model.vocab_size, n).astype(np.int32) for n in PROMPTS]
    with AutoregressiveBatchInference(
        recorder or model,
        backend=backend,
        max_model_len=model.max_model_len,
        max_num_seqs=4,
        max_num_batched_tokens=BUDGET,
        block_size=BLOCK,
        dtype="float32",
        deterministic=False,  # the steps of a check would wait for the requests
    ) as engine:
        params = SamplingParams(temperature=0, max_tokens=NEW, logprobs=0, ignore_eos=True)
        streams = [engine.run(p, params) for p in prompts]
        if recorder is not None:
            recorder.ready.set()
        outputs = [list(s) for s in streams]
        shares = [word for word, what in SHARES.items() if any(what in remark for remark in engine.facts.remarks)]
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    gap, equal = 0.0, True
    for prompt, output, stream in zip(prompts, outputs, streams, strict=True):
        text = torch.tensor([*prompt.tolist(), *output])[None]
        with torch.inference_mode():
            theirs = own(input_ids=text, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        equal &= theirs.argmax(-1).tolist() == output
        if recorder is not None:
            [rows] = [rows for rows in recorder.logits.values() if min(rows) == len(prompt) - 1]
            ours = torch.stack([rows[i] for i in sorted(rows)])
        else:
            theirs = theirs.log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0]
            ours = torch.tensor([step[i] for step, i in zip(stream.logprobs, output, strict=True)])
        gap = max(gap, float((theirs - ours).abs().max()))
    mixed = recorder is not None and recorder.mixed
    unpaged = "" if paged else messages[0].partition(" cannot run it: ")[2]
    return Verdict(kind, name, gap, tokens_equal=equal, mixed=mixed, unpaged=unpaged, shares="; ".join(shares))


@contextmanager
def heard(messages: list[str]) -> Iterator[None]:
    """Collect what the engine logs."""
    log, handler = logging.getLogger("hibachi.engine"), logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def judge(kind: str) -> Verdict:
    """An architecture's verdict, whatever happens."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    try:
        model = tiny(kind)
    except Exception as e:
        line = " ".join(str(e).replace("`", "").split()).split(": ValueError: ")[-1]
        return Verdict(kind, name, why=f"{NOT_TRIED}{line:.120}")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            verdict = compare(Path(folder), kind, name)
        except (UnknownArchitecture, ConfigError) as e:
            why = str(e).partition(" can run neither ")[2] or str(e)
            return Verdict(kind, name, why=" ".join(why.partition(". Use a model")[0].split())[:400].replace("|", "/"))
    why = "" if verdict.agrees else f"differs by {verdict.gap:.0e}, tokens equal: {verdict.tokens_equal}"
    return replace(verdict, why=why)


def composite(kind: str) -> bool:
    """Is it a model of several, for images or sound? Their text models are on the list by themselves."""
    parts = {"text_config", "vision_config", "audio_config", "audio_encoder", "decoder", "patcher_config"}
    return not parts.isdisjoint(CONFIG_MAPPING[kind].sub_configs)


def kinds() -> list[str]:
    """Every model_type with a causal language model in the installed transformers."""
    return sorted(k for k in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not composite(k))


def page(verdicts: list[Verdict]) -> str:
    agree = [v for v in verdicts if v.agrees]
    untried = [v for v in verdicts if v.why.startswith(NOT_TRIED)]
    paged, own = [v for v in agree if not v.unpaged], architectures()
    return f"""# Models of transformers

An architecture that hibachi does not describe itself runs through the library transformers, if that library has it.
This needs the torch backend and the extra `hf`. hibachi reads a model's folder as data: it runs no code in it and opens
no pickle. `hibachi.LLM(folder)`, `serve --model`, `chat` and all else that takes a model's name take such a folder.

There are two ways, and the first that gives the model's own answers is taken:

- **Paged**: its layers run unmodified, over hibachi's batching and paged cache. Attention masks are read and must be
  causal, perhaps with a window. An attention option that hibachi does not know rules this out. And two short prompts,
  in chunks and mixed with decoding, are compared with the model's own forward pass.
- **With its own cache** ([how](models-caches.md#between-1-and-2-a-cache-of-the-models-own)): where the paged engine
  cannot run it, which the log says, with the reason. Requests share calls as far as a trial at the start finds that
  they may. Two short prompts are compared with the model's own forward pass here, too.

A model that would not compute the same in either way is refused when it is loaded, with both reasons.

Written by `docs/transformers_list.py` with transformers {transformers.__version__} and torch {torch.__version__}.
Each architecture is a tiny model with random weights. Three requests of {", ".join(map(str, PROMPTS))} tokens are
served together, with prompts in chunks, and {NEW} tokens are generated greedily for each.
Of the architectures, **{len(agree)} of {len(verdicts)}** agree with their own eager forward pass, **{len(paged)}** of
them paged: every token is the same, and no logit (with an own cache: no log-probability of a token) differs by more
than {LIMIT:.0e} (float32).

## These were tried

Numbers are the largest differences. hibachi describes architectures with a star itself, so they run on every backend
and need no transformers. With an own cache, "whole" means that prompts come whole and not in chunks, and "even" that
only rows of one length share a call.

| `model_type` | class | paged | own cache | refused |
|---|---|---|---|---|
{table(row(v, own) for v in verdicts if not v.why.startswith(NOT_TRIED))}

## These were not tried

The sizes that the script sets do not make a small model of these configs.

| `model_type` | class | why |
|---|---|---|
{table((v.kind, v.name, v.why.removeprefix(NOT_TRIED)) for v in untried)}

Models made of several parts, for images or sound, were left out. Their text models are in the lists above:
{textwrap.fill(", ".join(f"`{k}`" for k in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if composite(k)), 110)}.
"""


def row(v: Verdict, own: Collection[str]) -> tuple[str, ...]:
    name, gap = f"{v.name}{' *' if v.name in own else ''}", "" if v.gap is None else f"{v.gap:.1e}"
    if not v.agrees:
        return v.kind, name, "", "", v.why
    return (
        (v.kind, name, f"no: {v.unpaged}", f"{gap}{v.shares and f', {v.shares}'}", "")
        if v.unpaged
        else (v.kind, name, gap, "", "")
    )


def table(rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| `{first}` | {' | '.join(rest)} |" for first, *rest in rows)


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    verdicts = []
    for kind in wanted or kinds():
        verdicts.append(judge(kind))
        print(f"{kind:24}", f"{verdicts[-1].gap:.1e}" if verdicts[-1].agrees else verdicts[-1].why, flush=True)
    if not wanted:
        PAGE.write_text(page(verdicts))


if __name__ == "__main__":
    main(sys.argv[1:])
