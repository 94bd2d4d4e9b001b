"""Strings of a JSON schema that are written without JSON: what they may be, as bodies of terminals."""

from __future__ import annotations

import re
from typing import Any, Final

from hibachi.engine.guide.worker import FORMATS as KNOWN
from hibachi.engine.guide.worker import Refused, ascii_classes
from hibachi.llm.chatformat.grammar.joining import NoValue, Schema
from hibachi.llm.chatformat.grammar.lark import ANY


def string_body(schema: Schema, unit: str = "(?s:.)") -> str:
    """What a string may be, as the body of a terminal. unit: an expression for one character, as it is written."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not all(isinstance(n, int) and n >= 0 for n in (least, 0 if most is None else most)):
        raise Refused("the keyword `minLength` or `maxLength` has a value that is not supported", "maxLength")
    if most is not None and least > most:
        raise NoValue
    if least == 0 and most is None:
        body = f"/(?:{unit})*/"
    else:
        body = f"/(?:{unit}){{{least},{'' if most is None else most}}}/"
    bodies = [body, *([f"({pattern_body(schema['pattern'])})"] if "pattern" in schema else ())]
    expression = format_of(schema)
    return " & ".join([*bodies, *([f"/(?:{slashed(expression)})/"] if expression else ())])


def is_shaped(schema: Schema) -> bool:
    """Whether a string has a shape besides its length."""
    return "pattern" in schema or format_of(schema) != ""


def format_of(schema: Schema) -> str:
    """The expression of a string's format; "" where it says nothing. Raises Refused."""
    name = schema.get("format", "")
    if not isinstance(name, str):
        raise Refused("the keyword `format` has a value that is not supported", "format")
    if name in FORMATS or not KNOWN.fullmatch(name):
        return FORMATS.get(name, "")
    raise Refused(f"the keyword `format` has the value {name!r}, which is not supported", "format")


def pattern_body(pattern: Any) -> str:
    """A schema's pattern, which may stand anywhere in the text unless it says so, as the body of a terminal."""
    if not isinstance(pattern, str):
        raise Refused("the keyword `pattern` has a value that is not supported", "pattern")
    return " | ".join(map(_anchored, top_level(ascii_classes(pattern))))


def _anchored(pattern: str) -> str:
    front = back = ANY
    if pattern.startswith("^"):
        pattern, front = pattern[1:], ""
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2:
        pattern, back = pattern[:-1], ""
    inner = f"/(?:{slashed(pattern)})/" if pattern else ""
    return " ".join(part for part in (front, inner, back) if part) or '""'


def top_level(pattern: str) -> list[str]:
    """The alternatives of a regular expression."""
    found, depth, inside, at = [""], 0, False, 0
    while at < len(pattern):
        letter = pattern[at]
        part = pattern[at : at + 2] if letter == "\\" else letter
        if letter == "[" and not inside:
            inside = True
        elif letter == "]":
            inside = False
        elif not inside and letter in "()":
            depth += 1 if letter == "(" else -1
        if letter == "|" and not inside and depth == 0:
            found.append("")
        else:
            found[-1] += part
        at += len(part)
    return found


def slashed(pattern: str) -> str:
    """As it can stand between slashes."""
    found, at = [], 0
    while at < len(pattern):
        part = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        found.append({"/": "\\/", "\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(part, part))
        at += len(part)
    return "".join(found)


# ---- formats ---------------------------------------------------------------------------------------------------------


def _most(part: str, mark: str, most: int) -> str:
    """From 1 to `most` of the same with marks between."""
    return part if most == 1 else f"{part}(?:{mark}{part}){{0,{most - 1}}}"


def _date() -> str:
    long, short = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    fours = "(?:0[48]|[2468][048]|[13579][26])"  # years of 29 days in February, of which those of a century are fewer
    leap = f"(?:[0-9]{{2}}{fours}|(?:{fours}|00)00)-02-29"
    return f"(?:[0-9]{{4}}-(?:{long}|{short}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{leap})"


def _duration() -> str:
    n = "[0-9]+"
    minutes = f"{n}M(?:{n}S)?"
    time = f"T(?:{n}H(?:{minutes})?|{minutes}|{n}S)"
    months = f"{n}M(?:{n}D)?"
    return f"P(?:(?:{n}Y(?:{months})?|{months}|{n}D)(?:{time})?|{time}|{n}W)"


def _ipv6() -> str:
    """Eight groups, or fewer around one `::`."""
    group = "[0-9a-fA-F]{1,4}"
    found = [f"{group}(?::{group}){{7}}"]
    for before in range(8):
        left = f"{group}(?::{group}){{{before - 1}}}" if before else ""
        right = f"(?:{_most(group, ':', 7 - before)})?" if before < 7 else ""
        found.append(f"{left}::{right}")
    return f"(?:{'|'.join(found)})"


def _uri() -> str:
    coded, plain = "%[0-9A-Fa-f]{2}", "A-Za-z0-9._~!$&'()*+,;=-"
    letter, host = f"(?:[:@{plain}]|{coded})", f"(?:[{plain}]|{coded})"
    server = f"//(?:(?:[:{plain}]|{coded})*@)?{host}*(?::[0-9]*)?"
    path = f"(?:{server}(?:/{letter}*)*|/?(?:{letter}+(?:/{letter}*)*)?)"
    further = f"(?:{letter}|[/?])*"
    return f"[A-Za-z][A-Za-z0-9+.-]*:{path}(?:\\?{further})?(?:#{further})?"


_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_CLOCK}:[0-5][0-9](?:\\.[0-9]+)?(?:[Zz]|[+-]{_CLOCK})"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = f"{_LABEL}(?:\\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
# Those that the library enforces in JSON. Each takes nothing that is not of the format, but may leave out what is rare:
# leap seconds, addresses in brackets.
FORMATS: Final = {
    "date": _date(),
    "time": _TIME,
    "date-time": f"{_date()}[Tt]{_TIME}",
    "duration": _duration(),
    "email": f"{_ATOM}(?:\\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": f"{_OCTET}(?:\\.{_OCTET}){{3}}",
    "ipv6": _ipv6(),
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": _uri(),
}


def is_of_format(text: str, schema: Schema) -> bool:
    """Whether a text has the format of a string."""
    expression = format_of(schema)
    return not expression or re.fullmatch(expression, text) is not None
