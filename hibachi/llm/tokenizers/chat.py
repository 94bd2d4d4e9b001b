"""Chat templates: a conversation as the text that a model was trained on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.errors import InvalidModelFiles, InvalidRequest
from hibachi.llm.model.fields import read_text
from hibachi.llm.tokenizers import sandbox

# Such a template, for example Firefunction's, could not run without them.
_ADDS_FUNCTIONS = re.compile(r"\+ functions -?%\}.*\+ datetime \+", re.DOTALL)
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning, the usual one first


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    /,  # variables may have any name
    *,
    add_generation_prompt: bool = True,
    nulls: bool = False,
    **variables: Any,
) -> str:
    """A conversation as text: the Jinja `template`, rendered byte for byte as transformers' apply_chat_template does.

    messages: [{"role": ..., "content": ...}, ...]. add_generation_prompt: end with the beginning of an answer.
    nulls: a null in a message reaches the template as none; otherwise it counts as missing.
    variables: for the template, such as bos_token, or tools, a list of JSON schemas. Templates see plain data only.
    strftime_now: a number among them is the Unix time that templates take for the present, in UTC; without it, it is
    now, in local time.

    It runs in a process of its own, for at most 10 s and 1 GiB, see hibachi/llm/tokenizers/sandbox.py.

    The engine is minijinja. What jinja2 has and it has not: `%` to format; `varargs` and `kwargs` in macros; `self`,
    cycler, lipsum; the filters random, urlize and xmlattr, some arguments of truncate and wordwrap; of the methods of
    strings rsplit, partition, index, center, ljust, rjust, zfill, swapcase, removeprefix and removesuffix; the test
    callable. It is more lenient: a value that is not there becomes null in JSON and can be sliced, none may be looped
    over, unlike types may be compared. The control characters 0x1c to 0x1f are no blanks, and title() leaves a letter
    behind an apostrophe small. `x.items`, which is not called, is the entry of this name, and no method. What is added
    to a text that is `safe` is not escaped.

    Numbers are as in Python, but: a whole float, or one that Python writes with an exponent, can be computed with only
    where it is a variable itself, and not an entry of one. What a template computes with such floats is written with
    all digits in lists and texts, and without ".0" in JSON.

    Raises InvalidRequest if the template refuses the conversation or cannot run on it, InvalidModelFiles if it is not a
    template, MissingExtra without the library minijinja.
    """
    # As transformers passes them: `is not none` must be false, and `is defined` true.
    variables = {"tools": None, "documents": None, **variables, "add_generation_prompt": add_generation_prompt}
    if _ADDS_FUNCTIONS.search(template):
        variables = {**_functions(variables), **variables}
    try:
        more = ("thinking", "tool_plan") if "tool_plan" in template else ("thinking",)  # Cohere's name
        given = [_message(m, nulls, more) for m in messages]
        plain = {name: _plain(value) for name, value in variables.items()}
    except RecursionError:
        raise InvalidRequest("A message is nested too deep for a chat template. Send less deep data.") from None
    except UnicodeEncodeError as e:
        raise InvalidRequest(f"Messages must be valid Unicode: {e}. Decode bytes with errors='replace'.") from e
    kind, text = sandbox.render(template, {**plain, "messages": given})
    if kind == "text":
        return text
    if kind == "broken":
        raise InvalidModelFiles(f"The chat template cannot be run: {text}. Mend or replace it.")
    if kind == "refused":
        raise InvalidRequest(f"The chat template refuses this conversation: {text}")
    raise InvalidRequest(
        f"The chat template does not take this conversation: {text}. Expected messages of the form "
        f'{{"role": "user", "content": "..."}} in an order that the model knows.'
    )


def _functions(variables: Mapping[str, Any]) -> dict[str, str]:
    """What templates of 2024 want to be told: the tools as a text, and the present."""
    now = variables.get("strftime_now")
    moment = time.gmtime(now) if isinstance(now, (int, float)) else time.gmtime()
    tools = json.dumps(_plain(variables.get("tools") or []), ensure_ascii=False, indent=4)
    return {"functions": tools, "datetime": time.strftime("%b %d %Y %H:%M:%S GMT", moment)}


def _message(message: Any, nulls: bool, more: Sequence[str]) -> dict[str, Any]:
    """As plain data. What is null counts as missing, unless `nulls`; reasoning is found under each of its names, and
    under `more` where there is nothing else.
    """
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"The chat template takes messages such as {{'role': 'user', 'content': '...'}}; got {message!r:.80}."
        )
    given = {str(k): _plain(v) for k, v in message.items() if nulls or v is not None}
    reasoning = next((given[name] for name in _REASONING if given.get(name) is not None), None)
    return (
        given
        if reasoning is None
        else {**dict.fromkeys(more, reasoning), **given, "reasoning_content": reasoning, "reasoning": reasoning}
    )


def _plain(value: Any) -> Any:
    """Numbers, texts, lists and objects of them; anything else, such as an image, by the name of its type."""
    if isinstance(value, str):
        value.encode()  # lone surrogates end here
        return value
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    return f"<{type(value).__name__}>"


# ---- the templates of a model ----------------------------------------------------------------------------------------


def read_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates in a model's folder, by name; the usual one is "default".

    chat_template.jinja and additional_chat_templates/NAME.jinja, or else chat_template in tokenizer_config.json, which
    `config` is the contents of: a template, or a list of {"name": ..., "template": ...}. Raises InvalidModelFiles.
    """
    file = path / "chat_template.jinja"
    files = {"default": file} if file.is_file() else {}
    files |= {f.stem: f for f in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if files:
        return {name: _read(f) for name, f in files.items()}
    given = config.get("chat_template")
    if isinstance(given, list) and all(isinstance(t, dict) for t in given):
        given = {t.get("name"): t.get("template") for t in given}
    named = given if isinstance(given, dict) else {"default": given} if given is not None else {}
    if not all(isinstance(x, str) for entry in named.items() for x in entry):
        raise InvalidModelFiles(
            f"{path / 'tokenizer_config.json'}: chat_template must be a text, or a list of objects with name and "
            f"template; got {given!r:.80}. Download it again."
        )
    return named


def _read(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, ValueError) as e:
        raise InvalidModelFiles(f"{file} cannot be read: {e}. Copy or download the file again.") from e


def choose_template(templates: Mapping[str, str], wanted: str | None, *, tools: bool) -> str:
    """The template of this name, or `wanted` itself; None means the one for tools if there are any, else the usual one.

    Raises InvalidRequest if there is none.
    """
    if wanted is not None:
        return templates.get(wanted, wanted)
    name = "tool_use" if tools and "tool_use" in templates else "default"
    if name in templates:
        return templates[name]
    if templates:
        raise InvalidRequest(
            f"This model has several chat templates and no default: pass chat_template= one of {sorted(templates)}."
        )
    raise InvalidRequest(
        "This model has no chat template: expected chat_template.jinja, or chat_template in tokenizer_config.json. "
        "Send plain text to it (`hibachi generate`, `llm.generate`), or give it a template (`--chat-template`, in "
        "Python `chat_template=`)."
    )
