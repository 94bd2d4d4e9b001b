"""complete a text with a model, streaming

The prompt comes from --prompt or from standard input; the completion goes to standard output as it comes.
"""

from __future__ import annotations

import argparse
import sys

from hibachi.engine.llm import LLM
from hibachi.request import SamplingParams


def arguments(parser: argparse.ArgumentParser) -> None:
    defaults = SamplingParams()
    parser.add_argument("--model", default="tiny", metavar="PATH", help='a folder in Hugging Face layout (default: "tiny")')
    parser.add_argument("--backend", metavar="NAME", help="numpy, torch, jax or another (default: numpy)")
    parser.add_argument("--device", help="in the backend's own notation, for example cuda:0")
    parser.add_argument("--dtype", help="to compute in (default: float32)")
    parser.add_argument("--prompt", help="the text to go on from (default: standard input)")
    parser.add_argument("--max-tokens", type=int, default=128, help="limit of new tokens (default: 128)")
    parser.add_argument("--temperature", type=float, default=defaults.temperature, help="0 is greedy (default: 1)")
    parser.add_argument("--top-k", type=int, default=defaults.top_k, help="keep the K likeliest tokens (default: all)")
    parser.add_argument("--top-p", type=float, default=defaults.top_p, help="keep this share of the mass (default: 1)")
    parser.add_argument("--seed", type=int, help="the same seed gives the same text")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--stop-token-id", action="append", default=[], type=int, metavar="ID", help="repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="go on at the model's end-of-text token")
    parser.add_argument("--echo", action="store_true", help="write the prompt first")


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=args.stop,
        stop_token_ids=args.stop_token_id,
        ignore_eos=args.ignore_eos,
    )
    with LLM(args.model, backend=args.backend, device=args.device, dtype=args.dtype) as llm:
        if args.prompt is None and sys.stdin.isatty():
            print("Type the prompt, then Ctrl-D.", file=sys.stderr)
        prompt = sys.stdin.read() if args.prompt is None else args.prompt
        with llm.stream(prompt, params) as stream:
            if args.echo:
                print(prompt, end="", flush=True)
            for piece in stream:
                print(piece.text, end="", flush=True)
        print()
    return 0
