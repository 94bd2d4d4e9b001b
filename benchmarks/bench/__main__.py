"""Measures and compares: engines side by side, where a step's time goes, how its cost grows; draws what came out.

    python -m benchmarks.bench --help     in a checkout

The same work goes through hibachi and any engine named with --peer, each in a process of its own. Works: W1, 64
requests at once; W2, 64 that share 512 tokens (prefix cache cold, warm, off); W3, 64 that arrive one by one; W4, a
single stream; W5, 16 long prompts. `model` makes a model to measure with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import growth, report, work
from benchmarks.bench.figures import read_results
from benchmarks.bench.plot import check_format, plot_growth, plot_load, plot_profile, plot_replays, plot_results
from benchmarks.bench.process import OURS, EngineSetup, engines
from benchmarks.bench.profile import from_json, table
from benchmarks.bench.randommodel import SHAPES, write_model
from benchmarks.bench.session import Session, bounds, ceilings, decoder_of, document
from hibachi.backend.discover import best_backend, load_backend
from hibachi.backend.kernels.threads import processors
from hibachi.backend.library import check_numerics
from hibachi.cli import sim
from hibachi.cli.bench import vocabulary_of
from hibachi.cli.main import CommandParser, add_command, run_words
from hibachi.cli.options import MODEL, SETTINGS, model_arguments, model_options
from hibachi.common.installed import version
from hibachi.common.phases import short_duration
from hibachi.common.settings.kinds import size
from hibachi.errors import ConfigError
from hibachi.llm.llm import LLM
from hibachi.llm.model.describe import describe
from hibachi.llm.model.files import locate
from hibachi.testing.bench.machine import machine
from hibachi.testing.bench.report import Slo


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status, as of `hibachi`."""
    return run_words(parser, sys.argv[1:] if argv is None else argv)


def parser() -> argparse.ArgumentParser:
    text, _, rest = (__doc__ or "").partition("\n")
    top = CommandParser(
        prog="python -m benchmarks.bench",
        description=text,
        epilog=rest.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.set_defaults(command="bench")
    what = top.add_subparsers(required=True, metavar="WHAT")
    for name, run, fill in (
        ("throughput", throughput, _throughput_arguments),
        ("latency", latency, _latency_arguments),
        ("compare", compare, _compare_arguments),
        ("growth", growing, _growth_arguments),
        ("model", model, _model_arguments),
        ("work", write_work, _work_arguments),
        ("sim", replay, _replay_arguments),
        ("picture", picture, _picture_arguments),
    ):
        add_command(what, name, run.__doc__, run, fill)
    return top


# ---- engines side by side ------------------------------------------------------------------------------------------


def throughput(args: argparse.Namespace) -> int:
    """tokens a second, times to and between tokens, memory, start-up

    Medians over the repeats. The engines take turns: each runs once before any
    runs again. Repeats while others used more than 3 % of the machine are marked.
    """
    return _measure(args, args.work or list(work.AT_ONCE), (), fitting_only=args.work is None)


def _throughput_arguments(parser: argparse.ArgumentParser) -> None:
    _session_arguments(parser)
    add = parser.add_argument
    works = f"any of {', '.join(work.AT_ONCE)} and FILE (of `benchmarks.bench work`), all at once"
    default = f"{' '.join(work.AT_ONCE)}, where they fit"
    add("--work", nargs="+", metavar="WORK", help=f"works to run: {works} (default: {default})")
    _profile_argument(parser)
    parser.set_defaults(rates=[])


def latency(args: argparse.Namespace) -> int:
    """requests that arrive at given rates: times to and between tokens, goodput

    Goodput: requests a second that kept what is promised (the SLO): a time to
    the first token, and one between tokens, on average over a request.
    """
    return _measure(args, args.work, args.rates)


def _latency_arguments(parser: argparse.ArgumentParser) -> None:
    _session_arguments(parser)
    _rates_arguments(parser)
    parser.add_argument(
        "--work", nargs="+", default=["W3"], metavar="WORK", help="work to run: W3 or FILE (default: W3)"
    )
    _profile_argument(parser)


def compare(args: argparse.Namespace) -> int:
    """tables of results with ratios to the best peer, from JSON or from new runs

    Without a file, W1 to W5 are run first, where they fit.
    """
    if args.results is not None:
        Path(args.results).open("ab").close()
    if not args.files:
        return _measure(args, list(work.NAMES), args.rates, fitting_only=True)
    if args.plot:
        check_format(args.plot)
    _show(read_results(args.files), args)
    return 0


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", metavar="JSON", help="results written by throughput, latency or compare --out"
    )
    parser.add_argument("--results", metavar="FILE", help="write the tables as a page, such as RESULTS.md")
    _session_arguments(parser)
    _rates_arguments(parser)
    _profile_argument(parser)


def _session_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser)
    add = parser.add_argument
    add("--max-num-seqs", type=int, default=64, metavar="N", help="most requests that run at once (default: 64)")
    add("--requests", type=int, default=64, metavar="N", help="requests of W1, W2 and W3 (default: 64)")
    add("--repeat", type=int, default=3, metavar="N", help="how often each work is measured (default: 3)")
    add("--threads", type=int, default=processors(), metavar="N", help="threads of each engine (default: all cores)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the works (default: 0)")
    text = "use prefix caches for works that are files (default: no)"
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=False, help=text)
    add(
        "--option",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="option of hibachi.LLM, as JSON",
    )
    peers = parser.add_argument_group(
        "peers",
        f"All compute in --dtype, float32 unless you say so. Engines: {', '.join(e for e in engines() if e != OURS)}.",
    )
    add = peers.add_argument
    add(
        "--peer",
        action="append",
        default=[],
        metavar="ENGINE[=PYTHON]",
        help="engine to compare with, and the interpreter that has it",
    )
    add("--peer-model", action="append", default=[], metavar="ENGINE=PATH", help="the model in this peer's own format")
    add(
        "--peer-option",
        nargs=3,
        action="append",
        default=[],
        metavar=("ENGINE", "NAME", "VALUE"),
        help="option of this peer, its value as JSON",
    )
    add("--no-hibachi", action="store_true", help="measure the peers only")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds to wait for an engine (default: 600)")
    add = parser.add_argument_group("output").add_argument
    add("--out", metavar="FILE", help="write all results as JSON")
    add("--plot", metavar="FILE", help="draw them, as .png or .svg")
    add("--no-bound", action="store_true", help="do not measure the machine's ceilings (about 4 seconds)")


def _rates_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--rates",
        nargs="+",
        type=float,
        default=[1.0, 2.0, 4.0],
        metavar="R",
        help="requests a second (default: 1 2 4)",
    )
    add("--slo-ttft", type=float, default=500.0, metavar="MS", help="longest time to the first token (default: 500)")
    add("--slo-itl", type=float, default=50.0, metavar="MS", help="longest mean time between tokens (default: 50)")


def _profile_argument(parser: argparse.ArgumentParser) -> None:
    text = "also show where the time of hibachi's steps goes; with FILE, draw it"
    parser.add_argument("--profile", nargs="?", const="", metavar="FILE", help=text)


def _measure(args: argparse.Namespace, works: list[str], rates: Any, *, fitting_only: bool = False) -> int:
    if min(args.max_num_seqs, args.requests, args.repeat, args.threads) < 1:
        args.parser.error("rows, requests, repeat and threads must be at least 1")
    if rates and min(rates) <= 0:
        args.parser.error("rates must be above 0")
    for picture in filter(None, (args.plot, args.profile)):
        check_format(picture)
    if args.out:
        Path(args.out).open("ab").close()
    path = locate(args.model)
    about = describe(path)
    if about.vocab_size is None:
        raise ConfigError(f"{args.model} does not say how large its vocabulary is, so no prompts can be made for it.")
    slo = Slo(args.slo_ttft / 1e3, args.slo_itl / 1e3) if rates else Slo()
    session = Session(
        engines=_setups(args, path),
        vocab_size=about.vocab_size,
        context=about.context,
        rows=args.max_num_seqs,
        repeat=args.repeat,
        seed=args.seed,
        requests=args.requests,
        rates=tuple(rates),
        slo=slo,
        cached=args.enable_prefix_caching,
        timeout=args.timeout,
        told=lambda line: print(line, flush=True),
    )
    if fitting_only:
        works = [name for name in works if session.fits(session.make(name, 1))]
    more: dict[str, Any] = {}
    decoder = None if args.no_bound or args.no_hibachi else decoder_of(path)
    if decoder is not None and args.quantization == "auto":
        print("There is no bound with --quantization auto, which may keep the dtype or take int8.", flush=True)
    elif decoder is not None:
        quantization = None if args.quantization == "none" else args.quantization
        limits = ceilings(args.backend or best_backend(), args.dtype or "float32", decoder, quantization)
        more = {"ceilings": limits, "bounds": bounds(session, works, decoder, limits)}
        print(_ceilings(limits), flush=True)
    runs: list[dict[str, Any]] = []
    try:
        runs.extend(session.run(works))
    finally:  # the results so far, if the user presses Ctrl-C
        profiles = {r["work"]: r.pop("profile") for r in runs if "profile" in r}  # of the last turn
        made = document(runs, **more, **({"profiles": profiles} if profiles else {}))
        kept = not args.out or not runs or _keep(args.out, json.dumps(made, indent=1) + "\n")
    print()
    _show([made], args)
    return int(not kept or all("failed" in r for r in runs))


def _keep(file: str, text: str) -> bool:
    """Write what took an hour to measure; if the disk is full, at least print it."""
    try:
        Path(file).write_text(text)
    except OSError as e:
        print(f"hibachi: the results are not in {file}: {e}", file=sys.stderr)
        return False
    return True


def _show(documents: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(report.text(documents))
    if args.plot:
        plot_results(documents, args.plot)
    if getattr(args, "results", None):
        Path(args.results).write_text(report.page(documents))
    profiles = {title: from_json(steps) for d in documents for title, steps in d.get("profiles", {}).items()}
    for title, steps in profiles.items():
        print(f"\n{title}: a step of hibachi\n\n{table(steps)}")
        if args.profile:
            file = Path(args.profile)
            name = f"{file.stem}-{title.replace(' ', '-')}" if len(profiles) > 1 else file.stem
            plot_profile(steps, f"{title}: a step of hibachi", file.with_name(name + file.suffix))


def _ceilings(limits: dict[str, Any]) -> str:
    rates = ", ".join(f"{rate / 1e9:,.0f} at {n} rows" for n, rate in limits["products"].items())
    mark = " (contended: the bounds are too low)" if limits["contended"] else ""
    return f"memory {limits['bandwidth'] / 1e9:.1f} GB/s; product of {limits['dtype']}, GFLOP/s: {rates}{mark}"


def _setups(args: argparse.Namespace, path: Path) -> list[EngineSetup]:
    """How each engine is set up. Raises ConfigError."""
    common: dict[str, Any] = {
        "dtype": args.dtype or "float32",
        "rows": 1,
        "max_model_len": 2,
        "threads": args.threads,
        "title": path.name,
    }
    names = [name.partition("=")[0] for name in args.peer]
    models = dict(_two(each, "--peer-model") for each in args.peer_model)
    for name in (*models, *(name for name, _, _ in args.peer_option)):
        if name not in names:
            raise ConfigError(f"There is no --peer {name}, but something is said about it.")
    out = []
    if not args.no_hibachi:
        if args.numerics is not None:
            check_numerics(args.numerics, load_backend(args.backend or best_backend(), device=args.device))
        options = {name: _value(value) for name, value in args.option}
        given = {key: getattr(args, key) for key in MODEL if key not in ("backend", "dtype", "max_model_len")}
        options |= {key: value for key, value in given.items() if value != SETTINGS[key].default}
        options |= {} if args.profile is None else {"profile": True}
        out.append(EngineSetup(OURS, str(path), backend=args.backend or best_backend(), options=options, **common))
    for each, name in zip(args.peer, names, strict=True):
        if name not in engines() or name == OURS:
            raise ConfigError(f"A peer must be one of {', '.join(e for e in engines() if e != OURS)}; got {name!r}.")
        options = {key: _value(value) for engine, key, value in args.peer_option if engine == name}
        python, own = each.partition("=")[2] or None, common | {"dtype": options.pop("dtype", common["dtype"])}
        out.append(EngineSetup(name, models.get(name, str(path)), python=python, options=options, **own))
    if not out:
        raise ConfigError("There is no engine to measure: --no-hibachi needs a --peer.")
    return out


def _two(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise ConfigError(f"{option} must be ENGINE=VALUE; got {text!r}.")
    return name, value


def _value(text: str) -> Any:
    """JSON, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# ---- one engine ----------------------------------------------------------------------------------------------------


def growing(args: argparse.Namespace) -> int:
    """the cost of decoding over rows and context, and where it jumps

    A cliff: more rows give over 20 % less tokens a second, or a longer context
    costs over 20 % more than the contexts before it say. By default one or two
    minutes with 135M parameters on two cores. --full: up to 256 rows, contexts
    up to 4,096 and three rounds, some four times as long.
    """
    args.rows = args.rows or list(growth.FULL_ROWS if args.full else growth.ROWS)
    args.contexts = args.contexts or list(growth.FULL_CONTEXTS if args.full else growth.CONTEXTS)
    args.rounds = (growth.FULL_ROUNDS if args.full else 1) if args.rounds is None else args.rounds
    if min([*args.rows, *args.contexts, args.rounds]) < 1:
        args.parser.error("rows, contexts and rounds must be at least 1")
    if args.plot:
        check_format(args.plot)
    if args.out:
        Path(args.out).open("ab").close()
    longest = describe(locate(args.model)).context
    limit = args.max_model_len or min(max(args.contexts) + 16, longest or max(args.contexts) + 16)
    options = model_options(args)
    options["max_model_len"], options["max_num_seqs"] = limit, max(args.rows)
    options["kv_cache_memory_bytes"] = args.kv_cache_memory_bytes
    with LLM(args.model, **options) as llm:
        backend = llm.backend.versions()
        print(f"{args.model} in {llm.model.dtype} on {llm.backend.fingerprint()}")
        print("\n   rows  context     a step   tokens/s")
        points = growth.measure(
            llm.engine, vocabulary_of(llm), rows=args.rows, contexts=args.contexts, rounds=args.rounds, told=_point
        )
    if not points:
        raise ConfigError(f"Nothing to measure: {limit} tokens have no room for a context of {min(args.contexts)}.")
    found = growth.cliffs(points)
    print("\n" + ("\n".join(["cliffs:", *(f"  {cliff}" for cliff in found)]) if found else "no cliffs"))
    if args.out:
        about = {"hibachi": version(), "model": Path(args.model).name, "backend": backend}
        data = about | {"machine": machine(), "points": growth.as_json(points), "cliffs": [str(c) for c in found]}
        Path(args.out).write_text(json.dumps(data, indent=1) + "\n")
    if args.plot:
        plot_growth(points, found, f"{Path(args.model).name} on {backend['library']}", args.plot)
    return 0


def _point(p: growth.Point) -> None:
    print(f"{p.rows:>7}  {p.context:>7}  {short_duration(p.seconds):>9}  {p.tokens_per_second:>9,.0f}", flush=True)


def _growth_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser)
    add = parser.add_argument
    add("--full", action="store_true", help="use larger defaults for --rows, --contexts and --rounds; slow")
    add("--rows", nargs="+", type=int, metavar="N", help="numbers of rows (default: 1 to 128)")
    add("--contexts", nargs="+", type=int, metavar="N", help="context lengths in tokens (default: 128 to 2048)")
    add("--rounds", type=int, metavar="N", help="repeats of which the best counts (default: 1)")
    add("--kv-cache-memory-bytes", type=size().read, default="4G", metavar="BYTES", help="largest cache (default: 4G)")
    add("--out", metavar="FILE", help="write all points as JSON")
    add("--plot", metavar="FILE", help="draw them, as .png or .svg")


# ---- what is measured with -----------------------------------------------------------------------------------------


def model(args: argparse.Namespace) -> int:
    """make a model with random weights in the shape of a real one"""
    count = write_model(args.shape, args.folder, seed=args.seed)
    print(f"{args.folder}: {count:,} parameters in bfloat16")
    return 0


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", metavar="OUT", help="folder for the model, which holds none yet")
    shapes = "135m: SmolLM2-135M; 1b: Llama 3.2 1B; 8b: Llama 3 8B (default: 135m)"
    add("--shape", choices=list(SHAPES), default="135m", help=shapes)
    add("--seed", type=int, default=0, metavar="N")


def write_work(args: argparse.Namespace) -> int:
    """write a work to a file, to change it, or as an example of the format

    A line for each request: {"id": 0, "arrival": 0.0, "prompt": [17, 5, 23],
    "max_tokens": 16}; arrival in means of the time between two requests.
    """
    requests = work.make(args.name, args.vocab_size, seed=args.seed, requests=args.requests)
    work.write(requests, args.file)
    prompt, new = work.totals(requests)
    print(f"{args.file}: {len(requests)} requests, {prompt:,} tokens in, {new:,} out")
    return 0


def _work_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", choices=work.NAMES, metavar="NAME", help=f"work to write: {', '.join(work.NAMES)}")
    add("file", metavar="FILE")
    add("--vocab-size", type=int, required=True, metavar="N", help="vocabulary size of the model")
    add("--requests", type=int, default=64, metavar="N", help="requests of the work (default: 64)")
    add("--seed", type=int, default=0, metavar="N")


# ---- pictures ------------------------------------------------------------------------------------------------------


def replay(args: argparse.Namespace) -> int:
    """`hibachi sim`, with a picture

    Takes the options of `hibachi sim`.
    """
    file, args.plot = args.plot, None
    if file:
        check_format(file)
        Path(file).open("ab").close()
    runs = sim.replays(args)
    if file:
        plot_replays(runs, sim.labels(runs), file)
    return 0


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    sim.arguments(parser)


def picture(args: argparse.Namespace) -> int:
    """draw what `hibachi bench serve --out FILE` measured"""
    check_format(args.file)
    plot_load(json.loads(Path(args.json).read_text()), args.file)
    return 0


def _picture_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("json", metavar="JSON", help="what `hibachi bench serve --out JSON` wrote")
    parser.add_argument("file", metavar="FILE", help="picture to write, .png or .svg")


if __name__ == "__main__":
    sys.exit(main())
