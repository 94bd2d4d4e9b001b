"""Each kind of form accepts what it says, and what cannot be served is refused by name."""

import json
import pickle

import pytest

from hibachi.engine.guide.protocol import FormRefused, Vocabulary
from hibachi.errors import InvalidRequest

from . import made

PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
}
BLANK_WHERE_NONE_MAY_BE = [
    *('{"a":  1}', '{"a" :1}', '{ "a":1}', '{"a":1 }', '{"a":1,  "b":[]}', '{"a":1 ,"b":[]}', '{"a":\t1}', ' {"a":1}'),
    *('{"a":1} ', '{"a":1}\n', '{"b":[ 1]}', '{"b":[1 ]}', "{ }", '{"b":[ ]}', '{"a":1,\n"b":[]}'),
]
CLOSED = {**PAIR, "additionalProperties": False}


@pytest.fixture(scope="module")
def ids():
    """A model whose tokens are no text."""
    setting = made.Setting(Vocabulary([b""] * 40, frozenset(), (39,), texts=False))
    yield setting
    setting.guides.close()


# ---- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern, good, bad",
    [
        (
            None,
            ['{"a":1,"b":[1,2]}', '{"a": 1, "b":[1, 2]}', '{"a":1, "b": [1,2]}', "{}"],
            BLANK_WHERE_NONE_MAY_BE,
        ),
        ("", ['{"a":1,"b":[1,2]}'], ['{"a": 1}', '{"a":1, "b":[]}']),
        (r"[ \n]?", ['{ "a" : 1 , "b":[ 1 ] }', "{\n}"], ['{  "a":1}', ' {"a":1}', '{"a":1} ', '{\t"a":1}']),
        (r"\s{0,2}", ['{\n\t"a":\r\n1}', "{  }"], ["{   }", '{\u00a0"a":1}', '{\x0b"a":1}']),
        (r" {2}|\n", ['{  "a":  1\n}', '{"a":1}'], ['{ "a":1}']),
    ],
)
def test_blanks_are_where_they_may_be(tiny, pattern, good, bad):
    guide = tiny.guide(json=CLOSED, whitespace_pattern=pattern)
    assert [t for t in good if not tiny.fits(guide, t)] == []
    assert [t for t in bad if tiny.fits(guide, t)] == []


@pytest.mark.parametrize("pattern", ["x", " |x", "[^a]", r"\S", ".*", r"\\s", r"[ \u00a0]*"])
def test_blanks_are_only_those_of_json(tiny, pattern):
    with pytest.raises(FormRefused, match=r"whitespace_pattern: it may match only blanks of JSON"):
        tiny.check(json=PAIR, whitespace_pattern=pattern)


@pytest.mark.parametrize("pattern", ["(", "a\\", "a(?=b)"])
def test_blanks_need_an_expression(tiny, pattern):
    with pytest.raises(FormRefused, match=r"structured_outputs.whitespace_pattern: it is no regular expression"):
        tiny.check(json=PAIR, whitespace_pattern=pattern)


@pytest.mark.parametrize("schema", ["true", "{}", {"description": "anything", "unknown": 1}])
def test_a_schema_that_says_nothing_allows_any_value(tiny, schema):
    guide = tiny.guide(json=schema)
    for value in (1, -2.5e9, "ü", None, True, [], {"a": [{"b": None}]}):
        assert tiny.fits(guide, json.dumps(value, ensure_ascii=False)), value
    assert not tiny.fits(guide, "nul") and not tiny.fits(guide, "01")


def test_json_object_is_any_object(tiny):
    guide = tiny.guide(json_object=True)
    assert tiny.fits(guide, '{"a": [1, {"b":null}]}') and tiny.fits(guide, "{}")
    assert not tiny.fits(guide, "[]") and not tiny.fits(guide, '"a"') and not tiny.fits(guide, "{ }")
    assert tiny.fits(tiny.guide(json_object=True, whitespace_pattern=" *"), "{   }")


def test_a_name_has_one_way_to_be_written(tiny):
    """Else {"\\u0061": ...} would be an "a" that the schema for "a" does not see."""
    guide = tiny.guide(json={"type": "object", "properties": {"a": {"type": "string"}, "é\n": {"type": "string"}}})
    good = ['{"a":"x"}', '{"é\\n":"x"}', '{"b":1}', '{"b\\n\\"\\\\":1}', '{"b":"\\t\\b\\f\\r"}']
    bad = [
        '{"a":1}',
        '{"\\u0061":1}',
        '{"é\\n":1}',
        '{"é\\u000a":1}',
        '{"\\u00e9\\n":1}',
        '{"b":"\\u0041"}',
        '{"b":"\\/"}',
    ]
    assert [t for t in good if not tiny.fits(guide, t)] == []
    assert [t for t in bad if tiny.fits(guide, t)] == []


@pytest.mark.parametrize(
    "keyword, schema",
    [
        ("const", {"const": "a\0b"}),
        ("enum", {"type": "object", "properties": {"x": {"enum": ["ok", ["a\x7fb"]]}}}),
        ("pattern", {"type": "string", "pattern": "^a\x01b$"}),
        ("pattern", {"type": "string", "pattern": "^a\\x1Fb$"}),
        ("pattern", {"type": "string", "pattern": "^a\\u{7f}b$"}),
        ("pattern", {"type": "string", "pattern": "^a[\\x01]b$"}),
        ("patternProperties", {"type": "object", "patternProperties": {"^\\v": {}}}),
    ],
)
def test_texts_that_cannot_be_written_are_refused(tiny, keyword, schema):
    """The library would leave the character out: "ab" would do."""
    with pytest.raises(FormRefused, match=f"`{keyword}` has a control character") as caught:
        tiny.check(json=schema)
    assert caught.value.keyword == keyword


@pytest.mark.parametrize(
    "pattern", ["^a[^\\x00-\\x1f]b$", "^a.b$", "^a[a-z\\x01]b$", "^a\\\\x01b$|^axb$", "^a[\\n\\x01x]b$"]
)
def test_classes_with_such_characters_go_without_them(tiny, pattern):
    guide = tiny.guide(json={"type": "string", "pattern": pattern})
    assert tiny.fits(guide, '"axb"') and not tiny.fits(guide, '"ab"')


def test_one_of_is_any_of_if_it_is_wished(tiny):
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    with pytest.raises(FormRefused, match=r"json: the keyword `oneOf` .*; write `anyOf`, or set one_of_as_any_of"):
        tiny.check(json=schema)
    guide = tiny.guide(json=schema, one_of_as_any_of=True)
    assert tiny.fits(guide, "1") and tiny.fits(guide, "1.5")
    assert tiny.fits(tiny.guide(json={"oneOf": [{"type": "integer"}, {"type": "null"}]}), "null")  # cannot overlap


@pytest.mark.parametrize(
    "keyword, schema",
    [
        ("not", {"not": {"type": "string"}}),
        ("if", {"type": "object", "properties": {"a": {"if": {}, "then": {}}}}),
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("contains", {"contains": {}}),
        ("propertyNames", {"propertyNames": {"maxLength": 2}}),
        ("dependentRequired", {"dependentRequired": {"a": ["b"]}}),
        ("unevaluatedProperties", {"unevaluatedProperties": False}),
        ("oneOf", {"oneOf": [{"type": "integer"}, {"minimum": 2}]}),
        ("format", {"type": "string", "format": "iri"}),
        ("pattern", {"type": "string", "pattern": "a(?=b)"}),
        ("pattern", {"type": "string", "pattern": "\\bword"}),
        ("pattern", {"type": "string", "pattern": "("}),
        ("patternProperties", {"type": "object", "patternProperties": {"^a": {}, "b$": {}}}),
        ("minProperties", {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}),
        ("$ref", {"$ref": "#/$defs/nowhere"}),
        ("$ref", {"$ref": "https://example.com/schema"}),
        ("$ref", {"$ref": "file:///etc/hosts"}),
        ("type", {"type": "text"}),
        ("minLength", {"type": "string", "minLength": "2"}),
        ("properties", {"type": "object", "properties": []}),
        ("required", {"type": "object", "required": "a"}),
        ("x-guidance", {"type": "object", "x-guidance": {"lenient": True}}),
        (None, {"type": "integer", "minimum": 5, "maximum": 4}),
        (None, {"type": "object", "properties": {"a": False}, "required": ["a"]}),
        (None, {"type": "string", "pattern": "^a$", "minLength": 2}),
        (None, "false"),
        (None, "[]"),
        (None, "3"),
        (None, '{"minimum": Infinity}'),
        (None, {"$ref": "#"}),
    ],
)
def test_a_schema_that_cannot_be_served_is_refused_by_name(tiny, keyword, schema):
    with pytest.raises(FormRefused, match=r"^structured_outputs.json: .*\.$") as caught:
        tiny.check(json=schema)
    assert caught.value.keyword == keyword
    assert keyword is None or f"`{keyword}`" in str(caught.value)
    assert len(str(caught.value)) < 250 and "\n" not in str(caught.value)


def test_what_is_below_x_guidance_of_a_property_is_no_option(tiny):
    assert tiny.guide(json={"type": "object", "properties": {"x-guidance": {"type": "integer"}}})


@pytest.mark.parametrize("depth", [30, 59])
def test_deep_schemas_are_served(tiny, depth):
    schema = value = 1
    for _ in range(depth):
        schema, value = {"type": "object", "properties": {"a": schema if schema != 1 else {}}}, {"a": value}
    assert tiny.fits(tiny.guide(json=schema), json.dumps(value))


def test_a_schema_that_is_too_deep_is_refused(tiny):
    with pytest.raises(FormRefused, match="deeper than 120 levels"):
        tiny.check(json='{"items":' * 121 + "{}" + "}" * 121)


# ---- regular expressions, choices, grammars --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression, good, bad",
    [
        ("abc", ["abc"], ["ab", "abcd", ""]),
        ("^abc$", ["abc"], ["^abc$", "xabc", "abcx"]),
        ("^a|b$", ["a", "b"], ["ax", "xb", "ab"]),
        (r"\Aab\z", ["ab"], ["abc"]),
        ("a/b//c", ["a/b//c"], ["a"]),
        (r"a\/b", ["a/b"], [r"a\/b"]),
        ("a\nb\tc", ["a\nb\tc"], ["anb"]),
        ("(?i)straße", ["STRAße", "straße"], ["strasse"]),
        ("(?x) a b  # a remark", ["ab"], ["a b"]),
        ("é+[α-ω]{2}", ["ééαω"], ["é", "éα"]),
        (".", ["a", "é", "😀"], ["\n", "ab"]),
        ("(?s).", ["\n"], [""]),
        ("a*?b", ["b", "aab"], ["a"]),
        (r"\d{2}", ["12"], ["1", "a1"]),
        (r"[\]\\]+", ["]\\]"], ["["]),
        (r"\$\^", ["$^"], [""]),
        (r"x\\", ["x\\"], ["x"]),
    ],
)
def test_a_regular_expression_is_for_the_whole_answer(tiny, expression, good, bad):
    guide = tiny.guide(regex=expression)
    assert [t for t in good if not tiny.fits(guide, t)] == []
    assert [t for t in bad if tiny.fits(guide, t)] == []


@pytest.mark.parametrize(
    "expression, why",
    [
        (r"a(?=b)", "lookaround"),
        (r"(?<!a)b", "lookaround"),
        (r"a\b", "lookaround"),
        ("a^b", "anchor"),
        ("(", "unclosed group"),
        ("a{2,1}", "invalid repetition"),
        (r"\p{Nonsense}", "property not found"),
        (r"(a)\1", "backreferences"),
        ("a\\", "ends with a backslash"),
        ("", "only an empty answer"),
        ("(?:)|a{0}", "only an empty answer"),
        (r"[^\x00-\x{10FFFF}]", "no token of the model can begin"),
    ],
)
def test_an_expression_that_cannot_be_served_is_refused_by_name(tiny, expression, why):
    with pytest.raises(FormRefused, match=rf"^structured_outputs.regex: .*{why}"):
        tiny.check(regex=expression)


def test_a_choice_is_one_of_its_texts(tiny):
    texts = ["yes", "yesterday", "no", 'a "b"\\', "é\n\t", "\x7f", "😀", "<|endoftext|>", "//", "{}", "a|b"]
    guide = tiny.guide(choice=texts)
    assert [t for t in texts if not tiny.fits(guide, t)] == []
    assert not [t for t in ("ye", "yesno", "yesterda", "a", "", "noo", '"yes"') if tiny.fits(guide, t)]
    assert 0 not in tiny.allowed(guide)  # the end token has the name of one of them


def test_a_grammar_in_larks_notation(tiny):
    grammar = (
        'start: sum // a remark with "::="\nsum: sum "+" term | term\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]+/'
    )
    guide = tiny.guide(grammar=grammar)
    assert tiny.fits(guide, "1+(2+34)") and not tiny.fits(guide, "1+") and not tiny.fits(guide, "(1")
    guide = tiny.guide(grammar='start: "<" %json {"type": "integer"} ">"')
    assert tiny.fits(guide, "<-5>") and not tiny.fits(guide, "<x>")


def test_a_grammar_in_gbnf(tiny):
    grammar = '# sums\nroot ::= sum\nsum ::= term ("+" term)*\nterm ::= [0-9]+ | "(" sum ")"\n'
    guide = tiny.guide(grammar=grammar)
    assert tiny.fits(guide, "1+(2+34)") and not tiny.fits(guide, "1+") and not tiny.fits(guide, "(1")


def test_a_grammar_in_gbnf_within_another(tiny):
    sums = json.dumps('root ::= sum "/"?\nsum ::= TERM ("+" TERM)* # "x"\nTERM ::= [0-9"/]+ | "(" sum ")" | "root"\n')
    word = json.dumps('root ::= "TERM" root?')
    guide = tiny.guide(grammar=f'start: "%gbnf " sum word | TERM\nsum: %gbnf {sums}\nword: %gbnf {word}\nTERM: "gbnf"')
    for text in ("%gbnf 1+(2+root)TERMTERM", '%gbnf "//TERM', "gbnf"):
        assert tiny.fits(guide, text), text
    for text in ("%gbnf 1TERM1", "%gbnf gbnfTERM", "1"):
        assert not tiny.fits(guide, text), text
    with pytest.raises(FormRefused, match="it is no GBNF: No 'root' rule found"):
        tiny.check(grammar="start: %gbnf " + json.dumps('a ::= "b"'))


@pytest.mark.parametrize(
    "grammar, why",
    [
        ("", "it cannot be read"),
        ("start:", "only an empty answer"),
        ('start: "" | x*\nx: ""', "only an empty answer"),
        ('start: "a" nowhere', 'unknown name: "nowhere"'),
        ('begin: "a"', "no start rule found"),
        ('start: "a', "it cannot be read"),
        ('start: start "a"', "no token of the model can begin"),
        ("start: <|nobody|>", "names a special token that the model has not"),
        ("start: <[4000]>", "names a token id that the model has not"),
        ("start: /a(?=b)/", "lookaround"),
        ("start: /(/", "unclosed group"),
        ('start: %json {"not": {}}', "a schema in it is not supported: Unimplemented keys"),
        ('{"grammars": [{"json_schema": {}}]}', "Lark's notation or in GBNF; got JSON"),
        ("root ::= (", "is no GBNF"),
        ('root ::= "a" nowhere', "is no GBNF: Rule 'nowhere' not found"),
        ('wurzel ::= "a"', "is no GBNF: No 'root' rule found"),
    ],
)
def test_a_grammar_that_cannot_be_served_is_refused_by_name(tiny, grammar, why):
    with pytest.raises(FormRefused, match=rf"^structured_outputs.grammar: .*{why}") as caught:
        tiny.check(grammar=grammar)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_token_ids_guide_a_model_whose_tokens_are_no_text(ids):
    guide = ids.guide(grammar='%llguidance {"no_forcing": true}\nstart: <[0-3]> <[^0-30]>+ x? // not "text"\nx: <[7]>')
    assert ids.allowed(guide) == {0, 1, 2, 3}
    guide.advance([2])
    assert ids.allowed(guide) == set(range(31, 39))  # 39 ends, and it may not end here
    guide.advance([38, 31])
    assert ids.allowed(guide) == {7, *range(31, 40)}
    guide.advance([7])
    assert guide.complete and ids.allowed(guide) == {39}


@pytest.mark.parametrize(
    "form, part",
    [
        ({"json": {}}, "only a grammar of token ids"),
        ({"json_object": True}, "only a grammar of token ids"),
        ({"regex": "a"}, "only a grammar of token ids"),
        ({"choice": ["a"]}, "only a grammar of token ids"),
        ({"grammar": 'start: <[1]> "a"'}, 'got "a"'),
        ({"grammar": "start: <[1]> X\nX: /a/"}, "got /a/"),
        ({"grammar": "start: <[1]> %json {}"}, "got %json"),
        ({"grammar": "%import common.INT\nstart: INT"}, "got %import"),
        ({"grammar": 'root ::= "a"'}, "GBNF is about text"),
    ],
)
def test_texts_are_refused_where_tokens_are_none(ids, form, part):
    with pytest.raises(FormRefused, match=f"needs token_bytes: .*{part}"):
        ids.check(**form)


def test_a_refusal_is_an_invalid_request_that_can_be_pickled(tiny):
    with pytest.raises(InvalidRequest) as caught:
        tiny.check(json={"not": {}})
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is FormRefused and again.keyword == "not" and str(again) == str(caught.value)
    assert pickle.loads(pickle.dumps(FormRefused("x"))).keyword is None
