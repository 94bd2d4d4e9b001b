"""Foreign agents against servers that run: each in an environment of its own, by a script in clients/NAME_tools.

They talk to the model `Plans` in clients/plans.py, which calls the tools that it is shown in Hermes' form, so their
loops run to the end; and to one that says nonsense, whose template shows no tools, and of which they demand calls. The
scripts print as JSON what came. With pytest's -s it is shown, and which routes were asked.
"""

import json
import re
import shutil

import pytest

from .clients.plans import BEFORE, PERSON, SAID, THOUGHT
from .conftest import serving
from .overheard import overheard
from .test_clients import MESSAGES, promptfoo
from .venvs import CLIENTS, run, strangers, strangers_for_node

pytestmark = pytest.mark.install

COMES = {
    "tool": {"called": ["Paris"], "text": "It is sunny in Paris."},
    "turn": {"called": ["Lima"], "text": "It is sunny in Paris, windy in Lima."},
    "parallel": {"called": ["Oslo", "Paris"], "text": "It is sunny in Paris, rainy in Oslo."},
    "think": {"called": ["Paris"], "text": "It is sunny in Paris.", "reasoning": THOUGHT},
    "unshown": {"called": ["Paris"], "text": "It is sunny in Paris."},
    "typed": PERSON,
    "says": BEFORE + SAID,
    "calls": [{"name": "get_weather", "args": {"city": place}} for place in ("Paris", "Oslo")],
    "called": {"called": ["Paris"], "text": None},
    "several": [PERSON],
    "city": "string",
    "name": ["name"],
}
"""What must come, by the first word of what is said."""


@pytest.fixture(scope="module")
def generic(tmp_path_factory):
    """The address of a server of a model that says nonsense, as "tiny", whose template shows no tools."""
    log = tmp_path_factory.mktemp("generic") / "log"
    more = ("--served-model-name", "tiny", "--tool-call-parser", "generic")
    with serving(log, *more, model=f"{CLIENTS / 'plans.py'}:Rambles") as found:
        yield found


@pytest.fixture
def asked(plans, generic):
    """What the scripts are told; and a function that takes what one printed and checks it."""
    notes, paths = [], []
    with overheard(plans, notes, paths) as talking, overheard(generic, notes, paths) as tiny:
        told = {"url": talking, "tiny": tiny, "messages": MESSAGES, "max_tokens": 400}
        yield json.dumps(told), lambda output, routes: check(output, routes, paths)


def check(output, routes, paths):
    """routes: that must have been asked, and no others."""
    said = json.loads(output.splitlines()[-1])
    assert said
    for name, found in said.items():
        kind = name.split()[0].removesuffix("_streamed")
        print(f"{name}: {json.dumps(found)}")
        if kind == "demanded":
            assert found["mood"] in ("good", "bad") and 0 <= found["age"] <= 120 and len(found["name"]) <= 12
            assert found == said[name.removesuffix("_streamed")]
        elif kind == "partly":
            assert set(found) == set(PERSON)
        elif kind in ("think", "unshown"):  # perhaps it has sent the reasoning back
            assert found in (COMES[kind], {**COMES[kind], "text": "As I thought, it is sunny in Paris."}), name
        else:
            assert found == COMES[kind], name
    print(f"asked: {sorted(set(paths))}")
    asked = {path.partition("?")[0].removeprefix("/v1/") for path in paths}
    assert {re.sub(r"resp_\w+", "ID", path) for path in asked} == set(routes.split())


CHAT, RESPONSES, MESSAGES_ = "chat/completions ", "responses ", "messages "
# What is installed, the script NAME_tools, and the routes that it asks.
PYTHON = [
    ("openai", "openai", CHAT + RESPONSES + "responses/ID responses/ID/input_items"),
    ("anthropic", "anthropic", MESSAGES_ + "messages/count_tokens models models/tiny"),
    ("instructor anthropic", "instructor", CHAT + RESPONSES + MESSAGES_),
    ("pydantic-ai-slim[openai,anthropic]", "pydantic_ai", CHAT + RESPONSES + MESSAGES_),
    ("openai-agents", "agents", CHAT + RESPONSES),
    ("llama-index-llms-openai-like", "llama_index", CHAT),
    ("haystack-ai", "haystack", CHAT + RESPONSES),
    ("dspy", "dspy", CHAT + RESPONSES),
    ("langchain langchain-openai langchain-anthropic", "langchain", CHAT + RESPONSES + MESSAGES_),
]
NODE = [
    ("openai zod", "node", CHAT + RESPONSES),
    ("@anthropic-ai/sdk zod", "node_anthropic", MESSAGES_ + "messages/count_tokens models"),
    ("@ai-sdk/openai-compatible ai zod", "ai_compatible", CHAT),
    ("@ai-sdk/openai ai zod", "ai_openai", CHAT + RESPONSES),
    ("@ai-sdk/anthropic ai zod", "ai_anthropic", MESSAGES_),
    (
        "langchain @langchain/openai @langchain/anthropic @langchain/core zod",
        "langchain",
        CHAT + RESPONSES + MESSAGES_,
    ),
]


def each(clients):
    return pytest.mark.parametrize("packages, name, routes", clients, ids=[c[0].split()[0] for c in clients])


@each(PYTHON)
def test_an_agent_in_python(home, asked, packages, name, routes):
    told, check = asked
    python = strangers(home, *packages.split()) / "python"
    check(run(python, CLIENTS / f"{name}_tools.py", told, cwd=home), routes)


@each(NODE)
def test_an_agent_for_node(home, asked, packages, name, routes):
    told, check = asked
    strangers_for_node(home, *packages.split())
    for script in CLIENTS.glob("*.mjs"):  # node looks for packages beside it
        shutil.copy(script, home)
    check(run("node", f"{name}_tools.mjs", told, cwd=home), routes)


def test_promptfoo(plans, home):
    """Two calls by each of its providers, by its own assertions."""
    strangers_for_node(home, "promptfoo")
    function = {"name": "get_weather", "description": "The weather in a city."}
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = {
        ("openai:chat:tiny", "/v1"): {"type": "function", "function": {**function, "parameters": city}},
        ("openai:responses:tiny", "/v1"): {"type": "function", **function, "parameters": city},
        ("anthropic:messages:tiny", ""): {**function, "input_schema": city},
    }
    for (provider, path), tool in tools.items():
        asserted = [{"type": "contains", "value": "Paris"}, {"type": "contains", "value": "Oslo"}]
        if ":chat:" in provider:
            asserted.append({"type": "is-valid-openai-tools-call"})
        config = {"apiBaseUrl": f"{plans}{path}", "apiKey": "none", "max_tokens": 1000, "tools": [tool]}
        asking = {
            "prompts": ["What is the weather in Paris and Oslo?"],
            "providers": [{"id": provider, "config": config}],
            "tests": [{"assert": asserted}],
        }
        (result,) = promptfoo(home, asking)["results"]
        assert result["success"], result
        print(f"promptfoo, {provider}: {json.dumps(result['response']['output'])}")
