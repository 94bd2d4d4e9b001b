"""Reduce OpenAI's OpenAPI document to the routes that are served: reduce_spec.py IN OUT MODEL [--answered].

Every model that a request names becomes MODEL, as others get 404 and nothing else would be tried. --answered: requests
also lose what is refused by name, and stay small, so that more of them are answered with text.

Mended is where the document says other than OpenAI's service does, or than itself:
- it gives no media type to streamed completions, although `stream` is described;
- with `echo`, the first token has nothing in front of it: its log-probability is null;
- with `encoding_format` base64, a vector is a string;
- a stream's schema is that of the data in an event, and schemathesis takes it for the event's;
- the pieces of a text's stream have no finish_reason before the last;
- `nullable` is a word of OpenAPI 3.0, and the document is of 3.1.
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from typing import Any

import yaml

ROUTES = {
    "/models": ("get",),
    "/models/{model}": ("get",),
    "/completions": ("post",),
    "/chat/completions": ("post",),
    "/embeddings": ("post",),
}
REQUESTS = ("CreateCompletionRequest", "CreateChatCompletionRequest", "CreateEmbeddingRequest")
REFUSED = (
    *("suffix", "response_format", "audio", "functions", "function_call", "reasoning_effort", "verbosity"),
    *("web_search_options", "modalities", "moderation", "dimensions", "tool_choice", "tools", "best_of", "logit_bias"),
    *("stream_options", "prompt_cache_options"),
)
_SOME = {"minItems": 1, "maxItems": 8}
TEXT = {"type": "string", "minLength": 1, "maxLength": 100}
SMALL = {
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
    "max_completion_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
    "n": {"type": "integer", "minimum": 1, "maximum": 3},
    "prompt": {
        "anyOf": [TEXT, {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 2047}, **_SOME}]
    },
    "messages": {
        "type": "array",
        **_SOME,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": TEXT},
        },
    },
}
PIECES = {"/completions": "CompletionPiece", "/chat/completions": "CreateChatCompletionStreamResponse"}
PREFIX = "#/components/"


def reduced(spec: dict[str, Any], model: str, *, answered: bool) -> dict[str, Any]:
    paths = {path: {m: spec["paths"][path][m] for m in methods} for path, methods in ROUTES.items()}
    for parameter in paths["/models/{model}"]["get"]["parameters"]:
        parameter["schema"] = {"type": "string", "enum": [model]}
    schemas = spec["components"]["schemas"]
    for name in REQUESTS:
        for properties in _properties(schemas[name]):
            if "model" in properties:
                properties["model"] = {"type": "string", "enum": [model]}
            if answered:
                for field in REFUSED:
                    properties.pop(field, None)
                properties |= {field: SMALL[field] for field in SMALL.keys() & properties.keys()}
    _mend(paths, schemas)
    used: dict[str, Any] = {}
    _collect(paths, spec, used)
    kept = {"openapi": spec["openapi"], "info": {"title": "served", "version": "1"}, "paths": paths}
    return plain(kept | {"components": used})


def _mend(paths: dict[str, Any], schemas: dict[str, Any]) -> None:
    choice = schemas["CreateCompletionResponse"]["properties"]["choices"]["items"]["properties"]
    (scores,) = [s for s in choice["logprobs"]["anyOf"] if "properties" in s]
    for field in ("token_logprobs", "top_logprobs"):
        items = scores["properties"][field]["items"]
        items["type"] = [items["type"], "null"]
    piece = deepcopy(schemas["CreateCompletionResponse"])
    piece["properties"]["choices"]["items"]["properties"]["finish_reason"]["nullable"] = True
    schemas["CompletionPiece"] = piece
    for path, name in PIECES.items():
        told = {"schema": event({"$ref": f"{PREFIX}schemas/{name}"}, ended=True)}
        paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"] = told
    vector = schemas["Embedding"]["properties"]
    vector["embedding"] = {"anyOf": [vector["embedding"], {"type": "string"}]}


def event(data: Any, *, ended: bool) -> dict[str, Any]:
    """Of a stream. data: the schema of its JSON. ended: the last one is [DONE]."""
    told: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    told = {"anyOf": [{"const": "[DONE]"}, told]} if ended else told
    return {"type": "object", "required": ["data"], "properties": {"data": told}}


def _properties(schema: dict[str, Any]) -> list[dict[str, Any]]:
    found = [schema["properties"]] if "properties" in schema else []
    return found + [p for part in schema.get("allOf", ()) for p in _properties(part)]


def _collect(node: Any, spec: dict[str, Any], used: dict[str, Any]) -> None:
    """What is referred to, and what that refers to."""
    if isinstance(node, list):
        for item in node:
            _collect(item, spec, used)
    elif isinstance(node, dict):
        to = node.get("$ref")
        if isinstance(to, str) and to.startswith(PREFIX):
            kind, name = to.removeprefix(PREFIX).split("/")
            if name not in used.setdefault(kind, {}):
                used[kind][name] = spec["components"][kind][name]
                _collect(used[kind][name], spec, used)
        for value in node.values():
            _collect(value, spec, used)


def plain(node: Any) -> Any:
    """In the words of 3.1, and without the vendor's extensions, which hold long examples."""
    if isinstance(node, list):
        return [plain(item) for item in node]
    if isinstance(node, dict):
        found = {str(k): plain(v) for k, v in node.items() if not str(k).startswith("x-")}
        if found.pop("nullable", False) is True:
            return {"anyOf": [found, {"type": "null"}]}
        return found
    return node


if __name__ == "__main__":
    source, target, model, *more = sys.argv[1:]
    with open(source) as file:
        whole = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    made = reduced(whole, model, answered="--answered" in more)
    with open(target, "w") as file:
        json.dump(made, file, indent=1, default=str)
