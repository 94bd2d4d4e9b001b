"""llama-index's OpenAILike as one that is told of response_format: structured_predict, as_structured_llm, streamed."""

from asked import base, greedy, say, user
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from person import Person, fields

own = {"api_base": base, "api_key": "none", "max_retries": 0, "context_window": 512}
model = OpenAILike(model="tiny", is_chat_model=True, should_use_structured_outputs=True, **own, **greedy)
messages = [ChatMessage(role="user", content=user)]
predicted = model.structured_predict(Person, PromptTemplate(user))
as_model = model.as_structured_llm(Person).chat(messages).raw
*_, last = model.stream_structured_predict(Person, PromptTemplate(user))
say(schema=fields(predicted), schema_as_model=fields(as_model), schema_streamed=last.model_dump())
