"""Tools with random schemas: nested, with references, alternatives, odd names and odd texts."""

from hibachi.llm.chatformat.tools import Tool

NAMES = [
    "a", "city", "naïve", "名前", "x-y", "with space", 'q"uote', "a'b", "a.b", "$ref", "type", "items", "ключ", "a<b",
    "k&v", "0", "_", "𝔘", "properties", "e\u0301", "new\nline", "tab\t", "a/b", "back\\slash", "{", "}", ",", "=",
    "</a>", "arguments", "name", "enum", "null",
]  # fmt: skip
TEXTS = [
    "", "a", "two words", "naïve", "漢字", 'q"x', "it's", "a\\b", "l1\nl2", "\t", "<b>", "&amp;", "null", "true", "3",
    "-1.5", "{}", "[1]", "None", "</parameter>", "]]>", "𝔘", "\u2028", "'", '"', '<|"|>', "  pad ", '{"a": 1}',
]  # fmt: skip
VALUES = [*TEXTS, 1, 0, 2.5, -3, 1e21, None, True, False, [], {}, [1, "a"], {"k": "v"}, {"a": [None]}]
PATTERNS = [
    "^[A-Z]{2}[0-9]+$", "^a|b$", "x", "^(ab)*$", r"^\d{3}-\d{4}$", '^[^"<>]{1,4}$', r"^\w+$", "[0-9]", "^$|^z", "^é+$",
    r"^[\s\S]{0,3}$", "^.{2,5}$", "a/b", "^(foo|bar)[._-]?$", r"^[+-]?\d+(\.\d+)?$", r"^[\d_]\D$",
]  # fmt: skip
FORMATS = ["date", "date-time", "email", "uuid", "ipv4", "time", "uri", "hostname", "starts_with"]
DEFINED = ["node", "a b", "名", "x/y", "~"]
TOOLS = ["f", "get_x", "a.b", "ns:do", "ns", "t-1", "x/y"]
KINDS = ["string"] * 4 + ["integer"] * 2 + ["number", "boolean", "null"]


class RandomTool:
    """Makes one tool. rng: a random.Random."""

    def __init__(self, rng):
        self._rng, self._defined = rng, {}

    def tool(self):
        schema = {"type": "object", **self._object(3)}
        if self._defined:
            schema["$defs"] = self._defined
        return Tool(self._rng.choice(TOOLS), schema)

    def _schema(self, depth):
        rng = self._rng
        kind = rng.choices(
            ["enum", "const", "types", "anyOf", "oneOf", "ref", "any", "allOf", "typed"],
            [6, 4, 6, 5 * (depth > 0), 3 * (depth > 0), 8, 2, 3 * (depth > 0), 63],
        )[0]
        if kind == "enum":
            return {"enum": [rng.choice(VALUES) for _ in range(rng.randint(1, 5))]}
        if kind == "const":
            return {"const": rng.choice(VALUES)}
        if kind == "types":
            return {"type": rng.sample(["string", "integer", "number", "boolean", "null"], rng.randint(2, 3))}
        if kind in ("anyOf", "allOf"):
            most = 3 if kind == "anyOf" else 1
            return {kind: [self._schema(depth - 1) for _ in range(rng.randint(1, most))]}
        if kind == "oneOf":  # of which only one can hold
            kinds = rng.sample(["string", "integer", "boolean", "null", "array", "object"], 2)
            return {"oneOf": [self._typed(each, depth - 1) for each in kinds]}
        if kind == "ref":
            return self._reference(depth)
        if kind == "any":
            return rng.choice([{}, True, {"description": "any"}])
        return self._typed(rng.choice(KINDS + (["array", "object"] * 2 if depth > 0 else [])), depth)

    def _reference(self, depth):
        name = self._rng.choice(DEFINED)
        if name not in self._defined:
            self._defined[name] = {}  # it may refer to itself
            self._defined[name] = self._typed(self._rng.choice(["object", "string", "array"]), max(0, depth - 1))
        return {"$ref": "#/$defs/" + name.replace("~", "~0").replace("/", "~1")}

    def _typed(self, kind, depth):
        makes = {"string": self._string, "integer": self._integer, "number": self._number}
        more = makes[kind]() if kind in makes else {}
        if kind in ("array", "object"):
            more = self._array(depth) if kind == "array" else self._object(depth)
        if self._rng.random() < 0.2:
            more[self._rng.choice(["title", "description"])] = self._rng.choice(TEXTS)
        return {"type": kind, **more}

    def _string(self):
        rng, least = self._rng, self._rng.randint(0, 3)
        return rng.choice(
            [
                {},
                {"maxLength": least * 2},
                {"minLength": least},
                {"minLength": least, "maxLength": least + rng.randint(0, 4)},
                {"pattern": rng.choice(PATTERNS)},
                {"format": rng.choice(FORMATS)},
                {"enum": [rng.choice(TEXTS) for _ in range(rng.randint(1, 4))]},
            ]
        )

    def _integer(self):
        rng, low = self._rng, self._rng.randint(-50, 50)
        one = rng.choice(["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"])
        whole = {"minimum": low, "maximum": low + rng.randint(0, 200)}
        return rng.choice([{}, whole, whole, {one: low}, {"multipleOf": rng.choice([2, 5, 10])}])

    def _number(self):
        rng, low = self._rng, self._rng.choice([-1.5, -0.5, 0, 0.25, 3])
        high = low + rng.choice([0.1, 0.5, 1, 10])
        both = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        return rng.choice([{}, {"minimum": low, "maximum": high}, both, {"exclusiveMinimum": low, "maximum": high}])

    def _array(self, depth):
        rng, least = self._rng, self._rng.randint(0, 2)
        bounds = [{}, {"minItems": least, "maxItems": least + rng.randint(0, 2)}, {"maxItems": least}]
        items = {"items": self._schema(max(0, depth - 1))} if rng.random() < 0.85 else {}
        return items | rng.choice(bounds)

    def _object(self, depth):
        rng = self._rng
        names = rng.sample(NAMES, rng.randint(0, 4))
        found = {"properties": {name: self._schema(max(0, depth - 1)) for name in names}} if names else {}
        if needed := [name for name in names if rng.random() < 0.5]:
            found["required"] = needed
        more = rng.choices(
            [
                {},
                {"additionalProperties": False},
                {"additionalProperties": True},
                {"additionalProperties": {"type": "integer"}},
                {"patternProperties": {"^x": {"type": "integer"}}},
                {"minProperties": 1},
            ],
            [50, 30, 8, 8, 2, 2],
        )
        return found | more[0]


class CombinedTool(RandomTool):
    """Makes a tool whose schemas say things in several places that hold at once: beside references and alternatives,
    beside listed values, and of names that are only required.
    """

    def tool(self):
        found = super().tool()
        if self._rng.random() < 0.2:
            found.parameters["allOf"] = [self._object(1)]
        return found

    def _schema(self, depth):
        rng, found = self._rng, super()._schema(depth)
        if not isinstance(found, dict) or rng.random() < 0.5:
            return found
        how = rng.choice(["beside", "anyOf", "anyOf", "allOf", "enum", "required", "format"])
        kind = rng.choice([found.get("type", "string"), *KINDS])
        more = self._typed(kind if isinstance(kind, str) else "string", max(0, depth - 1))
        if how == "beside":
            return {**more, **found}
        if how == "enum":
            return {**more, "enum": [rng.choice(VALUES) for _ in range(rng.randint(1, 9))]}
        if how == "format":
            return {**found, "format": rng.choice(FORMATS)}
        if how == "required" and rng.random() < 0.5:
            return {**self._object(depth), "required": rng.sample(NAMES, 2)}
        if how == "required":
            named = self._object(depth)
            some = [{"required": [name]} for name in named.get("properties", {})]
            return {"type": "object", **named, "anyOf": some or [True]}
        return {**more, how: [found, self._typed(more["type"], max(0, depth - 1))]}
