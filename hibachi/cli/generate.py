"""complete a text with a model, streaming

The prompt comes from --prompt or from standard input, whose last line end does
not count; the completion goes to standard output as it comes.
"""

from __future__ import annotations

import argparse
import sys

from hibachi.engine.llm import LLM
from hibachi.errors import InvalidRequest
from hibachi.request import SamplingParams


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command that runs a language model takes."""
    add = parser.add_argument
    add(
        "--model",
        default="tiny",
        metavar="MODEL",
        help="a folder in Hugging Face layout, a .gguf file, or org/name on the Hub (default: tiny, which ships)",
    )
    add("--backend", metavar="NAME", help="numpy, torch, jax or another (default: numpy)")
    add("--device", metavar="NAME", help="in the backend's own notation, for example cuda:0")
    add("--dtype", metavar="NAME", help="to compute in (default: float32)")
    add("--max-model-len", type=int, metavar="N", help="most tokens of a request (default: the model's)")


def open_model(args: argparse.Namespace) -> LLM:
    return LLM(args.model, backend=args.backend, device=args.device, dtype=args.dtype, max_model_len=args.max_model_len)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model_arguments(parser)
    add("--prompt", metavar="TEXT", help="what to go on from (default: standard input)")
    add("--echo", action="store_true", help="write the prompt first")
    add("--max-tokens", type=int, default=128, metavar="N", help="limit of new tokens (default: 128)")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: 1)")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest tokens (default: all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="and from this share of the mass (default: 1)")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    add("--stop-token-id", action="append", default=[], type=int, metavar="ID", help="end before it; repeatable")
    add("--ignore-eos", action="store_true", help="go on at the model's end-of-text token")


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
    with open_model(args) as llm:
        prompt = _read() if args.prompt is None else args.prompt
        with llm.stream(prompt, params) as stream:
            if args.echo:
                print(prompt, end="", flush=True)
            for piece in stream:
                print(piece.text, end="", flush=True)
        print()
    return 0


def _read() -> str:
    if sys.stdin.isatty():
        print("Type the prompt, then Ctrl-D.", file=sys.stderr)
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as e:
        raise InvalidRequest(f"The prompt must be text; standard input is not {e.encoding}: {e.reason}.") from e
