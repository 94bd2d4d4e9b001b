"""A soak of proposals: requests of the shipped model in a cache too small for them, with tokens proposed at random;
every answer must be the one without proposals.

First all requests run without proposals, with room for all. Then they run again, in this process with a drafter that
proposes right tokens, wrong ones and none, and in a process of its own with n-grams. Some leave, before their first
token or after a few. At the end all blocks are free. Exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hibachi import LLM, SamplingParams
from hibachi.engine.speculation.drafting import Direct, Drafting
from hibachi.llm.remote.llm import RemoteLLM
from hibachi.request import Finish, Request

ROWS, BLOCK_SIZE, POSITIONS = 12, 16, 320
LENGTHS = 9, 24, 40  # of prompts, the last three tokens of which are the request's number
MOST = 24  # new tokens
LIVE = 48  # requests at once
K = 4
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0, "logprobs": 1, "min_tokens": 5},
    {"temperature": 1.3, "top_k": 20, "stop_token_ids": [11, 198, 262]},
)
NGRAMS = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


class Asked:
    """A request by its number, and whether and when its client leaves."""

    def __init__(self, number: int, vocab: int, seed: int) -> None:
        rng = random.Random(f"{seed} {number}")
        length, beginning = rng.choice(LENGTHS), random.Random(rng.randrange(4))
        own = [number % 97 + 5, number // 97 % 97 + 5, number // 97**2 + 5]
        self.prompt = [beginning.randrange(5, vocab) for _ in range(length - 3)] + own
        params = KINDS[rng.randrange(len(KINDS))]
        self.params = SamplingParams(seed=number, max_tokens=rng.randrange(5, MOST + 1), **params)
        self.leaves = rng.choice((0, 1, 3, 7)) if rng.random() < 0.15 else None


class Guesses:
    """Proposes what will come, wrong tokens, some of both, or nothing."""

    def __init__(self, asked: Iterable[Asked], answers: list[Any], vocab: int, seed: int) -> None:
        self._answers = {tuple(a.prompt): answer[0] for a, answer in zip(asked, answers, strict=True)}
        self._rng, self._vocab = random.Random(seed), vocab

    def propose(self, keys: Any, tokens: Any, most: Any) -> list[list[int]]:
        return [self._of(row.tolist(), n) for row, n in zip(tokens, most, strict=True)]

    def _of(self, row: list[int], n: int) -> list[int]:
        luck = self._rng.random()
        if luck < 0.2:
            return []
        length = next(m for m in LENGTHS if tuple(row[:m]) in self._answers)
        right = self._answers[tuple(row[:length])][len(row) - length :][:n]
        kept = right if luck < 0.5 else right[: self._rng.randrange(len(right) + 1)] if luck < 0.8 else []
        return kept + [self._rng.randrange(self._vocab) for _ in range(n - len(kept))]


def until_calm(engine: Any) -> Any:
    """The figures of an engine once nothing runs or waits."""
    end = time.monotonic() + 60
    while (stats := engine.stats()).running or stats.waiting or stats.free_blocks < stats.blocks:
        if time.monotonic() > end:
            raise AssertionError(f"something stayed: {stats}")
        time.sleep(0.05)
    return stats


def run(engine: Any, asked: list[Asked], judge: Callable[[int, Any, int | None], None], *, leave: bool) -> None:
    """All requests, at most LIVE at a time. judge: gets each one's number, what came, and after how many tokens it
    left.
    """
    live: deque[tuple[int, Any]] = deque()
    for number, one in enumerate(asked):
        live.append((number, engine.submit(engine.check(Request(np.array(one.prompt, np.int32), one.params)))))
        if len(live) == LIVE:
            _finish(*live.popleft(), asked, judge, leave=leave)
    while live:
        _finish(*live.popleft(), asked, judge, leave=leave)


def _finish(
    number: int, stream: Any, asked: list[Asked], judge: Callable[[int, Any, int | None], None], *, leave: bool
) -> None:
    leaves = asked[number].leaves if leave else None
    tokens = []
    if leaves != 0:
        for token in stream:
            tokens.append(token)
            if len(tokens) == leaves:
                break
    stream.close()
    judge(number, (tokens, stream.logprobs[: len(tokens)], stream.finish_reason), leaves)


class Judge:
    """Compares what came with what had to."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers, self.count = answers, Counter[str]()

    def __call__(self, number: int, got: Any, leaves: int | None) -> None:
        want = self._answers[number]
        if got[2] == Finish.CANCELLED or leaves is not None:
            n = len(got[0])
            self.count["left"] += 1
            same = (got[0], got[1]) == (want[0][:n], want[1][:n])
        else:
            self.count["whole"] += 1
            same = got == want
        if not same:
            self.count["WRONG"] += 1
            print(f"request {number}: got {got}, expected {want}")


def main(count: int, seed: int) -> bool:
    with LLM("tiny", backend="numpy", max_num_seqs=ROWS) as llm:
        vocab = llm.vocab_size
        asked = [Asked(i, vocab, seed) for i in range(count)]
        answers: list[Any] = [None] * count
        began = time.perf_counter()
        run(llm.engine, asked, lambda i, got, _: answers.__setitem__(i, got), leave=False)
        print(f"without: {count:,} requests, {llm.stats().steps:,} steps, {time.perf_counter() - began:.0f} s")
    options: dict[str, Any] = {"max_num_seqs": ROWS, "cache_tokens": POSITIONS, "block_size": BLOCK_SIZE}
    options |= {"backend": "numpy", "pause_after": 6}
    fine = True
    for where, make in (("this process", LLM), ("a process of its own", RemoteLLM)):
        with make("tiny", speculative_config=NGRAMS, **options) as llm:
            judge, began = Judge(answers), time.perf_counter()
            if isinstance(llm, LLM):
                core = llm.engine.core
                core.drafting = Drafting(Direct(Guesses(asked, answers, vocab, seed), vocab), K)
            run(llm.engine, asked, judge, leave=True)
            stats = until_calm(llm.engine)
            if isinstance(llm, LLM):
                core.scheduler.check()
            drafted = llm.engine.meters().drafted
            done = {**judge.count, "WRONG": judge.count["WRONG"]}
            print(
                f"{where}: {done}, {stats.steps:,} steps, {drafted.proposed:,} proposed, {drafted.accepted:,} "
                f"accepted, {stats.preemptions:,} preemptions, {stats.evictions:,} evictions, "
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )
            fine &= not judge.count["WRONG"] and drafted.accepted > 0 and (stats.preemptions > 0 or count < 500)
    return fine


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="requests (default: 10,000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.exit(not main(args.count, args.seed))
