"""Grammars become guides in threads of their own, so that no step waits for one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np

from hibachi.backend.masks import words
from hibachi.engine.guide.turns import Turns
from hibachi.engine.runners.guiding import Guided
from hibachi.engine.runners.job import Job

MOST_THREADS = 2
TRIES = 3  # masks of a new form: this thread waits for the others, and the quickest says most
NICE = 10  # steps come first

Done: TypeAlias = "Callable[[Job, Guided | BaseException, float], None]"


class Compiling:
    """Makes the guides of jobs, in the order in which they come.

    done: called in one of the threads, with the seconds that it took. vocab_size: of the model, where it is guided.
    """

    def __init__(self, done: Done, turns: Turns, vocab_size: int) -> None:
        self._work = partial(_work, done=done, turns=turns, vocab_size=vocab_size)
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = 0

    def begin(self, job: Job) -> None:
        self._queue.put(job)
        if self._threads < MOST_THREADS:
            self._threads += 1
            threading.Thread(target=self._work, args=(self._queue,), name="hibachi-grammars", daemon=True).start()

    def close(self) -> None:
        for _ in range(self._threads):
            self._queue.put(None)


def _work(queue: SimpleQueue[Job | None], done: Done, turns: Turns, vocab_size: int) -> None:
    if hasattr(os, "setpriority"):
        with suppress(OSError):  # Linux: of this thread only
            if os.uname().sysname == "Linux":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    while (job := queue.get()) is not None:
        if any(not each.silent and each.channel.finish is None for each in job.group):
            assert job.grammar is not None
            guides, grammar = job.grammar
            began = time.perf_counter()
            try:
                ends = () if job.stop is None or job.stop.tokens is None else job.stop.tokens.tolist()
                guided = Guided(guides, guides.compile(grammar), ends, turns.form(grammar.source))
                _try(guided, vocab_size)
                made: Guided | BaseException = guided
            except BaseException as e:
                made = e
            done(job, made, time.perf_counter() - began)
        del job


def _try(guided: Guided, vocab_size: int) -> None:
    """See by a first mask whether a form is slow. One that fails is found where it is drawn by."""
    least, bits = 1e9, np.empty((1, words(vocab_size)), np.uint32)
    for _ in range(0 if guided.form.known else TRIES):
        began = time.perf_counter()
        guided.guides.masks([guided.guide], bits)
        least = min(least, time.perf_counter() - began)
    guided.form.expect(least)
