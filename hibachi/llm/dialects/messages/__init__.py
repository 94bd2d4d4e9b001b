"""Anthropic's Messages API: bodies of requests, how they become chats, and answers."""
