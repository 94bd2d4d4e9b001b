"""What deterministic=True costs: milliseconds of a decode step, and prompt tokens a second, with it and without.

Both are measured by turns in one run, so that they see the same machine. The shipped model (3.3 million parameters),
and a Llama of 19 million with random weights. Above 1.00: deterministic=True takes longer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import hibachi
from hibachi.llm.model.files import TINY

LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=16384,
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=1,
)
PROMPT, LONG = 32, 448


def write_llama(folder: Path) -> Path:
    """The larger model in Hugging Face's layout."""
    hidden, inner, kv = 384, 1024, 128
    shapes = {"model.embed_tokens": (LLAMA["vocab_size"], hidden), "model.norm": (hidden,)}
    for i in range(8):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj": (kv, hidden) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj": (hidden, inner)}
    random, header, parts, end = np.random.default_rng(0), {}, [], 0
    for name, shape in shapes.items():
        w = np.ones(shape) if len(shape) == 1 else random.normal(scale=0.05, size=shape)
        parts.append(w.astype("<f4").tobytes())
        header[f"{name}.weight"] = dict(dtype="F32", shape=list(shape), data_offsets=[end, end + len(parts[-1])])
        end += len(parts[-1])
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"".join(parts))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


class Side:
    """An engine, and what was measured on it."""

    def __init__(self, folder: Path, backend: str, dtype: str, deterministic: bool) -> None:
        b = hibachi.load_backend(backend)
        b = b.invariant() if deterministic else b
        model = hibachi.load_model(folder, b, dtype=dtype)
        self.engine = hibachi.AutoregressiveBatchInference(
            model,
            max_num_seqs=32,
            max_model_len=model.max_model_len,
            dtype=dtype,
            deterministic=deterministic,
            enable_prefix_caching=False,
        )
        self.random, self.vocab = np.random.default_rng(0), model.vocab_size

    def prompt(self, n: int) -> np.ndarray:
        return self.random.integers(2, self.vocab, n)

    def step(self, batch: int, new: int) -> float:
        """Seconds of a decode step with so many rows."""
        streams = [self.engine.run(self.prompt(PROMPT), max_tokens=new + 1) for _ in range(batch)]
        last = iter(streams[-1])
        next(last)
        began, count = perf_counter(), sum(1 for _ in last)
        took = perf_counter() - began
        assert count == new, count
        for s in streams[:-1]:
            s.collect()
        return took / new

    def prefill(self, batch: int = 4) -> float:
        """Seconds of a prompt token."""
        began = perf_counter()
        streams = [self.engine.run(self.prompt(LONG), max_tokens=1) for _ in range(batch)]
        for s in streams:
            s.collect()
        return (perf_counter() - began) / (batch * LONG)


def measure(name: str, folder: Path, backend: str, dtype: str, repeat: int, new: int) -> str:
    sides = [Side(folder, backend, dtype, d) for d in (False, True)]
    cells = []
    for what in (1, 8, 32, 0):
        times: list[list[float]] = [[], []]
        for i in range(repeat + 1):
            for side, seconds in zip(sides[:: 1 - 2 * (i % 2)], times[:: 1 - 2 * (i % 2)], strict=True):
                took = side.step(what, new) if what else side.prefill()
                if i:  # the first warms up
                    seconds.append(took)
        normal, ours = (median(t) for t in times)
        ratio = median(b / a for a, b in zip(*times, strict=True))
        shown = f"{1e3 * normal:.2f} → {1e3 * ours:.2f} ms" if what else f"{1 / normal:,.0f} → {1 / ours:,.0f} tok/s"
        cells.append(f"{shown}, **{ratio:.2f}**")
    for side in sides:
        side.engine.close()
    return f"| {name} | {backend} {dtype} | {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", action="append", help="repeatable, NAME or NAME:DTYPE (default: all)")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    print("| model | backend | batch 1 | batch 8 | batch 32 | prompts |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for name, folder in (("shipped", TINY), ("19M Llama", write_llama(Path(place)))):
            for spec in args.backend or ["numpy", "torch", "torch:bfloat16", "jax"]:
                backend, _, dtype = spec.partition(":")
                print(measure(name, folder, backend, dtype or "float32", args.repeat, args.tokens), flush=True)
