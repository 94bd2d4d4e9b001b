"""litellm: chats as openai/MODEL, texts as text-completion-openai/MODEL."""

import json
import sys

import litellm

asked = json.loads(sys.argv[1])
common = {"api_base": asked["url"] + "/v1", "api_key": "none"}
greedy = {**common, "temperature": 0, "max_tokens": asked["max_tokens"]}
chat = {"model": "openai/tiny", "messages": asked["messages"], **greedy}
text = {"model": "text-completion-openai/tiny", "prompt": asked["prompt"], **greedy}

said = {"chat": litellm.completion(**chat).choices[0].message.content}
chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
said["chat_streamed"] = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
said["chat_tokens"] = chunks[-1].usage.completion_tokens
said["text"] = litellm.text_completion(**text).choices[0].text
said["text_streamed"] = "".join(c.choices[0].text or "" for c in litellm.text_completion(**text, stream=True))
vectors = litellm.embedding(model="openai/tiny", input=[asked["prompt"]], **common)
said["embedding"] = vectors.data[0]["embedding"]
try:
    litellm.completion(**{**chat, "model": "openai/other"})
except litellm.NotFoundError as e:
    said["unknown_model"] = str(e)
print(json.dumps(said))
