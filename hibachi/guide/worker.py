"""The process that checks forms. It is run as a script, sees nothing of hibachi, and is killed at will.

A form comes from anywhere, and what it costs shows only when it is compiled: nested `oneOf` take seconds and gigabytes
before they are refused, a deep reference overflows the stack. So each is compiled here first, with little time, little
memory and a small stack. The first line of the input is the set-up (`Setup`), each further line is a form, and each
line of the output a verdict. See hibachi/guide/checks.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypedDict

STACK = 3 * 2**18  # bytes; less than any thread has that compiles or computes masks later
DEEPEST = 120  # levels of a schema; the library's reader of JSON goes no deeper than 128
LONGEST = 1000  # bytes of a token; the library's tree of tokens goes no deeper than 1024
# Texts may be cut into tokens in any way, as a model does by itself. Otherwise the library asks a tokenizer for the way
# and forbids all others, calling Python in the middle of a mask.
FREE = '%llguidance {"no_forcing": true}\n'


class Setup(TypedDict):
    """tokens: bytes as Latin-1. special, ends: ids. seconds, memory: what one form may take; bytes. limits: the
    library's.
    """

    tokens: list[str]
    special: list[int]
    ends: list[int]
    texts: bool
    seconds: float
    memory: int
    limits: dict[str, int]


class Form(TypedDict):
    """The fields of StructuredOutputs."""

    kind: str
    text: str
    whitespace_pattern: str | None
    one_of_as_any_of: bool


class Refused(Exception):
    """A form that cannot be served, and the keyword that it is about."""

    def __init__(self, why: str, keyword: str | None = None) -> None:
        super().__init__(why)
        self.keyword = keyword


# ---- the vocabulary --------------------------------------------------------------------------------------------------


class Words:
    """What the library asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], end: int) -> None:
        self.tokens = [t if len(t) <= LONGEST else b"" for t in tokens]
        self.special_token_ids, self.eos_token_id = list(special), end

    def __call__(self, text: bytes) -> list[int]:
        """Never called, as no text is forced (`FREE`); the library wants it callable."""
        raise NotImplementedError


def make_tokenizer(library: Any, tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int]) -> Any:
    """An LLTokenizer. End tokens are special, so that their names never count as text. Without ends, the id beyond the
    vocabulary stands for the end.
    """
    if not ends:
        tokens, ends = [*tokens, b"<end>"], [len(tokens)]
    kept = {*special, *ends}
    # Names of their own: the library takes special tokens of one name for one token.
    named = [t or b"<|%d|>" % i if i in kept else t for i, t in enumerate(tokens)]
    return library.LLTokenizer(Words(named, sorted(kept), ends[0]), eos_token=list(ends))


# ---- from forms to grammars ------------------------------------------------------------------------------------------


def make_source(library: Any, form: Form, texts: bool) -> str:
    """The grammar of a form, in the library's notation. Raises Refused.

    It is always Lark, and schemas are within: the library reads Lark without Python's lock, and JSON with it.
    """
    kind, text = form["kind"], form["text"]
    if not texts and kind != "grammar":
        raise Refused(
            "needs token_bytes: the tokens of this model are no text, so only a grammar of token ids can guide"
        )
    if kind == "json_object":
        return json_source('{"type": "object"}', form)
    if kind == "json":
        return json_source(text, form)
    if kind == "regex":
        return regex_source(library, text)
    if kind == "choice":
        return choice_source(json.loads(text))
    return grammar_source(text, texts)


def json_source(text: str, form: Form) -> str:
    schema = read_schema(text)
    between = form["whitespace_pattern"]
    options = {
        "item_separator": ", ?" if between is None else ",",
        "key_separator": ": ?" if between is None else ":",
        "whitespace_flexible": False,
        "whitespace_pattern": between,
        "coerce_one_of": form["one_of_as_any_of"],
        "lenient": False,
        # No \\u: else "\\u0061" would be another way to write the name "a", which no rule for "a" sees.
        "json_allowed_escapes": 'nrbtf\\"',
    }
    return f"{FREE}start: %json {json.dumps({**schema, 'x-guidance': options})}\n"


def read_schema(text: str) -> dict[str, Any]:
    def no_number(word: str) -> Any:
        raise Refused(f"contains {word}, which is no number of JSON")

    try:
        schema = json.loads(text, parse_constant=no_number)
    except RecursionError:
        raise too_deep() from None
    if schema is False:
        raise Refused("is false, which no value satisfies")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise Refused("must be an object or a boolean")
    if "x-guidance" in schema:
        raise Refused("has the keyword `x-guidance`, which is not for callers", "x-guidance")
    level: list[Any] = [schema]
    for _ in range(DEEPEST):
        level = [v for each in level for v in (each.values() if isinstance(each, dict) else each)]
        level = [v for v in level if isinstance(v, (dict, list)) and v]
        if not level:
            return schema
    raise too_deep()


def too_deep() -> Refused:
    return Refused(f"is nested deeper than {DEEPEST} levels. Make it flatter, or use `$ref`")


def regex_source(library: Any, text: str) -> str:
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise Refused("ends in the middle of an escape: a backslash")
    return f"{FREE}start: /{library.regex_to_lark(text, '')}/\n" if text else f'{FREE}start: ""\n'


def choice_source(choices: Sequence[str]) -> str:
    # One terminal: as alternatives of a rule they would all be tried at once, and 2,000 are too many.
    quoted = (json.dumps(c).replace("\x7f", "\\u007f") for c in choices)
    return f"{FREE}start: CHOICE\nCHOICE: {' | '.join(quoted)}\n"


def grammar_source(text: str, texts: bool) -> str:
    if text.lstrip().startswith("{"):  # which the library would read as grammars in JSON
        raise Refused("must be in Lark's notation or in GBNF; got JSON")
    if re.search(r"(?m)^\s*[A-Za-z][A-Za-z0-9_-]*\s*::=", text):
        if not texts:
            raise Refused("needs token_bytes: the tokens of this model are no text, and GBNF is about text")
        return from_gbnf(text)
    if not texts and (part := next(text_parts(text), None)):
        raise Refused(
            f"needs token_bytes: the tokens of this model are no text, so only `<[..]>` can be used; got {part}"
        )
    return f"{text}\n{FREE}"  # behind it, so that numbers of lines stay


def from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(text)
        return f"{lark}\n{FREE}"
    except RecursionError:
        raise Refused("is nested too deep. Make it flatter") from None
    except Exception as e:  # the library raises Exception itself
        raise Refused(f"is no GBNF: {str(e).splitlines()[0]:.200}") from None


PARTS = re.compile(
    r"""(?P<skip>\#[^\n]*|//[^\n]*|<[^<>\s]+>|%llguidance\s*\{[^{}]*\}|"")"""
    r"""|(?P<text>"(?:\\.|[^"\\])*"?|/(?:\\.|[^/\\])+/?|%json|%regex|%import|%ignore)""",
)


def text_parts(lark: str) -> Iterator[str]:
    """What in a grammar can only be matched by text."""
    return (m["text"][:40] for m in PARTS.finditer(lark) if m["text"])


# ---- why the library refuses -----------------------------------------------------------------------------------------

COMPLEX = "is too complex: "
RULES: list[tuple[str, Callable[[re.Match[str]], tuple[str, str | None]]]] = [
    (r"Unimplemented keys: \[(.*)\]", lambda m: unsupported(re.findall(r'"([^"]*)"', m[1]))),
    (
        r"oneOf constraints are not supported",
        lambda m: (
            "has the keyword `oneOf` with alternatives that may overlap. Write `anyOf`, or set one_of_as_any_of",
            "oneOf",
        ),
    ),
    (
        r"Unknown format: (.*)",
        lambda m: (f"has the keyword `format` with {m[1]!r:.80}, which is not supported", "format"),
    ),
    (
        r"min/maxProperties only supported",
        lambda m: (
            "has the keyword `minProperties` or `maxProperties` beside optional properties, which is not supported",
            "minProperties",
        ),
    ),
    (
        r"patternProperty regexes|patternProperties",
        lambda m: ("has the keyword `patternProperties` with patterns that may match one name", "patternProperties"),
    ),
    (r"Unknown specification: (.*)", lambda m: (f"has the keyword `$schema` with {m[1]!r:.100}", "$schema")),
    (
        r"Only absolute \$ref|Reference segment|Definition not found|invalid digit found in string",
        lambda m: ("has the keyword `$ref` with a place that is not found in it; only `#/...` is followed", "$ref"),
    ),
    (r"intersection stack level", lambda m: ("has the keyword `allOf` or `$ref` combined too deep", "allOf")),
    (r"Unsatisfiable schema", lambda m: ("is satisfied by no value", None)),
    (r"recursion limit", lambda m: (f"is nested deeper than {DEEPEST} levels", None)),
    (
        r"look-?around|Word(Start|End)?(Unicode|Ascii)|lookahead",
        lambda m: ("has a lookaround, `\\b` or an inner anchor", "lookaround"),
    ),
    (
        r"too large|too big|precomputation|fuel|[Tt]oo [Cc]omplex|max is|too deeply",
        lambda m: (COMPLEX + "its automaton grows too large", None),
    ),
    (
        r"(?:Expected|must be|for) [^'\n]*'(\w+)'",
        lambda m: (f"has the keyword `{m[1]}` with a value of a wrong type", m[1]),
    ),
    (r"(\w+) must be an? \w+", lambda m: (f"has the keyword `{m[1]}` with a value of a wrong type", m[1])),
    (r"unknown special token", lambda m: ("names a special token that the model has not", None)),
    (r"Token range end too large", lambda m: ("names a token id that the model has not", None)),
    (r"NoExtensionBias", lambda m: ("allows no answer: no token can come first", None)),
]


def unsupported(keys: list[str]) -> tuple[str, str | None]:
    names = ", ".join(f"`{k:.60}`" for k in keys[:8])
    said = f"keyword {names}, which is" if len(keys) == 1 else f"keywords {names}, which are"
    return f"has the {said} not supported", keys[0]


def explain(kind: str, error: str) -> Refused:
    """Of the library's message the first that is known; else its first line, which names a place and no more of it."""
    if kind == "regex" and "invalid regex" in error and "look" not in error:
        reason = next((line[7:] for line in error.splitlines() if line.startswith("error: ")), "it cannot be read")
        return Refused(f"is no regular expression that is supported: {reason:.200}")
    for pattern, say in RULES:
        if found := re.search(pattern, error):
            return Refused(*say(found))
    if kind == "json" and "regex" in error:
        return Refused("has the keyword `pattern` with an expression that is not supported", "pattern")
    return Refused(f"cannot be compiled: {error.splitlines()[0]:.200}" if error else "cannot be compiled")


# ---- the loop --------------------------------------------------------------------------------------------------------


class Checking:
    def __init__(self, library: Any, setup: Setup) -> None:
        tokens = [t.encode("latin-1") for t in setup["tokens"]]
        self.library, self.texts = library, setup["texts"]
        self.ends = setup["ends"] or [len(tokens)]
        self.tokenizer = make_tokenizer(library, tokens, setup["special"], setup["ends"])
        self.limits = library.LLParserLimits(**setup["limits"], verbose_errors=False)

    def check(self, form: Form) -> dict[str, Any]:
        """The verdict: a grammar and the seconds it took to compile, or why there is none."""
        try:
            source = make_source(self.library, form, self.texts)
            began = time.perf_counter()
            self.compile(form["kind"], source)
            return {"source": source, "seconds": time.perf_counter() - began}
        except Refused as e:
            return {"refused": str(e), "keyword": e.keyword}

    def compile(self, kind: str, source: str) -> None:
        matcher = self.library.LLMatcher(self.tokenizer, source, log_level=0, limits=self.limits)
        bits = bytearray(b"" if matcher.is_error() else matcher.compute_bitmask())
        if matcher.is_error():
            raise explain(kind, matcher.get_error())
        for end in self.ends:
            bits[end // 8] &= ~(1 << end % 8)
        if not any(bits):
            raise Refused("allows only an empty answer")


def set_alarm(seconds: float) -> None:
    """The end of the process after so much work, unless it is set anew before. Windows has no such thing.

    It is not the time that passes: where others keep all cores busy, this process gets little of it.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def address_space() -> int:
    """Bytes that this process has mapped; 0 means unknown."""
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def limit_memory(more: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = (address_space() or 2**31) + more
    with suppress(ValueError, OSError):  # a lower limit is in force
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def serve(place: str) -> None:
    sys.path.append(place)
    import llguidance

    setup: Setup = json.loads(sys.stdin.buffer.readline())
    checking = Checking(llguidance, setup)
    limit_memory(setup["memory"])
    base = address_space()
    say({"ready": True})
    for line in sys.stdin.buffer:
        set_alarm(setup["seconds"])
        answer = checking.check(json.loads(line))
        set_alarm(0)
        # What stays allocated would be missed by the next form.
        last = address_space() - base > setup["memory"] // 4
        say({**answer, "last": last})
        if last:
            return


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(19)
    threading.stack_size(STACK)
    thread = threading.Thread(target=serve, args=(sys.argv[1],))
    thread.start()
    thread.join()
