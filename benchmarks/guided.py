"""What guiding costs: rows whose answers follow schemas beside the same rows without, on one model, by turns.

    .venv/bin/python benchmarks/guided.py --model .smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --backend torch

64 rows, each with a schema of its own; a row that ends is replaced at once. `guided` and `free` take turns of a few
seconds, and the table shows the medians of their tokens per second, their ratio turn by turn, and the ratio for rows
without a schema beside 32 that have one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hibachi import LLM, NumpyBackend, SamplingParams, StructuredOutputs, TextStream
from hibachi.engine.guide.find import guides_for
from hibachi.engine.guide.protocol import Vocabulary

WORDS = ["name", "city", "age", "price", "tags", "notes", "owner", "start", "count", "level", "items", "code", "unit"]
DEEP = ["text", "text", "integer", "number", "enum", "boolean", "list", "object"]


def schema(seed: int) -> dict[str, object]:
    """One of many: an object with some fields, perhaps nested, perhaps with lists."""
    r = random.Random(seed)

    def value(depth: int) -> dict[str, object]:
        kind = r.choice(DEEP if depth else ["text", "integer", "enum"])
        if kind == "text":
            return {"type": "string", "maxLength": r.randint(20, 200)}
        if kind == "integer":
            return {"type": "integer", "minimum": 0, "maximum": 10 ** r.randint(1, 6)}
        if kind == "enum":
            return {"enum": r.sample(WORDS, 4)}
        if kind == "list":
            return {"type": "array", "items": value(depth - 1), "maxItems": r.randint(2, 8)}
        return fields(depth - 1) if kind == "object" else {"type": kind}

    def fields(depth: int) -> dict[str, object]:
        names = r.sample(WORDS, r.randint(3, 8))
        return {
            "type": "object",
            "properties": {n: value(depth) for n in names},
            "required": names,
            "additionalProperties": False,
        }

    return fields(2)


def params(i: int, guided: bool, tokens: int) -> SamplingParams:
    form = {"json": schema(i % 4096)} if guided else None
    return SamplingParams(temperature=0.8, seed=i, max_tokens=tokens, ignore_eos=not guided, structured_outputs=form)


class Run:
    """Keeps `rows` requests going, of which `guided` are guided. Others are as long as guided ones were."""

    lengths: ClassVar[list[int]] = []  # of guided answers

    def __init__(self, llm: LLM, rows: int, guided: int, tokens: int) -> None:
        self.llm, self.rows, self.guided, self.tokens, self.number = llm, rows, guided, tokens, 0

    def turn(self, seconds: float) -> tuple[float, float]:
        """Tokens per second of guided rows, and of the others."""
        live = [self.begin(i < self.guided) for i in range(self.rows)]
        counts, self.had = [0, 0], [0] * self.rows
        warm, end = time.perf_counter() + 1.0, time.perf_counter() + 1.0 + seconds
        began = warm
        while (now := time.perf_counter()) < end:
            time.sleep(0.01)
            for i, (stream, kind) in enumerate(live):
                new = len(stream.tokens.come())
                self.had[i] += new
                if now >= warm:
                    counts[kind] += new
                if stream.finish_reason is not None:
                    if kind:
                        self.lengths.append(max(1, self.had[i]))
                    self.had[i] = 0
                    live[i] = self.begin(bool(kind))
        took = time.perf_counter() - began
        for stream, _ in live:
            stream.close()
        while self.llm.stats().running:
            time.sleep(0.01)
        return counts[1] / took, counts[0] / took

    def begin(self, guided: bool) -> tuple[TextStream, int]:
        self.number += 1
        prompt = f"Describe thing number {self.number % 97} as JSON:\n"
        tokens = self.tokens if guided or not self.lengths else self.lengths[self.number % len(self.lengths)]
        return self.llm.stream(prompt, params(self.number, guided, tokens)), int(guided)


def soak(llm: LLM, n: int) -> None:
    """n requests, many of which are cancelled at any moment: what is left of them, and what memory they took."""
    r, live, ended = random.Random(0), list[TextStream](), 0
    for i in range(n):
        live.append(llm.stream(f"Thing {i}:", params(i, True, r.choice([5, 30, 120]))))
        while len(live) > 100:
            stream = live.pop(r.randrange(len(live)))
            if r.random() < 0.5:
                stream.close()
            else:
                ended += sum(1 for _ in stream) >= 0
        if not i % (n // 10):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            print(f"{i:6d} requests  {pages * 4096 / 2**20:6.0f} MiB  {llm.stats().waiting:3d} waiting")
    for stream in live:
        stream.close()
    while llm.stats().running or llm.stats().waiting:
        time.sleep(0.01)
    core = llm.engine.core  # type: ignore[attr-defined]
    core.scheduler.check()
    print(f"{ended} read to their end, {n - ended} cancelled; left: {len(core.live())} jobs, {llm.stats().held} held")


def masks(tokenizer: Any, base: int, steps: int = 200) -> None:
    """CPU time a step of 64 guided rows for masks and for applying them to random logits, at three vocabularies.

    Those of 128k and 151k are made: the tokenizer's own tokens, and pairs of them joined.
    """
    real = [tokenizer.token_bytes(i) for i in range(base)]
    backend = NumpyBackend()
    for size in (base, 128_256, 151_936):
        r = random.Random(0)
        tokens = [*real, *(r.choice(real)[:12] + r.choice(real)[:12] for _ in range(size - base))]
        guides = guides_for(Vocabulary(tokens, tokenizer.special_ids, (0,)))
        words = -(-size // 32)
        logits, bits = backend.put(np.zeros((64, size), np.float32)), np.zeros((64, words), np.uint32)
        made = [guides.compile(guides.check(StructuredOutputs(json=schema(i)))) for i in range(64)]
        spent = np.zeros((steps, 3))
        for n in range(steps):
            began = time.process_time()
            failed = guides.masks(made, bits)
            between = time.process_time()
            x, _ = backend.kept_rows(logits, np.arange(64, dtype=np.int32), bits)
            after = time.process_time()
            del x
            for i, guide in enumerate(made):
                may = np.flatnonzero(np.unpackbits(bits[i].view(np.uint8), bitorder="little")[:size])
                may = may[may > 0]
                if failed[i] or guide.complete or not len(may):
                    made[i] = guides.compile(guides.check(StructuredOutputs(json=schema(r.randrange(4096)))))
                else:
                    told = time.process_time()
                    guide.advance([int(may[r.randrange(len(may))])])
                    spent[n, 2] += time.process_time() - told
            spent[n, :2] = between - began, after - between
        m = np.median(spent, axis=0) * 1e3
        mean = spent.mean(axis=0) * 1e3
        print(
            f"{size:7d} tokens: masks {m[0]:5.2f} ms (mean {mean[0]:5.2f}), applying {m[1]:5.2f}, taking {m[2]:5.2f}; "
            f"together {np.median(spent.sum(axis=1)) * 1e3:5.2f}"
        )
        guides.close()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="tiny")
    p.add_argument("--backend")
    p.add_argument("--dtype")
    p.add_argument("--rows", type=int, default=64)
    p.add_argument("--seconds", type=float, default=5.0)
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--tokens", type=int, default=120)
    p.add_argument("--masks", action="store_true", help="instead: masks alone, at three vocabularies")
    p.add_argument("--soak", type=int, help="instead: so many requests with random cancels")
    p.add_argument("--speculate", help="a speculative_config, such as auto: forced tokens are proposed")
    a = p.parse_args()
    options: dict[str, Any] = dict(backend=a.backend, dtype=a.dtype, speculative_config=a.speculate)
    llm = LLM(a.model, max_num_seqs=a.rows, max_model_len=512, **options)
    if a.masks:
        masks(llm.tokenizer, llm.tokenizer.vocab_size)
        return llm.close()
    if a.soak:
        soak(llm, a.soak)
        return llm.close()
    kinds = {"free": Run(llm, a.rows, 0, a.tokens), "guided": Run(llm, a.rows, a.rows, a.tokens)}
    kinds["half"] = Run(llm, a.rows, a.rows // 2, a.tokens)
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    kinds["guided"].turn(a.seconds)
    kinds["free"].turn(1.0)
    for _ in range(a.turns):
        for name, run in kinds.items():
            figures[name].append(run.turn(a.seconds))
    free = [f for _, f in figures["free"]]
    guided = [g for g, _ in figures["guided"]]
    half = figures["half"]
    m = statistics.median
    print(json.dumps({"engine": llm.engine.facts.fingerprint, "rows": a.rows, "turns": a.turns, "seconds": a.seconds}))
    print(f"free           {m(free):8.0f} tokens/s")
    print(f"guided         {m(guided):8.0f} tokens/s   ratio {m(g / f for g, f in zip(guided, free, strict=True)):.3f}")
    beside = [o / (f * (a.rows - a.rows // 2) / a.rows) for (_, o), f in zip(half, free, strict=True)]
    print(f"free, beside {a.rows // 2:2d} guided                   ratio {m(beside):.3f}")
    llm.close()


if __name__ == "__main__":
    main()
