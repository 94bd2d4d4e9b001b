"""Forms that were made lately are not made again, and what differs in anything has a form of its own."""

import random
from dataclasses import replace

import pytest

from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat import talk
from hibachi.llm.chatformat.format import HERMES, PLAIN, THINK, ChatFormat, Thinking
from hibachi.llm.chatformat.grammar.recent import RecentForms, content_of
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.chatformat.tools import Tool, Toolbox
from hibachi.structured import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TURNED = {"type": "object", "properties": {"days": {"type": "integer"}, "city": {"type": "string"}}}
WEATHER, NEWS = Tool("weather", SCHEMA), Tool("news", SCHEMA)
BOX, HERE = Toolbox((WEATHER, NEWS)), ChatFormat(tools=HERMES)
PARTS = {"format": HERE, "toolbox": BOX, "thinking": Thinking.NONE, "answer": None, "ends": (2, 1)}
OTHERS = [
    {"format": PLAIN},
    {"format": ChatFormat(tools=HERMES, reasoning=THINK)},
    {"format": ChatFormat(tools=replace(HERMES, most=1))},
    {"toolbox": Toolbox((NEWS, WEATHER))},
    {"toolbox": Toolbox((WEATHER,))},
    {"toolbox": Toolbox((WEATHER, replace(NEWS, name="new")))},
    {"toolbox": Toolbox((replace(WEATHER, strict=True), NEWS))},
    {"toolbox": Toolbox((replace(WEATHER, parameters=TURNED), NEWS))},
    {"toolbox": Toolbox((replace(WEATHER, parameters={**SCHEMA, "required": ["city"]}), NEWS))},
    {"toolbox": replace(BOX, mode="required")},
    {"toolbox": replace(BOX, allowed=frozenset({"weather"}))},
    {"toolbox": replace(BOX, allowed=frozenset())},
    {"toolbox": replace(BOX, parallel=False)},
    {"thinking": Thinking.OPEN},
    {"answer": StructuredOutputs(json={"type": "integer"})},
    {"answer": StructuredOutputs(json={"type": "integer"}, whitespace_pattern=" ?")},
    {"answer": StructuredOutputs(regex='{"type":"integer"}')},
    {"ends": (2,)},
]


def content(**others):
    parts = {**PARTS, **others}
    return content_of(
        AnswerReader(parts["format"], parts["toolbox"], parts["thinking"]), parts["answer"], parts["ends"]
    )


def test_what_differs_in_anything_is_something_else():
    found = [content(**other) for other in ({}, *OTHERS)]
    assert None not in found and len({*found}) == len(found)


def test_what_is_the_same_is_the_same():
    told = Toolbox((replace(WEATHER, description="Of a city"), NEWS), allowed=frozenset(["news", "weather"]))
    again = Toolbox((Tool("weather", dict(SCHEMA)), NEWS), allowed=frozenset(["weather", "news"]))
    assert content(toolbox=told) == content(toolbox=again, ends=(1, 2))


def test_what_is_no_json_has_no_content():
    round_ = {"type": "object", "properties": {}}
    round_["properties"]["x"] = round_
    for schema in (round_, {"type": "object", "properties": {"x": {"default": object()}}}):
        assert content(toolbox=Toolbox((Tool("x", schema),))) is None
    recent = RecentForms()
    recent.keep(None, StructuredOutputs(regex="a"))
    assert recent.find(None) is None and len(recent) == 0


def test_there_is_a_bound_of_forms_and_of_their_text():
    rng, recent = random.Random(5), RecentForms(entries=20, size=5000)
    for i in range(300):
        recent.keep(b"%d" % rng.randrange(40), StructuredOutputs(grammar="a" * rng.choice([1, 100, 900, 4000])))
        assert len(recent) <= 20 and sum(len(f.text) for i in range(40) if (f := recent.find(b"%d" % i))) <= 5000
        if i % 3 == 0:
            recent.find(b"%d" % rng.randrange(40))
    recent.keep(b"large", StructuredOutputs(grammar="a" * 6000))
    assert recent.find(b"large") is None and len(recent) == 0


def test_those_used_last_stay():
    recent = RecentForms(entries=3)
    forms = [StructuredOutputs(grammar=f"start: {i}") for i in range(5)]
    for i in (0, 1, 2):
        recent.keep(b"%d" % i, forms[i])
    assert recent.find(b"0") is forms[0]
    recent.keep(b"3", forms[3])
    assert recent.find(b"1") is None and recent.find(b"0") is forms[0]


class Tokenizer:
    special_ids = frozenset()
    chat_templates = ()

    guarded = bare = staticmethod(str)

    def split_special(self, text):
        return [text]


@pytest.fixture
def written(monkeypatch):
    """How often a form is written."""
    found, whole = [], talk.served_form
    monkeypatch.setattr(talk, "served_form", lambda *given, **more: (found.append(given[1]), whole(*given, **more))[1])
    return found


def ask(given, box=BOX, check=lambda form: None, answer=None):
    return given.form(AnswerReader(HERE, box), answer, check, (2,))


def test_the_same_tools_again_are_checked_and_not_written(written):
    checked, given = [], talk.Talk(Tokenizer())
    first = ask(given, check=checked.append)
    again = ask(given, Toolbox((replace(WEATHER, description="Of a city"), NEWS)), checked.append)
    assert first is again and checked == [first, first] and len(written) == 1
    assert ask(given, replace(BOX, mode="required")) != first and len(written) == 2


def test_what_is_refused_is_refused_again_in_the_same_words(written):
    def check(form):
        if form.kind == "grammar":
            raise InvalidRequest.at(("structured_outputs", "grammar"), ": it is too complex.")

    given, box = talk.Talk(Tokenizer()), replace(BOX, mode="required")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"^tools: it is too complex\.$"):
            ask(given, box, check)
    found = ask(given, box)  # of another engine, say
    with pytest.raises(InvalidRequest, match=r"^tools: it is too complex\.$"):
        ask(given, box, check)
    assert ask(given, box) is found


def test_the_form_of_what_is_said_is_not_taken_for_the_forms_of_others(written):
    given, nothing = talk.Talk(Tokenizer()), Toolbox(mode="none")
    first, again = StructuredOutputs(regex="a"), StructuredOutputs(regex="a")
    assert ask(given, nothing, answer=first) is first and ask(given, nothing, answer=again) is again
