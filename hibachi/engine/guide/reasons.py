"""Why a form is refused: what the library's messages mean to a caller, without the parts of the form they repeat."""

from __future__ import annotations

import re

# Looked for in this order: in the library's message, what it means, and the keyword; {0} is the first group.
JSON = (
    (
        r"oneOf constraints",
        "the keyword `oneOf` is not supported where alternatives may overlap; write `anyOf`, or set one_of_as_any_of",
        "oneOf",
    ),
    (r"Unknown format: (.*)", "the keyword `format` has {0!r:.80}, which is not supported", "format"),
    (r"min/maxProperties", "the keyword `minProperties` or `maxProperties` needs required properties", "minProperties"),
    (r"patternProperty", "the keyword `patternProperties` has patterns that may match one name", "patternProperties"),
    (r"Unknown specification: (.*)", "the keyword `$schema` has {0!r:.100}, which is not known", "$schema"),
    (
        r"^Resource '|^Pointer '|^Anchor '|is not found|not found|Definition",
        "the keyword `$ref` names what is not within the schema; nothing is fetched",
        "$ref",
    ),
    (r"circular references", "the keyword `$ref` is in a circle that has other keywords beside it", "$ref"),
    (r"intersection stack", "the keyword `allOf` or `$ref` combines too many schemas", "allOf"),
    (r"[Uu]nsatisfiable|Regex is empty|NoExtensionBias", "no value satisfies it", None),
    (r"if regex is empty", "the keyword `pattern` is too complex beside others", "pattern"),
    (r"number range|(float|integer) range", "the keyword `minimum` or `maximum` is out of range", "minimum"),
    (r"[^']*'([$\w]+)'[^']*", "the keyword `{0}` has a value that is not supported", "{0}"),
    (r"^([$\w]+) must be an? ", "the keyword `{0}` has a value that is not supported", "{0}"),
    (
        r"^Invalid type: (.*)",
        "the keyword `type` has {0!r:.40}, and must be string, number, integer, boolean, object, array or null",
        "type",
    ),
    (r"recursion limit", "it is nested too deep", None),
    (r"look-?around|in regex /", "the keyword `pattern` has a lookaround, `\\b` or an inner anchor", "pattern"),
    (r"regex", "the keyword `pattern` has an expression that is not supported", "pattern"),
)
OTHERS = (
    (r"NoExtensionBias", "no token of the model can begin an answer", None),
    (r"look-?around|in regex /", "a lookaround, `\\b` or an inner anchor is not supported", "lookaround"),
    (r"(?s)invalid regex.*^error: ([^\n]*)", "the expression cannot be read: {0:.100}", None),
    (r"failed to compile JSON schema: (.*[Uu]nsatisfiable[^\n]*)", "no value satisfies a schema in it: {0:.150}", None),
    (r"failed to compile JSON schema: ([^\n]*)", "a schema in it is not supported: {0:.150}", None),
)
ALL = (
    (r"unknown special token", "it names a special token that the model has not", None),
    (r"Token range end too large", "it names a token id that the model has not", None),
    (
        r"too (?:big|large|complex|deep)|TooComplex|precomputation|fuel|max is",
        "it is too complex. Make it simpler",
        None,
    ),
)
SIMPLER = "it is too complex: checking it took more than {seconds:g} s, {mebibytes} MiB or the stack. Make it simpler"


def explain(kind: str, error: str) -> tuple[str, str | None]:
    """What a message of the library's means for a form of a kind, and the keyword that it is about."""
    error = re.sub(r"^at \d+\(\d+\): ", "", error)
    if kind in ("json", "json_object"):
        error = error.removeprefix("failed to compile JSON schema: ").partition("\n")[0]
        if found := re.search(r"Unimplemented keys: \[(.*)\]", error):
            return unsupported(re.findall(r'"([^"]*)"', found[1]))
    for pattern, why, keyword in (*ALL, *(JSON if kind in ("json", "json_object") else OTHERS)):
        if found := re.search(pattern, error, re.MULTILINE):
            return why.format(*found.groups()), keyword and keyword.format(*found.groups())
    return f"it cannot be read: {error.partition(chr(10))[0]:.150}", None


def unsupported(keys: list[str]) -> tuple[str, str | None]:
    names = ", ".join(f"`{k:.60}`" for k in keys[:8])
    words = ("keyword", "is") if len(keys) == 1 else ("keywords", "are")
    return f"the {words[0]} {names} {words[1]} not supported", keys[0] if keys else None
