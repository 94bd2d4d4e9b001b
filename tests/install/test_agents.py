"""Foreign agents against servers that run: each in an environment of its own, by a script in clients/NAME_tools.

They talk to the model `Plans` in clients/plans.py, which calls the tools that it is shown in Hermes' form, so their
loops run to the end; and to one that says nonsense, whose template shows no tools, and of which they demand calls. The
scripts print as JSON what came. With pytest's -s it is shown, and which routes were asked.
"""

import json
import re
import shutil
import sys
from itertools import pairwise

import pytest

from .clients.plans import BEFORE, PERSON, SAID, THOUGHT
from .conftest import serving
from .overheard import overheard
from .test_clients import MESSAGES, promptfoo
from .venvs import CLIENTS, ROOT, run, strangers, strangers_for_node

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
    ("llama-index-llms-openai-like", "llama_index", CHAT + RESPONSES),
    ("haystack-ai", "haystack", CHAT + RESPONSES),
    ("dspy", "dspy", CHAT + RESPONSES),
    ("litellm", "litellm", CHAT + RESPONSES + MESSAGES_),
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


TWO, NEXT = "What is the weather in Paris and Oslo?", "And in Lima?"
THINK, WHO = "Please think: what is the weather in Paris?", "Who are you?"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "mood": {"enum": ["good", "bad"]}, "age": {"type": "integer"}},
    "required": ["name", "mood", "age"],
    "additionalProperties": False,
}
CODEX = """
model = "tiny"
model_provider = "hibachi"
web_search = "disabled"
[model_providers.hibachi]
name = "hibachi"
base_url = "{url}/v1"
wire_api = "responses"
[mcp_servers.weather]
command = {command}
args = {args}
required = true
default_tools_approval_mode = "approve"
"""


REAL = {
    "GptOss": "openai-gpt-oss-120b",
    "Qwen": "Qwen3.5-4B",
    "Ministral": "mistralai-Ministral-3-14B-Reasoning-2512",
}
"""Templates of models in clients/obeys.py."""
MARKED = "internal_chat_message_metadata_passthrough"


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


def test_claude_code(plans, asked, home):
    """With all of its own tools besides one of a server of MCP: two calls at once, a second turn, reasoning, a type."""
    strangers_for_node(home, "@anthropic-ai/claude-code")
    claude = [home / "node_modules" / ".bin" / "claude", "--mcp-config", _weather(home, asked), "--strict-mcp-config"]
    claude += ["--allowedTools", "mcp__weather__get_weather"]
    own = {"ANTHROPIC_BASE_URL": plans, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "tiny"}
    own |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ENABLE_TOOL_SEARCH": "false", "HOME": str(home)}

    def ask(question, *more):
        told = run(*claude, *more, "-p", question, cwd=home, **own).strip()
        print(f"Claude Code, {question} {told[-2000:]}")
        return told

    assert ask(TWO) == "It is sunny in Paris, rainy in Oslo."
    assert ask(NEXT, "--continue") == "It is sunny in Paris, rainy in Oslo, windy in Lima."
    events = [json.loads(line) for line in ask(THINK, "--verbose", "--output-format", "stream-json").splitlines()]
    blocks = [block for event in events if event["type"] == "assistant" for block in event["message"]["content"]]
    assert [block["thinking"] for block in blocks if block["type"] == "thinking"][:1] == [THOUGHT]
    assert events[-1]["result"] == "As I thought, it is sunny in Paris."
    typed = ask(WHO, "--output-format", "json", "--json-schema", json.dumps(SCHEMA))
    assert json.loads(typed)["structured_output"] == PERSON


def test_codex(plans, asked, home):
    """The same."""
    strangers_for_node(home, "@openai/codex")
    (home / "codex").mkdir()
    weather = json.loads(_weather(home, asked).read_text())["mcpServers"]["weather"]
    (home / "codex" / "config.toml").write_text(
        CODEX.format(url=plans, **{k: json.dumps(v) for k, v in weather.items()})
    )
    (home / "schema.json").write_text(json.dumps(SCHEMA))
    codex = [home / "node_modules" / ".bin" / "codex", "exec", "--skip-git-repo-check"]

    def ask(*words):
        told = run(*codex, *words, cwd=home, HOME=str(home), CODEX_HOME=str(home / "codex"))
        print(f"Codex, {words[-1]} {told[-2000:]}")
        return told.strip()

    assert {"sunny in Paris", "rainy in Oslo"} <= set(re.findall(r"\w+ in \w+", ask(TWO)))
    assert "windy in Lima" in ask("resume", "--last", NEXT)
    events = [json.loads(line) for line in ask("--json", THINK).splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [item["text"] for item in items if item["type"] == "reasoning"][:1] == [THOUGHT]
    assert [item["arguments"] for item in items if item["type"] == "mcp_tool_call"] == [{"city": "Paris"}]
    assert json.loads(ask("--output-schema", "schema.json", WHO)) == PERSON


@pytest.mark.skipif(not (ROOT / ".templates" / "fetched").exists(), reason="make .templates/fetched")
def test_codex_in_the_templates_of_others(home, monkeypatch):
    """As a provider that is named OpenAI, with what it sends to no other. It goes on behind a call whose arguments were
    cut off and an answer that is missing, and in another sandbox; and the model sees all that Codex tells it.
    """
    strangers_for_node(home, "@openai/codex")
    for model, template in REAL.items():
        own, notes = home / model, []
        own.mkdir()
        monkeypatch.setenv("PROMPTS", str(own / "prompts"))
        more = ("--served-model-name", "tiny", "--chat-template", str(ROOT / ".templates" / f"{template}.jinja"))
        with serving(own / "log", *more, model=f"{CLIENTS / 'obeys.py'}:{model}") as url, overheard(url, notes) as told:
            config = CODEX.partition("[mcp_servers")[0].replace('name = "hibachi"', 'name = "OpenAI"')
            (own / "config.toml").write_text(config.format(url=told))

            def ask(question, *more, sandbox="danger-full-access", own=own):
                codex = [
                    home / "node_modules" / ".bin" / "codex",
                    "exec",
                    "--skip-git-repo-check",
                    "--sandbox",
                    sandbox,
                ]
                return run(*codex, *more, question, cwd=own, HOME=str(own), CODEX_HOME=str(own)).strip()

            on = ("resume", "--last")
            assert ask("SAY hello;;") == "hello"
            assert ask("CALL exec_command cmd echo weather: $((6 * 7));;", *on) == "It is 42."
            (session,) = own.glob("sessions/**/*.jsonl")
            broken = re.sub(r'(?<="arguments":)"(\\.|[^"\\])*"', json.dumps('{"cmd": "echo wea'), session.read_text())
            lines = [line for line in broken.splitlines(True) if '"role":"assistant"' not in line or "42" not in line]
            session.write_text("".join(lines))
            assert ask("SAY again;;", *on) == "again"
            assert ask("SAY bye;;", *on, sandbox="read-only") == "bye"
        bodies = [body for _, body in notes]
        prompts = [json.loads(line) for line in (own / "prompts").read_text().splitlines()][-len(bodies) :]
        items = [[i for i in body["input"] if i.get("role") == "developer"] for body in bodies]
        print(model, [(len(p), len(i)) for p, i in zip(prompts, items, strict=True)])
        assert [len(each) for each in items] == [2, 2, 2, 2, 3] and MARKED in json.dumps(bodies)
        assert {i["arguments"] for i in bodies[-1]["input"] if i["type"] == "function_call"} == {'{"cmd": "echo wea'}
        for prompt, each in zip(prompts, items, strict=True):
            assert all(part["text"].strip() in prompt for item in each for part in item["content"])
        for before, after in pairwise(prompts):  # but the thoughts of turns that are over, and the call that was broken
            assert after.startswith(before[:-500])


def _weather(home, asked):
    """A file that names the server of MCP in clients/weather_mcp.py."""
    told, _ = asked
    server = {"command": sys.executable, "args": [str(CLIENTS / "weather_mcp.py"), told]}
    (home / "mcp.json").write_text(json.dumps({"mcpServers": {"weather": server}}))
    return home / "mcp.json"


@pytest.mark.xdist_group("promptfoo")
def test_promptfoo(plans, with_promptfoo):
    """Two calls by each of its providers, by its own assertions."""
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
        (result,) = promptfoo(with_promptfoo, asking)["results"]
        assert result["success"], result
        print(f"promptfoo, {provider}: {json.dumps(result['response']['output'])}")
