"""langchain-openai: ChatOpenAI, OpenAI, OpenAIEmbeddings.

Embeddings are asked for as texts and, as is the client's default, as token ids. It would fetch OpenAI's tokenizer for
these, whose ids mean nothing to another model; here the model's own stands in.
"""

import json
import sys

import tiktoken
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from tokenizers import Tokenizer

asked = json.loads(sys.argv[1])
common = {"model": "tiny", "base_url": asked["url"] + "/v1", "api_key": "none"}
greedy = {**common, "temperature": 0, "max_tokens": asked["max_tokens"]}


class Own:
    def __init__(self, file):
        self._tokenizer = Tokenizer.from_file(file)

    def encode(self, text, **_):
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    encode_ordinary = encode


tiktoken.encoding_for_model = tiktoken.get_encoding = lambda name: Own(asked["folder"] + "/tokenizer.json")

chat = ChatOpenAI(**greedy, stream_usage=True)
messages = [(m["role"], m["content"]) for m in asked["messages"]]
said = {"chat": chat.invoke(messages).content}
chunks = list(chat.stream(messages))
said["chat_streamed"] = "".join(c.content for c in chunks)
said["chat_tokens"] = sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata)
text = OpenAI(**greedy)
said["text"] = text.invoke(asked["prompt"])
said["text_streamed"] = "".join(text.stream(asked["prompt"]))
said["embedding"] = OpenAIEmbeddings(**common, check_embedding_ctx_length=False).embed_query(asked["prompt"])
said["embedding_of_ids"] = OpenAIEmbeddings(**common).embed_documents([asked["prompt"]])[0]
print(json.dumps(said))
