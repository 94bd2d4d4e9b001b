"""Perplexity of a model on a text, and tokens a second, with weights in float32, bfloat16, int8 and int4, and
as a GGUF file has them in Q4_0 and Q8_0.

    .venv/bin/python benchmarks/perplexity.py --model .smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --text FILE

Windows of the text are scored by themselves: each token but the first of a window given those before it. The bound that
int8 has to keep: at most 1 % above bfloat16; the command fails otherwise. Where a file has blocks that are multiplied
as they are ("as stored"), the other variants unpack them.

Decoding is timed in turns: all variants write the same number of tokens, one after the other, and again.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import hibachi
from hibachi.llm.model.files import locate, open_files
from hibachi_torch.native import NativeTorchBackend

MOST = 0.01  # that int8 may be above bfloat16

VARIANTS: dict[str, tuple[Any, str, str | None]] = {
    "float32": (NativeTorchBackend, "float32", None),
    "bfloat16": (NativeTorchBackend, "bfloat16", None),
    "int8": (NativeTorchBackend, "bfloat16", "int8"),
    "int8, float32": (NativeTorchBackend, "float32", "int8"),
    "int4": (NativeTorchBackend, "bfloat16", "int4"),
    "as stored": (NativeTorchBackend, "bfloat16", None),
}


def perplexity(llm: hibachi.LLM, windows: list[list[int]]) -> tuple[float, float]:
    """e to the mean negative log-likelihood, and tokens scored a second."""
    began = time.perf_counter()
    scores = llm.score([w[:1] for w in windows], [w[1:] for w in windows])
    seconds = time.perf_counter() - began
    each = [logprob for s in scores for logprob in s.logprobs]
    return math.exp(-sum(each) / len(each)), len(each) / seconds


def speed(llm: hibachi.LLM, prompts: list[list[int]], tokens: int) -> float:
    """Tokens a second between the first and the last of `tokens` of each prompt."""
    rates = []
    time.sleep(0.2)  # threads of the engine before spin for a while
    for count in (1, tokens):
        began = time.perf_counter()
        llm.generate(prompts, hibachi.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        rates.append(time.perf_counter() - began)
    return len(prompts) * (tokens - 1) / (rates[1] - rates[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", default="tiny", help="as of hibachi.LLM (default: tiny)")
    add("--text", required=True, type=Path, help="a file of text that the model was not trained on")
    add("--tokens", type=int, default=8192, help="of the text, from its middle")
    add("--window", type=int, default=512, help="tokens that are scored together")
    add("--rows", type=int, nargs="+", default=[1, 64], help="requests at once, to time decoding with")
    add("--written", type=int, default=24, help="tokens of each such request")
    add("--turns", type=int, default=3, help="of timing each variant")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()

    text = args.text.read_text(errors="replace")
    text = text[len(text) // 2 :][: 8 * args.tokens]
    llms, found = {}, {}
    for name in args.variants:
        if name == "as stored" and not open_files(locate(args.model)).blocks:
            continue
        make, dtype, quantization = VARIANTS[name]
        llms[name] = llm = hibachi.LLM(
            args.model,
            backend=make("cpu"),
            dtype=dtype,
            quantization=quantization,
            gguf_unpack=name != "as stored",
            max_num_seqs=max(args.rows),
            max_model_len=args.window + 1,
            kv_cache_memory_bytes=1 << 29,
            enable_prefix_caching=False,
        )
        ids = llm.tokenizer.encode(text)[: args.tokens]
        windows = [ids[i : i + args.window] for i in range(0, len(ids) - args.window + 1, args.window)]
        found[name] = perplexity(llm, windows)
        print(f"{name}: {found[name][0]:.4f}", file=sys.stderr, flush=True)
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.turns):
        for rows in args.rows:
            for name, llm in llms.items():
                prompts = [ids[i : i + 16] for i in range(rows)]
                rates.setdefault((name, rows), []).append(speed(llm, prompts, args.written))
    print(f"{len(windows)} windows of {args.window} tokens of {args.text.name}, {Path(args.model).name}\n")
    print(f"| weights | perplexity | to bfloat16 | scored/s | {' | '.join(f'{n} at once' for n in args.rows)} |")
    print("|---" * (4 + len(args.rows)) + "|")
    base = found.get("bfloat16", (math.nan, 0))[0]
    for name, (value, rate) in found.items():
        written = " | ".join(f"{median(rates[name, n]):.1f}" for n in args.rows)
        print(f"| {name} | {value:.4f} | {value / base - 1:+.3%} | {rate:.0f} | {written} |")
    for llm in llms.values():
        llm.close()
    return int(any(found[n][0] / base - 1 > MOST for n in found if n.startswith("int8")))


if __name__ == "__main__":
    sys.exit(main())
