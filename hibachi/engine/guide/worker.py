"""The process that checks forms. It is run as a script, sees nothing of hibachi, and is killed at will.

A form comes from anywhere, and what it costs shows only when it is compiled: nested `oneOf` take seconds and gigabytes
before they are refused, a deep reference overflows the stack. So each is compiled here first, with little time, little
memory and a small stack. The first line of the input is the set-up (`Setup`), each further line is a form, and each
line of the output a verdict. See hibachi/engine/guide/checks.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, TypedDict

STACK = 3 * 2**18  # bytes; less than any thread has that compiles or computes masks later
DEEPEST = 120  # levels of a schema; the library's reader of JSON goes no deeper than 128
STEPS = 8  # tokens of an answer that are tried
STEP_SECONDS = 0.25  # of computing that one of them may take
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
    """A form that cannot be served, and the keyword that it is about. field: of the form; None: of its kind."""

    def __init__(self, why: str, keyword: str | None = None, field: str | None = None) -> None:
        super().__init__(why)
        self.keyword, self.field = keyword, field


class Failed(Exception):
    """The library refuses a form, in its own words."""


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
    vocabulary stands for the end. Special tokens without a name get one: by an empty name all would be meant.
    """
    names = list(tokens)
    if not ends:
        ends = [len(names)]
        names.append(b"")
    all_special = sorted({*special, *ends})
    for i in all_special:
        names[i] = names[i] or b"<|%d|>" % i
    return library.LLTokenizer(Words(names, all_special, ends[0]), eos_token=list(ends))


# ---- from forms to grammars ------------------------------------------------------------------------------------------


def make_source(library: Any, form: Form, texts: bool) -> str:
    """The grammar of a form, in the library's notation. Raises Refused.

    It is always Lark, and schemas are within: the library reads Lark without Python's lock, and JSON with it.
    """
    kind, text = form["kind"], form["text"]
    if not texts and kind != "grammar":
        raise Refused(
            "it needs token_bytes: the tokens of this model are no text, so only a grammar of token ids can guide"
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
    part = json_part(read_schema(text), form["whitespace_pattern"], any_of=form["one_of_as_any_of"])
    return f"{FREE}start: {part}\n"


def json_part(schema: dict[str, Any], between: str | None = None, *, any_of: bool = False) -> str:
    """A schema as a part of a rule. between: a pattern of the blanks between tokens. any_of: read `oneOf` as `anyOf`.
    Raises Refused.
    """
    schema = without_notes(schema)
    check_characters(schema)
    if between is not None:
        between = json_blanks(between)
    options = {
        "item_separator": ", ?" if between is None else ",",
        "key_separator": ": ?" if between is None else ":",
        "whitespace_flexible": False,
        "whitespace_pattern": between,
        "coerce_one_of": any_of,
        "lenient": False,
        # No \\u: else "\\u0061" would be another way to write the name "a", which no rule for "a" sees.
        "json_allowed_escapes": 'nrbtf\\"',
    }
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def read_schema(text: str) -> dict[str, Any]:
    def no_number(word: str) -> Any:
        raise Refused(f"{word} is no number of JSON")

    try:
        schema = json.loads(text, parse_constant=no_number)
    except RecursionError:
        raise too_deep() from None
    if schema is False:
        raise Refused("no value satisfies false")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise Refused("it must be an object or a boolean")
    if "x-guidance" in schema:
        raise Refused("the keyword `x-guidance` is not for callers", "x-guidance")
    level: list[Any] = [schema]
    for _ in range(DEEPEST):
        level = [v for each in level for v in (each.values() if isinstance(each, dict) else each)]
        level = [v for v in level if isinstance(v, (dict, list)) and v]
        if not level:
            return schema
    raise too_deep()


# Without \\u these have no way to be written in JSON; the library would leave them out of a text that is given.
UNWRITTEN = re.compile("[\\x00-\\x07\\x0b\\x0e-\\x1f\\x7f]")
# The same as escapes of a regular expression, outside of a class of several characters, where others can be chosen.
_CODE = "(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])"
_HEX = "[0-9a-fA-F]"
_CLASS = rf"\[\^?(?:\\x{_HEX}{{2}}|\\u{_HEX}{{4}}|\\[xu]\{{{_HEX}+\}}|\\[^xu]|[^\]\\]){{2,}}\]"
_ESCAPE = rf"\\x{_CODE}|\\u00{_CODE}|\\U000000{_CODE}|\\[xuU]\{{0*(?:{_CODE}|[0-7])\}}|\\[av]"
UNWRITTEN_ESCAPE = re.compile(rf"\\\\|{_CLASS}|(?P<found>{_ESCAPE}|{UNWRITTEN.pattern})")


MOST_WHOLE = 2**53


def check_characters(schema: Any) -> None:
    """Refuse texts that cannot be written, in `const`, `enum` and patterns. What only looks like one counts as well.
    So are whole numbers that the library would write as others.
    """
    waiting: list[tuple[Any, str]] = [(schema, "")]
    while waiting:
        value, inside = waiting.pop()
        if isinstance(value, dict):
            for name, each in value.items():
                waiting.append((each, inside or (name if name in ("const", "enum", "pattern") else "")))
                if name == "patternProperties" and isinstance(each, dict):
                    waiting += [(pattern, name) for pattern in each]
        elif isinstance(value, list):
            waiting += [(each, inside) for each in value]
        elif isinstance(value, str) and inside:
            given = inside in ("const", "enum")
            if UNWRITTEN.search(value) if given else any(m["found"] for m in UNWRITTEN_ESCAPE.finditer(value)):
                raise Refused(f"the keyword `{inside}` has a control character, which answers do not contain", inside)
        elif isinstance(value, int) and inside in ("const", "enum") and abs(value) > MOST_WHOLE:
            raise Refused(f"the keyword `{inside}` has a whole number of more than 53 bits", inside)


def json_blanks(pattern: str) -> str:
    r"""The pattern, with \s for JSON's blanks alone."""
    return re.sub(r"(\\\\)|\\s", lambda m: m[1] or r"[ \t\n\r]", pattern)


# Of draft 2020-12. To JSON Schema any other is a note to the reader, as are pydantic's "path" and zod's "starts_with".
FORMATS = re.compile(
    r"date-time|date|time|duration|(idn-)?email|(idn-)?hostname|ipv[46]|[ui]ri(-reference)?|uuid|uri-template|"
    r"(relative-)?json-pointer|regex"
)
MAPS = ("properties", "patternProperties", "$defs", "definitions")
WITHIN = ("items", "prefixItems", "additionalProperties", "allOf", "anyOf", "oneOf")


NO_URI = re.compile(r"[^!#-;=?-Z_a-z~]")
TINY = 1e-9


def without_notes(schema: Any) -> Any:
    """A schema as the library takes it. Without what says nothing, and the library refuses: formats that JSON Schema
    does not know, and that names of properties are strings. References are URIs, and bounds are such as it keeps.
    """
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            value = {name: without_notes(each) for name, each in value.items()}
        elif key in WITHIN:
            value = [without_notes(each) for each in value] if isinstance(value, list) else without_notes(value)
        if key == "$ref" and isinstance(value, str):
            value = NO_URI.sub(lambda m: "".join(f"%{byte:02X}" for byte in m[0].encode(errors="surrogatepass")), value)
        if key == "pattern" and isinstance(value, str):
            value = ascii_classes(value, r"\x01")  # which no answer holds, and the library takes it in others than [^"]
        if not says_nothing(key, value):
            found[key] = value
    return kept_names(found | kept_bounds(found))


def kept_names(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of an object without `propertyNames` that lists names, and without patterns that no further name can
    match: the library would write a comma, and then find no name.
    """
    declared, names, patterns = (schema.get(key) for key in ("properties", "propertyNames", "patternProperties"))
    declared = declared if isinstance(declared, dict) else {}
    listed = [] if names is False else listed_names(names)
    if listed is not None and not patterns:
        more = schema.get("additionalProperties", True)
        known = [name for name in declared if name in listed] + [
            n for n in listed if n not in declared and more is not False
        ]
        kept = {name: declared.get(name, more) for name in known}
        schema = {**schema, "properties": kept, "additionalProperties": False}
        return {key: value for key, value in schema.items() if key != "propertyNames"}
    if not isinstance(patterns, dict):
        return schema
    kept, left = dict(declared), dict(patterns)
    required = schema.get("required")
    named = [*declared, *(n for n in required if isinstance(n, str))] if isinstance(required, list) else [*declared]
    for pattern, each in patterns.items():
        matched = texts_of(pattern)
        if matched is not None and matched.issubset(named):
            del left[pattern]
            kept |= {n: {"allOf": [kept[n], each]} if n in kept else each for n in named if n in matched}
    schema = (
        {**schema, "patternProperties": left} if left else {k: v for k, v in schema.items() if k != "patternProperties"}
    )
    return {**schema, "properties": kept} if kept else schema


def listed_names(names: Any) -> list[str] | None:
    """The names that `propertyNames` lists; None if it does not."""
    if not isinstance(names, dict) or not names.keys() & {"enum", "const"} or names.keys() - {"type", "enum", "const"}:
        return None
    listed = names.get("enum", [names.get("const")])
    if not isinstance(listed, list) or names.get("type", "string") != "string":
        return None
    return [name for name in listed if isinstance(name, str) and names.get("const", name) == name]


MOST_NAMES = 256
PARSER = import_module("re._parser")
BEGIN, END = "\x02", "\x03"  # for ^ and $; no name that an answer holds has these


def texts_of(pattern: str) -> set[str] | None:
    """All texts that a pattern matches; None where it is not sure that they are few and short."""
    try:
        found = written_by(PARSER.parse(ascii_classes(pattern[: 16 * MOST_NAMES])))
    except (re.error, ValueError, RecursionError, OverflowError):
        return None
    if (
        len(pattern) > 16 * MOST_NAMES
        or re.search(r"\(\?(?!:)", pattern)
        or not all(t[:1] == BEGIN and t[-1:] == END for t in found)
    ):
        return None
    return {t[1:-1] for t in found if BEGIN not in t[1:] and END not in t[:-1]}


def written_by(parsed: Any) -> set[str]:
    """The texts of a pattern as Python reads it, with `BEGIN` and `END`. Raises ValueError where they are not few."""
    found = {""}
    for kind, value in parsed:
        match str(kind):
            case "LITERAL":
                each = {chr(value)}
            case "AT" if str(value) in ("AT_BEGINNING", "AT_END"):
                each = {BEGIN if str(value) == "AT_BEGINNING" else END}
            case "IN":
                spans = [
                    (v, v) if str(k) == "LITERAL" else v if str(k) == "RANGE" else (0, MOST_NAMES) for k, v in value
                ]
                each = {chr(code) for a, b in spans for code in range(a, min(b, a + MOST_NAMES) + 1)}
            case "BRANCH":
                each = set[str]().union(*map(written_by, value[1]))
            case "SUBPATTERN":
                each = written_by(value[-1])
            case "MAX_REPEAT":
                least, most, part = value
                if most > MOST_NAMES:
                    raise ValueError
                one, each, times = written_by(part), {""} if not least else set[str](), {""}
                for n in range(1, most + 1):
                    times = few({a + b for a in times for b in one})
                    each |= times if n >= least else set()
            case _:
                raise ValueError
        found = few({a + b for a in found for b in few(each)})
    return found


def few(texts: set[str]) -> set[str]:
    if len(texts) > MOST_NAMES or any(len(text) > MOST_NAMES for text in texts):
        raise ValueError
    return texts


ASCII = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f"}
OTHERS = {"D": r"\x00-/:-\x{10FFFF}", "W": r"\x00-/:-@\[-^`{-\x{10FFFF}"}


def ascii_classes(pattern: str, without: str = "") -> str:
    r"""A pattern in which \d, \w and \s are of ASCII, as JSON Schema has \d and \w; in the library's notation they are
    not. \D and \W are all others. \S and [^\s] are as they were: no blank of any kind.

    without: what classes such as [^"] leave out as well.
    """
    inside = ""

    def written(found: re.Match[str]) -> str:
        nonlocal inside
        part, within = found[0], inside
        inside = "" if part == "]" else inside or (part if part[0] == "[" else "")
        if part[0] == "[":
            return part if within or part == "[" else part + without
        letters = ASCII.get(part[1:].lower()) if part != "]" and part != "\\S" else None
        if letters is None or (part == "\\s" and within == "[^"):
            return part
        if part[1:] in OTHERS:
            return OTHERS[part[1:]] if within else f"[^{without}{letters}]"
        return letters if within else f"[{letters}]"

    return re.sub(r"\\.|\[\^(?!\])|\[|\]", written, pattern, flags=re.DOTALL)


def kept_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Of a range of numbers that begins or ends at a whole number and is shorter than 1, without this number: the
    library would take it nevertheless, so the range begins or ends beside it.
    """
    low: Any = schema.get("exclusiveMinimum", schema.get("minimum"))
    high: Any = schema.get("exclusiveMaximum", schema.get("maximum"))
    if not all(isinstance(n, (int, float)) and not isinstance(n, bool) and abs(n) < 1e6 for n in (low, high)):
        return {}
    if not 2 * TINY < high - low < 1:
        return {}
    found = {}
    if schema.get("exclusiveMinimum") == low == int(low):
        found["exclusiveMinimum"] = low + TINY
    if schema.get("exclusiveMaximum") == high == int(high):
        found["exclusiveMaximum"] = high - TINY
    return found


def says_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and not FORMATS.fullmatch(value)
    return key == "propertyNames" and value in (True, {}, {"type": "string"})


def too_deep() -> Refused:
    return Refused(f"it is nested deeper than {DEEPEST} levels. Make it flatter, or use `$ref`")


def regex_source(library: Any, text: str) -> str:
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise Refused("it ends with a backslash that escapes nothing")
    return f"{FREE}start: /{library.regex_to_lark(ascii_classes(text), '')}/\n" if text else f'{FREE}start: ""\n'


def choice_source(choices: Sequence[str]) -> str:
    # One terminal: as alternatives of a rule they would all be tried at once, and 2,000 are too many.
    quoted = (json.dumps(c).replace("\x7f", "\\u007f") for c in choices)
    return f"{FREE}start: CHOICE\nCHOICE: {' | '.join(quoted)}\n"


SHAPED = re.compile(r"(?m)^(?:RAW|STRING|BARE)_\d+: (.* & .*)$")  # in a grammar of calls, by itself
NONE = re.compile(r"[Uu]nsatisfiable|Regex is empty|NoExtensionBias")
GBNF = re.compile(r"(?m)^\s*[A-Za-z][A-Za-z0-9_-]*\s*::=")
_SKIPPED = r'"(?:\\.|[^"\\])*"|//[^\n]*|\#[^\n]*|/(?:\\.|[^/\\\n])+/'
WITHIN_LARK = re.compile(rf'%gbnf\s+(?P<gbnf>"(?:\\.|[^"\\])*")|{_SKIPPED}')
NAMES = re.compile(rf"{_SKIPPED}|(?P<name>[A-Za-z_][A-Za-z0-9_]*)")


def grammar_source(text: str, texts: bool) -> str:
    if text.lstrip().startswith("{"):  # which the library would read as grammars in JSON
        raise Refused("it must be in Lark's notation or in GBNF; got JSON")
    if GBNF.search(text):
        if not texts:
            raise Refused("it needs token_bytes: the tokens of this model are no text, and GBNF is about text")
        return f"{from_gbnf(text)}\n{FREE}"
    if not texts and (part := next(text_parts(text), None)):
        raise Refused(
            f"it needs token_bytes: the tokens of this model are no text, so only `<[..]>` can be used; got {part}"
        )
    return f"{with_gbnf(text)}\n{FREE}"  # behind it, so that numbers of lines stay


def with_gbnf(lark: str) -> str:
    """A grammar in which each `%gbnf "..."`, a grammar in GBNF within one string of JSON, is a rule."""
    found = list[str]()

    def as_rule(part: re.Match[str]) -> str:
        if part["gbnf"] is None:
            return part[0]
        prefix = f"gbnf_{len(found)}_"
        rules = from_gbnf(json.loads(part["gbnf"])).replace("%llguidance {}", "", 1)
        found.append(NAMES.sub(lambda m: m[0] if m["name"] is None else own_name(prefix, m["name"]), rules))
        return f"{prefix}start"

    return "\n".join([WITHIN_LARK.sub(as_rule, lark), *found]) if "%gbnf" in lark else lark


def own_name(prefix: str, name: str) -> str:
    """Names of terminals are in capitals."""
    return f"{prefix.upper() if name.isupper() else prefix}{name}"


def from_gbnf(text: str) -> str:
    """The same in Lark's notation. Raises Refused."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(text)
        return lark
    except RecursionError:
        raise Refused("it is nested too deep. Make it flatter") from None
    except Exception as e:  # the library raises Exception itself
        raise Refused(f"it is no GBNF: {str(e).splitlines()[0]:.200}") from None


PARTS = re.compile(
    r"""(?P<skip>\#[^\n]*|//[^\n]*|<[^<>\s]+>|%llguidance\s*\{[^{}]*\}|"")"""
    r"""|(?P<text>"(?:\\.|[^"\\])*"?|/(?:\\.|[^/\\])+/?|%json|%regex|%import|%ignore)""",
)


def text_parts(lark: str) -> Iterator[str]:
    """What in a grammar can only be matched by text."""
    return (m["text"][:40] for m in PARTS.finditer(lark) if m["text"])


# ---- the loop --------------------------------------------------------------------------------------------------------


class Checking:
    def __init__(self, library: Any, setup: Setup) -> None:
        tokens = [t.encode("latin-1") for t in setup["tokens"]]
        self.library, self.texts = library, setup["texts"]
        self.end_bits = sum(1 << end for end in setup["ends"] or [len(tokens)])
        self.tokenizer = make_tokenizer(library, tokens, setup["special"], setup["ends"])
        self.limits = library.LLParserLimits(**setup["limits"], verbose_errors=False)

    def check(self, form: Form) -> dict[str, Any]:
        """The verdict: a grammar and the seconds it took to compile, or why there is none."""
        try:
            if form["whitespace_pattern"] is not None:
                self.check_blanks(form["whitespace_pattern"])
            source = make_source(self.library, form, self.texts)
            began = time.perf_counter()
            matcher = self.compiled(source)
            if not self.first(matcher):
                raise Refused("it allows only an empty answer")
            took = time.perf_counter() - began
            self.check_texts(source)
            self.walk(matcher)
            return {"source": source, "seconds": took}
        except Refused as e:
            return {"refused": str(e), "keyword": e.keyword, "field": e.field}
        except Failed as e:
            return {"error": str(e)}

    def compiled(self, source: str) -> Any:
        matcher = self.library.LLMatcher(self.tokenizer, source, log_level=0, limits=self.limits)
        if matcher.is_error():
            raise Failed(matcher.get_error()[:10_000])
        return matcher

    def first(self, matcher: Any) -> int:
        """Tokens that may come next, as bits, without those that end. Raises Failed if nothing may, not even they."""
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise Failed(matcher.get_error()[:10_000])
        return bits & ~self.end_bits

    def walk(self, matcher: Any) -> None:
        """Refuse what is too complex after a few tokens already: each time that with the lowest id, a short one."""
        for _ in range(STEPS):
            began = time.process_time()
            try:
                bits = self.first(matcher)
            except Failed as e:
                if "NoExtensionBias" in str(e):  # of this way; others may go on
                    return
                raise
            if not bits:
                return
            matcher.consume_token((bits & -bits).bit_length() - 1)
            if time.process_time() - began > STEP_SECONDS:
                raise Refused(f"it is too complex: a token takes more than {STEP_SECONDS:g} s. Make it simpler")

    def check_texts(self, source: str) -> None:
        """Refuse a string of a call that must be several things at once and cannot: its call would come to no end. Of
        thousands those are tried for which there is time.
        """
        until = time.process_time() + STEP_SECONDS
        for body in dict.fromkeys(SHAPED.findall(source)):
            if time.process_time() > until:
                return
            try:
                self.first(self.compiled(f"{FREE}start: SHAPED\nSHAPED: {body}\n"))
            except Failed as e:
                if NONE.search(str(e)):
                    raise Refused(
                        "no value satisfies a string in it, by its length, pattern and format", "pattern"
                    ) from None

    def check_blanks(self, pattern: str) -> None:
        """Refuse what matches other characters than JSON's blanks between tokens."""
        try:
            blanks = regex_source(self.library, json_blanks(pattern)).strip().removeprefix(f"{FREE}start: ")
            other = self.first(self.compiled(f"{FREE}start: OTHER\nOTHER: {blanks} & ~/[ \\t\\n\\r]*/\n"))
        except (Refused, Failed) as e:
            if "NoExtensionBias" in str(e):
                return
            raise Refused("it is no regular expression that is supported", field="whitespace_pattern") from None
        if other:
            raise Refused("it may match only blanks of JSON: space, \\t, \\n, \\r", field="whitespace_pattern")


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
