"""OpenAI's responses: bodies, what they ask for, what is kept of them, and the answers."""
