"""The tools of a request, in the words of OpenAI's API."""

import pytest

from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.asked import MOST, as_shown, toolbox_of

LOOK = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
EMPTY = {"type": "object", "properties": {}}


def tool(name="look", **more):
    return {"type": "function", "function": {"name": name, **more}}


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(n) for n in names]}}


TWO = [tool(parameters=LOOK, description="Look at it", strict=True), tool("ping")]


def test_a_tool():
    look, ping = toolbox_of(TWO).tools
    assert (look.name, look.parameters, look.description, look.strict) == ("look", LOOK, "Look at it", True)
    assert (ping.parameters, ping.description, ping.strict) == (EMPTY, "", False)


def test_arguments_may_be_an_object_or_nothing():
    schema = {"type": ["object", "null"], "properties": {}}
    assert toolbox_of([tool(parameters=schema)]).tools[0].parameters == schema
    with pytest.raises(InvalidRequest, match=r'^tools\[0\]\.function\.parameters\.type must be "object"'):
        toolbox_of([tool(parameters={"type": ["string", "null"]})])


@pytest.mark.parametrize(
    "choice, mode, names, parallel",
    [
        (None, "auto", {"look", "ping"}, True),
        ("auto", "auto", {"look", "ping"}, True),
        ("required", "required", {"look", "ping"}, True),
        ("any", "required", {"look", "ping"}, True),
        (named("ping"), "required", {"ping"}, False),
        ({"function": {"name": "ping"}}, "required", {"ping"}, False),
        (allowed("auto", "look"), "auto", {"look"}, True),
        (allowed("required", "look", "ping"), "required", {"look", "ping"}, True),
    ],
)
def test_what_may_be_called(choice, mode, names, parallel):
    box = toolbox_of(TWO, choice)
    assert (box.mode, {t.name for t in box.callable}, box.parallel) == (mode, names, parallel)
    assert toolbox_of(TWO, choice, parallel=False).parallel is False
    assert len(box.tools) == 2, "all of them are shown"


@pytest.mark.parametrize("tools, choice", [(None, None), ([], None), ([], "auto"), (None, "none"), (TWO, "none")])
def test_nothing_may_be_called(tools, choice):
    assert toolbox_of(tools, choice) is None


def test_parallel_calls_are_asked_for_by_a_truth_value():
    for given in ("no", 0, []):
        with pytest.raises(InvalidRequest, match=r"^parallel_tool_calls must be true or false; got "):
            toolbox_of(TWO, None, given)


@pytest.mark.parametrize("name", ["a", "get_weather", "mcp.server/tool-1", "A:b", "x" * 128])
def test_names_that_clients_send(name):
    assert toolbox_of([tool(name)]).tools[0].name == name


@pytest.mark.parametrize(
    "tools, choice, field",
    [
        ([tool("")], None, "tools[0].function.name"),
        ([tool("a b")], None, "tools[0].function.name"),
        ([tool("x" * 129)], None, "tools[0].function.name"),
        ([tool("ä")], None, "tools[0].function.name"),
        ([tool('a"')], None, "tools[0].function.name"),
        ([tool(7)], None, "tools[0].function.name"),
        ([tool(), tool("b"), tool()], None, "tools[2].function.name"),
        ([tool(description=7)], None, "tools[0].function.description"),
        ([tool(strict="yes")], None, "tools[0].function.strict"),
        ([tool(), tool("b", parameters=[])], None, "tools[1].function.parameters"),
        ([tool(parameters={"type": "string"})], None, "tools[0].function.parameters.type"),
        ([tool(parameters={"properties": {"a": 7}})], None, "tools[0].function.parameters.properties"),
        ([tool(parameters={"required": "a"})], None, "tools[0].function.parameters.required"),
        ([7], None, "tools[0]"),
        (tool(), None, "tools"),
        ("look", None, "tools"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([{"type": "custom", "custom": {}}], None, "tools[0].type"),
        ([{"type": 7, "function": {"name": "a"}}], None, "tools[0]"),
        ([tool(f"t{i}") for i in range(MOST + 1)], None, "tools"),
        (TWO, "sometimes", "tool_choice"),
        (TWO, 7, "tool_choice"),
        (TWO, {"type": "custom", "custom": {"name": "a"}}, "tool_choice.type"),
        (TWO, {"type": "function"}, "tool_choice.function.name"),
        (TWO, named("other"), "tool_choice"),
        (TWO, allowed("auto", "other"), "tool_choice"),
        (TWO, allowed("auto"), "tool_choice.allowed_tools"),
        (TWO, allowed("none", "look"), "tool_choice.allowed_tools"),
        (TWO, {"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (
            TWO,
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{**named("look"), "type": 7}]}},
            "tool_choice.allowed_tools.tools[0].type",
        ),
        ([], "required", "tool_choice"),
        (None, named("look"), "tool_choice"),
    ],
)
def test_what_is_wrong_is_named_first(tools, choice, field):
    with pytest.raises(InvalidRequest) as caught:
        toolbox_of(tools, choice)
    assert str(caught.value).partition(" ")[0] == field
    assert len(str(caught.value)) < 700


def test_what_is_shown_to_the_model():
    sent = [tool(strict=True, description=None, returns={"type": "string"}), {"function": {"name": "b"}}, *TWO]
    shown = as_shown(sent)
    assert shown[0]["function"] == {"name": "look", "returns": {"type": "string"}, "parameters": EMPTY}
    assert shown[1] == {"type": "function", "function": {"name": "b", "parameters": EMPTY}}
    assert shown[2]["function"] == {"name": "look", "parameters": LOOK, "description": "Look at it"}
    assert TWO[0]["function"]["strict"] is True, "what was sent is not changed"


def test_a_mode_that_is_sent_as_an_object_is_told_how_to_send_it():
    with pytest.raises(InvalidRequest, match=r"'any': expected \"function\" or .* are sent as texts, not as objects"):
        toolbox_of(TWO, {"type": "any"})


def test_tools_that_are_allowed_are_bounded():
    named = {"type": "function", "function": {"name": "f"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named] * 1025}}
    with pytest.raises(InvalidRequest, match="tool_choice has 1025 tools; at most 1024 are served"):
        toolbox_of([named], choice)
