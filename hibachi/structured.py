"""What form the answer of a request must have: a schema, a regular expression, a choice, a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from hibachi.common.options import spelled_fields
from hibachi.errors import InvalidRequest, shown

Kind: TypeAlias = Literal["json", "json_object", "regex", "choice", "grammar"]
FORMS: tuple[Kind, ...] = ("json", "json_object", "regex", "choice", "grammar")
MOST_BYTES = 2**20  # of UTF-8, in all
MOST_CHOICES = 2**15
AT_ONCE = 2**16  # characters of a schema, which take some milliseconds to read
_PATH = ("structured_outputs",)


@spelled_fields
@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that an answer must have: one of the first five fields. Names are vLLM's.

    json: a JSON schema (draft 2020-12), a mapping or its text; kept as text. Properties come in its order.
    json_object: True means any JSON object.
    regex: a regular expression for the whole answer (the syntax of Rust's crate regex; no lookaround).
    choice: texts, one of which is the answer.
    grammar: in Lark's notation as llguidance reads it, or in llama.cpp's (GBNF). `<[0-127]>` stands for token ids, so
    models whose tokens are no text can be guided as well.

    whitespace_pattern: a regular expression for the blanks between JSON's tokens; None means at most one blank after a
    comma and a colon.
    one_of_as_any_of: read `oneOf` in a schema as `anyOf`. False refuses a `oneOf` whose alternatives may overlap.
    begun: what the prompt has already written of the answer; the output is the rest of it.

    Raises InvalidRequest unless exactly one form is given, and for a value of a wrong type or size.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    one_of_as_any_of: bool = False
    begun: str = ""

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = ", ".join(given) or "none of them"
            raise InvalidRequest.at(_PATH, f" must have exactly one of {', '.join(FORMS)}; got {got}.")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check(isinstance(getattr(self, name), (str, type(None))), name, "a text", getattr(self, name))
        _check(isinstance(self.begun, str), "begun", "a text", self.begun)
        for name in ("json_object", "one_of_as_any_of"):
            _check(isinstance(getattr(self, name), bool), name, "True or False", getattr(self, name))
        if self.choice is not None:
            object.__setattr__(self, "choice", _texts(self.choice))
        if self.whitespace_pattern is not None and self.kind not in ("json", "json_object"):
            raise InvalidRequest.at((*_PATH, "whitespace_pattern"), f" is for JSON; got {self.kind} beside it.")
        if self.one_of_as_any_of and self.kind != "json":
            raise InvalidRequest.at((*_PATH, "one_of_as_any_of"), f" is for json; got {self.kind} beside it.")
        if (size := _size(self.text) + _size(self.whitespace_pattern or "") + _size(self.begun)) > MOST_BYTES:
            raise InvalidRequest.at(
                (*_PATH, self.kind), f" must have at most {MOST_BYTES} bytes of UTF-8; got {size}. Make it smaller."
            )

    @property
    def kind(self) -> Kind:
        """Which of the forms is given."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """The form as one text; of a choice, a JSON list."""
        if self.json_object:
            return ""
        found = getattr(self, self.kind)
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def as_structured(given: Any) -> StructuredOutputs | None:
    """What a caller passed; a mapping has the fields by name. Raises InvalidRequest."""
    if given is None or isinstance(given, StructuredOutputs):
        return given
    if not isinstance(given, Mapping):
        raise InvalidRequest.at(_PATH, f" must be a StructuredOutputs or a mapping (or None); got {shown(given)}.")
    known = [f.name for f in fields(StructuredOutputs)]
    try:
        found = dict(given)
    except Exception:  # of a class of the caller's own
        raise InvalidRequest.at(_PATH, f" must be a mapping that can be read; got {shown(given)}.") from None
    if others := [name for name in found if name not in known]:
        raise InvalidRequest.at(_PATH, f" has no field {shown(others[0])}; it has {', '.join(known)}.")
    return StructuredOutputs(**found)


def _check(ok: bool, name: str, expected: str, got: object) -> None:
    if not ok:
        raise InvalidRequest.at((*_PATH, name), f" must be {expected}; got {shown(got)}.")


def _size(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest.at(_PATH, " must be valid Unicode; got a lone surrogate. Remove it.") from None


def _schema(given: Any) -> str:
    """Without blanks; but a long text is kept as it is, as reading it takes a while. It is read where it is checked."""
    if isinstance(given, str) and len(given) > AT_ONCE:
        return given
    _check(isinstance(given, (str, Mapping)), "json", "a JSON schema, a mapping or its text", given)
    try:
        found = json.loads(given) if isinstance(given, str) else given
        return json.dumps(found, ensure_ascii=False, separators=(",", ":"), default=_mapping)
    except RecursionError:
        raise InvalidRequest.at((*_PATH, "json"), " is nested too deep. Make it flatter.") from None
    except Exception as e:  # what is no data, or a class of the caller's own
        raise InvalidRequest.at((*_PATH, "json"), f" must be a JSON schema; {type(e).__name__}: {e}.") from e


def _mapping(given: Any) -> Any:
    """A dictionary for a mapping of another class."""
    if isinstance(given, Mapping):
        return dict(given)
    raise TypeError(f"{type(given).__name__} is no part of JSON")


def _texts(given: Any) -> tuple[str, ...]:
    expected = f"1 to {MOST_CHOICES} texts, none of them empty"
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        _check(False, "choice", expected, given)
    try:
        found = tuple(given)
    except Exception:  # of a class of the caller's own
        found = ()
    _check(1 <= len(found) <= MOST_CHOICES and all(isinstance(x, str) and x for x in found), "choice", expected, given)
    return found
