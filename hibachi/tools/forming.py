"""What the format of a chat asks of the engine: the form of the answer, and which special tokens its text shows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from hibachi.errors import InvalidRequest, MissingExtra, UnsupportedOperation
from hibachi.structured import StructuredOutputs
from hibachi.tools.format import ChatFormat, Quoted, Tagged, Thinking, ToolFormat
from hibachi.tools.grammar import guided
from hibachi.tools.tools import Toolbox


def formed(
    format: ChatFormat,
    box: Toolbox,
    thinking: Thinking,
    answer: StructuredOutputs | None,
    split: Callable[[str], Sequence[str | int]],
    check: Callable[[StructuredOutputs], object],
    *,
    ids: Iterable[int] = (),
    ends: Collection[int] = (),
) -> StructuredOutputs | None:
    """The form of an answer, checked. See `hibachi.tools.grammar.guided`.

    Where nothing must come, and no grammar can be had (the library is missing, the model's tokens are no text, there
    are too many tools), there is none: then calls are written as the model was trained to.
    """
    must = box.mode == "required" or answer is not None or any(tool.strict for tool in box.callable)
    try:
        return guided(format, box, thinking, answer, split, check, ids=ids, ends=ends)
    except (MissingExtra, UnsupportedOperation):
        if must:
            raise
    except InvalidRequest as e:
        if must or not str(e).startswith("tools: "):
            raise
    return None


def shown_by(format: ChatFormat, split: Callable[[str], Sequence[str | int]]) -> frozenset[int]:
    """The special tokens in the texts of a format. split: cuts a text into texts and ids of special tokens."""
    return frozenset(part for text in _texts(format) for part in split(text) if isinstance(part, int))


def _texts(format: ChatFormat) -> Iterator[str]:
    yield from (format.before_said, format.prompted, *format.silent)
    if format.reasoning is not None:
        yield from (format.reasoning.begin, format.reasoning.end)
    if format.tools is not None:
        yield from _texts_of(format.tools)


def _texts_of(tools: ToolFormat) -> Iterator[str]:
    yield from (tools.begin, tools.between, tools.end, tools.marker)
    yield from (part for call in (tools.call, *tools.spellings) for part in call if isinstance(part, str))
    match tools.arguments:
        case Tagged() as tagged:
            yield from (tagged.open, tagged.close, tagged.end, tagged.between, *tagged.kinds.values())
        case Quoted(quote):
            yield quote
