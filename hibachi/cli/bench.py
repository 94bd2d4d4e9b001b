"""measure: load on a server, and how long a model's steps take

What compares engines and draws pictures is in a checkout of hibachi:
`python -m benchmarks.bench --help`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hibachi.cli import benchserve
from hibachi.cli.main import add_command
from hibachi.cli.options import model_arguments, model_options
from hibachi.common.installed import version
from hibachi.common.named import is_named
from hibachi.common.phases import phase, short_duration
from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.kinds import kind_of
from hibachi.engine.ladder import ModelKind
from hibachi.errors import ConfigError
from hibachi.llm.llm import LLM
from hibachi.llm.users_model import model_named
from hibachi.testing.bench import fit as fitting
from hibachi.testing.bench.machine import machine

IN_A_CHECKOUT = ("throughput", "latency", "compare", "growth", "model", "work")
_WORDS = {
    "step": "of each step",
    "token": "for each token computed",
    "row": "for each row",
    "position": "for each position read",
    "pair": "for each pair of a token and a position",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(required=True, metavar="WHAT")
    add_command(what, "serve", benchserve.serve.__doc__, benchserve.serve, benchserve.arguments)
    add_command(what, "fit", fit.__doc__, fit, _fit_arguments)
    for name in IN_A_CHECKOUT:  # every word is one of theirs: none is an option here
        sub = what.add_parser(name, add_help=False, prefix_chars="\0")
        sub.add_argument("words", nargs="*")
        sub.set_defaults(run=_in_a_checkout, parser=sub, name=name)


def _in_a_checkout(args: argparse.Namespace) -> int:
    raise ConfigError(
        f"`hibachi bench {args.name}` is not part of the package. In a checkout of hibachi it is "
        f"`python -m benchmarks.bench {args.name}`."
    )


def fit(args: argparse.Namespace) -> int:
    """how long a model's steps take, for `hibachi sim`

    Runs prompts of several lengths, alone and together, and fits
    seconds = step + token*T + row*B + position*P + pair*A to the steps:
    tokens computed, rows, positions read, pairs of a token and a position.
    The loads are fixed, so that nothing but the machine changes a figure.
    """
    if min([*args.rows, *args.contexts, args.max_num_batched_tokens, args.rounds]) < 1:
        args.parser.error("rows, contexts, budget and rounds must be at least 1")
    if args.out:
        Path(args.out).open("ab").close()
    load = {"rows": args.rows, "contexts": args.contexts, "rounds": args.rounds}
    sizes = {"max_num_seqs": max(args.rows) + 1, "max_num_batched_tokens": args.max_num_batched_tokens}
    if is_named(args.model):
        model = model_named(args.model, args.backend)
        if kind_of(model) is ModelKind.FORWARD:
            raise ConfigError(f"A step is measured with prompts of random token ids; {args.model} takes other tokens.")
        limit = args.max_model_len or getattr(model, "max_model_len", max(args.contexts) + fitting.NEW_TOKENS)
        with AutoregressiveBatchInference(model, backend=args.backend, max_model_len=limit, **sizes) as engine:
            samples = fitting.measure(engine, model.vocab_size, **load)
        backend = {"library": args.backend or "its own", "device": "default"}
    else:
        with phase(f"opening {args.model}"):
            llm = LLM(args.model, **model_options(args), **sizes)
        with llm:
            samples = fitting.measure(llm.engine, vocabulary_of(llm), **load)
            backend = llm.backend.versions()
    found = fitting.fit(samples)
    time = found.time
    print(f"{args.model} on {backend['library']} ({backend['device']}), {found.steps} steps\n")
    for name, what in _WORDS.items():
        print(f"  {name:8}  {short_duration(getattr(time, name)):>9}  {what}")
    print(f"\nrelative error: median {found.median_error:.1%}, 90 % of the steps below {found.p90_error:.1%}")
    if args.out:
        about = {"hibachi": version(), "model": args.model, "backend": backend, "machine": machine()}
        about |= load | {"max_num_batched_tokens": args.max_num_batched_tokens}
        Path(args.out).write_text(json.dumps(found.as_json(**about), indent=1) + "\n")
    return 0


def _fit_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser)
    add = parser.add_argument
    add(
        "--rows",
        nargs="+",
        type=int,
        default=[1, 2, 4, 8, 16, 32],
        metavar="N",
        help="requests at once (default: 1 to 32)",
    )
    add(
        "--contexts",
        nargs="+",
        type=int,
        default=[16, 64, 128, 256, 448],
        metavar="N",
        help="tokens of a prompt (default: 16 to 448)",
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        default=1024,
        metavar="N",
        help="most tokens computed in a step (default: 1024)",
    )
    add("--rounds", type=int, default=2, metavar="N", help="how often everything is measured (default: 2)")
    add("--out", metavar="FILE", help="write the step time as JSON")


def vocabulary_of(llm: LLM) -> int:
    if llm.model.vocab_size is None:
        raise ConfigError(f"{llm.path} does not say how large its vocabulary is, so no prompts can be made for it.")
    return llm.model.vocab_size
