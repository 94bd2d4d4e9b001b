"""The process that renders chat templates. It is run as a script, sees nothing of hibachi, and is killed at will.

Each line of its input is a JSON list: a template and its variables. Each line that it prints is a JSON list: "text" and
the text, or "refused", "broken" or "failed" and why. See hibachi/llm/tokenizers/sandbox.py.
"""

from __future__ import annotations

import json
import math
import re
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

# transformers marks the answers in a training text with this block; for a prompt it means nothing but its own scope.
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(?=\s*[-+]?%\})")
# minijinja's own lists cannot be changed, but Python's can: an empty one that a template names may be filled later.
_FILLED = re.compile(r"\.(?:append|extend|insert|pop)\(")
_TAG = re.compile(r"\{([%{]).*?[%}]\}", re.DOTALL)
_EMPTY_LIST = re.compile(r"(?<![=!<>])=\s*\[\s*\]")
_LITERAL = re.compile(r"(\{\{[-+]?\s*)(\d[\d_.]*[eE][-+]?\d+)(?=\s*[-+]?\}\})")  # a number to be printed
_WHOLE = re.compile(r"(%[-+ 0#]*\d*[dixX][^'\"{}|]*['\"]\s*\|\s*)format(?=\s*\()")  # floats written as whole numbers
_LONGEST = 2**25  # characters of a text
_BROKEN = ("SyntaxError", "UnknownFilter", "UnknownFunction", "UnknownTest", "BadEscape")


class Refusal(Exception):
    """The template says no, or does what it may not."""


def _never(self: Any, *_: Any, **__: Any) -> NoReturn:
    raise Refusal("it changes the conversation")


class Array(list[Any]):
    append = clear = extend = insert = pop = remove = reverse = sort = _never


class Map(dict[str, Any]):
    clear = pop = popitem = setdefault = update = _never


class Float:
    """A number that minijinja would print or hand on otherwise than Python: 1.0, 1e+20, nan. Nothing can be computed
    with it.
    """

    def __init__(self, value: float) -> None:
        self.value = value

    def __str__(self) -> str:
        return str(self.value)

    __repr__ = __str__

    def __bool__(self) -> bool:
        return bool(self.value)


def frozen(value: Any) -> Any:
    """Data that a template cannot change."""
    if isinstance(value, dict):
        return Map((k, frozen(v)) for k, v in value.items())
    if isinstance(value, list):
        return Array(map(frozen, value))
    if isinstance(value, float) and (value.is_integer() or not repr(value)[-1].isdigit() or "e" in repr(value)):
        return Float(value)
    return value


# ---- what transformers gives to templates, and what jinja2 has and minijinja has not -------------------------------


def refuse(message: str = "") -> NoReturn:
    raise Refusal(message)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=lambda x: x.value if isinstance(x, Float) else refuse(f"{x!r:.80} is not JSON"),
    )


def length(value: Any) -> int:
    return 0 if value is None else len(value)  # of what is not there


def replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    return "" if value is None else str(value).replace(str(old), str(new), -1 if count is None else count)


def to_int(value: Any, default: Any = 0, base: int = 10) -> Any:
    value = value.value if isinstance(value, Float) else value

    def whole() -> int:
        return int(value, base) if isinstance(value, str) else int(value)

    for read in (whole, lambda: int(float(value))):
        try:
            return read()
        except (TypeError, ValueError, OverflowError):
            pass
    return default


def to_float(value: Any, default: Any = 0.0) -> Any:
    try:
        return float(value.value if isinstance(value, Float) else value)
    except (TypeError, ValueError):
        return default


FILTERS: dict[str, Callable[..., Any]] = {
    "tojson": to_json,
    "length": length,
    "count": length,
    "replace": replace,
    "int": to_int,
    "float": to_float,
    "whole": lambda value, *numbers: value % numbers,
    "center": lambda value, width=80: str(value).center(width),
    "wordcount": lambda value: len(re.findall(r"\w+", str(value))),
}
TESTS: dict[str, Callable[[Any], bool]] = {
    "number": lambda value: isinstance(value, (int, float, Float)),
    "sequence": lambda value: isinstance(value, (str, dict, list, tuple)),
}
GLOBALS = {
    "raise_exception": refuse,
    "strftime_now": lambda form: datetime.now().strftime(form),
    "new_list_of_python": lambda: [],
}


def with_floats(template: str, given: dict[str, Any]) -> str:
    """The template where variables that are a Float can be computed with: they are numbers in `given`, and the Float
    stands in places that would write them otherwise than Python.
    """
    for name, kept in list(given.items()):
        if name in template and name.isidentifier() and isinstance(kept, Float) and math.isfinite(kept.value):
            written = r"(?:[\w\s,.:'\"]*[\]})])?\s*\|\s*(?:tojson|replace|string|join)\b"
            template = re.sub(rf"(?<![\w.'\"]){name}\b(?=\s*~|{written})|(?<=~ ){name}\b", f"{name}_written", template)
            given[name], given[f"{name}_written"] = kept.value, kept
    return template


def printed(value: Any) -> Any:
    """What stands between double braces, as Python prints it."""
    return repr(value) if isinstance(value, float) else NotImplemented


def with_lists(template: str) -> str:
    """The template with lists that it can fill, if it fills any."""
    if not _FILLED.search(template):
        return template
    return _TAG.sub(lambda tag: _EMPTY_LIST.sub("= new_list_of_python()", tag[0]), template)


def clock(now: float) -> Callable[[str], str]:
    """strftime_now of a moment, in Unix seconds; in UTC, so that it is the same everywhere."""
    return lambda form: datetime.fromtimestamp(now, UTC).strftime(form)


# ---- the loop --------------------------------------------------------------------------------------------------------


def render(minijinja: Any, environment: Any, template: str, variables: dict[str, Any]) -> tuple[str, str]:
    template = with_lists(_GENERATION.sub(lambda tag: f"{tag[1]}{tag[2] or ''}with", template))
    template = _LITERAL.sub(lambda tag: f"{tag[1]}'{float(tag[2])}'", _WHOLE.sub(r"\1whole", template))
    now = variables.get("strftime_now")
    try:
        given = frozen(variables)
        if isinstance(now, (int, float)) and not isinstance(now, bool):
            given["strftime_now"] = clock(now)
        template = with_floats(template, given)
        text = environment.render_str(template, **given)
        return ("text", text) if len(text) <= _LONGEST else ("failed", f"it gives more than {_LONGEST} characters")
    except Refusal as e:
        return "refused", str(e)
    except minijinja.TemplateError as e:
        return ("broken" if e.kind in _BROKEN else "failed"), e.message
    except Exception as e:
        return "failed", str(e)


def set_alarm(seconds: float) -> None:
    """The end of the process, unless it is set anew before; Windows has no such thing."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def main(place: str, seconds: float, memory: int, fuel: int) -> None:
    sys.path.append(place)
    import minijinja

    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except ImportError:  # no such limits on Windows
        pass
    environment = minijinja.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        fuel=fuel,
        filters=FILTERS,
        tests=TESTS,
        globals=GLOBALS,
        finalizer=printed,
    )
    for line in sys.stdin.buffer:
        set_alarm(seconds)
        answer = render(minijinja, environment, *json.loads(line))
        set_alarm(0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
