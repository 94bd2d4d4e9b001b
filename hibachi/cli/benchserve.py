"""`hibachi bench serve`: load on a server."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from hibachi.backend.kernels.threads import processors
from hibachi.common.installed import need, version
from hibachi.engine.simulator.trace import read_trace
from hibachi.errors import ConfigError
from hibachi.testing.bench import report, traffic, work
from hibachi.testing.bench.machine import machine
from hibachi.testing.bench.report import Slo
from hibachi.testing.bench.samples import Loaded, Sample
from hibachi.testing.bench.traffic import Ask, RequestForm

KEY = "HIBACHI_API_KEY"
_LONGEST_RANDOM = 100  # requests, where nothing says how many


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the server").add_argument
    add("--url", required=True, metavar="URL", help="server to load, such as http://127.0.0.1:8000")
    add("--model", metavar="NAME", help="model to ask for (default: the first that the server names)")
    add("--api-key", metavar="KEY", help=f"key to send (default: the variable {KEY}, which no list of processes shows)")
    add(
        "--endpoint",
        choices=list(traffic.PATHS),
        default=traffic.COMPLETIONS,
        help="route to load (default: completions)",
    )
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds for a request (default: 600)")
    when = parser.add_argument_group("when requests are sent (default: all at once)").add_argument
    when(
        "--rate", type=float, metavar="R", help="requests a second on average; times count from when a request was due"
    )
    when("--arrivals", choices=traffic.ARRIVALS, help="arrivals with --rate: poisson or constant (default: poisson)")
    when("--concurrency", type=int, metavar="N", help="most requests at a time")
    when("--requests", type=int, metavar="N", help="requests to send (default: all of a file, else 100)")
    when(
        "--duration", type=float, metavar="S", help="send none after S seconds; without --requests as many as possible"
    )
    when("--warmup", type=int, default=1, metavar="N", help="uncounted requests before, one by one (default: 1)")
    group = parser.add_argument_group("what they ask (default: random tokens)")
    source = group.add_mutually_exclusive_group().add_argument
    source(
        "--work", metavar="FILE", help="requests as JSON lines (docs/benchmarks.md); their arrivals count with --rate"
    )
    source("--trace", metavar="FILE", help="lengths and times of a trace, as `hibachi sim` reads it (Azure, Mooncake)")
    what = group.add_argument
    what("--speed", type=float, default=1.0, metavar="X", help="send a trace's requests X times as fast (default: 1)")
    what("--input-len", type=int, metavar="N", help="tokens of a prompt (default: 128); of a trace: cut to N")
    what("--output-len", type=int, metavar="N", help="tokens to generate (default: 64); of a trace: at most N")
    what(
        "--range-ratio", type=float, default=0.0, metavar="R", help="spread of random lengths, as a share (default: 0)"
    )
    what(
        "--prefix-len", type=int, default=0, metavar="N", help="tokens that all random prompts begin with (default: 0)"
    )
    what("--vocab-size", type=int, default=1000, metavar="N", help="bound of random token ids (default: 1000)")
    what("--words", action="store_true", help="send prompts as words, one for each token (always so for chat)")
    what("--seed", type=int, default=0, metavar="N", help="seed of everything random (default: 0)")
    what("--no-stream", action="store_true", help="ask for whole answers; only their total time is measured")
    what("--no-ignore-eos", action="store_true", help="leave out ignore_eos, for servers that do not know it")
    what(
        "--body",
        type=_fields,
        default={},
        metavar="JSON",
        help="further fields of each request, such as '{\"temperature\": 0.7}'",
    )
    add = parser.add_argument_group("output").add_argument
    add("--slo-ttft", type=float, default=500.0, metavar="MS", help="promised time to the first token (default: 500)")
    add("--slo-itl", type=float, default=50.0, metavar="MS", help="promised mean time between tokens (default: 50)")
    add("--out", metavar="FILE", help="write all figures, and all times of each request, as JSON")
    add("--plot", metavar="FILE", help=argparse.SUPPRESS)  # where it went is said


def serve(args: argparse.Namespace) -> int:
    """load on a server with OpenAI's API: throughput, times to and between tokens

    Sends streaming requests to any such URL and measures what users would see.
    429 counts as rejected. Ctrl-C reports what there is.

    hibachi bench serve --url http://127.0.0.1:8000 --rate 5 --requests 200
    hibachi bench serve --url ... --concurrency 64 --duration 60
    hibachi bench serve --url ... --trace azure.csv --speed 2 --requests 500
    """
    error = args.parser.error
    for name in ("rate", "speed", "timeout", "duration", "concurrency", "requests", "input_len", "output_len"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            error(f"--{name.replace('_', '-')} must be above 0; got {value}")
    if args.warmup < 0 or args.prefix_len < 0:
        error("--warmup and --prefix-len must not be below 0")
    if args.rate is None and args.arrivals is not None:
        error("--arrivals needs --rate")
    if args.trace and args.rate is not None:
        error("a trace has its own times: change them by --speed")
    if args.plot:
        raise ConfigError(
            "Pictures are drawn in a checkout of hibachi: write --out JSON here, then run "
            "`python -m benchmarks.bench picture JSON FILE` there."
        )
    if args.out:
        Path(args.out).open("ab").close()
    asks = _asks(args)
    need("aiohttp", "hibachi bench serve", "serve")
    from hibachi.testing.bench.generator import run

    loaded, model = run(_drive(args, asks))
    slo = Slo(args.slo_ttft / 1e3, args.slo_itl / 1e3) if not args.no_stream else None
    found = report.figures(loaded, slo)
    print(report.text(found))
    warned = report.warnings(found, processors())
    for line in warned:
        print(f"\n! {line}", flush=True)
    if args.out:
        _write(args, loaded, found, warned, model)
    if loaded.interrupted:
        raise KeyboardInterrupt
    return int(not found["ok"])


def _asks(args: argparse.Namespace) -> Iterator[Ask]:
    due = traffic.arrivals(args.arrivals or "poisson", args.rate, args.seed)
    most = args.requests
    if args.trace:
        trace = read_trace(args.trace)
        trace = (trace if most is None else trace.head(most)).faster(args.speed)
        lengths = {"longest": args.input_len, "new": args.output_len}
        return traffic.of_trace(trace, vocab_size=args.vocab_size, seed=args.seed, **lengths)
    if args.work:
        requests = work.read(args.work)
        if args.output_len or args.input_len:
            args.parser.error("a work has lengths of its own")
        most = len(requests) if most is None and args.duration is None else most
        return islice(traffic.of_work(requests, due, args.rate), most)
    made = traffic.Random(
        args.input_len or max(128, args.prefix_len),
        args.output_len or 64,
        spread=args.range_ratio,
        prefix=args.prefix_len,
        vocab_size=args.vocab_size,
        seed=args.seed,
    )
    if most is None and args.duration is None:
        most = _LONGEST_RANDOM
    elif most is None and args.rate is None and args.concurrency is None:
        args.parser.error("--duration needs --rate, --concurrency or --requests: else there is no end to them")
    return islice(made.asks(due), most)


async def _drive(args: argparse.Namespace, asks: Iterator[Ask]) -> tuple[Loaded, str | None]:
    from hibachi.server.web.client import Client, Url
    from hibachi.testing.bench.generator import Generator, check, model_of

    key = args.api_key or os.environ.get(KEY)
    client = Client(Url.of(args.url), {"Authorization": f"Bearer {key}"} if key else {}, agent="hibachi-bench")
    try:
        model = args.model or await model_of(client)
        form = RequestForm(
            args.endpoint,
            model,
            words=args.words,
            stream=not args.no_stream,
            ignore_eos=not args.no_ignore_eos,
            more=args.body,
        )
        told = _progress if sys.stderr.isatty() else None
        generator = Generator(client, form, concurrency=args.concurrency, timeout=args.timeout, told=told)
        warm = traffic.Random(min(args.input_len or 16, 16), 4, vocab_size=args.vocab_size, seed=args.seed + 1)
        for ask in islice(warm.asks(traffic.arrivals("constant", None, 0)), args.warmup):
            check(await generator.one(ask), client.url, model)
        return await generator.run(asks, duration=args.duration), model
    finally:
        await client.close()


def _progress(samples: list[Sample], running: int, at: float) -> None:
    tokens = sum(s.tokens for s in samples)
    print(f"{at:5.0f} s: {len(samples):,} done, {running:,} running, {tokens:,} tokens", file=sys.stderr, flush=True)


def _write(
    args: argparse.Namespace, loaded: Loaded, found: dict[str, Any], warned: list[str], model: str | None
) -> None:
    hidden = ("api_key", "parser", "do", "run", "rest", "plot")
    document = {
        "hibachi": version(),
        "machine": machine(),
        "model": model,
        "options": {name: value for name, value in vars(args).items() if name not in hidden},
        "figures": found,
        "warnings": warned,
        "requests": [s.as_json() for s in loaded.samples],
    }
    Path(args.out).write_text(json.dumps(document) + "\n")


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"expected a JSON object; got {text!r} ({e})") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object; got {text!r}")
    return found
