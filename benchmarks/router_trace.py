"""The router's policies on Mooncake's trace: how much of the prompts four servers have in their caches, and how evenly
requests fall on them.

The servers are engines of the simulator (docs/simulator.md#replicas) with 2,000 blocks of 512 tokens and 64 slots each.
A step takes the time of the model that it assumes.

    python -m benchmarks.router_trace --mooncake FILE
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.simulator import lru
from hibachi.cli.simrouter import SimRouter
from hibachi.engine.scheduler.policy import Fcfs
from hibachi.engine.simulator.simulate import Setup, simulate
from hibachi.engine.simulator.steptime import StepTime
from hibachi.engine.simulator.trace import Keys, Trace, read_trace
from hibachi.router.affine import PrefixAffine
from hibachi.router.policies import Ask, LeastConnection, Policy, PowerOfTwo, RoundRobin
from hibachi.router.upstreams import Upstream

SERVERS, BLOCKS, SLOTS = 4, 2000, 64
POLICIES: dict[str, Callable[[], Policy]] = {
    "least-connection": LeastConnection,
    "round-robin": RoundRobin,
    "power-of-two": lambda: PowerOfTwo(Random(0)),
    "prefix-affine": PrefixAffine,
}


class Noted(SimRouter):
    """Notes where each request goes."""

    def __init__(self, trace: Trace, policy: Policy, n: int, network: int = 0) -> None:
        super().__init__(trace, policy, n, SLOTS, network)
        self.chosen = [-1] * len(trace)

    def place(self, i: int, now: float) -> int | None:
        engine = super().place(i, now)
        if engine is not None:
            self.chosen[i] = engine
        return engine


@dataclass(frozen=True)
class Result:
    """hit: share of the prompts' tokens. requests, tokens: of the most loaded server, over the mean."""

    hit: float
    requests: float
    tokens: float
    first: float  # seconds to the first token, the mean
    chosen: list[int]  # the server of each request


def replay(trace: Trace, policy: Policy, network: int = 0) -> Result:
    router = Noted(trace, policy, SERVERS, network)
    setup = Setup(max_num_seqs=SLOTS, num_blocks=BLOCKS, max_num_batched_tokens=8192, replicas=SERVERS)
    figures = simulate(trace, setup, StepTime(), Fcfs, router=router).summary()
    tokens = Counter[int]()
    for engine, prompt in zip(router.chosen, trace.prompt.tolist(), strict=True):
        tokens[engine] += prompt
    requests = most(list(Counter(router.chosen).values()))
    return Result(figures["hit_rate"], requests, most(list(tokens.values())), figures["ttft"]["mean"], router.chosen)


def most(counts: Sequence[int]) -> float:
    return max(counts) * len(counts) / sum(counts)


def led(trace: Trace, blocks: int) -> Trace:
    """The same requests, each with the same blocks in front: a system prompt."""
    front = tuple(f"system {i}" for i in range(blocks))
    keys: list[Keys] = [(*front, *own) for own in trace.keys or []]
    return replace(trace, prompt=trace.prompt + blocks * trace.key_tokens, keys=keys)


def moved(trace: Trace, before: Sequence[Upstream], after: Sequence[Upstream]) -> tuple[int, int]:
    """How many prefixes have another home, and how many there are."""
    router = SimRouter(trace, PrefixAffine(), 1)
    firsts = {pieces for i in range(len(trace)) if (pieces := router.ask(i).pieces[:1])}
    policy = PrefixAffine()
    homes = [(policy.home(Ask(pieces=f), before), policy.home(Ask(pieces=f), after)) for f in firsts]
    return sum(was is not now for was, now in homes), len(homes)


def table(trace: Trace) -> None:
    print("| policy | tokens hit | requests | tokens | first token, mean |\n|---|---|---|---|---|")
    for name, make in POLICIES.items():
        r = replay(trace, make())
        print(f"| {name} | {r.hit:.1%} | {r.requests:.2f} | {r.tokens:.2f} | {r.first:.2f} s |", flush=True)
    print(f"| one cache of {SERVERS * BLOCKS:,} blocks | {lru(trace, SERVERS * BLOCKS):.1%} | | | |")
    runs = [replay(trace, PrefixAffine(), network) for network in range(12)]
    print(
        f"\nprefix-affine with {len(runs)} sets of addresses: hit {min(r.hit for r in runs):.1%} to "
        f"{max(r.hit for r in runs):.1%}; most loaded, at worst: requests {max(r.requests for r in runs):.2f}, tokens "
        f"{max(r.tokens for r in runs):.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake", metavar="FILE", required=True)
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help="X times as fast (default: 1)")
    parsed = parser.parse_args()
    trace = read_trace(parsed.mooncake)
    if not trace.keys:
        parser.error("--mooncake: expected a trace with hash_ids.")
    trace = trace.faster(parsed.speed)
    print(
        f"{trace.name}, {len(trace):,} requests. Columns 3 and 4: the most loaded of {SERVERS} servers over the mean.\n"
    )
    table(trace)
    for blocks in (2, 8):
        print(f"\nWith a system prompt of {blocks} blocks in front of all requests:\n")
        table(led(trace, blocks))
    five = SimRouter(trace, PrefixAffine(), SERVERS + 1).upstreams
    other, all_of_them = moved(trace, five[:SERVERS], five)
    print(f"\nA fifth server takes {other:,} of {all_of_them:,} prefixes ({other / all_of_them:.1%}).")
