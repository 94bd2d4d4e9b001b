"""References within schemas: both the grammar of arguments and their reader follow them here."""

import pytest

from hibachi.llm.chatformat.references import referred

ROOT = {"$defs": {"a/b~c": {"type": "null"}, "no": False}, "anyOf": [{"type": "string"}, {"items": [True]}]}


@pytest.mark.parametrize(
    "ref, found",
    [
        ("#", ROOT),
        ("#/$defs/a~1b~0c", {"type": "null"}),
        ("#/$defs/no", False),
        ("#/anyOf/0", {"type": "string"}),
        ("#/anyOf/1/items/0", True),
    ],
)
def test_a_reference_leads_to_a_part_of_the_schema(ref, found):
    assert referred(ref, ROOT) == found


@pytest.mark.parametrize(
    "ref",
    [
        "#/$defs/missing",
        "#/$defs/no/further",
        "#/anyOf/2",
        "#/anyOf/-1",
        "#/anyOf/x",
        "#/anyOf/" + "9" * 5000,
        "#named",
        "",
        "other.json#/$defs/no",
        "https://example.com/schema#/$defs/no",
        3,
        None,
        ["#"],
    ],
)
def test_what_the_schema_does_not_hold_is_told(ref):
    with pytest.raises(LookupError):
        referred(ref, ROOT)
