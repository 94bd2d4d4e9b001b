"""What proposals gain, by requests in a step and by how many are right: measured, and as the cost model predicts it.

    python benchmarks/speculation_gain.py --model .smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --backend torch --out PNG

The drafter knows the answers, and gives each token right with a given probability. Turns with and without it
alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from hibachi import LLM, SamplingParams
from hibachi.engine.speculation.drafting import Direct, Drafting
from hibachi.engine.speculation.howmany import HowMany, best

K = 8
BATCHES = (1, 2, 4)
RIGHT = (0.2, 0.5, 0.8, 0.95)


class Knowing:
    """Proposes what comes, each token right with the probability `right`."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], prompt: int, right: float) -> None:
        self.answers, self.prompt, self.right, self.random = answers, prompt, right, np.random.default_rng(0)

    def propose(self, keys: Any, tokens: Any, most: Any) -> list[Any]:
        found = []
        for row, n in zip(tokens, most, strict=True):
            came = len(row) - self.prompt
            guess = np.array(self.answers[tuple(row[: self.prompt].tolist())][came : came + n], np.int32)
            found.append(np.where(self.random.random(len(guess)) < self.right, guess, guess ^ 1))
        return found


def turn(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Tokens per second until the first row ends; and the answers so far."""
    streams = [llm.engine.run(prompt, params) for prompt in prompts]  # type: ignore[attr-defined]
    answers = [[next(stream)] for stream in streams]
    began, before = time.perf_counter(), llm.stats().new_tokens
    while all(stream.finish_reason is None for stream in streams):
        time.sleep(0.002)
    speed = (llm.stats().new_tokens - before) / (time.perf_counter() - began)
    for answer, stream in zip(answers, streams, strict=True):
        answer += stream
    return speed, answers


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="tiny")
    p.add_argument("--backend")
    p.add_argument("--dtype")
    p.add_argument("--tokens", type=int, default=160)
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--out", help="a picture")
    a = p.parse_args()
    points = []
    for rows in BATCHES:
        config = {"method": "ngram", "num_speculative_tokens": K, "auto": True}
        options: dict[str, Any] = dict(backend=a.backend, dtype=a.dtype, max_num_seqs=rows, max_model_len=512)
        with LLM(a.model, speculative_config=config, **options) as llm:
            core: Any = llm.engine.core  # type: ignore[attr-defined]  # a drafter that knows the answers is put in
            params = SamplingParams(temperature=0, max_tokens=a.tokens, ignore_eos=True)
            prompts = [[i + 5] * 8 for i in range(rows)]
            core.drafting = None
            _, answers = turn(llm, prompts, params)
            known = {tuple(p): ids for p, ids in zip(prompts, answers, strict=True)}
            costs = HowMany().costs
            for right in reversed(RIGHT):  # so the largest steps are tried first
                how = HowMany()
                how.costs = costs
                drafting = Drafting(Direct(Knowing(known, 8, right), llm.tokenizer.vocab_size, how), K, how)
                ratios, predicted = [], []
                for i in range(a.turns + 2):
                    pair = {}
                    for kind in (None, drafting) if i % 2 else (drafting, None):
                        core.drafting = kind
                        pair[kind], found = turn(llm, prompts, params)
                        assert found == answers
                    if i > 1:  # the first turns learn the costs
                        ratios.append(pair[drafting] / pair[None])
                        rates = [right] * rows
                        gain = best(rows, [K] * rows, rates, how.costs.predict, K * rows)[1]
                        predicted.append(gain if gain >= 1.04 else 1.0)
                points.append((rows, right, statistics.median(ratios), statistics.median(predicted)))
                rows_, right_, got, want = points[-1]
                print(
                    f"{rows_} rows, {right_:.0%} right: {got:.2f}x ({min(ratios):.2f} to {max(ratios):.2f}), predicted "
                    f"{want:.2f}x, off by {got / want - 1:+.0%}",
                    flush=True,
                )
    if a.out:
        draw(points, a.out)


def draw(points: list[tuple[int, float, float, float]], out: str) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for rows in sorted({p[0] for p in points}):
        mine = [p for p in points if p[0] == rows]
        (line,) = axes.plot([p[1] for p in mine], [p[3] for p in mine], label=f"{rows} at once, predicted")
        axes.plot(
            [p[1] for p in mine], [p[2] for p in mine], "o", color=line.get_color(), label=f"{rows} at once, measured"
        )
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("proposals that are right")
    axes.set_ylabel("tokens per second, compared with none")
    axes.set_ylim(bottom=0.8)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
