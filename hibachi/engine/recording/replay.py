"""A recording played again: a new scheduler is told the same, and must plan the same."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from hibachi.engine.recording.recorder import sent_words, words_of
from hibachi.engine.scheduler import policy as policies
from hibachi.engine.scheduler.policy import Policy
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq, linked
from hibachi.engine.scheduler.step import Limits, StepPlan
from hibachi.engine.scheduler.tiers import Tiers
from hibachi.errors import HibachiError
from hibachi.request import Finish


class ReplayDiffers(HibachiError):
    """A scheduler that was told the same did something else."""


def read(path: str | Path) -> dict[str, Any]:
    """A recording from its file, in the form of `Recorder.dump`."""
    with open(path, encoding="utf-8") as file:
        head, *events = [json.loads(line) for line in file]
    return {**head, "complete": True, "events": events}


def replay(dump: dict[str, Any], policy: Policy | None = None) -> int:
    """Replay a recording on a new scheduler; returns the number of steps.

    policy: a new one, like the recorded one; None means ours of that name, with its defaults. Raises ReplayDiffers
    where a plan differs, and ValueError for a recording whose beginning is missing.
    """
    if not dump["complete"]:
        raise ValueError("The recording lacks its beginning: expected all events since the start. Use record=PATH.")
    if policy is None:
        policy = getattr(policies, dump["policy"])()
    player = _Player(Limits(**dump["limits"]), policy, grows=dump["grows"])
    for n, event in enumerate(dump["events"]):
        player.play(n, dict(event))
    return player.steps


class _Recorded(Tiers):
    """Tiers that have what those of the recording had."""

    def __init__(self, root: bytes, find: Callable[[bytes], Any | None]) -> None:
        super().__init__(root, find)
        self.loads: dict[Seq, tuple[int, int, bool]] = {}
        """{sequence: (its blocks, how many of them are loaded, whether a state is)} of the next step"""

    @override
    def names(self, seq: Seq, n: int) -> list[bytes]:
        return [b""] * n

    @override
    def found(self, seq: Seq, start: int, most: int) -> list[Any]:
        blocks, loaded, _ = self.loads.get(seq, (0, 0, False))
        return [None] * loaded if loaded and start == blocks - loaded else []

    @override
    def state(self, seq: Seq, start: int, most: int) -> tuple[int, Any] | None:
        blocks, _, state = self.loads.get(seq, (0, 0, False))
        return (blocks, True) if state else None


class _Player:
    def __init__(self, limits: Limits, policy: Policy, *, grows: bool) -> None:
        self.scheduler = Scheduler(limits, policy, self._key_of if grows else None)
        self._policy = copy.deepcopy(policy)
        self.steps = 0
        self._seqs: dict[int, Seq] = {}
        self._grown: dict[tuple[int, int], Hashable] = {}
        self._plans: deque[StepPlan] = deque()  # not yet committed
        self._tiers = self.scheduler.tiers = _Recorded(b"", lambda name: None)

    def _key_of(self, seq: Seq, n: int) -> Hashable:
        return self._grown[seq.number, n]

    def play(self, n: int, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        expected: Any = None
        got: Any = None
        s = self.scheduler
        match kind:
            case "add":
                now, number, members = event.pop("now"), event.pop("seq"), event.pop("linked", [])
                how = {name: event.pop(name) for name in ("alike", "parts", "early") if name in event}
                numbers = [each.pop("seq") for each in members]
                seqs = [Seq(**each) for each in members]
                seq = linked(seqs, **how) if seqs else Seq(**event)
                s.add(seq, now)
                self._seqs |= dict(zip([number, *numbers], [seq, *seqs], strict=True))
                expected, got = [number, *numbers], [each.number for each in (seq, *seqs)]
            case "load":
                self._tiers.loads[self._seqs[event.pop("seq")]] = event["blocks"], event["loaded"], event["state"]
            case "plan":
                self._grown |= {(number, at): key for number, at, key in event["grown"]}
                plan = s.schedule(event["now"])
                self._tiers.loads.clear()
                expected, got = event["plan"], None if plan is None else words_of(plan)
                if plan is not None:
                    self._plans.append(plan)
                    self.steps += 1
            case "commit":
                plan = self._plans.popleft()
                stopped = np.zeros(np.count_nonzero(plan.emit), bool)
                stopped[event["stopped"]] = True
                counts = event.get("tokens")
                parents = [(self._seqs[one], self._seqs[of]) for one, of in event.get("parents", [])]
                s.commit(plan, stopped, None if counts is None else np.array(counts, np.int32), parents)
            case "draft":
                s.propose([(self._seqs[number], n) for number, n in event["drafts"]])
            case "cancel":
                s.cancel(self._seqs[event["seq"]], Finish(event["reason"]))
            case "fail":
                expected, got = event["sent"], sent_words(s.fail(self._seqs[event["seq"]]))
            case "expire":
                expected, got = event["ended"], [seq.number for seq in s.expire(event["now"])]
            case "room":
                expected, got = event["sent"], sent_words(s.make_room())
            case "rollback":
                s.rollback(self._plans.pop())  # the newest first
            case "forget":
                s.forget()
            case "drop":
                s.drop_prefixes()
            case "limit":
                s.limit(event["budget"])
            case "rest":
                s.rest(frozenset(event["tenants"]))
            case "slow":
                s.slow(self._seqs[event["seq"]], event["tokens"])
            case "feed":
                s.feed(self._seqs[event["seq"]], event["tokens"])
            case "again":
                self.scheduler = s.fresh(copy.deepcopy(self._policy))
            case "pause":
                s.pause(self._seqs[event["seq"]])
            case "unpause":
                s.unpause(self._seqs[event["seq"]])
            case "free":
                s.free(self._seqs[event["seq"]])
        if expected != got:
            raise ReplayDiffers(f"Event {n} ({kind}): expected {expected}; got {got}.")
