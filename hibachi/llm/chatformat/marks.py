"""The fixed texts of a format, and the special tokens in them, which the text of an answer must show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hibachi.llm.chatformat.format import ChatFormat, Quoted, Tagged, ToolFormat


def marks(format: ChatFormat, special: Callable[[str], Sequence[str | int]]) -> frozenset[int]:
    """The ids of special tokens in a format's texts. special: cuts a text, as `Tokenizer.split_special` does."""
    return frozenset(part for text in texts(format) if text for part in special(text) if isinstance(part, int))


def texts(format: ChatFormat) -> Iterator[str]:
    """All texts of a format; some may be ""."""
    if format.reasoning is not None:
        yield from (format.reasoning.begin, format.reasoning.end)
    yield from (format.before_said, format.prompted, *format.silent)
    if format.tools is not None:
        yield from _of_calls(format.tools)


def _of_calls(tools: ToolFormat) -> Iterator[str]:
    yield from (tools.begin, tools.marker, tools.between, tools.end)
    for call in (tools.call, *tools.spellings):
        yield from (part for part in call if isinstance(part, str))
    arguments = tools.arguments
    if isinstance(arguments, Tagged):
        yield from (arguments.open, arguments.close, arguments.end, arguments.between, *arguments.kinds.values())
    elif isinstance(arguments, Quoted):
        yield arguments.quote
