"""OpenAI's completions and chats: bodies, what they ask for, and the answers."""
