"""The server: OpenAI's API over HTTP, for any model that `hibachi.LLM` or a user's own class serves."""
