"""Cut what OpenAI's OpenAPI document says of responses to what is served: responses_spec.py IN OUT MODEL [--answered].

IN: the whole document, or what this made of it. MODEL: the only name that requests may have; "" leaves all. --answered:
requests also lose what is refused by name, and stay small, so that more of them are answered.

Of items, tools and events only the kinds that are served stay. A stream's schema is that of the data in an event, and a
temperature above 2 is taken, as in chats.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import yaml
from reduce_spec import PREFIX, event, plain

KINDS = {  # of unions
    "OutputItem": ("OutputMessage", "FunctionToolCall", "ReasoningItem"),
    "ItemResource": (
        *("InputMessageResource", "OutputMessage", "FunctionToolCallResource", "FunctionToolCallOutputResource"),
        "ReasoningItem",
    ),
    "Tool": ("FunctionTool", "NamespaceToolParam"),
    "ToolChoiceParam": ("ToolChoiceOptions", "ToolChoiceAllowed", "ToolChoiceFunction"),
    "InputItem": ("EasyInputMessage", "Item", "ItemReferenceParam"),
    "Item": (
        *("InputMessage", "OutputMessage", "FunctionToolCall", "FunctionCallOutputItemParam"),
        "ReasoningItem",
    ),
    "InputContent": ("InputTextContent",),
    "FunctionAndCustomToolCallOutput": ("InputTextContent",),
    "ResponseStreamEvent": (
        *("ResponseCreatedEvent", "ResponseInProgressEvent", "ResponseCompletedEvent", "ResponseIncompleteEvent"),
        *("ResponseFailedEvent", "ResponseErrorEvent", "ResponseOutputItemAddedEvent", "ResponseOutputItemDoneEvent"),
        *("ResponseContentPartAddedEvent", "ResponseContentPartDoneEvent", "ResponseTextDeltaEvent"),
        *("ResponseTextDoneEvent", "ResponseReasoningTextDeltaEvent", "ResponseReasoningTextDoneEvent"),
        *("ResponseReasoningSummaryPartAddedEvent", "ResponseReasoningSummaryPartDoneEvent"),
        *("ResponseReasoningSummaryTextDeltaEvent", "ResponseReasoningSummaryTextDoneEvent"),
        *("ResponseFunctionCallArgumentsDeltaEvent", "ResponseFunctionCallArgumentsDoneEvent"),
    ),
}
ANYTHING = (  # nothing of it is served
    *("Annotation", "Prompt", "ConversationParam", "ResponseConversation", "Moderation", "ModerationParam"),
    *("ContextManagementParam", "PromptCacheOptions", "PromptCacheOptionsParam", "PromptCacheBreakpointConfig"),
    *("PromptCacheBreakpointParam", "ToolCallCaller", "ToolCallCallerParam"),
)
WORDS = ("description", "example", "title", "deprecated", "discriminator")
SERVED = ("CreateResponse", "Response", "ResponseStreamEvent", "ResponseItemList")
MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["developer", "user", "assistant"]},
        "content": {"type": "string", "maxLength": 50},
    },
    "additionalProperties": False,
}
INPUT = {
    "anyOf": [{"type": "string", "maxLength": 50}, {"type": "array", "minItems": 1, "maxItems": 4, "items": MESSAGE}]
}
SMALL = {
    "input": INPUT,
    "instructions": {"type": "string", "maxLength": 50},
    "max_output_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
    "stream": {"type": "boolean"},
    "store": {"type": "boolean"},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "truncation": {"enum": ["auto", "disabled"]},
    "metadata": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 9}, "maxProperties": 3},
}
"""Fields of requests that are answered."""


def cut(schemas: dict[str, Any], model: str, *, answered: bool) -> dict[str, Any]:
    names: dict[str, Any] = {"type": "string", "enum": [model]} if model else {"type": "string"}
    found: dict[str, Any] = {}

    def collect(node: Any) -> None:
        if isinstance(node, list):
            for item in node:
                collect(item)
        elif isinstance(node, dict):
            name = str(node.get("$ref", "")).removeprefix(f"{PREFIX}schemas/")
            if "$ref" in node and name not in found:
                found[name] = names if name == "ModelIdsResponses" else _schema(name, schemas)
                collect(found[name])
            for value in node.values():
                collect(value)

    collect([{"$ref": f"{PREFIX}schemas/{name}"} for name in SERVED])
    if answered:
        small = {"model": names, **SMALL}
        found["CreateResponse"] = {
            "type": "object", "properties": small, "required": ["input", "model"], "additionalProperties": False
        }  # fmt: skip
    return found


def _schema(name: str, schemas: dict[str, Any]) -> Any:
    if name in ANYTHING:
        return {}
    if name == "ModelResponseProperties":
        schemas[name]["properties"]["temperature"] = {"type": ["number", "null"]}
    found = plain(_without_words(schemas[name]))
    if name == "NamespaceToolParam":  # of functions
        found["properties"]["tools"]["items"] = {"$ref": f"{PREFIX}schemas/FunctionToolParam"}
    if name in KINDS:
        key = next(key for key in ("oneOf", "anyOf") if key in found)
        found[key] = [{"$ref": f"{PREFIX}schemas/{kind}"} for kind in KINDS[name]]
    return found


def _without_words(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_words(item) for item in node]
    if isinstance(node, dict):
        words = {k for k in WORDS if isinstance(node.get(k), (str, bool)) or k == "discriminator"}
        return {k: _without_words(v) for k, v in node.items() if k not in words}
    return node


def paths() -> dict[str, Any]:
    def of(name: str) -> dict[str, Any]:
        return {"$ref": f"{PREFIX}schemas/{name}"}

    def answer(content: dict[str, Any]) -> dict[str, Any]:
        told = {kind: {"schema": schema} for kind, schema in content.items()}
        return {"responses": {"200": {"description": "", "content": told}}}

    named = {"parameters": [{"in": "path", "name": "id", "required": True, "schema": {"type": "string"}}]}
    pages = [
        {"in": "query", "name": "limit", "schema": {"type": "integer"}},
        {"in": "query", "name": "order", "schema": {"enum": ["asc", "desc"]}},
        {"in": "query", "name": "after", "schema": {"type": "string"}},
    ]
    body = {"required": True, "content": {"application/json": {"schema": of("CreateResponse")}}}
    stream = event(of("ResponseStreamEvent"), ended=False)
    made = answer({"application/json": of("Response"), "text/event-stream": stream})
    listed = {**answer({"application/json": of("ResponseItemList")}), "parameters": pages}
    return {
        "/responses": {"post": {"requestBody": body, **made}},
        "/responses/{id}": {
            **named,
            "get": answer({"application/json": of("Response")}),
            "delete": answer({"application/json": {"type": "object", "required": ["id", "deleted"]}}),
        },
        "/responses/{id}/input_items": {**named, "get": listed},
    }


if __name__ == "__main__":
    source, target, model, *more = sys.argv[1:]
    with open(source) as file:
        whole = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    made = cut(whole["components"]["schemas"], model, answered="--answered" in more)
    document = {"openapi": "3.1.0", "info": {"title": "responses", "version": "1"}, "paths": paths()}
    with open(target, "w") as file:
        json.dump(document | {"components": {"schemas": dict(sorted(made.items()))}}, file, indent=1)
        file.write("\n")
