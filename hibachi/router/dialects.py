"""Errors of the router in the words of the API that a path belongs to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hibachi.llm.dialects.dialects import ANTHROPIC, OPENAI, TGI, Dialect, Headers, spoken
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.messages import answers as anthropic
from hibachi.llm.dialects.openai.answers import event
from hibachi.llm.dialects.responses import answers as responses
from hibachi.router.routes import TGI as TGI_PATHS
from hibachi.router.routes import TOKENS


def _as_tgi(refused: Refused) -> dict[str, Any]:
    """In our own words: no upstream has looked at the input."""
    return {**TGI.error(refused), "error": str(refused)}


_TGI = replace(TGI, error=_as_tgi)


def dialect_of(path: str, headers: Headers | None = None) -> Dialect:
    """The dialect of a path: OpenAI's, unless the path belongs to another API, or the headers name one."""
    if path in TGI_PATHS:
        return _TGI
    return spoken(path, headers or {}, ANTHROPIC if path.startswith("/v1/messages") else OPENAI)


# ---- streams -----------------------------------------------------------------------------------------------------

_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')
_CHATS = re.compile(r"(/v1/engines/.+)?(/v1)?(/chat)?/completions")


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How streams of a path end. end: is found in their last event, and in no other: texts in events are JSON, with
    neither line breaks nor quotes of their own.
    """

    dialect: Dialect
    end: re.Pattern[bytes]

    def broken(self, refused: Refused, request: str, last: bytes) -> bytes:
        """What ends a stream that broke. last: events before it."""
        told = self.dialect.told(refused, request)
        if self is RESPONSES:
            number = [int(n) + 1 for n in _NUMBER.findall(last)[-1:]] or [0]
            return responses.frame(responses.ResponseError(number[0], refused.code, str(refused), None))
        return (b"event: error\n" if self is MESSAGES else b"") + event(told) + self.dialect.end


def _form(dialect: Dialect, end: bytes) -> StreamForm:
    return StreamForm(dialect, re.compile(end, re.MULTILINE))


RESPONSES = _form(OPENAI, rb'(?:^event: ?|"type": ?")response\.(?:completed|incomplete|failed)\b')
MESSAGES = _form(ANTHROPIC, rb'(?:^event: ?|"type": ?")message_stop\b')
_OF_CHATS = _form(OPENAI, rb"^data: ?\[DONE\]")
_FORMS = {
    "/v1/chat/completions": _OF_CHATS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    TOKENS: _form(replace(OPENAI, end=b""), rb'"finish_reason": ?"'),
    **dict.fromkeys(TGI_PATHS, _form(_TGI, rb'"generated_text": ?"')),
}


def stream_form(path: str) -> StreamForm | None:
    """None means it is not known how streams of this path end."""
    return _FORMS.get(path) or (_OF_CHATS if _CHATS.fullmatch(path) else None)


# ---- models ------------------------------------------------------------------------------------------------------


def as_anthropic(listed: Sequence[dict[str, Any]]) -> anthropic.AnthropicModels:
    """Models in Anthropic's form. listed: in OpenAI's, as upstreams say it, which may be anything but the id."""
    return anthropic.models([anthropic.model(m["id"], _number(m, "created") or 0, _most(m)) for m in listed])


def _most(entry: dict[str, Any]) -> int | None:
    found = _number(entry, "max_model_len")
    return None if found is None else int(found)


def _number(entry: dict[str, Any], name: str) -> float | None:
    """A number that a date can be made of."""
    found = entry.get(name)
    return found if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 <= found < 1 << 35 else None
