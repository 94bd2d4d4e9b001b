"""What the format of a chat asks of the engine: the form of the answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from hibachi.errors import InvalidRequest, MissingExtra, UnsupportedOperation
from hibachi.structured import StructuredOutputs
from hibachi.tools.format import ChatFormat, Thinking
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
