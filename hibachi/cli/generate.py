"""complete a text with a model, streaming

The prompt comes from --prompt or from standard input, whose last line end does
not count; the completion goes to standard output as it comes. With a model of
your own (pkg:Class), or without a tokenizer, prompt and completion are token
ids: --prompt "3 1 4".
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hibachi.cli.options import model_arguments, open_model, sampling, sampling_arguments, told
from hibachi.common.named import is_named
from hibachi.common.phases import phase
from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.build import codebooks_of
from hibachi.engine.declared import own_params
from hibachi.engine.kinds import kind_of
from hibachi.engine.runners.extra_inputs import declared_by
from hibachi.engine.streams.stream import ItemStream
from hibachi.errors import ConfigError, InvalidRequest
from hibachi.llm.tokenizers.own import NoTokenizer
from hibachi.llm.users_model import model_named
from hibachi.request import SamplingParams


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model_arguments(parser)
    add("--prompt", metavar="TEXT", help="text to complete (default: standard input)")
    add("--echo", action="store_true", help="write the prompt first")
    sampling_arguments(parser, max_tokens=128)
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    add("--stop-token-id", action="append", default=[], type=int, metavar="ID", help="end before this id; repeatable")
    add("--ignore-eos", action="store_true", help="go on at the model's end-of-text token")


def run(args: argparse.Namespace) -> int:
    given = sampling(args) | {
        "stop": args.stop,
        "stop_token_ids": args.stop_token_id,
        "ignore_eos": args.ignore_eos,
    }
    SamplingParams(**given)  # wrong values are refused before a model is loaded
    if is_named(args.model):
        return _own(args, given)
    with open_model(args) as llm:
        prompt = _read() if args.prompt is None else args.prompt
        if isinstance(llm.tokenizer, NoTokenizer):
            ids = _ids(prompt)
            _tell(ids, llm.engine.run(ids, llm.default_params.with_(**given), include_stop=False), echo=args.echo)
            return 0
        with llm.stream(prompt, llm.default_params.with_(**given)) as stream:
            if args.echo:
                print(prompt, end="", flush=True)
            for piece in told(stream):
                print(piece.text, end="", flush=True)
        print()
    return 0


def _own(args: argparse.Namespace, given: dict[str, Any]) -> int:
    """A model of the user's own, which has no tokenizer. Level 0 returns tokens, so nothing is sampled there."""
    with phase(f"opening {args.model}"):
        model = model_named(args.model, args.backend)
    prompt = _ids(_read() if args.prompt is None else args.prompt)
    samples = kind_of(model).level > 0 and getattr(model, "vocab_size", None) is not None
    declared, params = declared_by(model), own_params(model).with_(**given)
    if declared.inputs or codebooks_of(model):
        raise ConfigError(
            f"{args.model} takes more than ids in a line: serve it (`hibachi serve --model {args.model}`) and send "
            f"arrays to /v1/generate, or call `run`."
        )
    limit = args.max_model_len
    if limit is None and not hasattr(model, "max_model_len"):
        limit = len(prompt) + args.max_tokens
    with AutoregressiveBatchInference(model, backend=args.backend, max_model_len=limit, max_num_seqs=1) as engine:
        own: dict[str, Any] = {"params": params, "include_stop": False} if samples else {"max_tokens": args.max_tokens}
        if declared.seeded and not samples:
            own["params"] = SamplingParams(seed=params.seed)
        stream = engine.run(prompt, **own)
        _tell(prompt, stream, echo=args.echo)
    return 0


def _ids(text: str) -> list[int]:
    """Raises InvalidRequest."""
    try:
        return [int(i) for i in text.replace(",", " ").split()]
    except ValueError:
        raise InvalidRequest(f"Without a tokenizer the prompt must be token ids; got {text!r:.80}.") from None


def _tell(prompt: list[int], stream: ItemStream[Any], *, echo: bool) -> None:
    if echo:
        print(*prompt, end=" ", flush=True)
    for token in told(stream):
        print(token, end=" ", flush=True)
    print()


def _read() -> str:
    if sys.stdin.isatty():
        print("Type the prompt, then Ctrl-D.", file=sys.stderr)
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as e:
        raise InvalidRequest(f"The prompt must be text; standard input is not {e.encoding}: {e.reason}.") from e
