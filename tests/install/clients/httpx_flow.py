"""httpx, with nothing between it and the server."""

import json

import httpx
from asked import asked, base, greedy, say

CHAT, TEXT = {"messages": asked["messages"]}, {"prompt": asked["prompt"]}
client = httpx.Client(base_url=base, timeout=60)


def whole(path, body):
    answer = client.post(path, json={**body, **greedy})
    answer.raise_for_status()
    return answer.json()["choices"][0]


def streamed(path, body):
    with client.stream("POST", path, json={**body, **greedy, "stream": True}) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, end = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert end == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]


upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAARAAAAAAAIAAAAA"}
assert client.get("/models", headers=upgrade).status_code == 200  # and HTTP/1.1 stays
say(
    chat=whole("/chat/completions", CHAT)["message"]["content"],
    chat_streamed="".join(choice["delta"].get("content") or "" for choice in streamed("/chat/completions", CHAT)),
    text=whole("/completions", TEXT)["text"],
    text_streamed="".join(choice["text"] for choice in streamed("/completions", TEXT)),
    embedding=client.post("/embeddings", json={"input": asked["prompt"]}).json()["data"][0]["embedding"],
)
