"""replay a trace of requests against the scheduler, without a model

The scheduler is the one that serves; a step takes the time that a model of
its size says (--step-time, from `hibachi bench fit`), on a clock that is not
real. Options that take several values make a grid: each is tried with each.

A trace is a .csv file (columns TIMESTAMP, ContextTokens, GeneratedTokens) or
a .jsonl file (timestamp, input_length, output_length, hash_ids); or let
--synthetic make up one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from hibachi.cli.settings import record_of, setting_argument
from hibachi.cli.simrouter import DEFAULT, router_of
from hibachi.common.installed import version
from hibachi.common.phases import short_duration
from hibachi.common.settings.settle import settings_of
from hibachi.engine.scheduler.policies import SHIPPED, policy_of
from hibachi.engine.scheduler.policy import Policy
from hibachi.engine.simulator.feed import ORDERS, WINDOW
from hibachi.engine.simulator.guesses import Guesses
from hibachi.engine.simulator.simulate import Run, Setup, simulate
from hibachi.engine.simulator.steptime import StepTime, read_step_time
from hibachi.engine.simulator.trace import Trace, read_trace, synthetic
from hibachi.errors import ConfigError
from hibachi.router.policynames import policy_of as policy_named

GRID = ("replicas", "router", "scheduling_policy", "max_num_seqs", "num_blocks")  # options that take several values
_COLUMNS = (
    ("replicas", 8),
    ("router", 16),
    ("policy", 16),
    ("rows", 5),
    ("blocks", 7),
    ("served", 9),
    ("refused", 7),
    ("TTFT p50", 8),
    ("p99", 8),
    ("ITL p50", 8),
    ("p99", 8),
    ("waiting", 9),
    ("in use", 6),
    ("token/s", 7),
    ("hits", 6),
    ("preempted", 9),
    ("time", 8),
    ("wall", 8),
    ("request/s", 9),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", nargs="?", metavar="TRACE", help="trace to replay, a .csv or .jsonl file")
    made = parser.add_argument_group("a made-up trace")
    made.add_argument("--synthetic", type=int, metavar="N", help="generate N random requests instead")
    made.add_argument("--rate", type=float, default=5.0, metavar="R", help="requests a second (default: 5)")
    made.add_argument(
        "--bursts", type=float, default=1.0, metavar="B", help="requests that arrive together (default: 1)"
    )
    made.add_argument(
        "--shared",
        type=float,
        default=0.5,
        metavar="S",
        help="share of requests that begin with a common text (default: 0.5)",
    )
    change = parser.add_argument_group("changes to the trace")
    change.add_argument("--requests", type=int, metavar="N", help="replay only the first N requests")
    change.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="replay the trace N times in a row (default: 1)"
    )
    change.add_argument("--copies", type=int, default=1, metavar="N", help="N at a time, of other people (default: 1)")
    change.add_argument("--speed", type=float, default=1.0, metavar="X", help="replay X times as fast (default: 1)")
    change.add_argument(
        "--tenants", type=int, metavar="N", help="assign requests to N tenants, some busier than others"
    )
    change.add_argument("--priorities", type=int, metavar="N", help="assign priorities from 0 to N-1")
    change.add_argument("--seed", type=int, default=0, metavar="N", help="seed of everything random (default: 0)")
    flags = [f"--{name.replace('_', '-')}" for name in GRID]
    group = parser.add_argument_group("the engine", f"Several values: {', '.join(flags[:3])},\n{', '.join(flags[3:])}.")
    for s in settings_of(Setup).values():
        setting_argument(group, s, several=s.key in GRID)
    group.add_argument(
        "--step-time", metavar="FILE", help="step times from `hibachi bench fit` (default: an 8B model on a large GPU)"
    )
    group.add_argument(
        "--speculate", type=int, metavar="N", help="propose N tokens for each row in each step (default: none)"
    )
    group.add_argument("--right", type=float, metavar="P", help="how likely a proposed token is right (default: 0.8)")
    group = parser.add_argument_group("a run offline")
    group.add_argument("--order", choices=ORDERS, help="put all requests in the queue at the start, in this order")
    group.add_argument(
        "--window", type=int, metavar="N", help=f"compose the order out of the next N (default: {WINDOW:,})"
    )
    add("--json", metavar="FILE", help="write all figures as JSON")
    add("--plot", metavar="FILE", help="draw a picture; in a checkout only: python -m benchmarks.bench sim")


def run(args: argparse.Namespace) -> int:
    if args.plot:
        raise ConfigError(
            "Pictures are drawn in a checkout of hibachi: give these options to `python -m benchmarks.bench sim` there."
        )
    replays(args)
    return 0


def replays(args: argparse.Namespace) -> list[Run]:
    """The runs, printed as they end and written where --json says."""
    time = StepTime() if args.step_time is None else read_step_time(args.step_time)
    policies = {name: policy_maker(name) for name in args.scheduling_policy}
    if args.json:  # fail now, not after an hour
        Path(args.json).open("ab").close()
    trace = _trace(args)
    if args.right is not None and args.speculate is None:
        args.parser.error("--right goes with --speculate")
    guesses = None
    if args.speculate is not None:
        guesses = Guesses(args.speculate, 0.8 if args.right is None else args.right, seed=args.seed)
    window = WINDOW if args.window is None else args.window
    setups = [
        record_of(Setup, args, **dict(zip(GRID, values, strict=True)), window=window, guesses=guesses)
        for values in product(*(getattr(args, name) for name in GRID))
    ]
    for setup in setups:
        setup.limits(trace)
        policy_named(setup.router or DEFAULT, "--router")
    span = 0.0 if args.order else float(trace.arrival[-1]) / 1e12
    when = f"at once, order {args.order}" if args.order else f"in {short_duration(span)}"
    print(
        f"{trace.name}: {len(trace):,} requests {when}, {int(trace.prompt.sum()):,} tokens of prompts, "
        f"{int(trace.output.sum()):,} of answers\n"
    )
    columns = _COLUMNS if setups[0].replicas else _COLUMNS[2:]
    print(_line([head for head, _ in columns], columns))
    runs = []
    for setup in setups:
        router = router_of(setup, trace, args.seed) if setup.replicas else None
        runs.append(simulate(trace, setup, time, policies[setup.scheduling_policy], router=router))
        print(_line(_cells(runs[-1])[-len(columns) :], columns), flush=True)
    print()
    for text in _notes(runs):
        print(text)
    if args.json:
        data = {
            "hibachi": version(),
            "trace": {"name": trace.name, "requests": len(trace), "seconds": span},
            "step_time": asdict(time),
            "runs": [one.summary() for one in runs],
        }
        Path(args.json).write_text(json.dumps(data, indent=1) + "\n")
    return runs


def _trace(args: argparse.Namespace) -> Trace:
    """The trace that the arguments name, changed as they say."""
    if args.window is not None and args.order != "composed":
        args.parser.error("--window goes with --order composed")
    if (args.trace is None) == (args.synthetic is None):
        args.parser.error("give a TRACE or --synthetic N")
    for name, least in (
        ("requests", 1),
        ("repeat", 1),
        ("copies", 1),
        ("tenants", 1),
        ("priorities", 1),
        ("synthetic", 1),
    ):
        value = getattr(args, name)
        if value is not None and value < least:
            args.parser.error(f"--{name} must be at least {least}; got {value}")
    if not 0 < args.speed < float("inf"):
        args.parser.error(f"--speed must be above 0; got {args.speed}")
    if args.synthetic is not None:
        many = {"tenants": args.tenants or 4, "priorities": args.priorities or 1, "seed": args.seed}
        trace = synthetic(args.synthetic, rate=args.rate, bursts=args.bursts, shared=args.shared, **many)
    else:
        trace = read_trace(args.trace)
    if args.requests is not None:
        trace = trace.head(args.requests)
    if args.repeat > 1:
        trace = trace.repeated(args.repeat)
    if args.synthetic is None and (args.tenants or args.priorities):
        trace = trace.shared_by(args.tenants or 1, args.priorities or 1, args.seed)
    trace = trace.faster(args.speed)
    return trace.copies(args.copies, args.seed) if args.copies > 1 else trace


def policy_maker(text: str) -> Callable[[], Policy]:
    """A function that makes policies of this name; options after a colon: priority:age=30. Raises ConfigError."""
    name, _, rest = text.partition(":")
    if not rest:
        policy_of(name)
        return lambda: policy_of(name)
    if name not in SHIPPED:
        raise ConfigError(f"Only {', '.join(SHIPPED)} take options; got {text!r}.")
    options: dict[str, Any] = {}
    try:
        for option in rest.split(","):
            key, _, value = option.partition("=")
            options[key] = float(value)
        SHIPPED[name](**options)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"Options of a policy are name:option=number,...; got {text!r} ({e}).") from e
    return lambda: SHIPPED[name](**options)


def labels(runs: Sequence[Run]) -> list[str]:
    """The options that differ between runs, for each run."""
    parts = [[one.setup.scheduling_policy for one in runs]]
    routers = [one.setup.router or "" for one in runs]
    parts += [routers] if len(set(routers)) > 1 else []
    for name, field in (("replicas", "replicas"), ("rows", "max_num_seqs"), ("blocks", "num_blocks")):
        values = [getattr(one.setup, field) for one in runs]
        if len(set(values)) > 1:
            parts.append([f"{'enough' if v is None else f'{v:,}'} {name}" for v in values])
    return [", ".join(words) for words in zip(*parts, strict=True)]


def _line(cells: list[str], columns: Sequence[tuple[str, int]]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, columns, strict=True))


def _cells(one: Run) -> list[str]:
    """A line of the table."""
    data, setup = one.summary(), one.setup
    shares = one.trace.keys is not None and setup.enable_prefix_caching
    return [
        f"{setup.replicas or 1:,}",
        setup.router or DEFAULT,
        setup.scheduling_policy,
        str(setup.max_num_seqs),
        "enough" if setup.num_blocks is None else str(setup.num_blocks),
        f"{data['served']:,}",
        f"{sum(data['refused'].values()):,}",
        short_duration(data["ttft"]["p50"]),
        short_duration(data["ttft"]["p99"]),
        short_duration(data["itl"]["p50"]),
        short_duration(data["itl"]["p99"]),
        f"{data['mean_waiting']:,.1f}",
        f"{data['mean_rows'] / setup.max_num_seqs / (setup.replicas or 1):.0%}",
        f"{data['new_tokens_per_second']:,.0f}",
        f"{data['hit_rate']:.1%}" if shares else "-",
        f"{data['preemptions']:,}",
        short_duration(data["virtual_seconds"]),
        short_duration(data["wall_seconds"]),
        f"{data['requests_per_wall_second']:,.0f}",
    ]


def _notes(runs: Sequence[Run]) -> list[str]:
    """Lines below the table: by tenant and class, proposed tokens, hits by tier, and refused requests."""
    out = []
    for one, label in zip(runs, labels(runs), strict=True):
        data = one.summary()
        for kind in ("tenants", "priorities"):
            groups = data.get(kind, {})
            if 1 < len(groups) <= 8:
                each = ", ".join(f"{name} {short_duration(spread['p99'])}" for name, spread in groups.items())
                out.append(f"{label}: TTFT p99 by {'tenant' if kind == 'tenants' else 'priority'}: {each}")
        if proposed := data["proposed_tokens"]:
            out.append(f"{label}: {proposed:,} tokens proposed, {data['accepted_tokens'] / proposed:.0%} of them kept")
        if one.setup.kv_host_blocks:
            host, disk = data["host_hit_tokens"], data["disk_hit_tokens"]
            out.append(
                f"{label}: hits of {data['hit_tokens'] - host - disk:,} tokens on the device, {host:,} in host memory, "
                f"{disk:,} on disk; {data['loads']:,} blocks loaded, {data['disk_loads']:,} read from disk"
            )
        out += [f"{label}: {n:,} refused: {cause}" for cause, n in data["refused"].items()]
    return out
