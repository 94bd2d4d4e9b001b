"""What the router says of its upstreams at /upstreams, and that as a table."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from hibachi.errors import ConfigError, HibachiError
from hibachi.router.fleet import Fleet
from hibachi.router.outliers import suspect
from hibachi.router.outliers import told as about
from hibachi.router.queue import Queues
from hibachi.router.upstreams import UpstreamState


def told(fleet: Fleet, lines: Queues, policy: str) -> dict[str, Any]:
    return {
        "policy": policy,
        "waiting": lines.waiting,
        "upstreams": [
            {
                "name": u.name,
                "state": (UpstreamState.TRIED if u.takes and suspect(u) else u.state).value,
                "why": u.why or (about(u) if suspect(u) else ""),
                "models": list(u.models),
                "in_flight": u.in_flight,
                "limit": u.place.limit,
                "latency": u.latency,
                "requests": u.used,
                "errors": sum(u.errors.values()) + sum(n for status, n in u.answers.items() if status >= 500),
                "retries": u.retries,
            }
            for u in (*fleet.upstreams, *fleet.leaving)
        ],
    }


COLUMNS = ("upstream", "state", "in flight", "latency", "requests", "errors", "models")


def as_table(found: dict[str, Any]) -> str:
    """found: what `told` made."""
    rows = [COLUMNS]
    for u in found["upstreams"]:
        latency = "-" if u["latency"] is None else f"{1000 * u['latency']:.0f} ms"
        models = ", ".join(u["models"][:4]) + (f" and {len(u['models']) - 4} more" if len(u["models"]) > 4 else "")
        busy = f"{u['in_flight']} of {u['limit']}"
        rows.append((u["name"], u["state"], busy, latency, str(u["requests"]), str(u["errors"]), models or "-"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{u['name']}: {u['why']}" for u in found["upstreams"] if u["why"]]
    return "\n".join([*lines, f"{found['waiting']} requests wait; policy {found['policy']}"])


def fetched(url: str, key: str | None) -> str:
    """The table of a router that runs. Raises HibachiError."""
    url = url if "://" in url else f"http://{url}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(url.rstrip("/") + "/upstreams", headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10) as answer:
            return as_table(json.load(answer))
    except urllib.error.HTTPError as e:
        why = "it wants a key: --api-key KEY" if e.code == 401 else f"it answered with {e.code}"
        raise HibachiError(f"--status {url}: {why}.") from e
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise ConfigError(f"--status {url}: there is no router ({getattr(e, 'reason', e)}).") from e
