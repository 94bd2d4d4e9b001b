"""A model that says what it is told to, letter by letter, so that answers in any format can be served.

The last message of the user holds the text between the letters 0x01 and 0x02. The template ends the prompt with 0x03.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hibachi.llm.own import open_texts

from .conftest import Site, site

SAYS = """
import numpy as np

class Says:
    vocab_size, max_model_len, eos_ids = 257, 4096, 256

    class tokenizer:
        encode = staticmethod(lambda text: list(text.encode()))
        decode = staticmethod(lambda ids: bytes(i for i in ids if i < 256).decode("utf-8", "replace"))
        token_bytes = staticmethod(lambda i: bytes([i]) if i < 256 else b"")

    deterministic = False

    def logits(self, tokens, lengths):
        out = np.zeros((len(tokens), 257), np.float32)
        for row, n, scores in zip(tokens, lengths, out):
            text = bytes(int(i) for i in row[:n] if i < 256)
            begun = text.rpartition(b"\\x03")[2]
            rest = text.rpartition(b"\\x01")[2].partition(b"\\x02")[0]
            rest = rest.removeprefix(begun) if rest.startswith(begun) else b""
            scores[rest[0] if rest else 256] = 100  # sure of it at any temperature
        return out
"""
# What it may be told to say: calls of a tool `look`, and reasoning before something else.
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the \\"sun\\"\\n猫"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "look", "arguments": {"at": ""}}\n</tool_call>'
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
THINKS = (
    "{% if reasoning_effort is defined %}EFFORT {{ reasoning_effort }}{% endif %}"
    "{% if tools %}TOOLS {{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\x03"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""A template of the kind of Qwen 3."""


def told(text: str) -> list[dict[str, Any]]:
    """Messages that the model answers with this text."""
    return [{"role": "user", "content": f"Say \x01{text}\x02"}]


@contextmanager
def saying(folder: Path, template: str = THINKS, **settings: Any) -> Iterator[Site]:
    """A server of this model."""
    file = folder / "says.py"
    file.write_text(SAYS)
    with (
        open_texts(f"{file}:Says", max_num_seqs=8, max_num_batched_tokens=8192) as texts,
        site(texts, chat_template=template, **settings) as here,
    ):
        yield here
