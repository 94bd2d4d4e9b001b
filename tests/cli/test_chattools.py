"""`hibachi chat --tools FILE.py`: functions become tools, are run here, and their results go back."""

import io
import sys

import pytest

from hibachi.cli import chat
from hibachi.cli.chattools import MOST_TURNS, Functions, results
from hibachi.errors import ConfigError, InvalidRequest
from hibachi.llm.chatformat.asked import toolbox_of
from hibachi.llm.chatformat.tools import ToolCall
from hibachi.llm.textstream import Choice, Completion
from hibachi.request import Finish, SamplingParams

FILE = '''
from json import dumps
from typing import Literal

def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", where: list[float] | None = None):
    """The weather of a city."""
    return {"city": city, "days": days}

def fails(a):
    raise ValueError("no such thing")

async def later(n: int):
    return n + 1

def leaves():
    raise SystemExit(3)

def _hidden(*numbers): ...
'''


@pytest.fixture
def functions(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text(FILE)
    return Functions(file)


def test_functions_are_described(functions):
    weather, fails, *_ = (tool["function"] for tool in functions.tools)
    assert (weather["name"], weather["description"], fails["description"]) == ("weather", "The weather of a city.", "")
    assert weather["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "where": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert len(toolbox_of(functions.tools).tools) == 4


@pytest.mark.parametrize(
    "name, arguments, result",
    [
        ("weather", '{"city": "Bath"}', '{"city": "Bath", "days": 1}'),
        ("fails", '{"a": 1}', "ValueError: no such thing"),
        ("weather", "{}", "TypeError: "),
        ("weather", '{"cit', "JSONDecodeError: "),
        ("other", "{}", "KeyError: "),
        ("leaves", "{}", "SystemExit: 3"),
        ("later", '{"n": 1}', "2"),
    ],
)
def test_what_goes_wrong_is_a_result(functions, name, arguments, result):
    assert functions.call(ToolCall(name, arguments)).startswith(result)


@pytest.mark.parametrize("content", ["x = 1", "1 +", "raise SystemExit", "from json import dumps"])
def test_a_file_without_functions(tmp_path, content):
    (tmp_path / "a.py").write_text(content)
    with pytest.raises(ConfigError, match=r"--tools .*a\.py: "):
        Functions(tmp_path / "a.py")


@pytest.mark.parametrize(
    "content, words",
    [
        ("def f(*numbers: int): ...", r"of f that are given by name; got '\*numbers: int', which is variadic"),
        ("def f(x, /): ...", "of f that are given by name; got 'x', which is positional-only"),
        ("def f(**more): ...", "of f that are given by name"),
        ("def größe(): ...", "^--tools: größe cannot be a tool: its name must have .* got 'größe'. Rename the tool"),
        ("from typing import *\ndef f(x: Literal[b'a']): ...", "type hints of f with values that JSON has.* bytes"),
        ("def f(x: 'Nowhere'): ...", "type hints of f that can be evaluated; got NameError: name 'Nowhere'"),
    ],
)
def test_functions_that_cannot_be_described(tmp_path, content, words):
    (tmp_path / "a.py").write_text(content)
    with pytest.raises(ConfigError, match=words):
        Functions(tmp_path / "a.py")


def test_a_function_without_a_name_of_its_own_has_that_of_its_variable(tmp_path):
    (tmp_path / "a.py").write_text("double = lambda x: 2 * x")
    [tool] = Functions(tmp_path / "a.py").tools
    assert tool["function"]["name"] == "double"


def test_a_parameter_without_a_hint_takes_any_value(tmp_path):
    (tmp_path / "a.py").write_text("def f(a, b=3, *, c: object): ...")
    [tool] = Functions(tmp_path / "a.py").tools
    assert tool["function"]["parameters"]["properties"] == {"a": {}, "b": {}, "c": {}}


CACHED = """
import functools
from functools import lru_cache
from textwrap import dedent

@lru_cache
def half(n: int):
    "Half of it."
    return n / 2

@functools.cache
def _hidden(): ...

class Number: ...
class Adder:
    def __call__(self, n: int): ...
add, cached = Adder(), lru_cache(dedent)
"""


def test_a_function_that_caches_is_a_function(tmp_path):
    """Classes, their objects and what is imported are none."""
    (tmp_path / "a.py").write_text(CACHED)
    functions = Functions(tmp_path / "a.py")
    [half] = (tool["function"] for tool in functions.tools)
    assert (half["name"], half["description"]) == ("half", "Half of it.")
    assert half["parameters"]["properties"] == {"n": {"type": "integer"}}
    assert functions.call(ToolCall("half", '{"n": 3}')) == "1.5"


class Scripted:
    """A model whose template knows no tools, and which calls until it has a result. always: it never stops."""

    def __init__(self, always=False):
        self.asked, self._always = [], always

    def chat(self, messages, params, tools, tool_call_parser):
        if tool_call_parser != "generic":
            raise InvalidRequest("tools is not supported: this template does not show them.")
        self.asked.append([*messages])
        calls = () if messages[-1]["role"] == "tool" and not self._always else (
            ToolCall("weather", '{"city": "Bath"}', "call_1"), ToolCall("fails", '{"a"', "call_2", False))  # fmt: skip
        text = "" if calls else "It is fine."
        return [Completion("", [], [Choice(0, text, [], Finish.STOP, tool_calls=calls, reasoning="Let me see.")])]


def test_calls_are_run_and_their_results_go_back(functions, monkeypatch, capsys):
    model = Scripted()
    monkeypatch.setattr("sys.stdin", io.StringIO("How is it?\n"))
    chat.talk(model, SamplingParams(), [], False, functions)
    out, err = capsys.readouterr()
    assert err.count("(Let me see.)\n") == 2 and "Let me see" not in out, "thoughts are not a part of the answer"
    assert '[weather({"city": "Bath"}) -> {"city": "Bath", "days": 1}]' in out and "It is fine." in out
    assert "fails" not in out, "a call that is not whole is not run"
    user, answer, result = model.asked[-1]
    assert user["content"] == "How is it?" and answer["tool_calls"][0]["id"] == result["tool_call_id"] == "call_1"
    assert result["content"] == '{"city": "Bath", "days": 1}'


def test_a_model_that_never_stops_calling(functions, monkeypatch):
    model = Scripted(always=True)
    monkeypatch.setattr("sys.stdin", io.StringIO("How is it?\n"))
    chat.talk(model, SamplingParams(), [], False, functions)
    assert len(model.asked) == MOST_TURNS - 1, "one of the tries showed that tools must be described"


class Interrupted(Scripted):
    """Ctrl-C comes while it computes its second answer, the one with the results."""

    def chat(self, messages, params, tools, tool_call_parser):
        if messages[-1]["role"] == "tool":
            raise KeyboardInterrupt
        return super().chat(messages, params, tools, tool_call_parser)


def test_an_interrupt_ends_the_answer_and_not_the_conversation(functions, monkeypatch, capsys):
    model, lines = Interrupted(), iter(["How is it?", "And now?"])
    monkeypatch.setattr(chat, "_read", lambda terminal: next(lines, None))
    chat.talk(model, SamplingParams(), [], True, functions)
    assert capsys.readouterr().out.count("stopped") == 2
    assert [[m["content"] for m in asked] for asked in model.asked] == [["How is it?"], ["And now?"]]


def test_the_message_of_an_answer_has_no_call_that_was_cut_off():
    calls = (ToolCall("weather", "{}", "call_1"), ToolCall("weather", '{"ci', "call_2", False))
    both, none = (Choice(0, "", [], Finish.LENGTH, tool_calls=some) for some in (calls, calls[1:]))
    assert [call["id"] for call in both.message["tool_calls"]] == ["call_1"]
    assert none.message == {"role": "assistant", "content": ""}


def test_a_file_may_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "a_neighbour_of_tools.py").write_text("CITY = 'Rome'\n")
    (tmp_path / "tools.py").write_text("from a_neighbour_of_tools import CITY\ndef home(): return CITY\n")
    assert Functions(tmp_path / "tools.py").call(ToolCall("home")) == "Rome"
    sys.modules.pop("a_neighbour_of_tools")


@pytest.mark.parametrize("body", ["return '\\udcff.txt'", "return ['\\udcff.txt']", "raise OSError('\\udcff.txt')"])
def test_a_result_with_half_a_character_is_shown_and_goes_to_the_model(tmp_path, capsys, body):
    """As os.listdir has it for a name that is not UTF-8."""
    (tmp_path / "tools.py").write_text(f"def files():\n    {body}\n")
    [message] = results(Functions(tmp_path / "tools.py"), [ToolCall("files", id="a")])
    assert "\\udcff.txt" in message["content"].encode().decode()
    assert "\\udcff.txt" in capsys.readouterr().out
