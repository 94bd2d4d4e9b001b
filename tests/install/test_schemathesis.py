"""schemathesis with OpenAI's own description of its API, over the routes that are served: it finds nothing.

Two runs: with requests as the document describes them, most of which say something that is refused; and with those
that are answered. Together at least 2,000 examples.
"""

import json
import os
from pathlib import Path

import pytest

from .venvs import environment, run

pytestmark = pytest.mark.install

HERE = Path(__file__).parent
SPEC = Path(os.environ.get("HIBACHI_OPENAPI", HERE.parent / "data" / "openai-openapi.json"))  # or all of it, in YAML
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance"


def test_openai_s_description_of_its_api_holds(url, home):
    programs = environment(home, "schemathesis")
    generated, accepted = 0, 0
    for examples, more in ((20, []), (100, ["--answered"])):
        report = _examine(programs, url, home, examples, *more)
        generated += report["test_cases"]["generated"]
        accepted += sum(phase["accepted"] for rates in report["valid_rates"].values() for phase in rates.values())
        chunks = run(
            programs / "python", HERE / "clients" / "check_streams.py", home / "openapi.json", f"{url}/v1", cwd=home
        )
        print(chunks)
    print(f"\n{generated} examples, of which {accepted} were valid and answered")
    assert generated >= 2000 and accepted >= 100  # else hardly anything was answered


def _examine(programs, url, home, examples, *more):
    schema, report = home / "openapi.json", home / "report.json"
    run(programs / "python", HERE / "clients" / "reduce_spec.py", SPEC, schema, "tiny", *more, cwd=home)
    told = run(
        *[programs / "schemathesis", "run", schema, "--url", f"{url}/v1", "--checks", CHECKS, "--continue-on-failure"],
        *["--max-examples", examples, "--seed", 1, "--no-color", "--report", "json", "--report-json-path", report],
        *["--request-timeout", 60, "--warnings", "off"],
        cwd=home,
    )
    print(f"\n{told}")
    found = json.loads(report.read_text())
    assert found["test_cases"]["unique_failures"] == 0 and not found["errors"]
    return found
