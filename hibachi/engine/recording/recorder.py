"""The flight recorder: what the scheduler was told and what it planned, the last steps or all of them.

A record is integers, times and words; it holds no prompt and no token. Where sequences may share blocks, the identity
of a block's tokens stands as a number that is the same for equal ones, and for nothing outside this recording. A
record that begins with the scheduler can be played again: `hibachi.engine.recording.replay` gives the same commands to
a new scheduler and compares the plans.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from typing_extensions import override

from hibachi.engine.scheduler.copies import Copied
from hibachi.engine.scheduler.policy import Policy
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Bools, Committed, Ints, KnownStart, Limits, Published, Sent, StepPlan
from hibachi.errors import ConfigError
from hibachi.request import Finish

log: logging.Logger = logging.getLogger("hibachi.engine")
LENGTH = 512  # entries: a step is two, plan and commit


class Recorder:
    """Notes what happens, in the order in which it happens. Not thread-safe, but for `dump` and `last`.

    The last `length` entries stay in memory.
    """

    def __init__(self, scheduler: Scheduler, *, length: int = LENGTH) -> None:
        self._head = {
            "limits": asdict(scheduler.limits),
            "policy": type(scheduler.policy).__name__,
            "grows": scheduler.shares_generated,
        }
        self._block = scheduler.limits.block_size
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=length)
        self._count = 0
        self._secret = secrets.token_bytes(16)
        self._file: TextIO | None = None

    def write_to(self, path: str | Path) -> None:
        """Also write everything to this file, from its beginning, one JSON object a line; where it cannot be written
        any more, a full disk say, the log says so once and the recording ends. Raises ConfigError for a file that
        cannot be opened.
        """
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # as long as the engine lives
        except (OSError, ValueError, TypeError) as e:  # those of a path that is none
            raise ConfigError(f"record={path!r:.200} cannot be written: {e}. Name a file that can.") from e
        self._write(None)

    def note(self, *entry: Any) -> None:
        """Record an event. entry: its name and fields, turned into words only when they are read."""
        self._ring.append(entry)
        self._count += 1
        if self._file is not None:
            self._write(entry)

    def dump(self) -> dict[str, Any]:
        """What can be written as JSON: {"limits", "policy", "complete", "events", ...}.

        complete: nothing is missing since the start, so it can be played again.
        """
        entries = self._entries()
        return self._head | {
            "complete": self._count == len(entries),
            "events": [self._words(entry) for entry in entries],
        }

    def last(self, steps: int) -> str:
        """The last steps and what happened between them, a line each, for a log."""
        lines, found = [], 0
        for entry in reversed(self._entries()):
            lines.append(_line(entry))
            found += entry[0] == "plan" and entry[1] is not None
            if found == steps:
                break
        return "\n".join(reversed(lines))

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # of what was not written yet
                self._file.close()
            self._file = None

    def _entries(self) -> list[tuple[Any, ...]]:
        while True:
            try:
                return list(self._ring)
            except RuntimeError:  # the engine's thread added one meanwhile
                continue

    def _write(self, entry: tuple[Any, ...] | None) -> None:
        """To the file, None means how it begins; if that fails, a full disk say, say so once and go on without it."""
        assert self._file is not None
        try:
            words = self._head if entry is None else self._words(entry)
            self._file.write(json.dumps(words) + "\n")
            self._file.flush()  # what a process that dies leaves behind is what this is for
        except Exception as e:
            log.error("the recording of the engine's plans ends here: %s: %s", type(e).__name__, e)
            file, self._file = self._file, None
            with suppress(Exception):
                file.close()

    # ---- as words ----------------------------------------------------------------------------------------------

    def _words(self, entry: tuple[Any, ...]) -> dict[str, Any]:
        event, *rest = entry
        words: dict[str, Any] = {"event": event}
        match event, rest:
            case "add", (seq, now, keys, held, members):
                words |= {"now": now} | self._seq(seq, keys, held)
                if members:
                    words["linked"] = [self._seq(*each) for each in members]
                    words |= {"alike": seq.link.alike, "parts": seq.link.parts, "early": seq.link.early}
            case "plan", (plan, now):
                words |= {"now": now, "plan": None if plan is None else words_of(plan), "grown": self._grown(plan)}
            case "commit", (stopped, seconds, counts, parents):
                words |= {"stopped": np.flatnonzero(stopped).tolist(), "seconds": round(seconds, 6)}
                words |= {} if counts is None else {"tokens": counts.tolist()}
                words |= {"parents": [[seq.number, of.number] for seq, of in parents]} if parents else {}
            case "cancel", (seq, reason):
                words |= {"seq": seq.number, "reason": str(reason)}
            case "fail", (seq, sent, error):
                words |= {"seq": seq.number, "sent": sent_words(sent), "error": error}
            case "load", (seq, blocks, loaded, state):
                words |= {"seq": seq.number, "blocks": blocks, "loaded": loaded, "state": state}
            case (("slow" | "feed"), (seq, tokens)):
                words |= {"seq": seq.number, "tokens": tokens}
            case "room", (sent,):
                words |= {"sent": sent_words(sent)}
            case "expire", (now, ended):
                words |= {"now": now, "ended": [seq.number for seq in ended]}
            case "rollback", (plan, why):
                words |= {"why": why}
            case "limit", (budget,):
                words |= {"budget": budget}
            case "draft", (drafts,):
                words |= {"drafts": drafts}
            case "rest", (tenants,):
                words |= {"tenants": sorted(map(str, tenants))}
            case (("pause" | "unpause" | "free"), (seq,)):
                words |= {"seq": seq.number}
        return words

    def _seq(self, seq: Seq, its: list[Hashable] | None, held: bool) -> dict[str, Any]:
        keys = None if its is None else self._names(islice(its, seq.prompt_len // self._block), seq.salt)
        words: dict[str, Any] = {"seq": seq.number, "prompt_len": seq.prompt_len, "max_new": seq.max_new}
        words |= {"priority": seq.priority, "tenant": str(seq.tenant), "salt": self._name(seq.salt)}
        words |= {"deadline": seq.deadline, "start_by": seq.start_by, "keys": keys}
        return words | ({"begun": True} if seq.begun else {}) | ({"held": True} if held else {})

    def _grown(self, plan: StepPlan | None) -> list[list[int]]:
        """[sequence, number of a block, name of its tokens] of blocks with generated tokens that became known."""
        if plan is None or not plan.published:
            return []
        ends = {seq.number: end for seq, end in zip(plan.seqs, plan.end.tolist(), strict=True)}
        grown = []
        for seq, before, _, keys, _ in plan.published:  # (after a fork it has other keys)
            first = max(before, seq.prompt_len // self._block)
            new = keys[first : ends.get(seq.number, 0) // self._block]
            grown += [[seq.number, n, name] for n, name in enumerate(self._names(new, seq.salt), first)]
        return grown

    def _names(self, keys: Iterable[Hashable], salt: Hashable) -> list[int]:
        return [self._name(key, salt) for key in keys]

    def _name(self, key: Hashable, salt: Hashable = None) -> Any:
        """What can be told of an identity: whether it equals another of this recording, of the same salt."""
        if key is None:
            return None
        data = key if isinstance(key, bytes) else repr(key).encode()
        if salt is not None:
            data = f"{salt!r} {len(data)} ".encode(errors="replace") + data
        return int.from_bytes(blake2b(data, digest_size=6, key=self._secret).digest())


class RecordedScheduler(Scheduler):
    """A scheduler whose commands are noted: each of them stands here, so that no caller has to think of it."""

    recorder: Recorder

    def __init__(
        self,
        limits: Limits,
        policy: Policy | None = None,
        key_of: Callable[[Seq, int], Hashable] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """recorder: None means a new one."""
        super().__init__(limits, policy, key_of)
        self.recorder = Recorder(self) if recorder is None else recorder
        self._note = self.recorder.note

    @override
    def fresh(self, policy: Policy) -> RecordedScheduler:
        new = RecordedScheduler(self.limits, policy, self._key_of, self.recorder)
        new.count_on(self)
        self._note("again")
        return new

    @override
    def add(self, seq: Seq, now: float = 0.0) -> None:
        super().add(seq, now)
        members = [] if seq.link is None else [(each, each.keys, each.held) for each in seq.link.seqs]
        self._note("add", seq, now, seq.keys, seq.held, members)

    @override
    def cancel(self, seq: Seq, reason: Finish = Finish.CANCELLED) -> bool:
        self._note("cancel", seq, reason)
        return super().cancel(seq, reason)

    @override
    def expire(self, now: float) -> list[Seq]:
        if not self._deadlines:  # as nearly always
            return []
        if ended := super().expire(now):
            self._note("expire", now, ended)
        return ended

    @override
    def pause(self, seq: Seq) -> None:
        self._note("pause", seq)
        super().pause(seq)

    @override
    def unpause(self, seq: Seq) -> None:
        self._note("unpause", seq)
        super().unpause(seq)

    @override
    def free(self, seq: Seq) -> None:
        self._note("free", seq)
        super().free(seq)

    @override
    def feed(self, seq: Seq, more: int) -> None:
        self._note("feed", seq, more)
        super().feed(seq, more)

    @override
    def make_room(self) -> Sent:
        if not self.waiting:
            return []
        if (sent := super().make_room()) or self.shares_rows:  # requests that ended while they waited are dropped then
            self._note("room", sent)
        return sent

    @override
    def rest(self, tenants: frozenset[Hashable]) -> None:
        if tenants != self.resting:
            self._note("rest", tenants)
            super().rest(tenants)

    @override
    def limit(self, budget: int) -> None:
        self._note("limit", budget)
        super().limit(budget)

    @override
    def propose(self, drafts: Sequence[tuple[Seq, int]]) -> None:
        self._note("draft", [(seq.number, n) for seq, n in drafts])
        super().propose(drafts)

    @override
    def slow(self, seq: Seq, tokens: int) -> None:
        self._note("slow", seq, tokens)
        super().slow(seq, tokens)

    @override
    def fail(self, seq: Seq, error: str = "") -> Sent:
        """error: its name."""
        sent = super().fail(seq)
        self._note("fail", seq, sent, error)
        return sent

    @override
    def rollback(self, plan: StepPlan, why: str = "") -> Sent:
        self._note("rollback", plan, why)
        return super().rollback(plan)

    @override
    def forget(self) -> Sent:
        self._note("forget")
        return super().forget()

    @override
    def drop_prefixes(self) -> None:
        self._note("drop")
        super().drop_prefixes()

    @override
    def _reserve(
        self,
        seq: Seq,
        at_work: list[Seq],
        published: list[Published],
        copied: list[Copied],
        more: int = 0,
        *,
        finds: bool = True,
    ) -> KnownStart | None:
        found = super()._reserve(seq, at_work, published, copied, more, finds=finds)
        if found is not None and (found.loaded or found.state is not None):
            self._note("load", seq, found.blocks, found.loaded, found.state is not None)
        return found

    @override
    def schedule(self, now: float = 0.0) -> StepPlan | None:
        plan = Scheduler.schedule(self, now)  # without super(), as it is called in each step
        self._note("plan", plan, now)
        return plan

    @override
    def commit(
        self,
        plan: StepPlan,
        stopped: Bools,
        counts: Ints | None = None,
        parents: Sequence[tuple[Seq, Seq]] = (),
        began: float | None = None,
    ) -> Committed:
        """began: the step, by time.perf_counter(); None means now."""
        committed = Scheduler.commit(self, plan, stopped, counts, parents)
        seconds = 0.0 if began is None else time.perf_counter() - began
        self._note("commit", stopped, seconds, counts, parents)
        return committed


def words_of(plan: StepPlan) -> dict[str, Any]:
    return {
        "seqs": [seq.number for seq in plan.seqs],
        "rows": plan.rows.tolist(),
        "start": plan.start.tolist(),
        "q": plan.q.tolist(),
        "emit": np.flatnonzero(plan.emit).tolist(),
        "fresh": [seq.number for seq in plan.fresh],
        "preempted": sent_words(plan.preempted),
    } | ({} if plan.draft is None else {"draft": plan.draft.tolist()})


def sent_words(sent: Sent) -> list[list[int]]:
    return [[seq.number, row] for seq, row in sent]


def _line(entry: tuple[Any, ...]) -> str:
    event, *rest = entry
    if event == "plan":
        plan = rest[0]
        if plan is None:
            return "nothing to compute"
        more = f", {len(plan.fresh)} start" if plan.fresh else ""
        more += f", {len(plan.preempted)} preempted" if plan.preempted else ""
        more += "" if plan.draft is None else f", {int(plan.draft.sum())} proposed"
        return f"step: {len(plan.rows)} rows, {int(plan.q.sum())} tokens, longest {int(plan.end.max())}{more}"
    if event == "commit":
        return f"  done in {rest[1] * 1e3:.1f} ms, {int(np.count_nonzero(rest[0]))} stopped"
    return f"  {event} " + " ".join(f"request {x.number}" if isinstance(x, Seq) else str(x)[:80] for x in rest)
