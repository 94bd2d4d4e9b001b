"""What a draft model gains for one stream: plain, n-grams and draft model by turns on the same prompts.

    python benchmarks/speculation_draft.py --text HELD_OUT.txt [--model tiny --draft tiny-draft --backend numpy]

The prompts are pieces of a text that neither model was trained on. Each turn writes all answers one after the other, by
each way in turn; answers must be equal. The tables show medians over the turns and the ratio to plain, turn by turn,
with its spread.

Acceptance is computed apart, over the distributions of both models behind each token of the plain answers: how often
both draw the same token with one random number (what hibachi does), what rejection sampling would accept, the sum of
min(p, q), and how often both draw the same with noise of its own for each token (Gumbel).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from hibachi import LLM, SamplingParams
from hibachi.backend.layout import StepInputs
from hibachi.engine.runners.memory import Memory
from hibachi.engine.sampling.uniforms import uniforms
from hibachi.engine.scheduler.lower import Packed, lower
from hibachi.engine.scheduler.step import Limits
from hibachi.llm.model.files import locate, open_files
from hibachi.llm.model.registry import load_model


def ways(a: argparse.Namespace) -> dict[str, Any]:
    draft = {"model": a.draft, "num_speculative_tokens": 8, "dtype": a.draft_dtype}
    found: dict[str, Any] = {"plain": None, "n-grams, auto": "auto", "draft, auto": draft | {"auto": True}}
    return found | {f"draft, k = {k}": draft | {"num_speculative_tokens": k} for k in a.k}


def prompts(llm: LLM, a: argparse.Namespace) -> list[list[int]]:
    ids = llm.tokenizer.encode(" ".join(Path(a.text).read_text(encoding="utf-8").split()))
    starts = np.linspace(a.prompt, len(ids) - 2 * a.prompt, a.prompts).astype(int)
    return [ids[at : at + a.prompt] for at in starts.tolist()]


def write(
    llm: LLM, asked: list[list[int]], temperature: float, tokens: int
) -> tuple[float, float, list[list[int]], int]:
    """Tokens a second of one stream, and tokens a second of processor time; the answers, and the steps."""
    steps, began, answers = llm.stats().steps, (time.perf_counter(), time.process_time()), []
    for i, prompt in enumerate(asked):
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True)
        answers.append(list(llm.generate([prompt], params)[0].token_ids))
    count, ended = len(asked) * tokens, (time.perf_counter(), time.process_time())
    wall, processor = (count / (b - a) for a, b in zip(began, ended, strict=True))
    return wall, processor, answers, llm.stats().steps - steps


def speeds(llms: dict[str, LLM], asked: list[list[int]], temperature: float, a: argparse.Namespace) -> list[list[int]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in llms}
    steps: dict[str, int] = {}
    plain: list[list[int]] = []
    for turn in range(a.turns + 1):
        for name, llm in llms.items():
            wall, processor, answers, steps[name] = write(llm, asked, temperature, a.tokens)
            plain = plain or answers
            assert answers == plain, f"{name} has other answers"
            if turn:  # the first warms up
                found[name].append((wall, processor))
    print(f"\nTemperature {temperature}: {len(asked)} prompts of {a.prompt} tokens, {a.tokens} more of each")
    print(f"{'':16} {'tokens/s':>9} {'of plain':>9} {'spread':>13} {'of its processor time':>22} {'tokens/step':>12}")
    for name, each in found.items():
        ratios, work = ([x[i] / y[i] for x, y in zip(each, found["plain"], strict=True)] for i in range(2))
        print(
            f"{name:16} {statistics.median(x for x, _ in each):9.0f} {statistics.median(ratios):8.2f}x "
            f"{min(ratios):6.2f}-{max(ratios):.2f} {statistics.median(work):12.2f}x {min(work):.2f}-{max(work):.2f} "
            f"{len(asked) * a.tokens / steps[name]:12.2f}"
        )
    return plain


def distributions(model: Any, backend: Any, ids: list[int], temperature: float) -> Any:
    """The probabilities of the token behind each of the ids: float64 [n, vocab]."""
    n, size = len(ids), backend.block_size
    blocks = -(-n // size) + 1
    memory = Memory(model.cache_spec(), backend, Limits(1, n, n, n + 1, blocks, size), model.dtype)
    one, q = np.zeros(1, np.int32), np.array([n], np.int32)
    table = np.arange(1, blocks, dtype=np.int32)[None]
    packed = lower(one, one, q, np.ones(1, bool), table, size, tiles=backend.shapes.choices, score=q)
    model.reach(n)
    tok, *rest = backend.put_all([np.array(ids, np.int32), *(getattr(packed, f.name) for f in fields(Packed))])
    with backend.guard():
        logits, _ = model.step(model.params, memory.cache, StepInputs(tok, *rest))
    x = backend.get(logits).astype(np.float64) / temperature
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def acceptance(
    models: tuple[Any, Any], backend: Any, asked: list[list[int]], answers: list[list[int]], temperature: float
) -> dict[str, float]:
    same, noise, rejection, count, dice = 0, 0, 0.0, 0, np.random.default_rng(0)
    for i, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        at = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        p, q = (distributions(m, backend, [*prompt, *answer], temperature or 1.0)[at] for m in models)
        count += len(p)
        if not temperature:
            same += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
            continue
        u = uniforms(np.full(len(p), i, np.uint64), np.arange(len(prompt), len(prompt) + len(answer)))
        drawn = [(np.cumsum(d, axis=1) > u[:, None]).argmax(axis=1) for d in (p, q)]
        same += int((drawn[0] == drawn[1]).sum())
        rejection += float(np.minimum(p, q).sum())
        gumbel = dice.gumbel(size=p.shape)
        noise += int(((np.log(p) + gumbel).argmax(axis=1) == (np.log(q) + gumbel).argmax(axis=1)).sum())
    if not temperature:
        return {"equal": same / count}
    return {"one number": same / count, "rejection": rejection / count, "noise by token": noise / count}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", default="tiny")
    add("--draft", default="tiny-draft")
    add("--draft-dtype", help="of the draft model (default: the main model's)")
    add("--backend", default="numpy")
    add("--text", required=True, help="a text that neither model was trained on")
    add("--prompts", type=int, default=16)
    add("--prompt", type=int, default=64, help="tokens of a prompt")
    add("--tokens", type=int, default=128, help="of an answer")
    add("--turns", type=int, default=7)
    add("--k", type=int, nargs="*", default=[2, 4])
    add("--temperatures", type=float, nargs="*", default=[0.0, 0.7])
    a = parser.parse_args()
    llms = {name: LLM(a.model, backend=a.backend, speculative_config=config) for name, config in ways(a).items()}
    plain = llms["plain"]
    asked = prompts(plain, a)
    draft = load_model(open_files(locate(a.draft)), plain.backend, dtype=plain.model.dtype)
    for temperature in a.temperatures:
        answers = speeds(llms, asked, temperature, a)
        found = acceptance((plain.model, draft), plain.backend, asked, answers, temperature)
        print("acceptance:", json.dumps({name: round(value, 3) for name, value in found.items()}))
    for name, llm in llms.items():
        if name.startswith("draft"):
            print(name, llm.engine.meters().drafted)
        llm.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
