"""The fuzzer: hostile requests to a hostile model, beside innocent ones that must notice nothing.

16 innocent requests run over and over. Every bit of their tokens and log-probabilities must equal what the same request
gets alone. Beside them hostile clients (clients.py) send what drawn.py lists, to a model that does what hostile.py
lists. What a call refuses, it refuses with a HibachiError; what it accepts ends in time, with a finish reason or a
HibachiError. In the end blocks, rows, threads, descriptors and memory are back where they were.

    python -m tests.adversary.fuzz --case "numpy, level 2" --seed 7 --seconds 20

The same seed gives the same requests in the same order for each client; how they interleave is up to the threads.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import hibachi
from hibachi import HibachiError, QueueFull, SamplingParams

from ..lib.inside import checking, core
from .clients import READS, Draw, Request, once
from .drawn import SALTS, WORDS
from .hostile import FAULTS
from .places import CASES, ask, innocents, options_of
from .watch import belongings, bounded_memory, shown, stacks, watched

INNOCENTS, CLIENTS = 16, 5
ROUND = 20.0  # seconds at most; then comes another engine, with the next seed
GRAMMARS = 2 + (os.cpu_count() or 1)  # threads that begin when they are first needed: they compile grammars, fill masks


# ---- a round ---------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What one round, or several, came to."""

    rounds: int = 0
    seconds: float = 0.0
    innocent: int = 0  # innocent requests that ended
    equal: int = 0  # of these, equal to their solo run in every bit
    slowest: float = 0.0  # seconds of an innocent request
    deaths: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    preemptions: int = 0
    memory: int = 0  # most bytes that a round kept: in use, and resident
    resident: int = 0
    wrong: list[str] = field(default_factory=list)

    def __add__(self, other: Report) -> Report:
        both = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(Report)}
        return Report(
            **{name: max(a, b) if name in ("slowest", "memory", "resident") else a + b for name, (a, b) in both.items()}
        )

    @property
    def good(self) -> bool:
        return not self.wrong and not self.deaths and self.equal == self.innocent > 0

    def __str__(self) -> str:
        return "\n".join(f"{f.name}: {getattr(self, f.name)}" for f in fields(self))

    def short(self) -> str:
        return (
            f"{self.rounds} rounds, {self.innocent:,} innocent requests, {self.innocent - self.equal} of them changed, "
            f"{sum(self.requests.values()):,} hostile, {self.deaths} deaths, {len(self.wrong)} wrong"
        )


class Gone(Exception):
    """The round is over: the engine is dead, or something hangs."""


class Round:
    """One engine, one seed."""

    def __init__(self, case: str, seed: int, seconds: float, *, only: str | None = None) -> None:
        """seconds: for all of it. only: a pattern, for bisecting; see `Draw`."""
        self.case, self.seed, self.seconds, self.only = case, seed, seconds, only
        self.options, self.bound = options_of(random.Random(f"options {seed}"), CASES[case].level), CASES[case].bound
        self.report, self.lock = Report(rounds=1), threading.Lock()
        self.over = threading.Event()  # all clients leave
        self.doing: dict[str, tuple[float, str]] = {}  # client -> since when, and what
        self.last: deque[str] = deque(maxlen=25)  # requests
        self.unread: deque[tuple[Any, str]] = deque()  # streams that nobody reads
        self.storms = 0
        self.log: deque[str] = deque(maxlen=15)

    def complain(self, what: str) -> None:
        with self.lock:
            if len(self.report.wrong) < 50:
                self.report.wrong.append(f"[{self.case}, seed {self.seed}] {what}")

    def explain(self) -> str:
        """For a failure: how to see it again, what came before, and what was wrong."""
        command = f'python -m tests.adversary.fuzz --case "{self.case}" --seed {self.seed} --seconds {self.seconds:.0f}'
        wrong = [f"WRONG: {what}" for what in self.report.wrong[:10]]
        parts = [
            command,
            f"{self.options}",
            "The last requests:",
            *self.last,
            "The log ends:",
            *self.log,
        ]
        return "\n".join([*parts, *wrong]).encode(errors="backslashreplace").decode()  # some have half a character

    # ---- from beginning to end -------------------------------------------------------------------------------------

    def run(self) -> Report:
        began = time.monotonic()
        make = CASES[self.case].make
        before = belongings()
        with watched(self.complain, self.log), bounded_memory():
            alone = make(self.options, random.Random(self.seed), True)
            self.innocents = innocents(alone)
            self.solo = [ask(alone, innocent, "at once") for innocent in self.innocents]
            alone.close()
            del alone
            self.place = make(self.options, random.Random(self.seed), False)
            self._arm()
            self.first = once(self.place, random.Random(self.seed))
            left = max(2.0, began + self.seconds - time.monotonic())
            try:
                self._storm(0.4 * left)
                self._begin_checking()
                warm = self._quiet()
                self._storm(0.6 * left)
                self._compare(warm, self._quiet(), "early in the round, and at its end")
                for n in range(INNOCENTS):  # nothing has remained of it all
                    self._bounded(lambda n=n: self._innocent(n, "at once"), f"innocent {n} at the end")
                self._end()
            except Gone:
                self.over.set()
                threading.Thread(target=self.place.close, daemon=True).start()
            else:
                before = {name: had for name, had in before.items() if not isinstance(had, int)}
                wait(lambda: all(len(belongings()[name]) <= len(had) for name, had in before.items()), 10.0)
                self._compare(before, belongings(), "before the round, and after")
        self.report.seconds = time.monotonic() - began
        return self.report

    def _begin_checking(self) -> None:
        """Start all processes that check forms, as they are started when they are first needed, perhaps late."""
        forms = self.place.engine.forms
        if forms.vocabulary is not None:
            checking(forms.guides, start=True)

    def _arm(self) -> None:
        """From now on the model may be hostile."""
        place, engine = self.place, self.place.engine
        used = {int(float(str(t).strip("[").split(",")[0])) for tokens, *_ in self.solo for t in tokens}
        used.update(i for innocent in self.innocents for i in innocent.ids)
        if place.mischief is not None:
            if not place.mischief.faults:  # the shipped model, which may say anything
                free = (t for t in range(WORDS, place.texts.vocab_size) if t not in used)
                place.triggers = list(itertools.islice(free, len(FAULTS)))
                place.mischief.arm(place.triggers)
            more: dict[str, Any] = {"params": SamplingParams(max_tokens=1)} if place.sampled else {"max_tokens": 1}
            if place.declares:
                more["inputs"] = place.inputs([1, 2])
            place.mischief.ask = lambda: engine.run(place.prompt([1, 2]), **more).collect()
        assert used.isdisjoint(place.triggers), "an innocent request has a hostile token"

    def _storm(self, seconds: float) -> None:
        """All clients at once, up to twice as long if not all is tried yet that is to be tried once. Raises Gone."""
        self.over.clear()
        self.storms += 1
        names = [f"innocent {n}" for n in range(INNOCENTS)] + [f"hostile {n}" for n in range(CLIENTS)]
        threads = [threading.Thread(target=self._client, args=(name,), name=name, daemon=True) for name in names]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end or (self.first and now < end + seconds):
            time.sleep(0.05)
            self._look()
        self.over.set()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.01)
            self._look()
        while self.unread:
            stream, said = self.unread.popleft()
            if not wait(lambda stream=stream: stream.finish_reason is not None, self.bound):
                self.complain(f"a stream that nobody read never ended: {said}")
            del stream

    def _health(self) -> hibachi.Health:
        try:
            health: hibachi.Health = self.place.engine.health()
        except BaseException as e:
            return hibachi.Health("failed", f"health raised {shown(e)}")
        return health

    @property
    def _dead(self) -> bool:
        return self._health().state in ("failed", "closed")

    def _look(self) -> None:
        """Is the engine alive, and does every client get on? Raises Gone."""
        health, now = self._health(), time.monotonic()
        if self._dead:
            self.report.deaths += 1
            with self.lock:
                self.report.wrong.insert(0, f"[{self.case}, seed {self.seed}] the engine died: {health.message}")
            raise Gone
        if health.state == "stalled":
            self.complain(f"the engine is stalled: {health.message}\n{stacks()}")
            raise Gone
        for name, (since, what) in list(self.doing.items()):
            if now - since > self.bound:
                self.complain(f"{name} hangs for {now - since:.0f} s: {what}\n{stacks()}")
                raise Gone

    def _quiet(self) -> dict[str, Any]:
        """Wait until the engine is idle, and look that nothing is left. Raises Gone."""
        engine = self.place.engine

        def idle() -> bool:
            gc.collect()  # streams in cycles
            stats, health = engine.stats(), engine.health()
            busy = stats.running or stats.waiting or stats.free_blocks != stats.blocks
            return not busy and health.state == "idle" and not health.paused

        def rests() -> None:
            if not wait(idle, self.bound):
                self.complain(f"the engine does not come to rest: {engine.health()}, {engine.stats()}\n{stacks()}")
                raise Gone

        rests()
        if self.place.remote:  # the other process tidies up as this one does
            self._bounded(self._collect_there, "a request that collects garbage")
            rests()
        if not self.place.remote:
            try:
                core(engine).scheduler.check()
            except AssertionError as e:
                self.complain(f"scheduler.check: {e}")
        if self.place.mischief is not None:
            self.place.mischief.forget()
        return belongings(engine.pid if self.place.remote else None)

    def _collect_there(self) -> None:
        trigger = self.place.triggers[list(FAULTS).index("collects garbage")]
        self.place.texts.generate([trigger], SamplingParams(max_tokens=1))

    def _end(self) -> None:
        """Drain and close. Raises Gone."""
        place, stats = self.place, self.place.engine.stats()
        self.report.steps, self.report.preemptions = stats.steps, stats.preemptions
        if not place.engine.drain(self.bound):
            self.complain("the engine did not drain: a place is kept")
        self._bounded(place.close, "close")
        if place.mischief is not None:
            self.report.faults, place.mischief.ask = place.mischief.done, None
        del self.place

    def _bounded(self, call: Callable[[], object], what: str) -> None:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(self.bound)
        if thread.is_alive():
            self.complain(f"{what} hangs\n{stacks()}")
            raise Gone

    def _compare(self, before: dict[str, Any], after: dict[str, Any], when: str) -> None:
        kept = {}
        for name in before.keys() & after.keys():
            had, has = before[name], after[name]
            if isinstance(had, int):
                kept[name] = has - had
            elif len(has) > len(had) + (GRAMMARS if name.startswith("threads") else 0):
                self.complain(f"{name}, {when}: {had} and {has}")
        self.report.resident = max(self.report.resident, *kept.values(), 0)
        # What is resident and not in use, the allocators keep: a large list leaves holes among small objects.
        for whose in ("", " of the engine's process"):
            used = kept.pop(f"memory in use{whose}", sys.maxsize)
            kept[f"memory{whose}"] = min(kept.pop(f"memory{whose}", 0), used)
        for name, n in kept.items():
            self.report.memory = max(self.report.memory, n)
            if n > CASES[self.case].memory:
                self.complain(f"{name}, {when}: {n / 2**20:.1f} MiB more than the {before[name] / 2**20:.1f} before")

    # ---- the clients -----------------------------------------------------------------------------------------------

    def _client(self, name: str) -> None:
        kind, n = name.split()
        rng = random.Random(f"{self.seed} {name} {self.storms}")
        draw = Draw(self.place, rng, self.innocents, self.first, self.only)
        while not self.over.is_set():
            self.doing[name] = time.monotonic(), "its request"
            if kind == "innocent":
                self._innocent(int(n), rng.choice(("at once", "at once", "asyncio", "slowly")), rng.choice(SALTS))
            else:
                self._hostile(name, draw, rng)
        del self.doing[name]

    def _innocent(self, n: int, how: str, salt: str | None = None) -> None:
        """One request, which must get what it gets alone."""
        began = time.monotonic()
        got: Any
        try:
            got = ask(self.place, self.innocents[n], how, salt)
        except QueueFull:
            time.sleep(0.005)
            return
        except BaseException as e:
            got = e
        same = _same(got, self.solo[n])
        if not same and self._dead:
            return  # `_look` says so
        with self.lock:
            self.report.innocent += 1
            self.report.equal += same
            self.report.slowest = max(self.report.slowest, time.monotonic() - began)
        if not same:
            cause = f" from {shown(got.__cause__)}" if isinstance(got, BaseException) else ""
            cause += "".join(getattr(got, "__notes__", ()))
            said = "\n".join(list(self.last)[-8:])
            self.complain(f"innocent {n} got {shown(got)}{cause}\ninstead of {shown(self.solo[n])}\nbeside\n{said}")

    def _hostile(self, name: str, draw: Draw, rng: random.Random) -> None:
        """One request, which must be refused or end."""
        request = draw()
        self.last.append(request.said)
        self.doing[name] = time.monotonic(), request.said
        outcome = self._became(request, rng)
        with self.lock:
            self.report.requests[outcome] += 1
            self.report.reads[request.read] += outcome.startswith("accepted")
            if self.place.remote and request.fault and not outcome.startswith("refused"):
                self.report.faults[request.fault] += 1  # there is no other way to know
        time.sleep(rng.random() * 0.004)

    def _became(self, request: Request, rng: random.Random) -> str:
        """Send it and read its stream; returns what became of it."""
        try:
            got = request.send(self.place)
        except BaseException as e:
            return self._raised(e, request, "refused" if request.streams else "whole")
        if not request.streams:
            return "whole: a text"
        if request.read == "never":
            while len(self.unread) > 20:
                self.unread.popleft()[0].close()
            self.unread.append((got, request.said))
            return "accepted: never read"
        if request.read == "dropped in a cycle":
            box = [got]
            box.append(box)
            del box
        if (read := READS[request.read]) is None:
            del got
            if rng.random() < 0.1:
                gc.collect()
            return "accepted: dropped"
        try:
            read(got, rng)
        except BaseException as e:
            return self._raised(e, request, "accepted")
        if got.finish_reason is None:
            self.complain(f"a stream was read to its end, and has none: {request.said}")
        return f"accepted: {got.finish_reason}"

    def _raised(self, e: BaseException, request: Request, when: str) -> str:
        """Fine: a HibachiError that does not speak of a defect, and Python's own for a field that does not exist."""
        if isinstance(e, TypeError) and "unexpected keyword" in str(e):
            return "refused: TypeError, no such field"
        if isinstance(e, hibachi.EngineError) and self._dead:
            return f"{when}: {type(e).__name__}"
        if not isinstance(e, HibachiError) or isinstance(e, (hibachi.EngineFailed, hibachi.InternalError)):
            at = "".join([*traceback.format_tb(e.__traceback__)[-4:], *getattr(e, "__notes__", ())])[-2500:]
            self.complain(f"{when} with {shown(e)}: {request.said}\n{at}")
        try:
            str(e), repr(e)
        except BaseException as other:
            self.complain(f"{type(e).__name__} has no text, but {shown(other)}: {request.said}")
        return f"{when}: {type(e).__name__}"


def _same(got: Any, want: Any) -> bool:
    try:
        return bool(got == want)
    except Exception:
        return False


def wait(true: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# ---- as a command ----------------------------------------------------------------------------------------------------


def fuzz(case: str, seed: int, seconds: float, *, only: str | None = None) -> tuple[Report, str]:
    """Rounds of a case for so many seconds, with seeds from `seed` on; and an account of failures."""
    end, total, wrong = time.monotonic() + seconds, Report(), []
    while (left := end - time.monotonic()) > 3 or not total.rounds:
        one = Round(case, seed, min(left, ROUND), only=only)
        total += one.run()
        if one.report.wrong:
            wrong.append(one.explain())
        seed += 1
    return total, "\n\n".join(wrong[:5])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="one of " + "; ".join(CASES) + " (default: all)")
    parser.add_argument("--seconds", type=float, default=600, help="for all cases together (default: 600)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="PATTERN", help="send only requests whose description matches")
    args = parser.parse_args()
    cases = [args.case] if args.case else list(CASES)
    total = Report()
    for case in cases:
        report, wrong = fuzz(case, args.seed, args.seconds / len(cases), only=args.only)
        print(wrong, end="\n" if wrong else "")
        print(f"{case}: {report.short()}", flush=True)
        total += report
    print(total)
    return not total.good


if __name__ == "__main__":
    os.environ.setdefault("HIBACHI_AUTOTUNE", "off")
    sys.exit(main())
