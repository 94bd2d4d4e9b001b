"""The router's policies on Mooncake's trace: how much of the prompts four servers have in their caches, and how evenly
requests fall on them.

The policies and the records are the router's own; the servers are simulated, and time is a number. A server has an LRU
cache of 2,000 blocks of 512 tokens and 64 slots. It prefills what it has not in its cache, 20,000 tokens a second, one
prompt after the other; then each request takes 20 ms for a token, whoever else runs. A prompt's full blocks are in the
cache from when it comes to the server. Text is made up: 2,048 bytes for each block, the same for the same block.

    python benchmarks/router_trace.py --mooncake FILE
"""

from __future__ import annotations

import argparse
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from random import Random

from hibachi.engine.simulator.trace import PICOSECONDS, Keys, Trace, read_trace
from hibachi.router.affine import FURTHEST, PrefixAffine, pieces_of
from hibachi.router.policies import Ask, LeastConnection, Policy, PowerOfTwo, RoundRobin
from hibachi.router.upstreams import Place, Upstream, UpstreamState

SERVERS, BLOCKS, SLOTS = 4, 2000, 64
PREFILL, DECODE = 20_000, 0.020  # tokens a second of a server; seconds a token of a request
BYTES = 2048  # of text in a block of 512 tokens
POLICIES: dict[str, Callable[[], Policy]] = {
    "least-connection": LeastConnection,
    "round-robin": RoundRobin,
    "power-of-two": lambda: PowerOfTwo(Random(0)),
    "prefix-affine": PrefixAffine,
}


@dataclass
class Cache:
    """The blocks of one server; the one that was used longest ago gives way."""

    capacity: int
    held: OrderedDict[Hashable, None] = field(default_factory=OrderedDict)

    def use(self, keys: Sequence[Hashable], prompt: int, size: int) -> int:
        """How many tokens of a prompt were there. Now all its full blocks are."""
        full = keys[: prompt // size]
        known = 0
        while known < len(full) and full[known] in self.held:
            known += 1
        for key in reversed(full):  # heads are left last, so tails go first
            self.held[key] = None
            self.held.move_to_end(key)
        while len(self.held) > self.capacity:
            self.held.popitem(last=False)
        return min(known, (prompt - 1) // size) * size  # the last token is always computed


@dataclass
class Server:
    cache: Cache
    idle: float = 0.0  # when its last prefill ends
    requests: int = 0
    tokens: int = 0  # of prompts
    computed: int = 0  # those of them that were not in its cache


@dataclass(frozen=True)
class Result:
    """hit: share of the prompts' tokens. requests, tokens, computed: of the most loaded server, over the mean."""

    hit: float
    requests: float
    tokens: float
    computed: float
    first: float  # seconds to the first token, the mean
    chosen: list[str]  # the server of each request


def upstreams(n: int, network: int = 0) -> list[Upstream]:
    return [Upstream(Place(f"http://10.0.{network}.{i + 1}:8000", limit=SLOTS), UpstreamState.UP) for i in range(n)]


@cache
def text_of(key: Hashable) -> bytes:
    """A block's text: as long as 512 tokens are, and another one for each key."""
    return f"{key!s:>32}".encode() * (BYTES // 32)


def asks(trace: Trace) -> list[Ask]:
    """What the router knows of each request."""
    found = []
    for keys, prompt in zip(trace.keys or [], trace.prompt.tolist(), strict=True):
        text = b"".join(map(text_of, keys[: FURTHEST // BYTES]))
        found.append(Ask(pieces=pieces_of(text[: prompt * BYTES // trace.key_tokens])))
    return found


def replay(trace: Trace, policy: Policy, given: Sequence[Ask], among: Sequence[Upstream]) -> Result:
    """Every request once, at its time. Where all slots are taken, requests wait in order."""
    servers, went = {u.name: Server(Cache(BLOCKS)) for u in among}, [""] * len(trace)
    keys, prompt, output = trace.keys or [], trace.prompt.tolist(), trace.output.tolist()
    arrival = (trace.arrival / PICOSECONDS).tolist()
    number, waiting, delay = count(len(trace)), deque[int](), 0.0
    # Time and number; then a request that comes, or an upstream with the seconds to a first byte, or None at the end.
    events: list[tuple[float, int, int | Upstream, float | None]]
    events = [(at, i, i, None) for i, at in enumerate(arrival)]  # sorted, so it is a heap
    while events:
        now, _, what, seconds = heapq.heappop(events)
        if isinstance(what, int):
            waiting.append(what)
        elif seconds is not None:
            what.took(seconds)
        else:
            what.in_flight -= 1
        while waiting and (free := [u for u in among if u.slots > 0]):
            i = waiting.popleft()
            chosen = policy.choose(free, replace(given[i], everyone=among), now)
            went[i], server = chosen.name, servers[chosen.name]
            computed = prompt[i] - server.cache.use(keys[i], prompt[i], trace.key_tokens)
            server.idle = first = max(server.idle, now) + computed / PREFILL
            server.requests += 1
            server.tokens += prompt[i]
            server.computed += computed
            chosen.in_flight += 1
            heapq.heappush(events, (first, next(number), chosen, first - now))
            heapq.heappush(events, (first + output[i] * DECODE, next(number), chosen, None))
            delay += first - arrival[i]
    all_ = list(servers.values())
    return Result(
        1 - sum(s.computed for s in all_) / sum(prompt),
        most([s.requests for s in all_]),
        most([s.tokens for s in all_]),
        most([s.computed for s in all_]),
        delay / len(trace),
        went,
    )


def most(counts: Sequence[int]) -> float:
    return max(counts) * len(counts) / sum(counts)


def one_cache(trace: Trace, blocks: int) -> float:
    """Share of the prompts' tokens that one server with so large a cache has."""
    lru = Cache(blocks)
    prompts = zip(trace.keys or [], trace.prompt.tolist(), strict=True)
    return sum(lru.use(keys, prompt, trace.key_tokens) for keys, prompt in prompts) / int(trace.prompt.sum())


def led(trace: Trace, blocks: int) -> Trace:
    """The same requests, each with the same blocks in front: a system prompt."""
    front = tuple(f"system {i}" for i in range(blocks))
    keys: list[Keys] = [(*front, *own) for own in trace.keys or []]
    return replace(trace, prompt=trace.prompt + blocks * trace.key_tokens, keys=keys)


def moved(given: Sequence[Ask], before: Sequence[Upstream], after: Sequence[Upstream]) -> tuple[int, int]:
    """How many prefixes have another home, and how many there are."""
    firsts = {ask.pieces[:1] for ask in given if ask.pieces}
    policy = PrefixAffine()
    homes = [(policy.home(Ask(pieces=f), before), policy.home(Ask(pieces=f), after)) for f in firsts]
    return sum(was is not now for was, now in homes), len(homes)


def table(trace: Trace) -> None:
    print(
        "| policy | tokens hit | requests | tokens | tokens computed | first token, mean |\n|---|---|---|---|---|---|"
    )
    given = asks(trace)
    for name, make in POLICIES.items():
        r = replay(trace, make(), given, upstreams(SERVERS))
        print(
            f"| {name} | {r.hit:.1%} | {r.requests:.2f} | {r.tokens:.2f} | {r.computed:.2f} | {r.first:.2f} s |",
            flush=True,
        )
    print(f"| one cache of {SERVERS * BLOCKS:,} blocks | {one_cache(trace, SERVERS * BLOCKS):.1%} | | | | |")
    runs = [replay(trace, PrefixAffine(), given, upstreams(SERVERS, network)) for network in range(12)]
    print(
        f"\nprefix-affine with {len(runs)} sets of addresses: hit {min(r.hit for r in runs):.1%} to "
        f"{max(r.hit for r in runs):.1%}; most loaded, at worst: requests {max(r.requests for r in runs):.2f}, tokens "
        f"{max(r.tokens for r in runs):.2f}, tokens computed {max(r.computed for r in runs):.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake", metavar="FILE", required=True)
    trace = read_trace(parser.parse_args().mooncake)
    if not trace.keys:
        parser.error("--mooncake: expected a trace with hash_ids.")
    print(
        f"{trace.name}, {len(trace):,} requests. Columns 3 to 5: the most loaded of {SERVERS} servers over the mean.\n"
    )
    table(trace)
    for blocks in (2, 8):
        print(f"\nWith a system prompt of {blocks} blocks in front of all requests:\n")
        table(led(trace, blocks))
    five = upstreams(SERVERS + 1)
    other, all_of_them = moved(asks(trace), five[:SERVERS], five)
    print(f"\nA fifth server takes {other:,} of {all_of_them:,} prefixes ({other / all_of_them:.1%}).")
