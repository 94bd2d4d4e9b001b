"""The data in every kind of stream against the reduced document: check_streams.py DOCUMENT URL."""

import json
import sys
import urllib.request

import jsonschema_rs

document, url = sys.argv[1:]
with open(document) as file:
    components = json.load(file)["components"]
CHAT = {"messages": [{"role": "user", "content": "How do you do?"}]}
TEXT = {"prompt": "It is a truth"}
count = 0
for path, kind, body in (
    ("/chat/completions", "CreateChatCompletionStreamResponse", CHAT),
    ("/chat/completions", "CreateChatCompletionStreamResponse", CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/chat/completions", "CreateChatCompletionStreamResponse", CHAT | {"logprobs": True}),
    ("/completions", "CompletionPiece", TEXT),
    ("/completions", "CompletionPiece", TEXT | {"logprobs": 2, "echo": True, "n": 2}),
):
    schema = {"$ref": f"#/components/schemas/{kind}", "components": components}
    validator = jsonschema_rs.validator_for(schema)
    asked = body | {"max_tokens": 6, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(url + path, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        *events, end = answer.read().decode().strip().split("\n\n")
    assert end == "data: [DONE]" and len(events) > 3
    for event in events:
        validator.validate(json.loads(event.removeprefix("data: ")))
    count += len(events)
print(f"{count} chunks are as described")
