"""llama-index's OpenAILike, as a model of chats and as one of texts."""

from asked import asked, base, greedy, say, system, user
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

common = {"model": "tiny", "api_base": base, "api_key": "none", "context_window": 512, **greedy}
chat, text = OpenAILike(**common, is_chat_model=True), OpenAILike(**common, is_chat_model=False)
messages = [ChatMessage(role="system", content=system), ChatMessage(role="user", content=user)]
say(
    chat=chat.chat(messages).message.content,
    chat_streamed="".join(piece.delta for piece in chat.stream_chat(messages)),
    text=text.complete(asked["prompt"]).text,
    text_streamed="".join(piece.delta for piece in text.stream_complete(asked["prompt"])),
)
