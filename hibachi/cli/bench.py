"""measure: `bench fit` finds how long a model's steps take, for `hibachi sim`

Runs prompts of several lengths, alone and together, and fits
seconds = step + token*T + row*B + position*P + pair*A to the steps:
tokens computed, rows, positions read, pairs of a token and a position.
The loads are fixed, so that nothing but the machine changes a figure.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

from hibachi.bench.fit import NEW_TOKENS, fit, machine, measure
from hibachi.cli.options import model_arguments
from hibachi.engine.autoregressive import AutoregressiveBatchInference, level_of
from hibachi.engine.llm import LLM
from hibachi.engine.named import is_named, model_named
from hibachi.errors import ConfigError
from hibachi.sim.plot import seconds

_WORDS = {
    "step": "of each step",
    "token": "for each token computed",
    "row": "for each row",
    "position": "for each position read",
    "pair": "for each pair of a token and a position",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["fit"], help="fit: the time of a step")
    model_arguments(parser)
    add = parser.add_argument
    add("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32], metavar="N", help="requests at once")
    add("--contexts", nargs="+", type=int, default=[16, 64, 128, 256, 448], metavar="N", help="tokens of a prompt")
    add("--budget", type=int, default=2048, metavar="N", help="tokens of a step (default: 2048)")
    add("--rounds", type=int, default=2, metavar="N", help="how often everything is measured (default: 2)")
    add("--out", metavar="FILE", help="write the step time as JSON")


def run(args: argparse.Namespace) -> int:
    if min([*args.rows, *args.contexts, args.budget, args.rounds]) < 1:
        args.parser.error("rows, contexts, budget and rounds must be at least 1")
    if args.out:
        Path(args.out).open("ab").close()
    load = {"rows": args.rows, "contexts": args.contexts, "rounds": args.rounds}
    sizes = {"max_batch_size": max(args.rows) + 1, "max_batch_tokens": args.budget}
    if is_named(args.model):
        model = model_named(args.model, args.backend)
        if level_of(model) == 0:
            raise ConfigError(f"A step is measured with prompts of random token ids; {args.model} takes other tokens.")
        limit = args.max_model_len or getattr(model, "max_model_len", max(args.contexts) + NEW_TOKENS)
        with AutoregressiveBatchInference(model, backend=args.backend, max_model_len=limit, **sizes) as engine:
            samples = measure(engine, model.vocab_size, **load)
        backend = {"library": args.backend or "its own", "device": "default"}
    else:
        options = {"backend": args.backend, "device": args.device, "dtype": args.dtype}
        with LLM(args.model, max_model_len=args.max_model_len, **options, **sizes) as llm:
            samples = measure(llm.engine, llm.model.vocab_size, **load)
            backend = llm.backend.versions()
    found = fit(samples)
    time = found.time
    print(f"{args.model} on {backend['library']} ({backend['device']}), {found.steps} steps\n")
    for name, what in _WORDS.items():
        print(f"  {name:8}  {seconds(getattr(time, name)):>9}  {what}")
    print(f"\nrelative error: median {found.median_error:.1%}, 90 % of the steps below {found.p90_error:.1%}")
    if args.out:
        about = {"hibachi": version("hibachi"), "model": args.model, "backend": backend, "machine": machine()}
        about |= load | {"budget": args.budget}
        Path(args.out).write_text(json.dumps(found.as_json(**about), indent=1) + "\n")
    return 0
