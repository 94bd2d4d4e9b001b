"""Every kind of stream against a document that describes its events: check_streams.py DOCUMENT URL [--tools].

Streams are asked of the routes below that the document has; --tools: those with calls. Each must have several events.
"""

import json
import sys
import urllib.request

import jsonschema_rs

document, url, *more = sys.argv[1:]
with open(document) as file:
    described = json.load(file)
SSE, LINES = "text/event-stream", "application/x-ndjson"
CHAT = {"messages": [{"role": "user", "content": "How do you do?"}]}
TEXT = {"prompt": "It is a truth"}
INPUTS = {"inputs": "It is a truth"}
OPENAI = {"max_tokens": 6, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
TGI = {"max_new_tokens": 6, "details": True, "top_n_tokens": 2}
IDS = {"prompt": [1, 2, 3], "max_tokens": 6, "stream": True}
RESPONSE = {"input": "How do you do?", "max_output_tokens": 6, "temperature": 0, "stream": True}
REQUESTS = [
    ("/chat/completions", OPENAI | CHAT, SSE),
    ("/chat/completions", OPENAI | CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}, SSE),
    ("/chat/completions", OPENAI | CHAT | {"logprobs": True}, SSE),
    ("/responses", RESPONSE, SSE),
    ("/responses", RESPONSE | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, SSE),
    ("/completions", OPENAI | TEXT, SSE),
    ("/completions", OPENAI | TEXT | {"logprobs": 2, "echo": True, "n": 2}, SSE),
    ("/generate_stream", INPUTS | {"parameters": TGI}, SSE),
    ("/generate_stream", INPUTS | {"parameters": TGI | {"stop": ["e"], "do_sample": True, "seed": 7}}, SSE),
    ("/", INPUTS | {"stream": True, "parameters": TGI}, SSE),
    ("/invocations", INPUTS | {"stream": True, "parameters": TGI}, SSE),
    ("/invocations", OPENAI | CHAT, SSE),
    ("/invocations", OPENAI | TEXT, SSE),
    ("/v1/generate", IDS, SSE),
    ("/v1/generate", IDS | {"logprobs": 2, "encoding": "base64"}, LINES),
]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": CITY, "strict": True}
FUNCTIONS = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "max_tokens": 99}
TOOL = {"type": "function", **FUNCTION}
SPACE = {"type": "namespace", "name": "places", "description": "Of places.", "tools": [TOOL]}
CALLED = {"tool_choice": "required", "max_output_tokens": 99}
MESSAGE = CHAT | {"model": "tiny", "max_tokens": 99, "temperature": 0, "stream": True}
WITH_TOOLS = [
    ("/chat/completions", OPENAI | CHAT | FUNCTIONS, SSE),
    ("/chat/completions", OPENAI | CHAT | FUNCTIONS | {"n": 2, "logprobs": True}, SSE),
    ("/chat/completions", OPENAI | CHAT | FUNCTIONS | {"max_tokens": 20}, SSE),
    ("/responses", RESPONSE | CALLED | {"tools": [TOOL]}, SSE),
    ("/responses", RESPONSE | CALLED | {"tools": [SPACE], "max_output_tokens": 20}, SSE),
    (
        "/v1/messages",
        MESSAGE | {"tools": [{"name": "weather", "input_schema": CITY}], "tool_choice": {"type": "any"}},
        SSE,
    ),
]


def schema_of(path):
    """Of the data of an event, and of the last one."""
    content = described["paths"][path]["post"]["responses"]["200"]["content"]
    data = content[SSE]["schema"]["properties"]["data"]
    end, data = data.get("anyOf", ({}, data))
    return {**data["contentSchema"], "components": described["components"]}, end.get("const")


def answered(path, body, kind):
    headers = {"Content-Type": "application/json", "Accept": kind}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        found = answer.read().decode().strip()
    if kind == LINES:
        return found.split("\n")
    return [event.rpartition("\n")[2].removeprefix("data: ") for event in found.split("\n\n")]  # behind a name


count = 0
for base in ("", "/v1"):  # OpenAI's document leaves it out
    for path, body, kind in WITH_TOOLS if "--tools" in more else REQUESTS:
        if base + path not in described["paths"]:
            continue
        schema, end = schema_of(base + path)
        validator = jsonschema_rs.validator_for(schema)
        events = answered(base + path, body, kind)
        if end is not None and path != "/invocations":
            assert events.pop() == end
        events = [json.loads(event) for event in events if event != end]
        assert len(events) > 1 and not any(event.get("error") for event in events), events
        for event in events:
            validator.validate(event)
        count += len(events)
print(f"{count} events are as described")
assert count
