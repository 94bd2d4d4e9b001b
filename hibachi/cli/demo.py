"""sixteen prompts at once on the model that ships, live

Then the same prompts one by one: how much faster was the batch, and are the tokens the same?
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time

from hibachi.engine.llm import LLM, TextStream
from hibachi.engine.stream import merge
from hibachi.request import SamplingParams

PROMPTS = (
    "It is a truth universally acknowledged, that",
    "The family had been long settled in",
    "She was perfectly convinced that he",
    "Mr. Knightley looked at her with",
    '"My dear," said her mother,',
    "The letter was from her brother, and",
    "There was no one in the room but",
    "As soon as breakfast was over, they",
    "Elinor could not be surprised at",
    "The evening passed off in",
    "He had never in his life been so",
    "Emma was not sorry to",
    "When the ladies returned to the drawing-room,",
    "Nothing could be more delightful than",
    '"I am quite sure," replied Anne,',
    "In the course of the following week,",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", metavar="NAME", help="numpy, torch, jax or another (default: numpy)")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens for each prompt (default: 96)")
    parser.add_argument("--plain", action="store_true", help="no live view, as when the output is piped")


def run(args: argparse.Namespace) -> int:
    live = sys.stdout.isatty() and not args.plain
    with LLM("tiny", backend=args.backend, max_batch_size=len(PROMPTS)) as llm:
        arch = llm.model.arch
        facts = llm.backend.versions()
        print(f"hibachi demo: {len(PROMPTS)} prompts at once, a Llama of {arch.layers} layers, {facts['library']}, {facts['device']}")
        params = [
            SamplingParams(temperature=0.7, top_p=0.95, seed=i, max_tokens=args.tokens, ignore_eos=True)
            for i in range(len(PROMPTS))
        ]
        _warm(llm, params)
        began = time.perf_counter()
        streams = [llm.stream(p, q) for p, q in zip(PROMPTS, params, strict=True)]
        (_watch if live else _report)(llm, streams, args.tokens)
        together = time.perf_counter() - began
        batched = [s.completion() for s in streams]
        if not live:
            for c in batched:
                print(f"\n{c.prompt}{c.text}")
        print("\nNow one by one, for comparison ...", flush=True)
        began = time.perf_counter()
        alone = [llm.generate(p, q)[0] for p, q in zip(PROMPTS, params, strict=True)]
        apart = time.perf_counter() - began
    tokens = sum(len(c.token_ids) for c in batched)
    same = sum(a.token_ids == b.token_ids for a, b in zip(alone, batched, strict=True))
    print(f"  {len(PROMPTS)} at once    {together:6.2f} s  {tokens / together:7.0f} tokens/s")
    print(f"  one by one   {apart:6.2f} s  {sum(len(c.token_ids) for c in alone) / apart:7.0f} tokens/s")
    print(f"  speed-up     {apart / together:6.1f} x")
    print(f"  the same tokens as alone: {same} of {len(PROMPTS)} prompts")
    return 0


def _warm(llm: LLM, params: list[SamplingParams]) -> None:
    """Everything once, so that a compiling backend is measured without its compiler."""
    if llm.backend.static_shapes:
        print("compiling ...", flush=True)
        llm.generate(PROMPTS, params)
        llm.generate(PROMPTS[0], params[0])


def _report(llm: LLM, streams: list[TextStream], limit: int) -> None:
    """A line now and then."""
    began = shown = time.perf_counter()
    done = 0
    for i, tokens in merge([s.tokens for s in streams]):
        streams[i].feed(tokens)
        done += len(tokens)
        if time.perf_counter() - shown > 1:
            shown = time.perf_counter()
            print(f"  {_progress(llm, done, limit, shown - began)}", flush=True)
    print(f"  {_progress(llm, done, limit, time.perf_counter() - began)}", flush=True)


def _watch(llm: LLM, streams: list[TextStream], limit: int) -> None:
    """One line for each prompt, its newest words at the right end, redrawn ten times a second."""
    texts = [str(s.prompt) for s in streams]
    began = time.perf_counter()
    shown, done = 0.0, 0
    print("\n" * len(streams))
    for i, tokens in merge([s.tokens for s in streams]):
        texts[i] += streams[i].feed(tokens)
        done += len(tokens)
        now = time.perf_counter()
        if now - shown > 0.1:
            shown = now
            _draw(texts, _progress(llm, done, limit, now - began))
    _draw(texts, _progress(llm, done, limit, time.perf_counter() - began))


def _draw(texts: list[str], progress: str) -> None:
    width = min(shutil.get_terminal_size().columns, 120) - 1
    lines = []
    for i, text in enumerate(texts):
        text = " ".join(text.split())
        room = width - 4
        lines.append(f"{i + 1:2d}  {text if len(text) <= room else '…' + text[1 - room :]}")
    # Up to the first line, then each line anew, clearing what was there.
    sys.stdout.write(f"\x1b[{len(lines) + 1}A" + "".join(f"\r\x1b[K{line}\n" for line in [*lines, progress[:width]]))
    sys.stdout.flush()


def _progress(llm: LLM, done: int, limit: int, seconds: float) -> str:
    total = limit * len(PROMPTS)
    bar = "#" * (20 * done // total)
    running = llm.stats().running
    return f"[{bar:<20}] {done}/{total} tokens  {done / seconds:.0f} tokens/s  batch {running}/{len(PROMPTS)}"
