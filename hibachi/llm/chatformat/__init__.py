"""Tool calls and reasoning in the text of a model: how a chat template writes them, and how they are read again."""
