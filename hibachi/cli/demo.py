"""sixteen prompts at once on the model that ships, live

Afterwards the same prompts one by one: how much faster was the batch, and are
the tokens the same?
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time

from hibachi.cli.options import model_arguments
from hibachi.common.phases import is_live, phase
from hibachi.common.progress import FRAME, Screen
from hibachi.engine.streams.merge import merge
from hibachi.llm.llm import LLM
from hibachi.llm.textstream import Completion
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
    model_arguments(parser, ["backend", "deterministic"])
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="new tokens of each text (default: 96)")
    parser.add_argument("--plain", action="store_true", help="write plain lines, as when the output is piped")


def run(args: argparse.Namespace) -> int:
    params = [
        SamplingParams(temperature=0.7, top_p=0.95, seed=i, max_tokens=args.tokens, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    with phase("opening the model that ships"):
        llm = LLM("tiny", backend=args.backend, deterministic=args.deterministic, max_num_seqs=len(PROMPTS))
    with llm:
        facts = llm.backend.versions()
        place = f"{facts['library']} on {facts['device']}"
        title = f"hibachi demo: {len(PROMPTS)} prompts, a Llama of {len(llm.model.cache_spec())} layers, {place}"
        view = Live(title) if is_live(sys.stdout) and not args.plain else PlainView(title)
        if llm.backend.shapes.compiled:  # the compiler is not what we measure
            view.say("compiling ...")
            Pass(llm, params, len(PROMPTS)).run()
            Pass(llm, params[:1], 1).run()
        batched = Pass(llm, params, len(PROMPTS)).run(view)
        alone = Pass(llm, params, 1).run(view)
    same = sum(a.token_ids == b.token_ids for a, b in zip(alone.completions, batched.completions, strict=True))
    equal = f"the same tokens as alone: {same} of {len(PROMPTS)} texts"
    if llm.deterministic:
        equal = f"deterministic, equal to a run alone: {same} of {len(PROMPTS)} texts"
    view.say(f"{alone.seconds / batched.seconds:.1f} times as fast at once; {equal}")
    return 0


class Pass:
    """One way through the prompts, `size` of them at a time."""

    seconds: float
    llm: LLM
    params: list[SamplingParams]
    size: int
    tokens: int

    def __init__(self, llm: LLM, params: list[SamplingParams], size: int) -> None:
        self.llm, self.params, self.size = llm, params, size
        self.prompts: tuple[str, ...] = PROMPTS[: len(params)]
        self.texts: list[str] = [""] * len(params)
        self.completions: list[Completion] = []
        room = [llm.model.max_model_len - len(llm.tokenizer.encode(p)) for p in self.prompts]
        self.total: int = sum(min(n, p.max_tokens or n) for n, p in zip(room, params, strict=True))
        self.tokens, self.seconds, self._before = 0, 0.0, llm.stats()

    def run(self, view: PlainView | Live | None = None) -> Pass:
        began = time.perf_counter()
        for first in range(0, len(self.params), self.size):
            some = slice(first, first + self.size)
            streams = [self.llm.stream(p, q) for p, q in zip(self.prompts[some], self.params[some], strict=True)]
            for i, ids in merge([s.tokens for s in streams]):
                self.texts[first + i] += streams[i].feed(ids)
                self.tokens += len(ids)
                self.seconds = time.perf_counter() - began
                if view:
                    view.update(self)
            self.completions += [s.completion() for s in streams]
        self.seconds = time.perf_counter() - began
        self.texts = [c.text for c in self.completions]
        if view:
            view.end(self)
        return self

    def line(self) -> str:
        """Progress, speed, and how full the batch is; afterwards the mean of that."""
        now, before = self.llm.stats(), self._before
        if self.tokens < self.total:
            batch = f"{now.running}/{now.max_num_seqs}"
        else:
            batch = f"{(now.new_tokens - before.new_tokens) / (now.steps - before.steps):.1f}"
        what = "one by one" if self.size == 1 else f"{self.size} at once"
        bar, speed = "#" * (10 * self.tokens // self.total), self.tokens / self.seconds if self.seconds else 0
        return (
            f"{what}  [{bar:10}] {self.tokens:4}/{self.total} tokens  {self.seconds:4.1f} s  "
            f"{speed:4.0f} tokens/s  batch {batch}"
        )


class PlainView:
    """Lines, for pipes: progress now and then, the texts when they are complete."""

    def __init__(self, title: str) -> None:
        self._shown = time.perf_counter()
        self.say(title)

    def say(self, line: str) -> None:
        print(line, flush=True)

    def update(self, now: Pass) -> None:
        if time.perf_counter() - self._shown > 2:
            self._shown = time.perf_counter()
            self.say(now.line())

    def end(self, now: Pass) -> None:
        self.say(now.line())
        if now.size > 1:
            for i, c in enumerate(now.completions):
                paragraphs = (textwrap.fill(p, 75) for p in f"{c.prompt}{c.text}".splitlines())
                self.say(f"\n{i + 1:2d}  " + textwrap.indent("\n".join(paragraphs), "    ").lstrip())
            self.say("")


class Live:
    """The last lines of a terminal, drawn anew ten times a second: a text a line, then how far we are."""

    def __init__(self, title: str) -> None:
        self._title, self._said = title, list[str]()
        self._prompts, self._texts = list[str](), list[str]()
        self._screen, self._shown = Screen(sys.stdout), 0.0
        self._draw()

    def say(self, line: str) -> None:
        self._said.append(line)
        self._draw()

    def update(self, now: Pass) -> None:
        if time.perf_counter() - self._shown > FRAME:
            self._shown = time.perf_counter()
            self._draw(now)

    def end(self, now: Pass) -> None:
        self._draw(now)
        self._said.append(now.line())

    def _draw(self, now: Pass | None = None) -> None:
        if now and now.size > 1:
            self._prompts, self._texts = list(now.prompts), now.texts
        columns = self._screen.size().columns
        texts = [
            f"{i + 1:2d}  {newest(prompt, text, max(columns - 4, 8))}"
            for i, (prompt, text) in enumerate(zip(self._prompts, self._texts, strict=True))
        ]
        self._screen.draw([self._title, *texts, *self._said, *([now.line()] if now else [])])


def newest(prompt: str, text: str, width: int) -> str:
    """Prompt and text in `width` columns: the beginning of the prompt, the end of the text."""
    whole = "".join(c if c.isprintable() else "?" for c in " ".join((prompt + text).split()))
    head = len(prompt)
    if len(whole) > width:
        head = min(head, width // 3)
        whole = f"{whole[:head]}…{whole[head + 1 - width :]}"
    bold, normal = ("", "") if os.environ.get("NO_COLOR") else ("\x1b[1m", "\x1b[22m")
    return f"{bold}{whole[:head]}{normal}{whole[head:]}"
