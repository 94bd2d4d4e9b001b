"""Text in and out: tokenizer, text as it is generated, chat templates."""

from hibachi.model.text.chat import render_chat
from hibachi.model.text.detokenizer import Detokenizer
from hibachi.model.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer", "render_chat"]
