"""Mend text-generation-inference's OpenAPI document so that it says what TGI does: tgi_spec.py IN OUT [--answered].

--answered: requests also lose what is refused by name or is rarely valid, so that more of them are answered with text.

Mended is where the document says other than TGI's own code and clients do, or than itself:
- it calls itself 3.0.3 and writes bounds as 3.1 does (`exclusiveMinimum` a number), so it is taken for 3.1, and
  `nullable` is written in its words;
- defaults that are no texts are written as such ("false", "null", "1024");
- a stream's schema is that of the data in an event, and schemathesis takes it for the event's;
- errors of POST /generate_stream are events of an answer 200, and so may those of other streams be;
- POST /invocations answers `inputs` as POST / does, with a list;
- it has shapes of its own for chats and completions at /invocations (log-probabilities as bare numbers, each chunk
  with a role), and we have OpenAI's, which OpenAI's document describes: of them only the first fields are looked at;
- what one of several forms may be is `oneOf`, and {"stream": true} alone is already of two of them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from reduce_spec import event, plain

REFUSED = ("watermark", "grammar", "adapter_id", "best_of", "decoder_input_details", "frequency_penalty")
REFUSED_OF_CHATS = ("tools", "tool_choice", "tool_prompt", "response_format", "model", "logit_bias", "logprobs")
SMALL = {
    "max_new_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
    "truncate": {"type": "integer", "minimum": 1, "maximum": 8},
    "top_n_tokens": {"type": "integer", "minimum": 1, "maximum": 4},
    "temperature": {"type": "number", "minimum": 0.1, "maximum": 2},
    "repetition_penalty": {"type": "number", "minimum": 0.5, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0.1, "maximum": 0.9},
    "typical_p": {"type": "number", "minimum": 0.1, "maximum": 0.9},
    "inputs": {"type": "string", "minLength": 1, "maxLength": 100},
}
EVENT = "text/event-stream"
OPENAI = {"type": "object", "required": ["id", "object", "created", "model", "choices"]}


def mended(spec: dict[str, Any], *, answered: bool) -> dict[str, Any]:
    schemas, paths = spec["components"]["schemas"], spec["paths"]
    listed = {"type": "array", "items": _ref("GenerateResponse")}
    schemas["SagemakerResponse"] = {"anyOf": [listed, OPENAI]}
    schemas["SagemakerStreamResponse"] = {"anyOf": [_ref("StreamResponse"), OPENAI]}
    for operation in (o for methods in paths.values() for o in methods.values()):
        good = operation["responses"]["200"].get("content", {})
        if EVENT in good:
            data = {"anyOf": [good[EVENT]["schema"], _ref("ErrorResponse")]}
            good[EVENT] = {"schema": event(data, ended=operation["operationId"].startswith("sagemaker"))}
        for status, answer in operation["responses"].items():
            if status != "200" and EVENT in answer.get("content", {}):
                answer["content"] = {"application/json": {"schema": _ref("ErrorResponse")}}
    if answered:
        for name, refused in (("GenerateParameters", REFUSED), ("ChatRequest", REFUSED_OF_CHATS)):
            properties = schemas[name]["properties"]
            for field in refused:
                properties.pop(field, None)
            properties |= {field: SMALL[field] for field in SMALL.keys() & properties.keys()}
        for name in ("GenerateRequest", "CompatGenerateRequest"):
            schemas[name]["properties"]["inputs"] = SMALL["inputs"]
    found: dict[str, Any] = plain(_defaults(spec))
    return found | {"openapi": "3.1.0"}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _defaults(node: Any) -> Any:
    if isinstance(node, list):
        return [_defaults(item) for item in node]
    if not isinstance(node, dict):
        return node
    found = {("anyOf" if name == "oneOf" else name): _defaults(value) for name, value in node.items()}
    given = found.get("default")
    if isinstance(given, str) and found.get("type") != "string" and given in ("true", "false", "null", "1024"):
        found["default"] = json.loads(given)
    elif given == "null":
        found["default"] = None
    return found


if __name__ == "__main__":
    source, target, *more = sys.argv[1:]
    with open(source) as file:
        whole = json.load(file)
    with open(target, "w") as file:
        json.dump(mended(whole, answered="--answered" in more), file, indent=1)
