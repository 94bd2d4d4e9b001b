"""A digest of answers, of the shipped model if no other is named: tokens and all digits of log-probabilities.

`python answers.py LIBRARY DTYPE [ENGINE [MODEL [ANSWERS]]]`: who prints another one computes other bits.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys

from hibachi import LLM, SamplingParams
from hibachi.backend.discover import resolve

WORDS = [
    "She",
    "was",
    "the",
    "day",
    "of",
    "and",
    "a",
    "in",
    "house",
    "not",
    "he",
    "had",
    "been",
    "much",
    "her",
    "sister",
]
NEW = 16
ENGINES = {
    "ample": dict(max_num_seqs=40),
    "chunked": dict(max_num_seqs=5, max_num_batched_tokens=24),
    "preempted": dict(max_num_seqs=12, kv_cache_memory_bytes=700_000, block_size=4),
}


def asked(many: int) -> tuple[list[str], list[SamplingParams]]:
    """Prompts of which many begin alike, greedy and drawn in all ways."""
    r = random.Random(1)
    begin = " ".join(r.choices(WORDS, k=20))
    prompts = [" ".join(r.choices(WORDS, k=r.randint(1, 40))) for _ in range(many)]
    prompts = [f"{begin} {p}" if i % 3 == 0 else p for i, p in enumerate(prompts)]
    params = [
        SamplingParams(
            temperature=r.choice([0, 0.7, 1.0, 1.3]),
            top_p=r.choice([1, 0.9, 0.95]),
            top_k=r.choice([0, 0, 40]),
            min_p=r.choice([0, 0, 0.05]),
            typical_p=r.choice([1, 1, 0.9]),
            repetition_penalty=r.choice([1, 1, 1.1]),
            seed=i,
            max_tokens=NEW,
            logprobs=r.choice([None, 0, 3]),
        )
        for i in range(many)
    ]
    return prompts, params


def digest(library: str, dtype: str, how: str = "ample", model: str = "tiny", many: str = "40") -> str:
    options = dict(ENGINES[how])
    if model != "tiny" and "kv_cache_memory_bytes" in options:
        options["kv_cache_memory_bytes"] = 20_000_000
    with LLM(model, backend=resolve(library), dtype=dtype, max_model_len=128, **options) as llm:
        assert llm.engine.facts.numerics == f"cpu-2 {dtype}", llm.backend.fingerprint()
        told = []
        for answer in llm.generate(*asked(int(many))):
            choice = answer.choices[0]
            scores = choice.logprobs and [sorted((t, p.hex()) for t, p in by_id.items()) for by_id in choice.logprobs]
            told.append([choice.token_ids, scores])
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


if __name__ == "__main__":
    print(digest(*sys.argv[1:]))
