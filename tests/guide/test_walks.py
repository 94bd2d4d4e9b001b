"""Whatever tokens are taken of those that a mask allows, the answer stays within its schema.

The judge, a reader of JSON, is written here. HIBACHI_GUIDE_EXAMPLES says how many schemas are tried.
"""

import json
import os
import random
import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
