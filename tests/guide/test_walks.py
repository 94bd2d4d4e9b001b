"""Whatever tokens are taken of those that a mask allows, the answer stays within its schema.

The judge, a reader of JSON, is written here. HIBACHI_GUIDE_EXAMPLES says how many schemas are tried.
"""

import json
import os
import random
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hibachi.engine.guide.protocol import FormRefused
from hibachi.engine.guide.worker import texts_of

from . import made

EXAMPLES = int(os.environ.get("HIBACHI_GUIDE_EXAMPLES", "40"))
FEW = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


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


def closed(properties, **more):
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


ONE, NEVER = {"enum": [1]}, {"type": "string", "minLength": 5, "maxLength": 2}
ENDS = {  # schemas in which something has no value, but not all
    "a pattern of a declared name": closed({"score": ONE}, patternProperties={"^score$": {"type": "integer"}}),
    "of several": closed({"a": ONE, "b": ONE, "cd": ONE}, patternProperties={"^(a|b|c[d])$": True, "^x-": ONE}),
    "of numbered names": closed({"k1": ONE, "k2": ONE}, patternProperties={"^k[12]$": ONE}, required=["k2"]),
    "of names of different lengths": closed({"a": ONE, "ab": ONE}, patternProperties={"^ab?$": ONE}),
    "with a digit": closed({f"n{i}": ONE for i in range(10)}, patternProperties={r"^n\d$": True}),
    "with anchors in a group": closed({"ab": ONE}, patternProperties={"(^a(b|b)$)": True}),
    "of names half declared": closed({"a": ONE}, patternProperties={"^[ab]$": ONE}),
    "of a required name": closed({}, patternProperties={"^a$": ONE}, required=["a"]),
    "of a declared and a required name": closed({"a": ONE}, patternProperties={"^[ab]$": ONE}, required=["b"]),
    "within an array": {"type": "array", "items": closed({"a": ONE}, patternProperties={"^a$": True}), "maxItems": 2},
    "that says more than the property": closed({"a": {"type": "integer"}}, patternProperties={"^a$": ONE}),
    "beside more": {**closed({"a": ONE}, patternProperties={"^a$": True}), "additionalProperties": ONE},
    "listed names": {"type": "object", "propertyNames": {"enum": ["a", "b", 3]}, "additionalProperties": ONE},
    "listed and declared": closed({"a": ONE, "c": ONE}, propertyNames={"type": "string", "enum": ["a", "b"]}),
    "one name": {"type": "object", "propertyNames": {"const": "a"}, "properties": {"a": ONE, "b": ONE}},
    "no name": {"type": "object", "propertyNames": False},
    "a property without a value": closed({"a": NEVER, "b": ONE}),
    "a part without one": {"anyOf": [NEVER, {"enum": []}, ONE]},
    "one of its types": {"type": ["string", "null"], "minLength": 5, "maxLength": 2},
    "items without one": {"type": "array", "items": NEVER},
    "a second item without one": {"type": "array", "prefixItems": [ONE, NEVER]},
    "more names without one": {**closed({"a": ONE}), "additionalProperties": NEVER},
    "a required name within": closed({"x": closed({"a": ONE}, required=["b"])}),
}
NONE = {  # schemas that no value satisfies
    "lengths": NEVER,
    "bounds": {"type": "integer", "minimum": 5, "maximum": 2},
    "no whole number between": {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 3},
    "nor between fractions": {"type": "integer", "minimum": 2.2, "maximum": 2.8},
    "a number that is excluded": {"type": "number", "minimum": 2, "exclusiveMaximum": 2},
    "no multiple": {"type": "integer", "minimum": 11, "maximum": 19, "multipleOf": 10},
    "items": {"type": "array", "minItems": 3, "maxItems": 2},
    "an item": {"type": "array", "items": NEVER, "minItems": 1},
    "no more items": {"type": "array", "prefixItems": [ONE], "items": False, "minItems": 2},
    "a name that must and must not be": closed({"a": ONE}, required=["b"]),
    "a name that is not listed": {"type": "object", "propertyNames": {"enum": ["a"]}, "required": ["b"]},
    "a value of a name": closed({"a": NEVER}, required=["a"]),
    "a pattern and the property": closed({"a": NEVER}, patternProperties={"^a$": ONE}, required=["a"]),
    "counts of names": {"type": "object", "minProperties": 2, "maxProperties": 1},
    "another type": {"type": "string", "enum": [1, 2]},
    "two constants": {"allOf": [{"const": 1}, {"const": 2}]},
    "a pattern and a length": {"type": "string", "pattern": "^a{3}$", "maxLength": 2},
    "a pattern and a format": {"type": "string", "pattern": "^x", "format": "date"},
    "behind a reference": {"$defs": {"a": {"minimum": 5}}, "$ref": "#/$defs/a", "type": "integer", "maximum": 3},
}


@pytest.mark.parametrize("schema", ENDS.values(), ids=ENDS)
def test_no_walk_comes_to_a_dead_end(schema):
    judge = pytest.importorskip("jsonschema").Draft202012Validator(schema)
    setting, ends = made.Setting(made.of_bytes([b"<eos>"], {256}, (256,))), 0
    for seed in range(200):
        chosen, guide, said = random.Random(seed), setting.guide(json=schema), b""
        while len(said) < 300 and not guide.complete:
            allowed = sorted(setting.allowed(guide))
            assert allowed, said
            signs = [t for t in allowed if t > 127 or t in b'"{}[],:0123456789abcdx-']
            token = chosen.choice(signs if signs and chosen.random() < 0.8 else allowed)
            if token == 256:
                break
            guide.advance([token])
            said += bytes([token])
        else:
            if not guide.complete:
                continue  # a name that grows and grows
        ends += 1
        judge.validate(json.loads(said))
    assert ends > 100


@pytest.mark.parametrize("schema", NONE.values(), ids=NONE)
def test_what_no_value_satisfies_is_refused(schema):
    with pytest.raises(FormRefused, match="no value satisfies it"):
        made.Setting(made.of_bytes(ends=(0,))).check(json=schema)


@pytest.mark.parametrize(
    "pattern, names",
    [
        ("^[ab]c?$", {"a", "b", "ac", "bc"}), (r"^k\d{1}$|^x$", {"x", *(f"k{i}" for i in range(10))}), ("^a^b$", set()),
        ("^((a{255}){255}){255}$", None), ("^(){1000000}$", None), ("^(a|b|c|d){8}$", None), ("^" + "(" * 5000, None),
        ("^" + "a" * 1_000_000 + "$", None), ("(?i)^a$", None), ("^a|b$", None), ("^a*$", None), ("a", None),
    ],
)  # fmt: skip
def test_the_names_of_a_pattern_where_they_are_few(pattern, names):
    began = time.process_time()
    assert texts_of(pattern) == names
    assert time.process_time() - began < 0.5
