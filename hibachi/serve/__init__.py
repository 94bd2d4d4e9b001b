"""The server: OpenAI's API over HTTP, for any model that `hibachi.LLM` or a class of one's own serves."""
