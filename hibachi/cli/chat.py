"""talk with a model in the terminal

Type a message and Enter; the answer comes as it is generated. Ctrl-C stops an
answer or drops a line, Ctrl-D (or /quit) ends the conversation, /clear begins
a new one. Without a terminal, every line of standard input is a message.
Thoughts of a model that reasons are dimmed; if standard output is no terminal,
they go to standard error. With --tools FILE.py the model may call the functions
of that file, which run here; answers then come as a whole (docs/tools.md).
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hibachi.cli.chattools import MOST_TURNS, Functions, results
from hibachi.cli.options import MODEL, SETTINGS, model_arguments, open_model, sampling, sampling_arguments, told
from hibachi.cli.thoughts import ShownAnswer
from hibachi.errors import ConfigError, InvalidRequest, PromptTooLong, printable
from hibachi.llm.chatformat.format import Reasoned, Said
from hibachi.llm.chatformat.reading.reader import ALL_SAID
from hibachi.llm.chatformat.talk import Talk
from hibachi.llm.llm import LLM
from hibachi.llm.model.files import open_files
from hibachi.llm.model.recommended import chat_sampling
from hibachi.llm.remote.opening import check_template, template_of
from hibachi.llm.textstream import cut_off
from hibachi.request import Finish, SamplingParams

FETCHED = ".smollm2"
"""Where in a checkout `make chat` puts its model."""


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        metavar="MODEL",
        help=f"{SETTINGS['model'].help} (default: what `make chat` fetched)",
    )
    model_arguments(parser, MODEL)
    add("--system", metavar="TEXT", help="system message to begin with")
    add("--tools", metavar="FILE.py", help="let the model call the functions of a file")
    model_arguments(parser, ["chat_template"])
    sampling_arguments(parser, max_tokens=512, temperature="what is known to suit it, or 0.7, with --top-p 0.9")


def run(args: argparse.Namespace) -> int:
    args.model = args.model or str(fetched())
    functions = Functions(args.tools) if args.tools else None
    template = template_of(args.chat_template)
    with open_model(args) as llm:
        check_template(args.chat_template, template, llm.tokenizer)
        start = [{"role": "system", "content": args.system}] if args.system else []
        question = {"role": "user", "content": "?"}
        Talk(llm.tokenizer, template).prompt_text([*start, question], {})  # fails now if it cannot be done
        params = llm.default_params.with_(**(chat_sampling(open_files(llm.path)) | sampling(args)))
        terminal = sys.stdin.isatty()
        if terminal:
            with suppress(ImportError):
                import readline  # noqa: F401 -- gives input() its editing and history
            print("Ctrl-C stops an answer, Ctrl-D ends the conversation, /clear begins a new one.\n", file=sys.stderr)
        talk(llm, params, start, terminal, functions, template)
    return 0


def fetched() -> Path:
    """The model that `make chat` fetched, into the working directory or this file's checkout. Raises ConfigError."""
    for checkout in (Path(), Path(__file__).parents[2]):
        if (checkout / FETCHED / "fetched").is_file():
            return checkout / FETCHED
    raise ConfigError(
        "`hibachi chat` needs a model: run `make chat` in hibachi's checkout, which fetches one of 100 MB, or pass "
        "--model with a folder in Hugging Face layout, a .gguf file or org/name on the Hugging Face Hub."
    )


def talk(
    llm: LLM,
    params: SamplingParams,
    start: list[dict[str, Any]],
    terminal: bool,
    functions: Functions | None = None,
    template: str | None = None,
) -> None:
    """Answer what is typed, until its end. template: in place of the model's chat template."""
    messages = list(start)
    talking = Talk(llm.tokenizer, template) if functions is None else None
    while (line := _read(terminal)) is not None and line != "/quit":
        if line == "/clear":
            messages = list(start)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        before = len(messages)
        try:
            if talking is not None:
                messages.append(_answer(talking, llm, messages, params, terminal))
            elif functions is not None:
                _answer_with(functions, llm, messages, params, template)
        except (InvalidRequest, PromptTooLong) as e:
            if not terminal and not isinstance(e, PromptTooLong):
                raise
            long = "\nThe conversation has grown too long: /clear begins a new one."
            print(f"{printable(str(e))}{long if isinstance(e, PromptTooLong) else ''}", file=sys.stderr)
            del messages[before - 1 :]
            continue
        except KeyboardInterrupt:  # an answer of which something was said keeps that
            if not terminal:
                raise
            print(" (stopped: this message and what followed are forgotten)")
            del messages[before - 1 :]
        print(flush=True)


def _read(terminal: bool) -> str | None:
    """The next message, or None at the end of the input. At the prompt Ctrl-C drops the line, as in a shell."""
    try:
        return (input("> ") if terminal else input()).strip()
    except EOFError:
        if terminal:
            print()
        return None
    except KeyboardInterrupt:
        if not terminal:
            raise
        print()
        return ""


def _answer_with(
    functions: Functions, llm: LLM, messages: list[dict[str, Any]], params: SamplingParams, template: str | None
) -> None:
    """Answer, and run what the model calls, until it calls nothing. All of it becomes a part of the conversation."""
    variables: dict[str, Any] = {} if template is None else {"chat_template": template}
    parser = "auto"
    for _ in range(MOST_TURNS):
        try:
            [done] = llm.chat(messages, params, tools=functions.tools, tool_call_parser=parser, **variables)
        except InvalidRequest as e:
            if parser == "generic" or not str(e).startswith("tools is not supported"):
                raise
            parser = "generic"  # the template does not know tools, so they are described
            continue
        answer = done.choices[0]
        messages.append(answer.message)
        if answer.text or answer.reasoning:
            shown = ShownAnswer()
            shown.tell([Reasoned(answer.reasoning)] if answer.reasoning else [])
            shown.tell([Said(answer.text)] if answer.text else [])
            shown.end()
            print()
        calls = [call for call in answer.tool_calls if call.complete]
        if len(calls) < len(answer.tool_calls):
            print("(A call was cut off and is not run. --max-tokens allows longer answers.)", file=sys.stderr)
        if not calls:
            return
        messages += results(functions, calls)
    print(f"(Stopped after {MOST_TURNS} answers with calls.)", file=sys.stderr)


def _answer(
    talking: Talk, llm: LLM, messages: list[dict[str, Any]], params: SamplingParams, terminal: bool
) -> dict[str, Any]:
    """The answer, shown as it comes; what there is of it if it was interrupted after it had said something."""
    (prompt, reader), shown = talking.prompt(messages, {}), ShownAnswer()
    reader = reader or ALL_SAID
    ids, parser = llm.tokenizer.encode(prompt, add_special_tokens=False), reader.parser()
    [stream] = llm.submit([ids], params, reader=reader)
    with stream:
        try:
            for piece in told(stream):
                shown.tell(parser.feed(piece.text))
            shown.tell(parser.end(cut_off(stream.choices[0])))
        except KeyboardInterrupt:
            if not shown.said or not terminal:
                raise
            shown.end()
            print(" (stopped)", end="")
        finally:
            shown.end()
    print()
    if not shown.said and stream.finish_reason is Finish.LENGTH:
        print("(The limit came before an answer. --max-tokens allows longer ones.)", file=sys.stderr)
    return shown.message
