"""Sixteen prompts at once against the same prompts one by one, on the shipped model. Target on NumPy: 4x.

Alternates the two, so that both see the same machine; compiling backends are warmed up first.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

import hibachi
from hibachi.cli.demo import PROMPTS


def seconds(
    llm: hibachi.LLM, prompts: list[list[str]], params: hibachi.SamplingParams
) -> tuple[float, list[list[int]]]:
    began = perf_counter()
    tokens = [c.token_ids for group in prompts for c in llm.generate(group, params)]
    return perf_counter() - began, tokens


def measure(backend: str, new: int, repeat: int) -> str:
    params = hibachi.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    together, apart = [list(PROMPTS)], [[p] for p in PROMPTS]
    with hibachi.LLM("tiny", backend=backend) as llm:
        seconds(llm, together, params), seconds(llm, apart[:2], params)
        batched, single, same = [], [], 0
        for _ in range(repeat):
            t, ours = seconds(llm, together, params)
            batched.append(t)
            t, alone = seconds(llm, apart, params)
            single.append(t)
            same = sum(a == b for a, b in zip(ours, alone, strict=True))
    total = new * len(PROMPTS)
    ratio = median(s / b for s, b in zip(single, batched, strict=True))
    rates = f"{total / median(batched):,.0f} | {total / median(single):,.0f}"
    return f"| {backend} | {rates} | **{ratio:.1f}x** | {same} of {len(PROMPTS)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", action="append", help="repeatable (default: all that load)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    print("| backend | 16 at once, tokens/s | one by one | ratio | same tokens |\n|---|---|---|---|---|")
    for name in args.backend or hibachi.available_backends():
        print(measure(name, args.tokens, args.repeat), flush=True)
