"""Text in and out: tokenizer, text as it is generated, chat templates."""

from hibachi.llm.tokenizers.chat import render_chat
from hibachi.llm.tokenizers.detokenizer import Detokenizer
from hibachi.llm.tokenizers.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer", "render_chat"]
