"""What proposals gain and cost: the same requests with and without them, by turns, on one model.

    python benchmarks/speculation.py repeat --model .smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --backend torch \\
        --text TEXT --rows 1
    python benchmarks/speculation.py free --questions QUESTIONS.jsonl --rows 1 4 16 64 ...
    python benchmarks/speculation.py human --text TEXT ...
    python benchmarks/speculation.py json ...

repeat: a passage of a text twice, and its beginning; the model goes on with a copy of it. free:
questions at temperature 0.7.
human: the answer is forced to be a text that was written by people. json: answers in the forms of guided.py.

Each turn runs all requests to their ends on both engines, one after the other. The answers must be equal. The table
shows medians, and the ratios turn by turn with their spread.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import guided
import numpy as np

from hibachi import LLM, SamplingParams

Work = list[tuple[Any, SamplingParams]]


def passages(text: str, n: int, chars: int) -> list[str]:
    """Pieces of a text, from one paragraph on."""
    paragraphs, r = text.split("\n\n"), random.Random(0)
    starts = r.sample(range(len(paragraphs) // 10, len(paragraphs) - 40), n)
    return ["\n\n".join(paragraphs[at : at + 40])[:chars].replace("\n", " ") for at in starts]


def repeat(llm: LLM, a: argparse.Namespace, n: int) -> Work:
    work: Work = []
    for i, passage in enumerate(passages(Path(a.text).read_text(encoding="utf-8"), n, a.chars)):
        ids, gap = llm.tokenizer.encode(passage), llm.tokenizer.encode("\n\n")
        copied = [*[*ids, *gap] * a.copies, *ids[:8]]
        tokens = min(a.tokens, len(ids) - 8)
        work.append((copied, SamplingParams(temperature=a.temperature, seed=i, max_tokens=tokens, ignore_eos=True)))
    return work


def free(llm: LLM, a: argparse.Namespace, n: int) -> Work:
    lines = Path(a.questions).read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line)["turns"][0] for line in lines]
    work: Work = []
    for i in range(n):
        text = llm.tokenizer.render_chat([{"role": "user", "content": asked[i % len(asked)]}])
        work.append(
            (
                llm.tokenizer.encode(text, add_special_tokens=False),
                SamplingParams(temperature=0.7, seed=i, max_tokens=a.tokens, ignore_eos=True),
            )
        )
    return work


def human(llm: LLM, a: argparse.Namespace, n: int) -> Work:
    work: Work = []
    for passage in passages(Path(a.text).read_text(encoding="utf-8"), n, a.chars):
        ids = llm.tokenizer.encode(passage)
        prompt, answer = ids[: len(ids) // 2], ids[len(ids) // 2 :][: a.tokens]

        def force(output: list[int], logits: Any, answer: list[int] = answer) -> Any:
            logits[answer[len(output)]] = 1000.0
            return logits

        work.append((prompt, SamplingParams(temperature=0, max_tokens=len(answer), logits_processors=[force])))
    return work


def forms(llm: LLM, a: argparse.Namespace, n: int) -> Work:
    return [(f"Describe thing number {i % 97} as JSON:\n", guided.params(i, True, a.tokens)) for i in range(n)]


KINDS: dict[str, Callable[[LLM, argparse.Namespace, int], Work]] = {
    "repeat": repeat,
    "free": free,
    "human": human,
    "json": forms,
}


class Turn:
    """What one turn took: seconds on the clock and of the processor, tokens, steps."""

    def __init__(self, llm: LLM, work: Work) -> None:
        before = llm.stats()
        clock, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate([prompt for prompt, _ in work], [params for _, params in work])
        self.seconds, self.cpu = time.perf_counter() - clock, time.process_time() - cpu
        self.answers = [(o.outputs[0].token_ids if hasattr(o, "outputs") else o.token_ids) for o in outputs]
        self.tokens = sum(len(ids) for ids in self.answers)
        self.steps = llm.stats().steps - before.steps


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def compare(plain: LLM, other: LLM, work: Work, rows: int, turns: int) -> None:
    Turn(plain, work[: max(rows, 2)]), Turn(other, work[: max(rows, 2)])  # both are warm
    pairs = []
    for i in range(turns):
        pair = [Turn(llm, work) for llm in ((plain, other) if i % 2 else (other, plain))]
        pairs.append(pair if i % 2 else pair[::-1])
    same = all(a.answers == b.answers for a, b in pairs)
    m = statistics.median
    print(
        f"rows {rows:3d}: plain {m(a.tokens / a.seconds for a, _ in pairs):7.1f} tokens/s, with them "
        f"{m(b.tokens / b.seconds for _, b in pairs):7.1f}; "
        f"clock {spread([a.seconds / b.seconds for a, b in pairs])}x, "
        f"processor time {spread([b.cpu / a.cpu for a, b in pairs])}x, steps a token "
        f"{m(b.steps * min(rows, len(work)) / b.tokens for _, b in pairs):.2f}; "
        f"answers {'equal' if same else 'DIFFER'}",
        flush=True,
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kind", choices=KINDS)
    p.add_argument("--model", default="tiny")
    p.add_argument("--backend")
    p.add_argument("--dtype")
    p.add_argument("--config", default="auto", help='"auto", or JSON')
    p.add_argument("--rows", type=int, nargs="+", default=[1])
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--chars", type=int, default=1500)
    p.add_argument("--copies", type=int, default=2)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--requests", type=int, help="of a turn; by default 3 a row, at least 4")
    p.add_argument("--text", help="a text file")
    p.add_argument("--questions", help="JSON lines, each with turns")
    a = p.parse_args()
    print(json.dumps({k: v for k, v in vars(a).items() if k not in ("text", "questions", "model")}))
    for rows in a.rows:
        options: dict[str, Any] = dict(backend=a.backend, dtype=a.dtype, max_num_seqs=rows, max_model_len=1536)
        with (
            LLM(a.model, speculative_config="off", **options) as plain,
            LLM(a.model, speculative_config=a.config, **options) as other,
        ):
            if rows == a.rows[0]:
                print(plain.engine.facts.fingerprint)
            n = a.requests or max(4, 3 * rows)
            compare(plain, other, KINDS[a.kind](plain, a, n), rows, a.turns)
            found = other.engine.meters().drafted
            how = other.engine.core.drafting.how  # type: ignore[attr-defined]  # figures for a benchmark only
            if how is not None:
                sizes = sorted(each.cost() for each in how.costs._sizes.values())
                print("          steps of " + ", ".join(f"{n:.0f}: {s * 1e3:.1f} ms" for n, s in sizes))
            print(
                f"          proposed {found.proposed}, right {found.accepted}; by place {np.array(found.by_position)}"
            )


if __name__ == "__main__":
    main()
