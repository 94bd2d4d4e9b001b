"""deploy/helm/hibachi-serve without Helm, which tests/install has: its schema, and that each flag in it is ours."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from hibachi.common.settings.kinds import SWITCH
from hibachi.router.settings import SETTINGS as ROUTE
from hibachi.server.settings import SETTINGS as SERVE

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "hibachi-serve"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
OURS = {"host", "port", "uds", "ssl-certfile", "ssl-keyfile", "ssl-ca-certs", "drain-timeout", "api-key"}  # the chart's
CHOSEN = {
    "serve": OURS | {"model", "kv-disk", "tensor-parallel-size", "pipeline-parallel-size"},
    "route": OURS | {"upstream", "upstream-key"},
}


def test_the_schema_takes_the_defaults_and_nothing_that_is_misspelt():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, SCHEMA)
    model = SCHEMA["properties"]["models"]["items"]["properties"]
    assert model.keys() - {"name", "model"} == values["defaults"].keys()
    values["defaults"]["settings"]["max-num-sequences"] = 8
    with pytest.raises(jsonschema.ValidationError, match="max-num-sequences"):
        jsonschema.validate(values, SCHEMA)


@pytest.mark.parametrize("command, settings", [("serve", SERVE), ("route", ROUTE)])
def test_settings_are_the_flags_of_the_commands(command, settings):
    kinds = {s.name: "switch" if s.kind is SWITCH else "values" if s.kind.many else "value" for s in settings.values()}
    wanted = {name: kind for name, kind in kinds.items() if name not in CHOSEN[command]}
    listed = SCHEMA["definitions"][command]["properties"]
    assert {name: of["$ref"].rpartition("/")[2] for name, of in listed.items()} == wanted


def test_flags_and_variables_in_templates_are_settings():
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    known = {s.name for s in [*SERVE.values(), *ROUTE.values()]}
    torchrun = {"nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port"}
    flags = set(re.findall(r"^\s*- (?:\{\{ printf \")?--([a-z-]+)", text, re.M))
    assert flags - torchrun <= known and {"model", "upstream", "drain-timeout", "tensor-parallel-size"} <= flags
    variables = {s.variable for s in [*SERVE.values(), *ROUTE.values()]}
    assert {"HIBACHI_API_KEY", "HIBACHI_UPSTREAM_KEY"} == set(re.findall(r"\"(HIBACHI_\w+)", text)) <= variables
