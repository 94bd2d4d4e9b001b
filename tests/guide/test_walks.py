"""Whatever tokens are taken of those that a mask allows, the answer stays within its language, and no other is missed.

The judges are written here: an automaton for expressions, and a reader of JSON for schemas. HIBACHI_GUIDE_EXAMPLES says
how many grammars are tried.
"""

import json
import os
import random
import re
from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("HIBACHI_GUIDE_EXAMPLES", "40"))
FEW = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


# ---- expressions -----------------------------------------------------------------------------------------------------

LETTERS = "abcé1 \n"

leaves = st.one_of(
    st.text(LETTERS, min_size=1, max_size=4).map(lambda t: ("text", t)),
    st.sampled_from(["ab", "abc", "bcé", "1"]).map(lambda t: ("set", t)),
)


def grown(children):
    return st.one_of(
        st.lists(children, min_size=2, max_size=3).map(lambda c: ("then", *c)),
        st.lists(children, min_size=2, max_size=3).map(lambda c: ("or", *c)),
        st.tuples(children, st.sampled_from([(0, 1), (0, None), (1, None), (2, 3), (0, 2)])).map(
            lambda c: ("times", c[0], *c[1])
        ),
    )


expressions = st.recursive(leaves, grown, max_leaves=6)


def spelled(e) -> str:
    kind, *parts = e
    if kind == "text":
        return re.escape(parts[0]).replace("\\\n", "\\n").replace("\\ ", " ")
    if kind == "set":
        return f"[{parts[0]}]"
    if kind == "times":
        child, low, high = parts
        return f"(?:{spelled(child)}){{{low},{'' if high is None else high}}}"
    return f"(?:{'|'.join(map(spelled, parts))})" if kind == "or" else "".join(f"(?:{spelled(p)})" for p in parts)


class Automaton:
    """Of an expression, over bytes: a set of states goes on by a byte. It has no state that leads nowhere."""

    def __init__(self, e) -> None:
        self.edges: list[list[tuple[int | None, int]]] = []  # (byte or nothing, where to), of each state
        self.begin, self.end = self._build(e)
        self.step = cache(self._step)

    def _new(self) -> int:
        self.edges.append([])
        return len(self.edges) - 1

    def _line(self, data: bytes, begin: int, end: int) -> None:
        for byte in data[:-1]:
            begin, after = self._new(), begin
            self.edges[after].append((byte, begin))
        self.edges[begin].append((data[-1], end))

    def _build(self, e) -> tuple[int, int]:
        kind, *parts = e
        begin, end = self._new(), self._new()
        if kind in ("text", "set"):
            for text in parts if kind == "text" else parts[0]:
                self._line(text.encode(), begin, end)
        elif kind == "or":
            for part in parts:
                first, last = self._build(part)
                self.edges[begin].append((None, first))
                self.edges[last].append((None, end))
        else:
            low, high = (len(parts), len(parts)) if kind == "then" else parts[1:]
            at = begin
            for i in range(low if high is None else high):
                if i >= low:
                    self.edges[at].append((None, end))
                first, last = self._build(parts[i] if kind == "then" else parts[0])
                self.edges[at].append((None, first))
                at = last
            if high is None:
                first, last = self._build(parts[0])
                self.edges[at].append((None, first))
                self.edges[last].append((None, at))
            self.edges[at].append((None, end))
        return begin, end

    def spread(self, states) -> frozenset[int]:
        found, waiting = set(states), list(states)
        while waiting:
            for byte, to in self.edges[waiting.pop()]:
                if byte is None and to not in found:
                    found.add(to)
                    waiting.append(to)
        return frozenset(found)

    def _step(self, states: frozenset[int], byte: int) -> frozenset[int]:
        return self.spread({to for s in states for b, to in self.edges[s] if b == byte})

    def after(self, states: frozenset[int], data: bytes) -> frozenset[int]:
        for byte in data:
            states = self.step(states, byte)
        return states


@FEW
@given(expressions, st.integers(0, 2**32))
def test_masks_of_expressions_are_exact(tiny, e, seed):
    """Every token of the vocabulary, at every place of a random answer."""
    judge, chosen = Automaton(e), random.Random(seed)
    states = judge.spread({judge.begin})
    guide, said = tiny.guide(regex=spelled(e)), b""
    tokens = {i: t for i, t in enumerate(tiny.vocabulary.tokens) if i not in tiny.vocabulary.special}
    by_first: dict[int, list[int]] = {}
    for i, t in tokens.items():
        by_first.setdefault(t[0], []).append(i)
    for _ in range(12):
        expected = {
            i
            for byte in range(256)
            if judge.step(states, byte)
            for i in by_first.get(byte, [])
            if judge.after(states, tokens[i])
        }
        accepting = judge.end in states
        allowed = tiny.allowed(guide)
        assert allowed - tiny.ends == expected, said
        assert (0 in allowed) == accepting and guide.complete == (accepting and not expected)
        if accepting:
            assert re.fullmatch(spelled(e), said.decode())  # a second judge
        if not expected:
            break
        token = chosen.choice(sorted(expected))
        guide.advance([token])
        said += tokens[token]
        states = judge.after(states, tokens[token])


# ---- schemas ---------------------------------------------------------------------------------------------------------

simple = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.tuples(st.integers(-50, 50), st.integers(0, 50)).map(
        lambda t: {"type": "integer", "minimum": t[0], "maximum": t[0] + t[1]}
    ),
    st.tuples(st.integers(0, 2), st.integers(0, 3)).map(
        lambda t: {"type": "string", "minLength": t[0], "maxLength": t[0] + t[1]}
    ),
    st.lists(st.sampled_from(["a", "ab", "é", 1, 2.5, None, True]), min_size=1, max_size=4, unique_by=repr).map(
        lambda v: {"enum": v}
    ),
)


def nested(children):
    return st.one_of(
        st.tuples(children, st.integers(0, 2), st.integers(0, 2)).map(
            lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[1] + t[2]}
        ),
        st.dictionaries(st.sampled_from(["a", "b", "ab", "é", 'q"']), children, max_size=3).map(
            lambda p: {"type": "object", "properties": p, "required": list(p)[::2], "additionalProperties": False}
        ),
        st.lists(children, min_size=2, max_size=3).map(lambda c: {"anyOf": c}),
    )


schemas = st.recursive(simple, nested, max_leaves=5)


def holds(schema, value) -> bool:
    if "anyOf" in schema:
        return any(holds(s, value) for s in schema["anyOf"])
    if "enum" in schema:
        return any(type(v) is type(value) and v == value for v in schema["enum"])
    kind = schema["type"]
    if kind == "null":
        return value is None
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
    if kind == "array":
        bounds = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return bounds and all(holds(schema["items"], v) for v in value)
    props = schema["properties"]
    names = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(props)
    return (
        names and [n for n in props if n in value] == list(value) and all(holds(props[n], v) for n, v in value.items())
    )


def once(pairs):
    assert len({name for name, _ in pairs}) == len(pairs), "a name came twice"
    return dict(pairs)


@FEW
@given(schemas, st.integers(0, 2**32))
def test_walks_through_schemas_end_in_values_that_hold(tiny, schema, seed):
    """And their blanks are at most one behind a comma or a colon."""
    chosen, guide, said = random.Random(seed), tiny.guide(json=schema), b""
    for _ in range(400):
        allowed = sorted(tiny.allowed(guide) - tiny.ends)
        if guide.complete or (0 in tiny.allowed(guide) and chosen.random() < 0.5):
            break
        token = chosen.choice(allowed)
        guide.advance([token])
        said += tiny.vocabulary.tokens[token]
    assert 0 in tiny.allowed(guide)
    text = said.decode()
    value = json.loads(text, object_pairs_hook=once)
    assert holds(schema, value), text
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    assert not re.search(r"\s\s|(?<![,:])\s|^\s|\s$|[\n\t\r]", bare), text
