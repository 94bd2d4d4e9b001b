"""haystack: a generator of chats, whole and streamed, and an embedder."""

from asked import asked, base, greedy, say, system, user
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

common = {"api_key": Secret.from_token("none"), "api_base_url": base, "model": "tiny"}
chat = OpenAIChatGenerator(**common, generation_kwargs=greedy)
messages = [ChatMessage.from_system(system), ChatMessage.from_user(user)]
pieces = []
streamed = chat.run(messages, streaming_callback=lambda piece: pieces.append(piece.content))["replies"][0].text
assert streamed == "".join(pieces)
say(
    chat=chat.run(messages)["replies"][0].text,
    chat_streamed=streamed,
    embedding=OpenAITextEmbedder(**common).run(asked["prompt"])["embedding"],
)
