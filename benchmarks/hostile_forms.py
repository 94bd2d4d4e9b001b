"""What forms that are hard to check do to the steps of other rows: the longest step, beside that of a plain loop.

    .venv/bin/python benchmarks/hostile_forms.py [--model tiny] [--backend numpy]

A batch of rows decodes without end. For each form: the longest steps while it is asked for, and the longest while a
plain loop at low priority runs in a process of its own for as long. The second is what any other work on the machine
does to a step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

from hibachi import LLM, HibachiError, SamplingParams


def nested(depth: int) -> dict[str, object]:
    """`oneOf` in `oneOf`."""
    found: dict[str, object] = {"type": "string"}
    for i in range(depth):
        found = {"oneOf": [{"type": "object", "properties": {f"a{i}": found, "b": {"type": "integer"}}}, found]}
    return found


def deep(depth: int) -> str:
    return '{"properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


def wide(n: int) -> dict[str, object]:
    return {"type": "object", "properties": {f"name{i}": {"type": "string"} for i in range(n)}}


FORMS: dict[str, Callable[[], dict[str, object]]] = {
    "a small schema": lambda: {"json": wide(3)},
    "oneOf, 11 deep": lambda: {"json": nested(11)},
    "5,000 deep": lambda: {"json": deep(5000)},
    "enum of 20,000": lambda: {"json": {"enum": [f"value number {i}" for i in range(20_000)]}},
    "2,000 optional properties": lambda: {"json": wide(2000)},
    "1 MB of schema": lambda: {"json": wide(18_000)},
    "choice of 20,000": lambda: {"choice": [f"value number {i}" for i in range(20_000)]},
    "regex (a{1,1000}){1,1000}": lambda: {"regex": "(a{1,1000}){1,1000}"},
    "regex ((a?){300}){300}": lambda: {"regex": "((a?){300}){300}"},
    "regex .*a.{20000}": lambda: {"regex": ".*a.{20000}"},
    "regex (a|b|ab)*c x 200": lambda: {"regex": "".join(f"(a|b|ab)*c{i}" for i in range(200))},
    "left recursion": lambda: {"grammar": 'start: start "a" | "b"'},
    "ambiguous": lambda: {"grammar": 'start: s\ns: s s s | s s | "a" | ""'},
    "empty alternatives": lambda: {"grammar": "start: " + " ".join("(a|)" for _ in range(200)) + '\na: "a" |'},
}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="tiny")
    p.add_argument("--backend", default="numpy")
    p.add_argument("--rows", type=int, default=16)
    a = p.parse_args()
    llm = LLM(a.model, backend=a.backend, max_num_seqs=a.rows + 4, cache_tokens=2**15)
    steps = list[float]()
    endless = SamplingParams(temperature=1.0, ignore_eos=True)
    live = [llm.stream("Once", endless) for _ in range(a.rows)]
    time.sleep(0.5)
    core = llm.engine.core  # type: ignore[attr-defined]
    step = core.step

    def timed() -> bool:
        began = time.perf_counter()
        found: bool = step()
        steps.append(time.perf_counter() - began)
        return found

    core.step = timed

    def during(do: Callable[[], str]) -> tuple[str, float, list[float]]:
        nonlocal live
        live = [s if s.finish_reason is None else llm.stream("Once", endless) for s in live]
        time.sleep(0.1)
        steps.clear()
        began = time.perf_counter()
        said = do()
        took = time.perf_counter() - began
        return said, took, sorted(1e3 * s for s in steps)[-3:]

    def ask(form: dict[str, object]) -> str:
        try:
            answer = llm.generate("x", SamplingParams(max_tokens=8, structured_outputs=form))[0]
        except HibachiError as e:
            return f"refused: {str(e)[:60]}"
        return f"served: {answer.text[:20]!r}"

    ask({"choice": ["warm"]})
    print(json.dumps({"engine": llm.engine.facts.fingerprint, "rows": a.rows}))
    print(f"{'form':28s} {'seconds':>7s}  longest steps, ms: beside it      beside a loop")
    for name, make in FORMS.items():
        form = make()
        said, took, with_it = during(lambda form=form: ask(form))  # type: ignore[misc]
        loop = f"import os, time; os.nice(19); e = time.time() + {max(took, 0.2)}\nwhile time.time() < e: pass"
        *_, alone = during(lambda loop=loop: str(subprocess.run([sys.executable, "-c", loop])))  # type: ignore[misc]
        told = ["  ".join(f"{ms:6.1f}" for ms in found) for found in (with_it, alone)]
        print(f"{name:28s} {took:7.2f}  {told[0]}   {told[1]}   {said}", flush=True)
    for stream in live:
        stream.close()
    llm.close()


if __name__ == "__main__":
    main()
