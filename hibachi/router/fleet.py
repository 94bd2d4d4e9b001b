"""The upstreams that there are, and which of them have a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hibachi.router.health import drain
from hibachi.router.policies import Ask
from hibachi.router.upstreams import Place, Upstream, UpstreamState

ANY = ""  # in the place of a model: any upstream


class Fleet:
    """In the order of the configuration. Those that left it are in `leaving` until their last request has ended."""

    upstreams: list[Upstream]
    leaving: list[Upstream]

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self.upstreams, self.leaving = [], []
        self._having: dict[str, list[Upstream]] = {}
        self.settle(places)

    def settle(self, places: Iterable[Place]) -> list[Upstream]:
        """From now on there are these. One that was there goes on, with what is new of its place. Returns new ones."""
        before = {u.name: u for u in (*self.leaving, *self.upstreams)}
        now, new = dict[str, Upstream](), list[Upstream]()
        for place in places:
            u = before.pop(place.name, None)
            if u is None:
                u = Upstream(place)
                new.append(u)
            elif u in self.leaving:  # it is back, with what it still has
                u.state, u.good, u.bad, u.faults, u.why = UpstreamState.NEW, 0, 0, 0, "it has not been asked yet"
                new.append(u)
            u.place = place
            now[place.name] = u
        for u in before.values():
            drain(u, "it has left the configuration")
            u.state = UpstreamState.DRAINING
        self.leaving = [u for u in before.values() if u.in_flight]
        self.upstreams = list(now.values())
        self.changed()
        return new

    def changed(self) -> None:
        """The models of an upstream have changed."""
        self._having = {}
        for u in self.upstreams:
            for model in u.models:
                self._having.setdefault(model, []).append(u)

    def having(self, model: str) -> Sequence[Upstream]:
        """The upstreams that have a model, whether they take requests or not."""
        return self._having.get(model, ()) if model != ANY else self.upstreams

    def taking(self, model: str) -> list[Upstream]:
        return [u for u in self.having(model) if u.takes]

    def keeper(self, server: str) -> Upstream | None:
        """The upstream whose models say this of it, whether it takes requests or not: it keeps responses."""
        return next((u for u in self.upstreams if server in u.servers), None)

    def lost(self, ask: Ask) -> bool:
        """Was what a request is about in the memory of an upstream that is gone?"""
        return ask.in_memory and any(u.gone for u in self.upstreams if u.name == ask.only)

    def numerics(self, model: str) -> dict[str | None, list[str]]:
        """The names of the bits that a model has by `/v1/models`, and who shows which. None: no name."""
        found = dict[str | None, list[str]]()
        for u in self._having.get(model, ()):
            name = u.models[model].get("numerics")
            found.setdefault(name if isinstance(name, str) else None, []).append(u.name)
        return found

    @property
    def models(self) -> list[str]:
        """Of those that take requests; where none does, of all."""
        takes = [model for model, having in self._having.items() if any(u.takes for u in having)]
        return takes or list(self._having)

    @property
    def ready(self) -> bool:
        return any(u.takes for u in self.upstreams)

    @property
    def known(self) -> bool:
        """Is it known which models there are? Not while one that was never reached may have others."""
        return self.ready and all(u.models or u.takes for u in self.upstreams)

    def listed(self, *, owners: bool) -> list[dict[str, Any]]:
        """What `/v1/models` says: each model once, as the first says that has it; owners: with the names of all."""
        out = []
        for model, having in self._having.items():
            if takes := [u for u in having if u.takes]:
                entry = {**takes[0].models[model], "id": model}
                if "server" in entry:  # a router before this one is to know all of them
                    entry["server"] = [server for u in takes for server in sorted(u.servers)]
                out.append(entry | {"upstreams": [u.name for u in takes]} if owners else entry)
        return out

    def reasons(self, model: str = ANY, only: str = "") -> str:
        """Why those that have a model take no requests. only: the name of the one that may."""
        if only:
            mine = next((u for u in self.upstreams if u.name == only), None)
            return f"{only}: {(mine.why or 'it has already had it') if mine else 'it has left the configuration'}"
        found = [f"{u.name}: {u.why or 'it is ready'}" for u in self.having(model) or self.upstreams]
        return "; ".join(found[:20]) or "there are no upstreams"


def shown(models: Sequence[str], most: int) -> str:
    """Names for an error or the log, where an upstream says what it is called: short, and on one line."""
    names = (name if name.isprintable() else repr(name) for name in models[:most])
    text = ", ".join(name[:80] for name in names) or "none"
    return text if len(models) <= most else f"{text}, and {len(models) - most} more"
