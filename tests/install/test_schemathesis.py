"""schemathesis with a description of an API, over the routes that are served: it finds nothing.

Four descriptions: OpenAI's own of its API, and of its responses; that of text-generation-inference; and ours, GET
/openapi.json. Each in two runs: with requests as the document describes them, most of which say something that is
refused; and with those that are answered. Together at least 2,000 examples. Streams with calls of tools are compared
besides, by each of the three APIs, of a model that is held to them.
"""

import json
import os
import urllib.request
from pathlib import Path

import pytest

from .conftest import TEMPLATE, serving
from .venvs import CLIENTS, environment, run

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("schemathesis")]

DATA = Path(__file__).parents[1] / "data"
OPENAI = Path(os.environ.get("HIBACHI_OPENAPI", DATA / "openai-openapi.json"))  # or all of it, in YAML
RESPONSES = Path(os.environ.get("HIBACHI_OPENAPI", DATA / "openai-responses.json"))
ANSWERED = "--answered"
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return environment(tmp_path_factory.mktemp("schemathesis"), "schemathesis")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A server whose texts are short, as most requests do not say how long they shall be."""
    with serving(tmp_path_factory.mktemp("short") / "log", "--max-tokens", "16") as found:
        yield found


@pytest.fixture(scope="module")
def tgi(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("tgi") / "log", "--compat", "tgi", "--max-tokens", "16") as found:
        yield found


@pytest.fixture(scope="module")
def tooled(tmp_path_factory):
    """A server of a model that says nonsense, whose template reads how much it shall reason."""
    template = "{% if reasoning_effort %}Reason: {{ reasoning_effort }}\n{% endif %}" + TEMPLATE
    more = ("--served-model-name", "tiny", "--chat-template", template, "--tool-call-parser", "generic")
    log, model = tmp_path_factory.mktemp("tooled") / "log", f"{CLIENTS / 'plans.py'}:Rambles"
    with serving(log, "--max-tokens", "80", *more, model=model) as found:
        yield found


def test_openai_s_description_of_its_api_holds(programs, url, home):
    reduce = [programs / "python", CLIENTS / "reduce_spec.py", OPENAI, "OUT", "tiny"]
    _find_nothing(programs, f"{url}/v1", home, [(20, reduce), (100, [*reduce, ANSWERED])])


def test_openai_s_description_of_responses_holds(programs, short, home):
    cut = [programs / "python", CLIENTS / "responses_spec.py", RESPONSES, "OUT", "tiny"]
    _find_nothing(programs, f"{short}/v1", home, [(60, cut), (200, [*cut, ANSWERED])])


@pytest.mark.parametrize("server", ["tgi", "short"])
def test_tgi_s_description_of_its_api_holds(programs, server, home, request):
    """With --compat tgi, and without."""
    mend = [programs / "python", CLIENTS / "tgi_spec.py", DATA / "tgi" / "openapi.json", "OUT"]
    _find_nothing(programs, request.getfixturevalue(server), home, [(40, mend), (40, [*mend, ANSWERED])])


def test_our_description_of_our_api_holds(programs, short, home):
    """With every status that an answer has."""
    own = _own(short, home)
    runs = [(20, ["cp", own, "OUT"]), (60, [programs / "python", CLIENTS / "own_spec.py", own, "OUT"])]
    _find_nothing(programs, short, home, runs, checks=f"{CHECKS},status_code_conformance", least=1000)


@pytest.mark.parametrize("dialect", ["chats", "responses", "messages"])
def test_streams_with_calls_are_as_they_are_described(programs, tooled, home, dialect):
    """Chats and responses by OpenAI; Anthropic's messages by us."""
    by = {"chats": ("reduce_spec.py", OPENAI), "responses": ("responses_spec.py", RESPONSES)}
    schema = home / "openapi.json"
    if dialect == "messages":
        schema = _own(tooled, home)
        described = json.loads(schema.read_text())
        described["paths"] = {"/v1/messages": described["paths"]["/v1/messages"]}
        schema.write_text(json.dumps(described))
    else:
        script, document = by[dialect]
        run(programs / "python", CLIENTS / script, document, schema, "tiny", cwd=home)
    base = tooled if dialect == "messages" else f"{tooled}/v1"
    print(run(programs / "python", CLIENTS / "check_streams.py", schema, base, "--tools", cwd=home))


def _own(url, home):
    """A file with our description."""
    own = home / "own.json"
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        own.write_bytes(answer.read())
    return own


def _find_nothing(programs, url, home, runs, checks=CHECKS, least=100):
    """runs: most examples of an operation, and a command that makes the document OUT. least: answers that are good."""
    schema, generated, accepted = home / "openapi.json", 0, 0
    for examples, command in runs:
        run(*[schema if word == "OUT" else word for word in command], cwd=home)
        report = _examine(programs, url, home, schema, checks, examples)
        generated += report["test_cases"]["generated"]
        accepted += sum(phase["accepted"] for rates in report["valid_rates"].values() for phase in rates.values())
        print(run(programs / "python", CLIENTS / "check_streams.py", schema, url, cwd=home))
    print(f"\n{generated} examples, of which {accepted} were valid and answered")
    assert generated >= 2000 and accepted >= least  # else hardly anything was answered


def _examine(programs, url, home, schema, checks, examples):
    report = home / "report.json"
    told = run(
        *[programs / "schemathesis", "run", schema, "--url", url, "--checks", checks, "--continue-on-failure"],
        *["--max-examples", examples, "--seed", 1, "--no-color", "--report", "json", "--report-json-path", report],
        *["--request-timeout", 60, "--warnings", "off"],
        cwd=home,
    )
    print(f"\n{told}")
    found = json.loads(report.read_text())
    assert found["test_cases"]["unique_failures"] == 0 and not found["errors"]
    return found
