"""The part of the flight recorder that one tenant may see: its own requests."""

from __future__ import annotations

from typing import Any

_OF_ONE = ("cancel", "fail", "slow", "pause", "unpause", "feed")
_LISTS = ("seqs", "start", "q")  # of a plan, an entry for each request


def of_tenant(dump: dict[str, Any], tenant: str) -> dict[str, Any]:
    """The part of a recording (`Recorder.dump`) that concerns the requests of one tenant.

    It has neither rows nor blocks, as the numbers of these would tell of other tenants; so it cannot be replayed.
    """
    events: list[dict[str, Any]] = []
    own: dict[int, int] = {}  # numbers of its own, as the engine's count the requests of all tenants
    for event in dump["events"]:
        kind = event["event"]
        if kind == "add" and event["tenant"] == tenant:
            own[event["seq"]] = len(own) + 1
            told = {name: value for name, value in event.items() if name not in ("keys", "salt")}
            events.append(told | {"seq": own[event["seq"]]})
        elif kind == "plan" and (mine := _own(event["plan"], own)):
            events.append({"event": "plan", "now": event["now"], "plan": mine})
        elif kind in _OF_ONE and event["seq"] in own:
            told = {name: value for name, value in event.items() if name != "sent"}
            events.append(told | {"seq": own[event["seq"]]})
        elif kind == "expire" and (ended := [own[n] for n in event["ended"] if n in own]):
            events.append({"event": "expire", "now": event["now"], "ended": ended})
    return {"policy": dump["policy"], "complete": False, "events": events} if "policy" in dump else {"events": []}


def _own(plan: dict[str, Any] | None, own: dict[int, int]) -> dict[str, Any] | None:
    if plan is None:
        return None
    places = [i for i, seq in enumerate(plan["seqs"]) if seq in own]
    if not places:
        return None
    told: dict[str, Any] = {name: [plan[name][i] for i in places] for name in _LISTS}
    told["seqs"] = [own[seq] for seq in told["seqs"]]
    emit = set(plan["emit"])
    return told | {
        "emit": [n for n, i in enumerate(places) if i in emit],
        "fresh": [own[seq] for seq in plan["fresh"] if seq in own],
        "preempted": [own[seq] for seq, _ in plan["preempted"] if seq in own],
    }
