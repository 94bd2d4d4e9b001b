"""Linked sequences: beams, guidance and many samples, beside the same rows without links and beside transformers.

    python benchmarks/linked.py [--rounds 5] [--rows 64]

The tiny model on PyTorch, in one process. Processor time is that of the whole process; ratios are of one round, and the
median of the rounds is told. Beams are compared with `generate` one by one, and with one padded batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hibachi import AutoregressiveBatchInference, Beams, Guidance, SamplingParams, Trie, load_model
from hibachi.llm.model.files import TINY
from hibachi_torch import TorchBackend

NEW = 32


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and seconds of the processor."""
    wall, spent = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - spent


def compared(rounds: int, **works: Callable[[], Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of each, round by round; the first round is not counted."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            both = timed(work)
            if turn:
                for seconds, one in zip(found[name], both, strict=True):
                    seconds.append(one)
    return found


def ratio(a: list[float], b: list[float]) -> str:
    return f"{statistics.median(x / y for x, y in zip(a, b, strict=True)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--paths", type=int, default=10**6, help="of the catalogue (default: 10^6)")
    asked = parser.parse_args()
    rounds, random = asked.rounds, np.random.default_rng(0)
    library = AutoModelForCausalLM.from_pretrained(str(TINY)).eval()
    vocab = library.config.vocab_size
    prompts = [random.integers(3, vocab, n).tolist() for n in random.integers(4, 60, 16)]
    plain = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with AutoregressiveBatchInference(
        load_model(TINY, backend=TorchBackend("cpu")), max_num_seqs=64, enable_prefix_caching=False
    ) as engine:

        def ran(ask: Callable[[list[int]], Any]) -> Callable[[], Any]:
            def work() -> list[Any]:
                asked = [ask(prompt) for prompt in prompts]
                streams = [s for each in asked for s in (each if isinstance(each, list) else [each])]
                return [stream.collect() for stream in streams]

            return work

        def rows(prompt: list[int]) -> Any:
            return engine.run_many(prompt, SamplingParams(max_tokens=NEW, seed=1, ignore_eos=True), 4)

        def apart(prompt: list[int]) -> Any:
            return [engine.run(prompt, SamplingParams(max_tokens=NEW, seed=i, ignore_eos=True)) for i in range(4)]

        def beams(prompt: list[int]) -> Any:
            return engine.run_many(prompt, SamplingParams(max_tokens=NEW, beams=Beams(4), ignore_eos=True), 1)

        def guided(prompt: list[int]) -> Any:
            return engine.run(prompt, plain, guidance=Guidance(1.5, prompt=prompt[:2]))

        how = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 4, "pad_token_id": 0, "eos_token_id": None}

        def one_by_one() -> None:
            for prompt in prompts:
                ids = torch.tensor([prompt])
                library.generate(ids, attention_mask=torch.ones_like(ids), **how)

        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])

        def batch() -> None:
            library.generate(padded, attention_mask=mask, **how)

        works = {"plain": ran(apart), "samples": ran(rows), "beams": ran(beams), "theirs": one_by_one, "batch": batch}
        t = compared(rounds, **works)
        print(f"16 prompts x 4 rows x {NEW} tokens, tiny on PyTorch, {torch.get_num_threads()} threads")
        print(f"  samples, of 64 plain rows: {ratio(t['samples'][1], t['plain'][1])} of the processor time")
        print(f"  beams, of 64 plain rows: {ratio(t['beams'][1], t['plain'][1])} of the processor time")
        print(f"  beams, as fast as transformers one by one: {ratio(t['theirs'][0], t['beams'][0])} times")
        print(f"  beams, as fast as its padded batch: {ratio(t['batch'][0], t['beams'][0])} times")

        few = prompts[:16]

        def alone() -> list[Any]:
            return [s.collect() for s in [engine.run(p, plain) for p in few]]

        t = compared(rounds, alone=alone, guided=ran(guided))
        print(f"guidance, of 16 plain rows: {ratio(t['guided'][0], t['alone'][0])} of the time")

        paths = random.integers(3, vocab, (asked.paths, 4))
        began = time.perf_counter()
        trie = Trie(paths)
        print(f"a catalogue of {asked.paths} paths of 4 ids: made in {time.perf_counter() - began:.1f} s")
        wide = SamplingParams(max_tokens=4, beams=Beams(50), ignore_eos=True)

        def free() -> None:
            for prompt in prompts:
                engine.run_many(prompt, wide, 1)[0].collect()

        def within() -> None:
            for prompt in prompts:
                engine.run_many(prompt, wide, 1, allowed=trie)[0].collect()

        t = compared(rounds, free=free, within=within)
        print(f"50 beams within it, of without: {ratio(t['within'][0], t['free'][0])} of the time")


if __name__ == "__main__":
    main()
