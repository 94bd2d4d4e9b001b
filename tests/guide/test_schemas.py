"""Whole schemas: a hundred of our own, and the JSON Schema Test Suite (its licence is beside it)."""

import json
from pathlib import Path

import pytest

from hibachi.engine.guide.protocol import FormRefused

HERE = Path(__file__).parent
MADE = json.loads((HERE / "schemas" / "made.json").read_text())
SUITE = json.loads((HERE / "suite" / "draft2020-12.json").read_text())
# Valid ones that no answer is: properties in another order than the schema's, 1.0 for an integer, texts with \u0000,
# and what the suite takes a format for: a remark.
NOT_WRITTEN = {
    "allOf": 2,
    "const": 5,
    "enum": 4,
    "format": 10,
    "type": 1,
}
# Keywords of which every group is refused, so that nothing is shown.
REFUSED = {
    "contains",
    "defs",
    "dependentRequired",
    "dependentSchemas",
    "dynamicRef",
    "if-then-else",
    "maxContains",
    "minContains",
    "not",
    "refRemote",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
    "vocabulary",
}


def written(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def verdicts(tiny, group) -> list[tuple[bool, bool, str]]:
    """(valid, accepted, the instance) for each test of a group. Raises FormRefused."""
    guide = tiny.guide(json=written(group["schema"]))
    return [(t["valid"], tiny.fits(guide, written(t["data"])), written(t["data"])) for t in group["tests"]]


def test_schemas_of_our_own_accept_what_is_valid_and_nothing_else(tiny):
    assert len(MADE) == 100
    found = [(case["name"], *each) for case in MADE for each in verdicts(tiny, case)]
    assert [f for f in found if f[2] and not f[1]] == []
    valid = [f for f in found if f[1]]
    assert [f for f in valid if not f[2]] == [] and len(valid) > 150 and len(found) - len(valid) > 300


@pytest.mark.parametrize("keyword", SUITE)
def test_the_suite_of_json_schema(tiny, keyword):
    """No instance that is not valid is accepted; of the valid ones only those of `NOT_WRITTEN` are not."""
    taken, missed = 0, []
    for group in SUITE[keyword]:
        try:
            found = verdicts(tiny, group)
        except FormRefused:
            continue
        taken += 1
        assert [f for f in found if f[1] and not f[0]] == [], group["description"]
        missed += [text for valid, accepted, text in found if valid and not accepted]
    assert (taken == 0) == (keyword in REFUSED), taken
    assert len(missed) == NOT_WRITTEN.get(keyword, 0), missed


WRONG = [  # what the library by itself takes, or refuses, against the schema
    ({"pattern": '^[^"]+$'}, ["a", "\\", "é"], ['"', 'a"']),
    ({"pattern": r"^[^\\]$"}, ['"', "\n"], ["\\"]),
    ({"pattern": r"^\[\^\"a[^b]$"}, ['[^"ac', '[^"a"'], ['[^"ab', '[^"c']),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.5, 0.001], [0, 0.6]),
    ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, [1.25], [1, 1.5]),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, [-1.5, -1.1], [-1]),
    ({"$ref": "#/$defs/名", "$defs": {"名": {"const": 1}}}, [1], [2]),
    ({"$ref": "#/$defs/a b[c]", "$defs": {"a b[c]": {"const": 1}}}, [1], [2]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), WRONG, ids=[str(schema) for schema, *_ in WRONG])
def test_what_the_library_takes_wrongly_is_mended(tiny, schema, valid, invalid):
    guide = tiny.guide(json=json.dumps({"type": "string", **schema} if "pattern" in schema else schema))
    assert [v for v in valid if not tiny.fits(guide, written(v))] == []
    assert [v for v in invalid if tiny.fits(guide, written(v))] == []


@pytest.mark.parametrize("value", [2**53 + 1, -(2**63), 10**20])
@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_whole_numbers_that_would_be_written_as_others_are_refused(tiny, value, keyword):
    given = value if keyword == "const" else [1, value]
    with pytest.raises(FormRefused, match=f"`{keyword}` has a whole number of more than 53 bits"):
        tiny.check(json={"type": "object", "properties": {"a": {keyword: given}}})
    assert tiny.fits(tiny.guide(json={"const": 2**53}), str(2**53))
